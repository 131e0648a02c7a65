"""Muon: the equation, whatever is stacked, skipped or sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fathom.training import muon
from fathom.training.muon import Muon, orthogonal
from tests import processes

SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5), (6, 4)]


def matrices(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(step + 1)
    return [torch.randn(shape, dtype=dtype) for shape in SHAPES]


def by_hand(step_count: int, lr: float, momentum: float, decay: float) -> list[Tensor]:
    """The same, one matrix and one line of the paper at a time."""
    weights = [p.detach().clone() for p in matrices()]
    kept = [torch.zeros_like(w) for w in weights]
    for step in range(step_count):
        for w, m, g in zip(weights, kept, gradients(step), strict=True):
            m.copy_(momentum * m + (1 - momentum) * g)
            x = momentum * m + (1 - momentum) * g
            x = x / math.sqrt(float((x * x).sum()))
            if w.shape[0] > w.shape[1]:
                x = x.T
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
            if w.shape[0] > w.shape[1]:
                x = x.T
            w.copy_(w - lr * decay * w - 0.2 * lr * math.sqrt(max(w.shape)) * x)
    return weights


def moved(step_count: int, found: list[Tensor], **options: float) -> list[Tensor]:
    optimizer = Muon(found, **options)
    for step in range(step_count):
        for p, g in zip(found, gradients(step, found[0].dtype), strict=True):
            p.grad = g
        optimizer.step()
    return found


@pytest.mark.parametrize("most", [1, 48, 2**25])
def test_it_is_the_equation(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """However many matrices are stacked: one, two, all of a shape."""
    monkeypatch.setattr(muon, "STACK", most)
    found = moved(4, matrices(), lr=0.02, momentum=0.9, weight_decay=0.3)
    for ours, theirs in zip(found, by_hand(4, 0.02, 0.9, 0.3), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_it_is_torchs_to_the_rounding_of_bfloat16() -> None:
    """In which torch's multiplies on every device."""
    theirs = [nn.Parameter(p.detach().clone()) for p in matrices(torch.float32)]
    published = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for p, g in zip(theirs, gradients(step, torch.float32), strict=True):
            p.grad = g
        published.step()
    ours = moved(4, matrices(torch.float32), lr=0.02, momentum=0.9, weight_decay=0.3)
    for a, b, start in zip(ours, theirs, matrices(torch.float32), strict=True):
        assert (a - b).norm() < 0.02 * (b - start).norm()


def test_singular_values_end_about_one() -> None:
    torch.manual_seed(0)
    for shape in [(1, 8, 40), (1, 40, 8), (3, 16, 16)]:
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.3 and values.max() < 1.3
    assert not torch.linalg.svdvals(torch.randn(8, 40)).max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_a_skipped_step_changes_nothing() -> None:
    """Though its gradients be infinite; the step after it is as if there had been none."""
    found = matrices()
    optimizer = Muon(found, lr=0.02, momentum=0.9, weight_decay=0.3)
    for gradient, skip in [(gradients(0), 0.0), ([g * math.inf for g in gradients(1)], 1.0), (gradients(1), 0.0)]:
        before = [tensor.clone() for p in found for tensor in (p, *optimizer.state[p].values())]
        for p, g in zip(found, gradient, strict=True):
            p.grad = g
        optimizer.found_inf = torch.tensor(skip)
        optimizer.step()
        after = [tensor for p in found for tensor in (p, *optimizer.state[p].values())]
        if skip:
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    for ours, theirs in zip(found, by_hand(2, 0.02, 0.9, 0.3), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_matrices_without_gradients_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = matrices()
    optimizer = Muon(found, lr=0.02)
    found[0].grad = gradients(0)[0]
    optimizer.step()
    assert list(optimizer.state) == [found[0]]
    assert all(torch.equal(p, q) for p, q in zip(found[1:], matrices()[1:], strict=True))


def shard_and_move(folder: Path) -> None:
    """On three ranks: rows of 6, 5 and 4 over three, so that some ranks hold less than others."""
    mesh = init_device_mesh("cpu", (3,))

    def cut(tensor: Tensor) -> DTensor:
        return distribute_tensor(tensor.detach(), mesh, [Shard(0)])

    found = [nn.Parameter(cut(p)) for p in matrices()]
    optimizer = Muon(found, lr=0.02, momentum=0.9, weight_decay=0.3)
    for step in range(4):
        for p, g in zip(found, gradients(step), strict=True):
            p.grad = cut(g)
        optimizer.step()
    whole = [p.full_tensor().detach() for p in found]
    if mesh.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")


def test_sharded_matrices_move_as_whole_ones_do(tmp_path: Path) -> None:
    processes.run_ranks(3, shard_and_move, tmp_path)
    for ours, theirs in zip(torch.load(tmp_path / "whole.pt"), by_hand(4, 0.02, 0.9, 0.3), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("wrong", [lambda x: x, lambda x: orthogonal(x.flatten(0, 1)[None]).view_as(x)])
def test_another_direction_would_be_seen(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor]) -> None:
    """No orthogonalisation; and one over a stack as if it were one tall matrix."""
    monkeypatch.setattr(muon, "orthogonal", wrong)
    found = moved(1, matrices(), lr=0.02, momentum=0.9, weight_decay=0.3)
    assert not torch.allclose(found[0], by_hand(1, 0.02, 0.9, 0.3)[0], rtol=0, atol=1e-3)
