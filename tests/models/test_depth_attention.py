"""Depth-Attention against its equations, restated here token by token and head by head in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.cost import mechanism_cost
from fathom.models.depth_attention import DepthAttention, depth_weights, mix, mix_few
from fathom.models.numerics import few
from fathom.models.slots import plan
from fathom.models.uniform_depth import UniformDepth

from .cases import SHAPE, build, config_of, tokens


def mixed_layers(config):
    """M of every layer: values mixed, the own one included; 0 where there is no source."""
    return [len(v.sources) + 1 if v.sources else 0 for trip in plan(config) for v in trip]


# --- the whole model, from the equations alone ------------------------------------------------------------------------


def oracle_logits(model, ids):
    """One row, in float64, with explicit loops: nothing of the code under test is called."""
    c, w = model.config, {name: t.double() for name, t in model.state_dict().items()}
    heads, kv, width = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    group, stride, window = heads // kv, c.mixer_options["stride"], c.mixer_options["recent_layers"]
    length = len(ids)

    def rms(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weight

    def normed(x, name):
        return rms(x, w[name]) if c.qk_norm == "head" else x

    def rope(x, t):
        angles = t / 10_000.0 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        a, b = x[: width // 2], x[width // 2 :]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    x = w["model.embed_tokens.weight"][ids]
    history = []  # per layer: keys and mixed values, [T][H_kv]
    for i in range(c.num_hidden_layers):
        p = f"model.layers.{i}."
        h = rms(x, w[p + "input_layernorm.weight"])
        names = ("q_proj", "k_proj", "v_proj")
        q, k, v = (h @ w[f"{p}self_attn.{name}.weight"].T for name in names)
        query, keys, values = ([[None] * n for _ in range(length)] for n in (heads, kv, kv))
        for t in range(length):
            for j in range(heads):
                query[t][j] = rope(normed(q[t, j * width : (j + 1) * width], p + "self_attn.q_norm.weight"), t)
            for j in range(kv):
                keys[t][j] = rope(normed(k[t, j * width : (j + 1) * width], p + "self_attn.k_norm.weight"), t)
                own = v[t, j * width : (j + 1) * width]
                sources = [s for s in range(i) if s % stride == 0 or s >= i - window]
                if sources:
                    pooled = sum(query[t][j * group + g] for g in range(group)) / group
                    candidates = [history[s][0][t][j] for s in sources] + [keys[t][j]]
                    if c.mixer_options["norm_scores"]:
                        pooled, *candidates = (rms(vector, 1.0) for vector in (pooled, *candidates))
                    scores = torch.stack([pooled @ key / math.sqrt(width) for key in candidates])
                    alpha = scores.softmax(0)
                    own = sum(
                        a * value
                        for a, value in zip(alpha, [*(history[s][1][t][j] for s in sources), own], strict=True)
                    )
                values[t][j] = own
        history.append((keys, values))
        attended = torch.zeros(length, heads * width, dtype=torch.float64)
        for t in range(length):
            for j in range(heads):
                scores = torch.stack([query[t][j] @ keys[u][j // group] / math.sqrt(width) for u in range(t + 1)])
                weights = scores.softmax(0)
                attended[t, j * width : (j + 1) * width] = sum(weights[u] * values[u][j // group] for u in range(t + 1))
        x = x + attended @ w[p + "self_attn.o_proj.weight"].T
        h = rms(x, w[p + "post_attention_layernorm.weight"])
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@pytest.mark.parametrize("kv_heads", [4, 1], ids=["g1", "g4"])
@pytest.mark.parametrize("options", [{"stride": 1}, {"stride": 2}, {}, {"stride": 6, "recent_layers": 2}], ids=str)
def test_model_is_the_equations(kv_heads, options):
    config = config_of("depth_attention", num_hidden_layers=6, num_key_value_heads=kv_heads, mixer_options=options)
    model, ids = build(config), tokens(1, 7)
    with torch.no_grad():
        ours = model(ids).logits[0].double()
    truth = oracle_logits(model, ids[0])
    assert (ours - truth).abs().max() <= 1e-5 * max(1.0, truth.abs().max())
    other = FathomForCausalLM(config_of("vanilla", num_hidden_layers=6, num_key_value_heads=kv_heads)).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (other(ids).logits[0].double() - truth).abs().max() > 1e-2, "the oracle must tell them apart"


def test_normed_scores_are_the_equations():
    """Of keys without norms, some of them far larger than others: plain products would score them otherwise."""
    options = {"stride": 1, "norm_scores": True}
    config = config_of("depth_attention", num_hidden_layers=4, qk_norm="none", mixer_options=options)
    model, ids = build(config), tokens(1, 7)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(6.0)
        ours = model(ids).logits[0].double()
        truth = oracle_logits(model, ids[0])
        assert (ours - truth).abs().max() <= 1e-5 * max(1.0, truth.abs().max())
        config.mixer_options["norm_scores"] = False
        assert (oracle_logits(model, ids[0]) - truth).abs().max() > 1e-2, "the oracle must tell them apart"


# --- the mixer alone --------------------------------------------------------------------------------------------------


def inputs(group, sources, dtype=torch.float64, batch=2, kv=2, length=3, width=8, seed=0):
    torch.manual_seed(seed)
    shape = (batch, kv, length, width)
    query = torch.randn(batch, kv * group, length, width, dtype=dtype)
    return query, *(torch.randn(shape, dtype=dtype) for _ in range(2 + 2 * sources))


def loop_mix(query, key, value, *sources):
    """Per token and head, in plain Python."""
    batch, kv, length, width = key.shape
    group = query.shape[1] // kv
    out = torch.empty_like(value)
    for b in range(batch):
        for h in range(kv):
            for t in range(length):
                pooled = query[b, h * group : (h + 1) * group, t].mean(0)
                keys = [k[b, h, t] for k in (*sources[::2], key)]
                values = [v[b, h, t] for v in (*sources[1::2], value)]
                alpha = torch.stack([pooled @ k / math.sqrt(width) for k in keys]).softmax(0)
                out[b, h, t] = sum(a * v for a, v in zip(alpha, values, strict=True))
    return out


def mixer(**options):
    return DepthAttention(config_of("depth_attention", mixer_options=options), 1)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("sources", [1, 2, 3])
def test_forward_and_gradients(group, sources):
    """The hand-written backward against autograd through the loops, and the plain form against both."""
    tensors = [t.requires_grad_() for t in inputs(group, sources)]
    torch.manual_seed(1)
    seed = torch.randn_like(tensors[2])
    query, key, value, *rest = tensors
    truth = torch.autograd.grad((loop_mix(*tensors) * seed).sum(), tensors)
    eager = torch.autograd.grad((mixer()(query, key, value, tuple(rest)) * seed).sum(), tensors)
    plain = torch.autograd.grad((mix(query, key, value, tuple(rest))[0] * seed).sum(), tensors)
    assert torch.allclose(mixer()(query, key, value, tuple(rest)), loop_mix(*tensors), atol=1e-12)
    for a, b, c in zip(truth, eager, plain, strict=True):
        assert torch.allclose(a, b, atol=1e-12) and torch.allclose(a, c, atol=1e-12)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("sources", [1, 5])
def test_few_tokens_are_mixed_as_many_are(length, group, sources):
    """As projections leave them, queries, keys and values are no contiguous memory."""
    made = torch.Generator().manual_seed(sources)
    query, key, value, *lower = (
        torch.randn(2, length, heads, 8, generator=made, dtype=torch.float64).transpose(1, 2)
        for heads in [2 * group] + [2] * (2 * sources + 2)
    )
    expected = mix(query, key, value, tuple(lower))[0]
    found = mix_few(query, key, value, tuple(lower))
    assert found.shape == value.shape and (found - expected).abs().max() < 1e-14
    assert (mix_few(query, key.roll(1, 1), value, tuple(lower)) - expected).abs().max() > 1e-3


def test_few_is_a_limit_of_eager_decoding_in_full_precision():
    query = torch.randn(2, 2, 3, 8)
    with torch.no_grad():
        assert few(query) and not few(query.half()) and not few(query.repeat(1, 1, 512, 1))
    assert not few(query)


def test_a_decoded_token_under_autocast_is_mixed_in_float32():
    """Attention proper would be computed, and returned, in half precision there."""
    query, key, value, *rest = (t.detach().float() for t in inputs(2, 2))
    with torch.no_grad():
        expected = mixer()(query, key, value, tuple(rest))
        with torch.autocast("cpu", torch.bfloat16):
            found = mixer()(query, key, value, tuple(rest))
    assert found.dtype == torch.float32 and (found - expected).abs().max() < 1e-6


def test_gradcheck():
    query, key, value, *rest = (t.requires_grad_() for t in inputs(2, 2, batch=1, kv=1, length=2, width=4))
    assert torch.autograd.gradcheck(lambda q, k, v, *s: mixer()(q, k, v, s), (query, key, value, *rest))


def test_groups_are_contiguous():
    query, key, value, *rest = inputs(2, 1)
    base = mixer()(query, key, value, tuple(rest))
    inside = query[:, [1, 0, 3, 2]]
    across = query[:, [0, 2, 1, 3]]
    assert torch.allclose(mixer()(inside, key, value, tuple(rest)), base, atol=1e-14)
    assert not torch.allclose(mixer()(across, key, value, tuple(rest)), base, atol=1e-3)


def test_no_source_returns_the_same_tensor():
    query, key, value = inputs(2, 0)
    assert mixer()(query, key, value, ()) is value


def test_ones_stay_ones_and_weights_are_convex():
    query, key, value, k0, _, k1, _ = inputs(2, 2)
    ones = torch.ones_like(value)
    assert torch.allclose(mixer()(query, key, ones, (k0, ones, k1, ones)), ones, atol=1e-15)
    weights, _ = depth_weights(query, key, (k0, ones, k1, ones))
    assert all((w >= 0).all() for w in weights) and torch.allclose(sum(weights), torch.ones(()).double(), atol=1e-15)


def test_zero_query_is_uniform():
    query, key, value, *rest = inputs(2, 2)
    uniform = UniformDepth(config_of("uniform_depth"), 3)
    zero = torch.zeros_like(query)
    assert torch.allclose(mixer()(zero, key, value, tuple(rest)), uniform(zero, key, value, tuple(rest)), atol=1e-14)


def test_known_weights():
    """One source with score 0, own score ln 2: a third and two thirds."""
    one = torch.ones(1, 1, 1, 4, dtype=torch.float64)
    own_key = one * math.log(2) / 2  # q · k / √4 = ln 2
    weights, _ = depth_weights(one, own_key, (one * 0, one))
    assert [w.item() for w in weights] == pytest.approx([1 / 3, 2 / 3], abs=1e-15)


def test_uniform_coefficients_of_raw_values():
    """Zero queries at L = 4, stride 2: how much of each raw value every layer ends up with."""
    config = config_of("uniform_depth")
    kept, rows = {}, []
    for visit in plan(config)[0]:
        own = torch.eye(4, dtype=torch.float64)[visit.layer].view(1, 1, 1, 4)
        sources = tuple(t for i in visit.sources for t in (own, kept[i]))
        kept[visit.index] = UniformDepth(config, visit.layer)(own, own, own, sources)
        rows.append(kept[visit.index].flatten().tolist())
    expected = [[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 2, 0, 1 / 2, 0], [1 / 2, 0, 1 / 6, 1 / 3]]
    assert rows == [pytest.approx(row, abs=1e-15) for row in expected]


def test_sources_are_mixed_values():
    """Handing layer 3 the *raw* value of layer 2 changes the output: recursion is not optional."""
    model, ids = build(config_of("depth_attention"), dtype=torch.float64), tokens(1, 9)
    with torch.no_grad():
        right = model(ids).logits
    third = model.model.layers[2].self_attn.mixer
    mixed, reader = third.forward, model.model.layers[3].self_attn.mixer
    raw = []
    third.forward = lambda q, k, v, s: (raw.append(v), mixed(q, k, v, s))[1]
    read = reader.forward
    reader.forward = lambda q, k, v, s: read(q, k, v, (*s[:3], raw[-1]))
    with torch.no_grad():
        assert (model(ids).logits - right).abs().max() > 1e-3


@pytest.mark.parametrize("position,same", [("before_rope", True), ("after_rope", False)])
def test_depth_scores_and_position(position, same):
    """The same token states give the same weights anywhere, but only if keys are normed before they are rotated."""
    model = build(config_of("depth_attention", k_norm_position=position), dtype=torch.float64)
    found = []

    def look(module, args):
        found.append(torch.stack(depth_weights(args[0], args[1], args[3])[0])) if args[3] else None

    model.model.layers[1].self_attn.mixer.register_forward_pre_hook(look)
    ids = tokens(1, 1)
    with torch.no_grad():
        for t in (0, 1000):
            model(ids, position_ids=torch.tensor([[t]]), use_cache=False)
    gap = (found[0] - found[1]).abs().max()
    assert gap < 1e-6 if same else gap > 1e-3  # cosines are float32, whatever the model is


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    """Sums are float32: the result is within one rounding of the exact mixture of the same inputs."""
    query, key, value, *rest = (t.to(dtype) for t in inputs(4, 3, torch.float32, length=64, width=32))
    exact = loop_mix(*(t.double() for t in (query, key, value, *rest)))
    ours = mixer()(query, key, value, tuple(rest))
    assert ours.dtype == dtype
    assert ((ours.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 1e-5).all()


def test_backward_keeps_no_copies():
    """Saved for backward: what came in, what goes out, and one number per candidate and head."""
    query, key, value, *rest = (t.requires_grad_() for t in inputs(2, 2, torch.bfloat16, length=16, width=32))
    sizes = {}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = mixer()(query, key, value, tuple(rest))
    known = {t.untyped_storage().data_ptr() for t in (query, key, value, *rest, out)}
    assert sum(n for p, n in sizes.items() if p not in known) <= 0.3 * key.nbytes


# --- schedule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers,stride,total",
    [
        *[(4, 2, 7), (24, 24, 46), (24, 12, 57), (24, 6, 79), (24, 1, 299), (28, 14, 67), (32, 16, 77)],
        *[(48, 48, 94), (48, 24, 117), (48, 12, 163), (48, 1, 1175)],
    ],
)
def test_sum_of_mixed_values(layers, stride, total):
    assert (
        sum(mixed_layers(config_of("depth_attention", num_hidden_layers=layers, mixer_options={"stride": stride})))
        == total
    )


def test_absolute_grid():
    config = config_of("depth_attention", num_hidden_layers=48)
    assert config.mixer_options["stride"] == 24, "half the layers, stored resolved"
    sources = [DepthAttention.source_layers(config, i) for i in range(48)]
    assert sources[0] == () and all(s == (0,) for s in sources[1:25]) and all(s == (0, 24) for s in sources[25:])
    relative = sum(1 + i // 24 for i in range(48))  # the paper's text
    assert relative == 72 != sum(mixed_layers(config)) == 117
    assert mixed_layers(config_of("depth_attention")) == [0, 2, 2, 3]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12))
def test_window_joins_the_grid(layers, stride, window):
    stride, window = min(stride, layers), min(window, layers)
    config = config_of(
        "depth_attention", num_hidden_layers=layers, mixer_options={"stride": stride, "recent_layers": window}
    )
    for i in range(layers):
        expected = {j for j in range(i) if j % stride == 0} | set(range(max(0, i - window), i))
        assert set(DepthAttention.source_layers(config, i)) == expected


def test_cost_at_three_billion():
    """The published count: 239,616 FLOPs and 288,768 bytes per token, 0.004 % of 2N."""
    shape = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    config = FathomConfig(**{**SHAPE, **shape}, mixer="depth_attention")
    cost = mechanism_cost(config)
    assert (cost.flops, cost.io_bytes, cost.transient_bytes) == (239_616, 288_768, 4096)
    assert (cost.parameters, cost.cache_bytes) == (0, 0)
    assert round(100 * cost.flops / (2 * 2_747_998_208), 3) == 0.004


# --- gradients through depth ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_sources(checkpointing):
    """Cut layer 0's output: its key and value still learn, through later layers; its query does not."""
    found = {}
    for case in ("depth_attention", "vanilla"):
        model, ids = build(config_of(case), dtype=torch.float64).train(), tokens(2, 12)
        if checkpointing:
            model.activation_checkpointing_enable()
        attention = model.model.layers[0].self_attn
        torch.nn.init.zeros_(attention.o_proj.weight)
        model(ids, labels=ids).loss.backward()
        found[case] = [
            getattr(attention, name).weight.grad.abs().sum().item() for name in ("q_proj", "k_proj", "v_proj")
        ]
    assert found["vanilla"] == [0, 0, 0]
    query, key, value = found["depth_attention"]
    assert query == 0 and key > 1e-4 and value > 1e-4


# --- retrofitting -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small vanilla model that has learned to count in steps, saved as Qwen3 would save it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        ids = counting(16)
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert loss < 2.0, "it must have learned something to lose"
    directory = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(directory)
    return directory


def counting(rows):
    start, step = torch.randint(0, 58, (rows, 1)), torch.randint(1, 6, (rows, 1))
    return 3 + (start + step * torch.arange(20)) % 58


@pytest.mark.slow
def test_retrofit_starts_as_itself_and_is_let_go(trained):
    torch.manual_seed(1)
    ids = counting(32)

    def loss(model):
        with torch.no_grad():
            return model(ids, labels=ids).loss.item()

    base = loss(FathomForCausalLM.from_pretrained(trained))
    plain = FathomForCausalLM.from_pretrained(trained, mixer="depth_attention")
    assert abs(loss(plain) - base) > 1e-2, "switched on at once, it is another function"
    options = {"blend_steps": 100}
    gentle = FathomForCausalLM.from_pretrained(trained, mixer="depth_attention", mixer_options=options)
    assert loss(gentle) == base
    gentle.set_step(100)
    assert loss(gentle) == pytest.approx(loss(plain), abs=1e-6)
