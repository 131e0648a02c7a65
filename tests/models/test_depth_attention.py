"""The depth mix against its equation, restated token by token and head by head, and which layers are sources."""

import math

import pytest
import torch

from fathom.models import FathomConfig
from fathom.models.axes.numerics import few
from fathom.models.mixers.depth_attention import DepthAttention, depth_weights, mix, mix_few
from fathom.models.registry import mechanism
from fathom.models.trips.slots import plan
from tests.tiny import seeded

from .cases import build, config_of, tokens

KINDS = ("sliding_attention", "full_attention")


def mixed_layers(config):
    """M of every layer: values mixed, the own one included; 0 where there is no source."""
    return [len(v.sources) + 1 if v.sources else 0 for trip in plan(config) for v in trip]


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
    made = seeded(sources)
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


@pytest.mark.parametrize("name", ["depth_attention", "uniform_depth", "value_residual"])
def test_no_source_returns_the_same_tensor(name):
    query, key, value = inputs(2, 0)
    assert mechanism("mixer", name).build(config_of(name), 0)(query, key, value, ()) is value


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


ROPES = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(KINDS, (30.0, 1e4), strict=True)}
TURNING = {
    "smollm3": {"qk_norm": "none", "no_rope_layers": [1, 0, 0, 1]},
    "gemma3": {"rope_parameters": ROPES, "layer_types": [*KINDS] * 2, "use_sliding_window": True, "sliding_window": 4},
}


@pytest.mark.parametrize("family", TURNING)
@pytest.mark.parametrize("case", ["loop+depth_attention-grid", "adaponder+depth_attention"])
def test_layers_that_rotate_differently_score_without_rotation(case, family, monkeypatch):
    """Padding and other positions change nothing, and decoding is reading at once; the control scores rotated keys."""

    def moves(model):
        with torch.no_grad():
            whole, padded = (model(x, attention_mask=m).logits[:, -7:] for x, m in ((ids, None), (longer, mask)))
            at = torch.arange(7).unsqueeze(0) + 50
            return (padded - whole).abs().max(), (model(ids, position_ids=at).logits - whole).abs().max(), whole

    ids = tokens(2, 7)
    longer, mask = torch.nn.functional.pad(ids, (4, 0), value=5), torch.ones(2, 11, dtype=torch.long)
    mask[:, :4] = 0
    model = build(config_of(case, **TURNING[family]), dtype=torch.float64)
    padded, moved, whole = moves(model)
    assert padded < 1e-11 and moved < 1e-4
    with torch.no_grad():
        first = model(ids[:, :4], use_cache=True)
        rest = [model(ids[:, t : t + 1], past_key_values=first.past_key_values).logits for t in range(4, 7)]
    assert (torch.cat([first.logits, *rest], 1) - whole).abs().max() < 1e-11
    monkeypatch.setattr(FathomConfig, "mixes_unrotated", False)
    assert moves(build(model.config, dtype=torch.float64))[1] > 1e-2


def test_layers_that_rotate_alike_score_as_they_attend():
    """Both forms are equal there, and the one without another tensor is taken."""
    for shape in ({}, {"no_rope_layers": [0] * 4}, {"rope_parameters": dict.fromkeys(KINDS, ROPES[KINDS[0]])}):
        layered = {"layer_types": [*KINDS] * 2, "use_sliding_window": True, "sliding_window": 4}
        assert not config_of("depth_attention", **layered, **shape).mixes_unrotated
    assert config_of("depth_attention", **TURNING["smollm3"]).mixes_unrotated
    late = {"no_rope_layers": [1, 0, 0, 1], "k_norm_position": "after_rope"}
    assert not config_of("depth_attention", **late).mixes_unrotated


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


def test_absolute_grid():
    config = config_of("depth_attention", num_hidden_layers=48)
    assert config.mixer_options["stride"] == 24, "half the layers, stored resolved"
    sources = [DepthAttention.source_layers(config, i) for i in range(48)]
    assert sources[0] == () and all(s == (0,) for s in sources[1:25]) and all(s == (0, 24) for s in sources[25:])
    relative = sum(1 + i // 24 for i in range(48))  # the paper's text
    assert relative == 72 != sum(mixed_layers(config)) == 117
    assert mixed_layers(config_of("depth_attention")) == [0, 2, 2, 3]
