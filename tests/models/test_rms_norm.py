"""RMS norm: Qwen3's forward to the last bit, and a backward pass that is the derivative."""

import pytest
import torch
from torch.autograd.gradcheck import gradcheck
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fathom.models.decoder.rms_norm import RMSNorm, normalise
from tests.tiny import seeded


def norms(width, dtype, eps=1e-6):
    torch.manual_seed(0)
    ours, theirs = RMSNorm(width, eps), Qwen3RMSNorm(width, eps)
    weight = torch.randn(width)
    for norm in (ours, theirs):
        with torch.no_grad():
            norm.weight.copy_(weight)
        norm.to(dtype)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 32), (2, 5, 64), (2, 5, 4, 8), (1, 1, 7), (0, 8)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_forward_is_qwen3s_bitwise(dtype, shape, scale):
    ours, theirs = norms(shape[-1], dtype)
    x = (scale * torch.randn(shape)).to(dtype)
    assert ours(x).dtype == dtype
    assert torch.equal(ours(x), theirs(x)), "the path with a backward of its own"
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x)), "and the plain one"


def test_forward_under_autocast_is_qwen3s():
    """Single-precision weights and half-precision inputs, as a projection under autocast hands them over."""
    ours, theirs = norms(16, torch.float32)
    x = torch.randn(3, 16).bfloat16()
    assert ours(x).dtype == theirs(x).dtype == torch.float32
    assert torch.equal(ours(x), theirs(x))


def equation(x, weight, eps):
    rows = []
    for row in x.flatten(0, -2):
        mean_square = sum(v * v for v in row) / len(row)
        rows.append(torch.stack([w * v / (mean_square + eps).sqrt() for v, w in zip(row, weight, strict=True)]))
    return torch.stack(rows).view(x.shape)


def test_double_stays_double():
    ours, theirs = norms(8, torch.float64)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    truth = equation(x, ours.weight, 1e-6)
    assert torch.allclose(ours(x), truth, rtol=0, atol=1e-14)
    with torch.no_grad():
        assert torch.equal(ours(x), normalise(x, ours.weight, 1e-6)[0]), "decoded as it is evaluated"
    assert not torch.allclose(theirs(x), truth, rtol=0, atol=1e-14), "Qwen3's narrows"


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_gradcheck(eps):
    ours, _ = norms(6, torch.float64, eps)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w: torch.func.functional_call(ours, {"weight": w}, (x,)), (x, ours.weight))


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_gradients_in_working_precision(dtype, tolerance):
    """Against float64 of the stored values; no worse than Qwen3's own."""
    x = torch.randn(4, 50, 32, generator=seeded(1)).to(dtype)
    seed = torch.randn(4, 50, 32, generator=seeded(2)).to(dtype)
    exact = x.double().requires_grad_()
    ours, theirs = norms(32, dtype)
    weight = ours.weight.detach().double().requires_grad_()
    y = exact * (exact.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    truth = torch.autograd.grad(y, (exact, weight), seed.double())

    def errors(norm):
        leaf = x.clone().requires_grad_()
        found = torch.autograd.grad(norm(leaf), (leaf, norm.weight), seed)
        assert [g.dtype for g in found] == [dtype, dtype]
        return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, truth, strict=True)]

    for mine, other in zip(errors(ours), errors(theirs), strict=True):
        assert mine < tolerance
        assert mine <= 1.5 * other + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_the_input_and_one_number_per_row(dtype):
    def kept(norm):
        x, storages = torch.randn(4, 16, 64).to(dtype).requires_grad_(), {}

        def pack(t):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            norm(x)
        return sum(storages.values())

    ours, theirs = norms(64, dtype)
    rows, size = 4 * 16, dtype.itemsize
    assert kept(ours) == rows * 64 * size + 64 * size + rows * 4
    assert kept(theirs) >= 2 * rows * 64 * size, "what autograd alone would keep"


def test_a_second_derivative_is_refused():
    ours, _ = norms(4, torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
