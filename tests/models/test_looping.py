"""A loop is a plain decoder whose layers repeat, and its mixers read the depth of that decoder."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from fathom.checkpoints.export import as_unrolled
from fathom.errors import ModelError
from fathom.models import FathomForCausalLM
from fathom.models.arithmetic import attention_flops
from fathom.models.cost import cache_bytes_per_token, flops_per_token, mechanism_cost
from fathom.models.rotary import signed
from fathom.models.slots import Out

from .cases import SHAPE, build, config_of, tokens
from .oracle import Oracle, agree, unrolled
from .test_slots import order_of, sources_of

SHAPES = [(1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 1, 0), (2, 0, 2), (3, 1, 1), (4, 3, 0)]
every_shape = pytest.mark.parametrize("count,prelude,coda", SHAPES)
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


# --- mixers across trips ----------------------------------------------------------------------------------------------


def softmax_mix(query, key, value, sources):
    group = query.shape[1] // key.shape[1]
    pooled = query.unflatten(1, (-1, group)).mean(2)
    keys, values = [k for k, _ in sources] + [key], [v for _, v in sources] + [value]
    alpha = torch.stack([(pooled * k).sum(-1) / query.shape[-1] ** 0.5 for k in keys]).softmax(0)
    return sum(a[..., None] * v for a, v in zip(alpha, values, strict=True))


def uniform_mix(query, key, value, sources):
    return sum([v for _, v in sources], value) / (len(sources) + 1)


@pytest.mark.quick("3-0-0-2-*softmax_mix", "2-1-1-2-grid*softmax_mix", "3-2-0-1-first*softmax_mix")
@pytest.mark.parametrize("mixer,mix", [("depth_attention", softmax_mix), ("uniform_depth", uniform_mix)])
@pytest.mark.parametrize("rule", ["same_layer", "grid", "none", "first"])
@pytest.mark.parametrize("count,prelude,coda,stride", [(3, 0, 0, 2), (2, 1, 1, 2), (3, 2, 0, 1)])
def test_sources_across_trips(mixer, mix, rule, count, prelude, coda, stride):
    options = {"stride": stride, "across_trips": rule}
    config = looped(count, prelude, coda, mixer=mixer, mixer_options=options)
    model, ids = build(config, dtype=torch.float64), tokens(2, 5)
    oracle, order = Oracle(model), order_of(4, count, prelude, coda)

    def truth(rule):
        return unrolled(oracle, ids, [i for i, _ in order], lambda p: sources_of(order, p, stride, 0, rule), mix)

    agree(model, ids, truth(rule), oracle)
    others = {"same_layer", "grid", "none", "first"} - {rule}
    with torch.no_grad():
        for other in others:
            assert (truth(other) - model(ids).logits).abs().max() > 1e-4


# --- cache and cost ---------------------------------------------------------------------------------------------------


@every_shape
def test_cache_layers_and_bytes(count, prelude, coda):
    config = looped(count, prelude, coda)
    visits = len(layers_of(config))
    assert visits == 4 + (count - 1) * (4 - prelude - coda)
    model, cache = build(config), DynamicCache(config=config)
    with torch.no_grad():
        for part in tokens(3, 7).split([4, 1, 1, 1], 1):
            model(part, past_key_values=cache)
    assert len(cache.layers) == visits
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert held == 3 * 7 * visits * 2 * 2 * 8 * 4
    assert cache_bytes_per_token(config, 4) == visits * 2 * 2 * 8 * 4


def test_a_static_cache_holds_every_trip():
    config = looped(3, 1)
    model, cache, ids = build(config, dtype=torch.float64), StaticCache(config=config, max_cache_len=12), tokens(2, 9)
    with torch.no_grad():
        steps = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([3, 1, 5], 1)], 1)
        assert torch.allclose(steps, model(ids, use_cache=False).logits, rtol=0, atol=1e-11)
    assert len(cache.layers) == 10


@every_shape
def test_sliding_banks_slide(count, prelude, coda):
    """A copy of a sliding layer holds a window and no more, in every trip."""
    model = build(looped(count, prelude, coda, **SLIDING))
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


@pytest.mark.quick("1-0-0", "3-1-1", "2-0-2")
@every_shape
def test_declared_flops_are_counted(count, prelude, coda):
    config, ids, length = looped(count, prelude, coda), tokens(1, 16), 16
    counted = counted_flops(config, ids) - counted_flops(config_of("vanilla"), ids)
    visits = len(layers_of(config))
    full = attention_flops(config, 0, 2 * length - 1)  # a counter does not know that half of the scores are masked
    assert full == 4 * 4 * 8 * length
    extra = mechanism_cost(config).flops
    assert counted == extra + (visits - 4) * full
    head_less = flops_per_token(config, length) - flops_per_token(config_of("vanilla"), length)
    assert head_less == extra + (visits - 4) * attention_flops(config, 0, length)


# --- keys and values of the first trip --------------------------------------------------------------------------------


def sharing(count, prelude=0, coda=0, **keys):
    options = {"trips": count, "prelude": prelude, "coda": coda, "kv": "first"}
    return config_of("loop", recurrence_options=options, **keys)


def read_once(oracle, ids, order):
    """Logits where a layer attends to what it made when it was passed first."""
    x, made = oracle.embedding[ids], {}
    for layer in order:
        query, key, value = oracle.project(layer, oracle.rms(x, f"model.layers.{layer}.input_layernorm.weight"))
        x = x + oracle.attend(layer, query, *made.setdefault(layer, (key, value)))
        x = x + oracle.mlp(layer, x)
    return oracle.logits(x)


@pytest.mark.parametrize("count,prelude,coda", [(2, 0, 0), (3, 1, 1)])
@pytest.mark.parametrize("keys", [{}, SLIDING, {"k_norm_position": "after_rope"}], ids=["full", "sliding", "late"])
def test_later_trips_read_what_the_first_one_made(count, prelude, coda, keys):
    model, ids = build(sharing(count, prelude, coda, **keys), dtype=torch.float64), tokens(2, 9)
    oracle, order = Oracle(model), [i for i, _ in order_of(4, count, prelude, coda)]
    agree(model, ids, read_once(oracle, ids, order), oracle)
    own = FathomForCausalLM(looped(count, prelude, coda, **keys)).eval().double()
    own.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (own(ids).logits - model(ids).logits).abs().max() > 1e-3


@pytest.mark.quick("1-0-0", "3-1-1", "2-0-2")
@every_shape
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


def test_in_a_budget_of_one_trip_nothing_is_shared():
    model, ids = build(sharing(3, 1)), tokens(2, 9)
    plain = FathomForCausalLM(config_of("vanilla")).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids, max_trips=1).logits, plain(ids).logits)


def test_drafts_need_keys_of_their_own():
    with pytest.raises(ValueError, match=r"draft_trips: .* set recurrence_options\.kv to own"):
        build(sharing(3)).generate(tokens(1, 4), max_new_tokens=3, draft_trips=1)


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


def test_without_injection_the_diagonal_is_the_plain_loop():
    model, ids = diagonal(), tokens(2, 9)
    decays(model, -100.0, 0.5)
    plain = FathomForCausalLM(looped(3, 1)).eval().double()
    plain.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-3)
        model.model.recurrence.entry_map.zero_()
        assert torch.allclose(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("injection", ["add", "diagonal"])
def test_the_entry_is_what_the_prelude_makes(injection):
    """Not the embeddings: with the prelude switched off it is the same, with it another."""
    seen = []
    model, ids = diagonal(injection=injection), tokens(1, 5)
    policy = model.model.recurrence
    injected = policy.injected
    policy.injected = lambda entry: seen.append(entry) or injected(entry)
    with torch.no_grad():
        state = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(seen[0], state[1]) and not torch.equal(seen[0], state[0])


def test_trips_are_drawn_for_each_step_alike_on_every_rank():
    options = {"trips": 3, "trips_range": [2, 5], "seed": 7}
    one, other = (FathomForCausalLM(config_of("loop", recurrence_options=options)).model.recurrence for _ in range(2))
    drawn = []
    for step in range(60):
        one.set_step(step)
        other.set_step(step)
        assert one.drawn_trips == other.drawn_trips
        drawn.append(one.drawn_trips)
    assert set(drawn) == {2, 3, 4, 5} and one.trips == 3


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
    with pytest.raises(ModelError, match="no plain deeper model"):
        as_unrolled(model)


def test_the_entry_has_a_price():
    plain, given = looped(3, 1), diagonal(entry_norm=True, norm_between="own").config
    width = given.hidden_size
    beyond = mechanism_cost(given)
    assert beyond.flops - mechanism_cost(plain).flops == 2 * width * width
    counted = {True: given, False: plain}
    numbers = {key: sum(p.numel() for p in FathomForCausalLM(c).parameters()) for key, c in counted.items()}
    assert beyond.parameters == numbers[True] - numbers[False] == width * width + 4 * width


@pytest.mark.parametrize(
    "options,says",
    [
        ({"injection": "linear"}, "recurrence_options.injection must be none, add or diagonal, got 'linear'"),
        ({"kv": "last"}, "recurrence_options.kv must be own or first, got 'last'"),
        ({"norm_between": "both"}, "recurrence_options.norm_between must be none, final or own, got 'both'"),
        ({"entry_norm": True}, "nothing is injected"),
        ({"trips": 3, "trips_range": [4, 6]}, r"trips must lie in trips_range \[4, 6\], got 3"),
        ({"trips": 3, "trips_max": 2}, "trips_max must be at least 3, got 2"),
        ({"trips": 0}, "recurrence_options.trips must be at least 1, got 0"),
        ({"prelude": 2, "coda": 2}, r"at least one of the 4 layers to loop, got 2 \+ 2"),
        ({"prelude": -1}, "prelude"),
        ({"trips": 2.5}, "recurrence_options.trips must be int, got 2.5"),
        ({"damping": 0.0}, r"damping must lie above 0 and be at most 1, got 0\.0"),
        ({"damping": 0.5, "injection": "add"}, "damping: set injection and norm_between to none, or damping to 1"),
        ({"damping": 0.5, "early_loss": 0.1}, "early_loss needs damping 1 and blend 1"),
        ({"blend": 0.5, "early_loss": 0.1}, "early_loss needs damping 1 and blend 1"),
        ({"times": 2}, "recurrence_options.times is not an option of loop"),
    ],
)
def test_bad_options_are_one_clear_line(options, says):
    with pytest.raises(ValueError, match=says) as error:
        config_of("loop", recurrence_options=options)
    assert "\n" not in str(error.value)


# --- an entry and an exit ---------------------------------------------------------------------------------------------


def by_hand(model, ids, trips, first, last, damping, blend):
    """Logits: x_{k+1} = x_k + δ (g(x_k) - x_k) over layers `first` … `last`, then n + λ (x_K - n) with n = g(x_0)."""
    decoder = model.model
    x = decoder.embed_tokens(ids)
    turned = signed(decoder.rotary_emb(x, torch.arange(ids.shape[1]).unsqueeze(0)))

    def through(x, layers):
        for layer in layers:
            x = layer(x, rotation=turned, attention_mask=None)[0]
        return x

    x = through(x, decoder.layers[:first])
    n = through(x, decoder.layers[first : last + 1])
    for _ in range(trips):
        x = x + damping * (through(x, decoder.layers[first : last + 1]) - x)
    return model.lm_head(decoder.norm(through(n + blend * (x - n), decoder.layers[last + 1 :])))


@pytest.mark.parametrize("trips,damping,blend", [(2, 0.5, 1.0), (3, 0.25, 0.5), (2, 1.0, 0.25), (3, 1 / 3, 1.0)])
def test_a_damped_and_blended_loop_by_hand(trips, damping, blend):
    options = {"trips": trips, "prelude": 1, "coda": 1, "damping": damping, "blend": blend}
    model, ids = build(config_of("loop", recurrence_options=options)).double(), tokens(1, 9)
    with torch.no_grad():
        found, wanted = model(ids).logits, by_hand(model, ids, trips, 1, 2, damping, blend)
        assert (found - wanted).abs().max() < 1e-6  # λ is a float32
        assert (found - by_hand(model, ids, trips, 1, 2, 1.0, 1.0)).abs().max() > 1e-2, "undamped"
        assert (found - by_hand(model, ids, trips, 1, 3, damping, blend)).abs().max() > 1e-2, "another span"


def test_in_a_budget_of_one_trip_it_is_the_model_without_a_loop():
    options = {"trips": 3, "prelude": 1, "coda": 1, "damping": 0.5, "blend": 0.5}
    model, ids = build(config_of("loop", recurrence_options=options)), tokens(2, 9)
    plain = FathomForCausalLM(config_of("vanilla")).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids, max_trips=1).logits, plain(ids).logits)
        assert not torch.equal(model(ids, max_trips=2).logits, plain(ids).logits)
