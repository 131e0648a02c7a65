"""liger-kernel's functions, held to those that they replace: in Triton's interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

import triton.language as tl
from triton.runtime import interpreter

import fathom.kernels.liger
from fathom.kernels import use
from fathom.models.axes.numerics import IGNORE
from fathom.models.axes.replaceable import faster, replace
from fathom.models.decoder import loss
from fathom.models.decoder.feed_forward import FeedForward
from fathom.models.decoder.rms_norm import RMSNorm, normalise

from .held import DEVICE, hold
from .test_use import model_of

NAMES = ("rms_norm", "swiglu", "linear_cross_entropy")
DTYPES = (torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16)
"""liger-kernel computes in half precision in part, and the interpreter knows no arithmetic of bfloat16."""


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """All of liger's, through the table. Two things of a GPU that the interpreter lacks are made up for: a launch that
    gives a kernel Triton's numbers, not Python's, for floats, and a device's library, of which one function is used."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        convert = interpreter._implicit_cvt

        def with_floats(argument):
            if type(argument) is not float:
                return convert(argument)
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)

        monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
        monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda x: tl.rsqrt(x))
    use(NAMES, DEVICE)
    yield
    replace({}, DEVICE)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 5, 2, 20), (3, 130)])
def test_rms_norm(shape, dtype):
    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        return faster("rms_norm", x)(x, weight, 1e-6)

    hold(kernel, lambda x, weight: normalise(x, weight, 1e-6)[0], drawn(shape, shape[-1:], dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype):
    def kernel(gate: Tensor, up: Tensor) -> Tensor:
        return faster("swiglu", gate)(gate.clone(), up.clone())  # backward writes over what it was given

    hold(kernel, lambda gate, up: F.silu(gate) * up, drawn((2, 3, 40), (2, 3, 40), dtype=dtype), dtype)


def test_linear_cross_entropy():
    rows, weight = drawn((7, 8), (19, 8), dtype=torch.float32)
    targets = torch.tensor([3, 18, IGNORE, 0, 5, 5, 11], device=DEVICE)

    def reference(rows: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(rows @ weight.T, targets, reduction="sum", ignore_index=IGNORE)

    hold(
        lambda rows, weight: loss.linear_cross_entropy(rows, weight, targets), reference, [rows, weight], torch.float32
    )


def test_a_model_trains_as_with_the_reference(monkeypatch):
    """And calls every kernel."""
    ids = torch.randint(3, 61, (1, 5), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    called = set()
    for name in NAMES:
        kernel = getattr(fathom.kernels.liger, name)
        monkeypatch.setattr(fathom.kernels.liger, name, lambda *a, n=name, k=kernel: called.add(n) or k(*a))

    def gradients() -> list[Tensor]:
        model = model_of().train()
        model(ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters()]

    use(NAMES, DEVICE)
    found = gradients()
    assert called == set(NAMES)
    replace({}, DEVICE)
    torch.testing.assert_close(found, gradients(), atol=2e-6, rtol=2e-4)


@pytest.mark.parametrize(("module", "name"), [(RMSNorm, "rms_norm"), (FeedForward, "swiglu")])
def test_another_function_under_the_name_is_seen(module, name):
    """The half of what is right."""
    kernel = faster(name, torch.empty(0, device=DEVICE))
    shapes = [(2, 8), (8,)] if module is RMSNorm else [(2, 8), (2, 8)]
    rest = (1e-6,) if module is RMSNorm else ()
    right = (lambda x, w: normalise(x, w, 1e-6)[0]) if module is RMSNorm else (lambda x, y: F.silu(x) * y)
    with pytest.raises(AssertionError, match="is off by"):
        hold(lambda x, y: kernel(x, y, *rest) / 2, right, drawn(*shapes, dtype=torch.float32), torch.float32)
