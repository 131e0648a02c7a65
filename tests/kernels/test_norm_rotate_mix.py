"""Norms, rotation and depth mix in one Triton kernel, held to the model's own functions, one after another."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fathom.kernels import norm_rotate_mix as ours
from fathom.models.decoder.rms_norm import RMSNorm
from fathom.models.decoder.rotary import rotate
from fathom.models.mixers import depth_attention

from .held import DEVICE, hold, hold_no_zeros
from .test_depth_mix import COUNTS, DTYPES, GROUPS, planted_in

EPS = 1e-6


def drawn(group: int, count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Both angles, the bias, both norms' weights, the raw query, key and value, and the sources, of a random shape."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, length, heads = choose.choice((1, 2)), choose.choice((1, 3, 11)), choose.choice((1, 2))
    width = choose.choice((4, 8, 20))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    turns = torch.rand(choose.choice((1, batch)), length, width // 2, generator=generator) * 6
    cos, sin = turns.cos(), turns.sin()
    angles = [torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)]
    bias = torch.randn((), generator=generator)
    own = [tensor(width) + 1, tensor(width) + 1, tensor(batch, length, group * heads, width)]
    own += [tensor(batch, length, heads, width) for _ in range(2)]
    sources = [tensor(batch, length, heads, width).transpose(1, 2) for _ in range(2 * count)]
    return [*angles, bias, *(x.requires_grad_() for x in (*own, *sources))]


def norms_of(*weights: Tensor) -> tuple[RMSNorm, ...]:
    """Norms with these weights, through which gradients reach them."""
    norms = tuple(RMSNorm(len(weight), eps=EPS) for weight in weights)
    for norm, weight in zip(norms, weights, strict=True):
        del norm.weight
        norm.weight = weight
    return norms


def reference(last: bool) -> Callable[..., Tensor]:
    """What `Attention` does without kernels; all that it makes, in one tensor."""

    def call(cos, sin, bias, query_weight, key_weight, query, key, value, *sources):
        norm_query, norm_key = norms_of(query_weight, key_weight)
        query, key = norm_query(query).transpose(1, 2), key.transpose(1, 2)
        query, key = rotate(query, key if last else norm_key(key), cos, sin)
        key = norm_key(key) if last else key
        return torch.cat((query, key, depth_attention.mix(query, key, value.transpose(1, 2), sources, bias)[0]), 1)

    return call


def made_by(module, last: bool) -> Callable[..., Tensor]:
    def call(cos, sin, bias, query_weight, key_weight, query, key, value, *sources):
        norms = norms_of(query_weight, key_weight)
        return torch.cat(module.norm_rotate_mix((query, key, value), sources, norms, (cos, sin), last, bias), 1)

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_equals_the_reference(group, dtype):
    for seed, count in enumerate(COUNTS):
        last = seed % 2 == 1
        hold(made_by(ours, last), reference(last), drawn(group, count, dtype, 10 * group + seed), dtype)


def call_of(inputs: list[Tensor], biased: bool = True) -> tuple[object, ...]:
    cos, sin, bias, query_weight, key_weight, *rest = (x.to(DEVICE) for x in inputs)
    return rest[:3], rest[3:], [query_weight, key_weight], [cos, sin], bias if biased else None, EPS, False


@pytest.mark.parametrize("biased", [True, False])
def test_is_an_operator_of_torch(biased):
    torch.library.opcheck(ours.mix, call_of(drawn(4, 2, torch.float32, 7), biased))


def test_weights_are_those_of_the_mix_and_have_no_gradient():
    inputs = drawn(4, 3, torch.float32, 5)
    query, key, mixed, weights = ours.mix(*call_of(inputs, biased=False))
    cos, sin, _, *norms_and_rest = inputs
    wanted = reference(False)(cos, sin, None, *norms_and_rest).to(DEVICE)
    torch.testing.assert_close(torch.cat([x.transpose(1, 2) for x in (query, key, mixed)], 1), wanted)
    torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
    assert not weights.requires_grad
    hold_no_zeros(query.sum() + key.sum() + mixed.sum(), norms_and_rest)


def test_a_gradient_of_one_output_alone():
    """Where nothing reads the others."""
    inputs = drawn(4, 2, torch.float32, 9)
    heads, kv_heads = inputs[5].shape[2], inputs[6].shape[2]
    for which in range(3):
        leaves = [x.detach().to(DEVICE).requires_grad_(x.requires_grad) for x in inputs]
        found = []
        for call in (made_by(ours, False), reference(False)):
            one = call(*leaves).split([heads, kv_heads, kv_heads], 1)[which]
            found.append(torch.autograd.grad(one.square().sum(), leaves[3:], materialize_grads=True))
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_nothing_to_mix_is_no_error():
    empty, weight = torch.zeros(1, 0, 2, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE)
    source, angle = empty.transpose(1, 2), torch.zeros(1, 0, 8, device=DEVICE)
    query, key, mixed, _ = ours.mix([empty] * 3, [source] * 2, [weight] * 2, [angle] * 2, None, EPS, False)
    (query.sum() + key.sum() + mixed.sum()).backward()
    assert mixed.shape == empty.shape == empty.grad.shape


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("return low * c[0] + high * c[2]", "return low * c[0] - high * c[2]"),
        ("return low * c[0] + high * c[3]", "return low * c[0] + high * c[2]"),
        ("d_low + last[:, None] * q_low", "d_low - last[:, None] * q_low"),
        ("inverse * (d_low - low * mean)", "inverse * (d_low + low * mean)"),
        ("partial + WIDTH", "partial"),
        ("(row // HEADS % turns)", "(row % turns)"),
    ],
)
def test_a_planted_fault_is_seen(right, wrong, tmp_path):
    planted = planted_in(ours, right, wrong, tmp_path)
    with pytest.raises(AssertionError, match=r"is off by|gradient"):
        hold(made_by(planted, False), reference(False), drawn(4, 2, torch.float32, 12), torch.float32)


@pytest.mark.parametrize(("hip", "compiler", "name"), [(None, "nvidia", "CUDAOptions"), ("6.4", "amd", "HIPOptions")])
def test_each_compiler_takes_its_limits(monkeypatch, hip, compiler, name):
    options = getattr(importlib.import_module(f"triton.backends.{compiler}.compiler"), name)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert ours.limits().keys() == {"maxnreg"} & options.__dataclass_fields__.keys()
