"""Rotation: Qwen3's to the last bit, a rotation by its equation, and its own transpose backwards."""

import pytest
import torch
from torch.autograd.gradcheck import gradcheck, gradgradcheck
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from fathom.models.decoder import rotary

from .cases import build, config_of


def angles(length, width, dtype, batch=1, start=0):
    frequencies = 1 / 10_000 ** (torch.arange(0, width, 2).double() / width)
    turn = torch.arange(start, start + length).double()[:, None] * frequencies
    full = torch.cat([turn, turn], -1).expand(batch, -1, -1)
    return full.cos().to(dtype), full.sin().to(dtype)


def rotate(query, key, cos, sin):
    """Ours, of Qwen3's cosines and sines."""
    low, high = sin.chunk(2, -1)
    return rotary.rotate(query, key, cos, torch.cat((-low, high), -1))


def heads(dtype, query_heads=4, key_heads=2, width=8, length=5):
    torch.manual_seed(0)
    # As the projections leave them: transposed, not contiguous.
    return tuple(torch.randn(2, length, n, width).to(dtype).transpose(1, 2) for n in (query_heads, key_heads))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("start", [0, 10_000])
@pytest.mark.parametrize("width", [2, 8, 64])
@pytest.mark.parametrize("length", [1, 5])
def test_qwen3s_bitwise(dtype, batch, start, width, length):
    query, key = heads(dtype, width=width, length=length)
    cos, sin = angles(length, width, dtype, batch, start)
    wanted = apply_rotary_pos_emb(query, key, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(rotate(query, key, cos, sin), wanted, strict=True))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(rotate(query, key, cos, sin), wanted, strict=True))


def test_gradients_are_those_of_autograd():
    for dtype in (torch.float32, torch.bfloat16):
        query, key = (x.contiguous().requires_grad_() for x in heads(dtype))
        cos, sin = angles(5, 8, dtype)
        seeds = [torch.randn_like(query), torch.randn_like(key)]
        ours = torch.autograd.grad(rotate(query, key, cos, sin), (query, key), seeds)
        theirs = torch.autograd.grad(apply_rotary_pos_emb(query, key, cos, sin), (query, key), seeds)
        assert [g.dtype for g in ours] == [dtype, dtype]
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(
                a.float(), b.float(), rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps
            )


def test_gradcheck():
    """With cosines of unequal halves, which no scaling type makes, but the transpose must not count on equal ones."""
    torch.manual_seed(0)
    cos, sin = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    query, key = (x.contiguous().requires_grad_() for x in heads(torch.float64, 2, 1, 4, 3))
    assert gradcheck(lambda q, k: rotate(q, k, cos, sin), (query, key))
    assert gradgradcheck(lambda q, k: rotate(q, k, cos, sin), (query, key))


def test_inputs_are_left_alone():
    """The rotation writes into its own output; a cache or a hook may hold the input."""
    query, key = heads(torch.float32)
    before = query.clone(), key.clone()
    rotate(query, key, *angles(5, 8, torch.float32))
    with torch.no_grad():
        rotate(query[:, :, :1], key[:, :, :1], *angles(1, 8, torch.float32))
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])
    seed = torch.randn(2, 4, 5, 8)
    kept, leaf = seed.clone(), query.contiguous().requires_grad_()
    torch.autograd.grad(rotate(leaf, key, *angles(5, 8, torch.float32))[0], leaf, seed)
    assert torch.equal(seed, kept)


def test_backward_keeps_cosines_only():
    query, key = (x.contiguous().requires_grad_() for x in heads(torch.float32, length=50))
    cos, sin = (x.contiguous() for x in angles(50, 8, torch.float32))

    def kept(function):
        storages = {}

        def pack(t):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            function(query, key, cos, sin)
        return sum(storages.values())

    assert kept(rotary.rotate) == 2 * 50 * 8 * 4


def test_the_models_angles_are_qwen3s_for_its_own_function():
    """`rotary_emb` may be used as Qwen3's. Layers get signed sines, which Qwen3's function would misread."""
    made = build(config_of("vanilla")).model.rotary_emb(torch.zeros(1, 5, 32), torch.arange(5)[None])
    query, key = heads(torch.float32)
    theirs = apply_rotary_pos_emb(query, key, *made)
    ours = rotary.rotate(query, key, *rotary.signed(made))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(apply_rotary_pos_emb(query, key, *rotary.signed(made))[0], theirs[0])
