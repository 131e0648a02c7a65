"""`mudd` against its equations, and the seam that it stands on: a read of three inputs."""

import pytest
import torch
from transformers import DynamicCache

from fathom.models import FathomForCausalLM, modeling
from fathom.models.cost import count_parameters
from fathom.models.mudd import Mudd, mixing, sources_of

from .cases import build, config_of, tokens
from .oracle import Oracle, agree


def name_of(oracle, layer):
    """The module that reads at the start of a layer, or before the final norm."""
    return "model.final_residual" if layer == oracle.c.num_hidden_layers else f"model.layers.{layer}.attn_residual"


def mix(oracle, layer, entries, ways, fault=None):
    """X̄ of every way, of the X_j by layer; `fault` is a way that keeps the newest alone."""
    name = name_of(oracle, layer)
    newest, w = entries[layer], oracle.w
    hidden = torch.nn.functional.gelu(oracle.normed(newest) @ w[f"{name}.weigher.w1.weight"].T)
    made = (hidden @ w[f"{name}.weigher.w2.weight"].T).unflatten(-1, (len(ways), -1)) + w[f"{name}.static"]
    read = [j for j in sources_of(oracle.c, layer)]
    added = oracle.c.residual_options["norm"] == "prepost"
    sources = {
        j: oracle.normed(x) * w[name_of(oracle, j) + ".source_gain.weight"] if added else x
        for j, x in entries.items()
        if j in read
    }
    sums = {
        way: sum(made[..., c, n, None] * sources[j] for n, j in enumerate(read) if j in sources)
        for c, way in enumerate(ways)
    }
    if added and "r" in ways:
        sums["r"] = oracle.normed(sums["r"]) * w[f"{name}.stream_gain.weight"]
    sums = {way: x + newest if added else x for way, x in sums.items()}
    return {way: newest if way == fault else x for way, x in sums.items()}


def truth_of(oracle, ids, spans=None, fault=None):
    """Logits; `spans` are the first layer of each trip and the one after its last."""
    c, x = oracle.c, oracle.embedding[ids]
    for start, stop in spans or [(0, c.num_hidden_layers)]:
        entries = {start: x}
        for i in range(start, stop):
            ways, _ = mixing(c, i)
            sums = mix(oracle, i, entries, ways, fault) if ways else {}
            stream = sums.get("r", entries[i])
            normed = [oracle.rms(sums.get(way, stream), f"model.layers.{i}.input_layernorm.weight") for way in "qkv"]
            for n, gain in ((1, "key_gain"), (2, "value_gain")):
                if "qkv"[n] in ways:
                    normed[n] = normed[n] * oracle.w[f"model.layers.{i}.attn_residual.{gain}.weight"]
            query, key, value = (oracle.project(i, way)[n] for n, way in enumerate(normed))
            x = stream + oracle.attend(i, query, key, value)
            x = entries[i + 1] = x + oracle.mlp(i, x)
        # A trip ends with the final sum, of the newest sources.
        last = c.num_hidden_layers
        moved = {j + last - stop: entry for j, entry in entries.items()}
        x = mix(oracle, last, moved, "r", fault)["r"]
    return oracle.logits(x)


OPTIONS = [
    {},
    {"ways": "vr", "last": 2, "sources": "few", "hidden": 5},
    {"ways": "qk"},
    {"ways": "r"},
    {"ways": "v", "sources": "few"},
    {"norm": "prepost"},
    {"norm": "prepost", "ways": "kr", "last": 2, "sources": "few"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equations(options):
    model = build(config_of("mudd", num_hidden_layers=5, residual_options=options), dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(2, 7)
    agree(model, ids, truth_of(oracle, ids), oracle)


def test_a_later_trip_has_fewer_sources():
    """Weights are counted back from the newest, as its trip's input stands where the prelude's output stood."""
    config = config_of("loop", num_hidden_layers=4, residual="mudd", recurrence_options={"trips": 2, "prelude": 1})
    model = build(config, dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(1, 6)
    agree(model, ids, truth_of(oracle, ids, [(0, 4), (1, 4)]), oracle)


@pytest.mark.parametrize("way", "qkvr")
def test_every_way_matters(way):
    """The negative control: a way that keeps X_i alone is another model."""
    model = build(config_of("mudd"), dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(1, 6)
    with torch.no_grad():
        assert (truth_of(oracle, ids, fault=way) - model(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("norm", ["none", "prepost"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_starts_as_itself_through_three_inputs(dtype, norm):
    """Bitwise, also with other weights in the MLP's first matrix, and with gradients on."""
    vanilla = build(config_of("vanilla"), dtype=dtype)
    torch.manual_seed(3)
    model = FathomForCausalLM(config_of("mudd", residual_options={"norm": norm})).eval().to(dtype)
    model.load_state_dict(vanilla.state_dict(), strict=False)
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, vanilla(ids).logits)
    assert torch.equal(model(ids).logits, vanilla(ids).logits)


def test_the_first_step_moves_the_last_matrix_alone():
    """W2 = 0 hides W1 from the first gradient, and from no other."""
    torch.manual_seed(0)
    model, ids = FathomForCausalLM(config_of("mudd")).train(), tokens(2, 9)

    def moved() -> dict[str, bool]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        weigher = model.model.layers[2].attn_residual.weigher
        return {"w1": bool(weigher.w1.weight.grad.any()), "w2": bool(weigher.w2.weight.grad.any())}

    assert moved() == {"w1": False, "w2": True}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert moved() == {"w1": True, "w2": True}


def test_attention_gets_one_norm_for_each_input_of_its_own(monkeypatch):
    """Three of three ways, two where queries and keys read the stream, and one without ways."""
    for options, norms in (({}, 3), ({"ways": "vr"}, 2), ({"ways": "r"}, 1)):
        model, calls = build(config_of("mudd", residual_options=options)), []
        model.model.layers[3].input_layernorm.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        model(tokens(1, 4))
        assert len(calls) == norms, options


def test_swapped_inputs_are_seen(monkeypatch):
    """The negative control of the seam: keys made of what values read."""
    model, ids = build(config_of("mudd"), dtype=torch.float64), tokens(1, 6)
    with torch.no_grad():
        right = model(ids).logits
        project = modeling.Attention._projected
        monkeypatch.setattr(modeling.Attention, "_projected", lambda self, q, k, v: project(self, q, v, k))
        assert (model(ids).logits - right).abs().max() > 1e-2


def test_a_token_is_what_a_text_is():
    """Few tokens are summed as a stack, many as a list."""
    model, ids = build(config_of("mudd"), dtype=torch.float64), tokens(1, 600)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids).logits
        model(ids[:, :-1], past_key_values=cache)
        one = model(ids[:, -1:], past_key_values=cache).logits
    assert (one[:, 0] - whole[:, -1]).abs().max() < 1e-11


def test_parameters():
    """Per layer i ≥ 1: d h + h 4 (i + 1) + 4 (i + 1) with h = 4 (i + 1), and 2 d gains; the last sum has one way."""
    width, layers, total = 32, 4, 0
    for i in range(1, layers + 1):
        made = (4 if i < layers else 1) * (i + 1)
        total += width * made + made * made + made + 2 * width * (i < layers)
    assert count_parameters(config_of("mudd")) - count_parameters(config_of("vanilla")) == total


def test_decay_leaves_the_static_weights_alone():
    """They would be pulled from the one-hot to nothing."""
    from fathom.training.optimizer import decays

    answer = decays(FathomForCausalLM(config_of("mudd")))
    static = [name for name in answer if name.endswith("attn_residual.static")]
    assert len(static) == 3 and not any(answer[name] for name in static)
    assert answer["model.layers.1.attn_residual.weigher.w1.weight"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ways": "vq"}, "ways must be some of the letters qkvr, in order, got 'vq'"),
        ({"ways": ""}, "ways must be"),
        ({"last": 5}, "last must be between 1 and 4"),
        ({"sources": "some"}, "sources must be one of all, few"),
        ({"hidden": 0}, "hidden must be at least 1"),
    ],
)
def test_bad_options_name_the_key(options, says):
    with pytest.raises(ValueError, match=f"residual_options.{says}"):
        config_of("mudd", residual_options=options)


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_an_engine_that_fuses_the_projections_is_refused(backend):
    """It would compute keys and values of the queries' input."""
    model = build(config_of("mudd"))
    model.config._attn_implementation = backend
    with pytest.raises(ValueError, match=f"attn_implementation={backend} makes queries, keys and values of one input"):
        model(tokens(1, 3))


def test_only_attention_has_several_inputs():
    model = FathomForCausalLM(config_of("mudd"))
    for i, layer in enumerate(model.model.layers):
        assert isinstance(layer.attn_residual, Mudd)
        assert layer.attn_residual.multiway == (i > 0) and not layer.mlp_residual.multiway
    assert not model.model.final_residual.multiway and model.model.multiway
