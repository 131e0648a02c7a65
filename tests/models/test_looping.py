"""A loop is a plain decoder whose layers repeat, and its mixers read the depth of that decoder."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from fathom.checkpoints.export import as_unrolled
from fathom.errors import ModelError
from fathom.models import FathomForCausalLM
from fathom.models.axes.visit import Out
from fathom.models.cost import cache_bytes_per_token, mechanism_cost
from fathom.models.decoder.arithmetic import attention_flops

from .cases import SHAPE, build, config_of, tokens
from .test_slots import order_of

SHAPES = [(1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 1, 0), (2, 0, 2), (3, 1, 1), (4, 3, 0)]
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}


def looped(count, prelude=0, coda=0, **keys):
    return config_of("loop", recurrence_options={"trips": count, "prelude": prelude, "coda": coda}, **keys)


def layers_of(config):
    options = config.recurrence_options
    return [i for i, _ in order_of(config.num_hidden_layers, options["trips"], options["prelude"], options["coda"])]


def deep_qwen3(model):
    """transformers' own Qwen3 with one layer for every visit, and the layer each is a copy of."""
    order = layers_of(model.config)
    keys = {**SHAPE, "num_hidden_layers": len(order), "layer_types": [model.config.layer_types[i] for i in order]}
    for name in ("use_sliding_window", "sliding_window", "tie_word_embeddings"):
        keys[name] = getattr(model.config, name)
    deep = Qwen3ForCausalLM(Qwen3Config(**keys)).eval()
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        deep.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())
    for copy, i in zip(deep.model.layers, order, strict=True):
        copy.load_state_dict(model.model.layers[i].state_dict())
    return deep, order


KINDS = {"full": {}, "sliding": SLIDING, "tied": {"tie_word_embeddings": True}}


@pytest.mark.quick("1-0-0-full", "2-0-2-sliding", "3-1-1-tied")
@pytest.mark.parametrize(
    ("count", "prelude", "coda", "keys"),
    [
        pytest.param(*shape, keys, id=f"{'-'.join(map(str, shape))}-{kind}")
        for shape in SHAPES
        for kind, keys in KINDS.items()
    ],
)
def test_loop_is_a_deep_qwen3(count, prelude, coda, keys):
    model, ids = build(looped(count, prelude, coda, **keys)), tokens(2, 13)
    deep, order = deep_qwen3(model)
    with torch.no_grad():
        truth = deep(ids).logits
        assert torch.equal(model(ids).logits, truth)
        caches = DynamicCache(config=model.config), DynamicCache(config=deep.config)
        for part in ids.split([6, 1, 1, 5], 1):
            ours, theirs = (m(part, past_key_values=c).logits for m, c in zip((model, deep), caches, strict=True))
            assert torch.equal(ours, theirs)

    seed = torch.randn(truth.shape)
    for m in (model, deep):
        m.zero_grad()
        (m(ids, use_cache=False).logits * seed).sum().backward()
    theirs = {name: p.grad for name, p in deep.named_parameters()}
    for name, parameter in model.named_parameters():
        if name.startswith("model.layers."):
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            copies = [theirs[f"model.layers.{n}.{rest}"] for n, i in enumerate(order) if i == int(layer)]
            assert len(copies) == (count if prelude <= int(layer) < 4 - coda else 1)
            wanted = sum(copies)
        else:
            wanted = theirs[name]
        assert (parameter.grad - wanted).abs().max() < 1e-5 * wanted.abs().max(), name


def test_a_norm_between_trips_would_be_seen():
    model, ids = build(looped(2)), tokens(1, 9)
    policy = model.model.recurrence
    with torch.no_grad():
        right = model(ids).logits
        policy.feed = lambda x, out, state: out.hidden
        assert (model(ids).logits - right).abs().max() > 1e-2
        policy.feed = lambda x, out, state: x + out.residual
        assert (model(ids).logits - right).abs().max() > 1e-2


@pytest.mark.quick("0-0-vanilla", "0-0-attention_residuals", "1-2-depth_attention", "1-2-denseformer")
@pytest.mark.parametrize("name", ["vanilla", "depth_attention", "denseformer", "attention_residuals"])
@pytest.mark.parametrize("prelude,coda", [(0, 0), (1, 2)])
def test_one_trip_is_no_loop_bitwise(name, prelude, coda):
    plain, ids = build(config_of(name)), tokens(2, 9)
    keys = {key: getattr(plain.config, key) for key in ("mixer", "mixer_options", "residual", "residual_options")}
    model = FathomForCausalLM(looped(1, prelude, coda, **keys)).eval()
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    again = FathomForCausalLM(looped(2, prelude, coda, **keys)).eval()
    again.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert not torch.allclose(again(ids).logits, plain(ids).logits, atol=1e-2)


# --- cache and cost ---------------------------------------------------------------------------------------------------


def test_sliding_banks_slide():
    """A copy of a sliding layer holds a window and no more, in every trip."""
    model = build(looped(3, 1, 1, **SLIDING))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in tokens(1, 11).split([5, 1, 5], 1):
            model(part, past_key_values=cache)
    for visit in (v for trip in model.model.plan for v in trip):
        assert cache.layers[visit.index].keys.shape[2] == (11 if visit.layer % 2 == 0 else 3)


def counted_flops(config, ids):
    """FLOPs per token of a forward pass, as torch counts them."""
    model = build(config)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, use_cache=False)
    return counter.get_total_flops() / ids.numel()


# --- keys and values of the first trip --------------------------------------------------------------------------------


def sharing(count, prelude=0, coda=0, **keys):
    options = {"trips": count, "prelude": prelude, "coda": coda, "kv": "first"}
    return config_of("loop", recurrence_options=options, **keys)


@pytest.mark.quick("1-0-0", "3-1-1", "2-0-2")
@pytest.mark.parametrize("count,prelude,coda", SHAPES)
def test_shared_keys_are_stored_and_made_once(count, prelude, coda):
    config, ids, length = sharing(count, prelude, coda), tokens(1, 16), 16
    model, cache = build(config), DynamicCache(config=config)
    with torch.no_grad():
        for part in ids.split([5, 1, 10], 1):
            model(part, past_key_values=cache)
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert held == length * cache_bytes_per_token(config, 4) == length * cache_bytes_per_token(config_of("vanilla"), 4)
    again = len(layers_of(config)) - 4
    full = attention_flops(config, 0, 2 * length - 1)
    counted = counted_flops(config, ids) - counted_flops(config_of("vanilla"), ids)
    assert counted == mechanism_cost(config).flops + again * full


@pytest.mark.parametrize("options", [{"kv": "first"}, {"coda": 1, "damping": 0.5, "blend": 0.5}])
def test_a_budget_of_one_trip_is_the_model_without_a_loop(options):
    model, ids = build(config_of("loop", recurrence_options={"trips": 3, "prelude": 1, **options})), tokens(2, 9)
    plain = FathomForCausalLM(config_of("vanilla")).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids, max_trips=1).logits, plain(ids).logits)
        assert not torch.equal(model(ids, max_trips=2).logits, plain(ids).logits)


@pytest.mark.parametrize("residual", ["plain", "denseformer", "attention_residuals", "hyper_connections", "mudd"])
def test_damping_goes_to_the_plain_loop(residual):
    """δ = 1 - 1e-9 is δ = 1 to rounding; δ = ½ is another model."""
    fields = {"trips": 3, "prelude": 1, "coda": int(residual == "plain")}
    made = [
        build(
            config_of("loop", residual=residual, recurrence_options={**fields, "damping": damping}), dtype=torch.float64
        )
        for damping in (1.0, 1 - 1e-9, 0.5)
    ]
    with torch.no_grad():
        plain, near, half = (model(tokens(2, 9)).logits for model in made)
    assert 0 < (near - plain).abs().max() < 1e-6 and (half - plain).abs().max() > 1e-2


# --- what further trips are given of the entry ------------------------------------------------------------------------


def diagonal(**options):
    fields = {"trips": 3, "prelude": 1, "injection": "diagonal", **options}
    return build(config_of("loop", recurrence_options=fields), dtype=torch.float64)


def decays(model, rate, step_size):
    """The factor on the stream where every channel has these weights."""
    policy = model.model.recurrence
    with torch.no_grad():
        policy.rate.fill_(rate)
        policy.step_size.fill_(step_size)
        return policy.decay()


@pytest.mark.parametrize("rate,step_size", [(0.0, 0.2), (-5.0, 3.0), (2.0, 1.0), (3.0, -3.0)])
def test_the_decay_lies_between_0_and_1(rate, step_size):
    found = decays(diagonal(), rate, step_size)
    assert ((found > 0) & (found < 1)).all()


def test_the_decay_starts_as_published():
    model = FathomForCausalLM(config_of("loop", recurrence_options={"injection": "diagonal"}))
    policy = model.model.recurrence
    assert torch.allclose(policy.decay(), torch.tensor(0.4472), atol=1e-4)
    assert torch.allclose(policy.injected(torch.eye(32)), 0.8047 * torch.eye(32), atol=1e-4)


def test_a_thousand_trips_through_nothing_stay_bounded():
    """With layers that change nothing the stream goes to Δ/(1 - decay) ⊙ B e; without the bound on the decay it goes to
    infinity."""
    policy, entry = diagonal().model.recurrence, torch.randn(1, 4, 32, dtype=torch.float64)
    given = {"entry": policy.injected(entry)}

    def after(trips):
        x = entry
        for _ in range(trips):
            x = policy.feed(x, Out(x, lambda y: y), given)
        return x

    with torch.no_grad():
        bound = entry.abs().max() + (given["entry"].abs() / (1 - policy.decay())).max()
        assert after(1000).abs().max() <= bound
        assert torch.allclose(after(1000), after(1001), atol=1e-9)
        policy.decay = lambda: torch.full((32,), 1.05, dtype=torch.float64)
        assert after(1000).abs().max() > 1e3 * bound


def test_more_trips_than_trained_may_be_asked_for():
    model, ids = diagonal(trips_max=6), tokens(1, 6)
    with torch.no_grad():
        six, three = model(ids, max_trips=6).logits, model(ids).logits
        assert not torch.equal(six, three) and torch.equal(model(ids, max_trips=3).logits, three)
    with pytest.raises(ValueError, match="max_trips"):
        model(ids, max_trips=7)


@pytest.mark.parametrize(
    "options",
    [
        *({"injection": "add"}, {"norm_between": "own"}, {"norm_between": "final"}),
        *({"damping": 0.5}, {"blend": 0.5}, {"blend_steps": 5}, {"kv": "first"}),
    ],
)
def test_only_a_plain_loop_is_a_deeper_qwen3(options):
    model = build(config_of("loop", recurrence_options={"trips": 2, **options}))
    with pytest.raises(ModelError, match="cannot be unrolled"):
        as_unrolled(model)


def test_the_entry_has_a_price():
    plain, given = looped(3, 1), diagonal(entry_norm=True, norm_between="own").config
    width = given.hidden_size
    beyond = mechanism_cost(given)
    assert beyond.flops - mechanism_cost(plain).flops == 2 * width * width
    counted = {True: given, False: plain}
    numbers = {key: sum(p.numel() for p in FathomForCausalLM(c).parameters()) for key, c in counted.items()}
    assert beyond.parameters == numbers[True] - numbers[False] == width * width + 4 * width


# --- an entry and an exit ---------------------------------------------------------------------------------------------
