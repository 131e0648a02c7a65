"""What a kernel is held to: its reference in float64, forward and gradient, from the same rounded numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.gpu.watch import Calls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WITHIN = {
    **{torch.float64: 1e-12, torch.float32: 1e-5},
    **{torch.float16: 2.0**-11, torch.bfloat16: 2.0 ** (-7 if DEVICE == "cpu" else -8)},
}
"""Largest relative error, in norm: a rounding of the result, and float32 sums whose terms nearly cancel.
The interpreter cuts to bfloat16 where a GPU rounds."""


class Stop(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


def hold_no_zeros(output: Tensor, inputs: Sequence[Tensor]) -> None:
    """Complain of a backward pass that fills tensors with zeros, or that makes a gradient of none."""
    with Calls() as calls:
        torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    assert not calls.counts["zeros"]
    assert torch.autograd.grad(Stop.apply(output).sum(), inputs, allow_unused=True) == (None,) * len(inputs)


def hold(
    kernel: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Complain of the first output or gradient that is farther off than `WITHIN` allows."""
    given = [x.detach().to(DEVICE).requires_grad_(x.requires_grad) for x in inputs]
    exact = [x.detach().double().to(DEVICE).requires_grad_(x.requires_grad) for x in inputs]
    wanted, found = reference(*exact), kernel(*given)
    assert found.dtype == dtype and found.shape == wanted.shape
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(found)
    differing = [i for i, x in enumerate(given) if x.requires_grad]
    theirs = torch.autograd.grad(wanted, [exact[i] for i in differing], grad.double())
    ours = torch.autograd.grad(found, [given[i] for i in differing], grad)
    for name, a, b in [
        ("output", found, wanted),
        *zip([f"gradient {i}" for i in differing], ours, theirs, strict=True),
    ]:
        assert torch.isfinite(a).all(), name
        off = (a.double() - b).norm() / b.norm().clamp(min=1e-30)
        assert off <= WITHIN[dtype], f"{name} is off by {off:.2e}"
