"""λ: exact at both ends, a schedule that a saved model settles, and the same numbers in every form of a mix."""

import copy

import pytest
import torch
from transformers import DynamicCache

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.axes.blend import Blended
from fathom.models.axes.replaceable import replace
from fathom.models.mixers.depth_attention import DepthAttention
from fathom.models.registry import MECHANISMS

from .cases import SHAPE, build, config_of, tokens

WITH_BLEND = [name for name, one in MECHANISMS.items() if one.closed and "blend" in one.closed]
TOGETHER = {
    "mixer": "depth_attention",
    "residual": "hyper_connections",
    "recurrence": "loop",
    "mixer_options": {"stride": 1},
    "recurrence_options": {"trips": 3, "prelude": 1},
}


def options_of(name: str, **options: object) -> dict:
    """The keys of a configuration that switch a mechanism on."""
    axis = MECHANISMS[name].axis
    return {axis: name, f"{axis}_options": options}


def copied(model: FathomForCausalLM, **keys: object) -> FathomForCausalLM:
    """A model of the same weights under other keys."""
    torch.manual_seed(7)
    other = FathomForCausalLM(FathomConfig(**SHAPE | keys)).train(model.training)
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def test_the_mechanisms_that_can_start_closed():
    assert set(WITH_BLEND) == {
        *("depth_attention", "uniform_depth", "value_residual"),
        *("attention_residuals", "hyper_connections"),
        *("loop", "ponder", "adaponder", "latent_cot"),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_both_ends_are_exact(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(2, 5000, dtype=torch.float64).mul(torch.logspace(-3, 3, 5000)).to(dtype)
    part = DepthAttention(config_of("depth_attention", mixer_options={"blend": 0.5}), 1)
    assert torch.equal(part.blended(a, b), torch.lerp(a, b, 0.5))
    part.blend.fill_(0.0)
    assert torch.equal(part.blended(a, b), a)
    part.blend.fill_(1.0)
    assert torch.equal(part.blended(a, b), b)
    assert not torch.equal(a + (b - a), b), "a sum would round"


@pytest.mark.quick("depth_attention", "attention_residuals", "loop", "adaponder")
@pytest.mark.parametrize("name", WITH_BLEND)
def test_the_schedule_rises_and_a_saved_model_settles_it(name, tmp_path):
    axis = MECHANISMS[name].axis
    model = FathomForCausalLM(FathomConfig(**SHAPE, **options_of(name, blend=0.5, blend_steps=4)))
    plain = copied(model).eval()
    ids, seen = tokens(2, 9), []
    for step in (0, 1, 3, 4, 9):
        model.set_step(step, 100)
        seen += [{part.blend_now for part in model.modules() if isinstance(part, Blended)}]
        assert {float(part.blend) for part in model.modules() if isinstance(part, Blended)} == seen[-1]
    assert seen == [{0.0}, {0.125}, {0.375}, {0.5}, {0.5}]

    model.set_step(0, 100)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids, use_cache=False).logits, plain(ids).logits)
    model.set_step(3, 100)
    model.save_pretrained(tmp_path)
    opened = FathomForCausalLM.from_pretrained(tmp_path).eval()
    kept = getattr(opened.config, f"{axis}_options")
    assert (kept["blend"], kept["blend_steps"]) == (0.375, 0)
    with torch.no_grad():
        found, wanted = opened(ids, use_cache=False).logits, model(ids, use_cache=False).logits
        assert torch.allclose(found, wanted, rtol=0, atol=1e-6)  # tensors lie elsewhere in memory
        assert not torch.equal(found, plain(ids).logits)
    opened.set_step(3, 100)
    assert {part.blend_now for part in opened.modules() if isinstance(part, Blended)} == {0.375}, "it rises once"
    assert getattr(model.config, f"{axis}_options")["blend_steps"] == 4, "the caller's configuration is the caller's"


def test_a_model_that_was_saved_closed_opens_or_says_that_it_does_not(tmp_path, recwarn):
    first = FathomForCausalLM(config_of("depth_attention", mixer_options={"stride": 2, "blend_steps": 4}))
    first.save_pretrained(tmp_path)
    again = FathomForCausalLM.from_pretrained(tmp_path, mixer_options={"blend_steps": 4})
    again.set_step(4, 4)
    assert [part.blend_now for part in again.modules() if isinstance(part, Blended)][-1] == 1.0 and not recwarn.list
    half = FathomForCausalLM.from_pretrained(tmp_path, mixer_options={"blend": 0.5, "blend_steps": 4})
    assert half.config.mixer_options["blend"] == 0.5, "what the caller says of it wins"
    closed = FathomForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="^mixer=depth_attention: closed for good .blend=0.: its output is left out"):
        closed.set_step(4, 4)
    recwarn.clear()
    closed.set_step(5, 5)
    assert not recwarn.list, "once"


def test_a_schedule_at_its_end_computes_what_the_settled_model_does():
    torch.manual_seed(0)
    keys = copy.deepcopy(TOGETHER)
    for axis in ("mixer", "residual", "recurrence"):
        keys.setdefault(f"{axis}_options", {})["blend_steps"] = 3
    model = build(FathomConfig(**SHAPE, **keys))
    model.set_step(3, 9)
    settled = model.settled_config()
    other = FathomForCausalLM(settled).eval()
    other.load_state_dict(model.state_dict())
    assert all(part.blend is None for part in other.modules() if isinstance(part, Blended))
    ids = tokens(2, 11)
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_closed_models_decode_and_learn_as_the_model_without():
    """Token by token too; and no gradient of a decoder's weight changes, while the mechanism's own are zero."""
    vanilla = build(FathomConfig(**SHAPE))
    keys = copy.deepcopy(TOGETHER)
    for axis in ("mixer", "residual", "recurrence"):
        keys.setdefault(f"{axis}_options", {})["blend"] = 0.0
    model, ids = copied(vanilla, **keys), tokens(2, 12)
    with torch.no_grad():
        caches = [DynamicCache(config=one.config) for one in (model, vanilla)]
        for part in ids.split([7, 1, 1, 3], 1):
            ours, theirs = (
                one(part, past_key_values=cache).logits for one, cache in zip((model, vanilla), caches, strict=True)
            )
            assert torch.equal(ours, theirs)
    for one in (model.train(), vanilla.train()):
        one(ids, labels=ids).loss.backward()
    theirs = {name: p.grad for name, p in vanilla.named_parameters()}
    for name, p in model.named_parameters():
        if name in theirs:
            assert torch.allclose(p.grad, theirs[name], rtol=1e-5, atol=1e-7), name
        else:
            assert not p.grad.any(), name


@pytest.mark.parametrize("length", [1, 3, 40], ids=["token", "few", "many"])
@pytest.mark.parametrize("norm_scores", [False, True])
def test_every_form_of_the_depth_mix_blends(length, norm_scores):
    """One token, a stack, the list, and the hand-written backward pass, beside v + λ (mix - v) by hand."""
    torch.manual_seed(0)
    query, *rest = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2, 2, 2, 2, 2))
    for x in (query, *rest):
        x.requires_grad_()
    key, value, *sources = rest
    keys = {"stride": 1, "norm_scores": norm_scores}
    whole, part = (
        DepthAttention(config_of("depth_attention", mixer_options=keys | more), 2) for more in ({}, {"blend": 0.25})
    )
    expected = value + 0.25 * (whole(query, key, value, tuple(sources)) - value)
    found = part(query, key, value, tuple(sources))
    seed = torch.randn_like(value)
    grads = [torch.autograd.grad((x * seed).sum(), (query, *rest), retain_graph=True) for x in (found, expected)]
    for ours, theirs in ((found, expected), *zip(*grads, strict=True)):
        assert (ours - theirs).abs().max() < 1e-12
    with torch.no_grad():
        assert (part(query, key, value, tuple(sources)) - expected).abs().max() < 1e-12
    assert (whole(query, key, value, tuple(sources)) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("kernel", ["depth_mix", "norm_rotate_mix"])
def test_a_kernel_blends(kernel, monkeypatch):
    """What stands in for the kernel is the reference, which knows nothing of λ."""
    torch.manual_seed(0)
    model = build(config_of("depth_attention-blend"))
    ids, mixes = tokens(2, 9), []

    def depth_mix(query, key, value, sources, self_bias):
        mixes.append(1)
        return mix(query, key, value, sources, self_bias)[0]

    def norm_rotate_mix(own, sources, norms, angles, last, self_bias):
        mixes.append(1)
        query, key, value = own
        query, key, value = (x.transpose(1, 2) for x in (norms[0](query), norms[1](key), value))
        query, key = rotate(query, key, *angles)
        return query, key, mix(query, key, value, sources, self_bias)[0]

    from fathom.models.decoder.rotary import rotate
    from fathom.models.mixers.depth_attention import mix

    with torch.no_grad():
        wanted = model(ids).logits
        try:
            replace({kernel: locals()[kernel]}, "cpu")
            found = model(ids).logits
        finally:
            replace({}, "cpu")
    assert len(mixes) == 3 and (found - wanted).abs().max() < 1e-4
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, DepthAttention):
                part.blend = None
        assert (model(ids).logits - wanted).abs().max() > 1e-2
