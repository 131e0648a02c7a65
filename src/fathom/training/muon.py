"""Muon: the momentum of each matrix is orthogonalised before it is added to the weights.

    M ← M + (1 − μ)(G − M)
    U = orthogonal(G + μ(M − G))
    W ← (1 − ηλ) W − 0.2 η √max(r, c) U

The factor 0.2 √max(r, c) scales U, r × c, to the size of adamw's updates, so that one learning rate suits both.

`optimizer.py` decides which parameters are Muon's, and which have weight decay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import ParamsT

from fathom.recipe import Optim

# x ← x (a + b xᵀx + c (xᵀx)²): steep at zero, so that five rounds lift every singular value to between 0.7 and 1.2.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
ROUNDS = 5
# Elements per stack: small matrices are stacked up to this number, large ones are alone.
STACK = 2**25


def orthogonal(matrices: Tensor) -> Tensor:
    """The approximate orthogonal factors of matrices [n, r, c], whose singular values are close to 1."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonal(matrices.mT).mT
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """The Muon optimizer, which stacks matrices of the same shape; sharded matrices are gathered, one stack at a time.

    Orthogonalises in bfloat16 on a GPU and in float32 elsewhere, because bfloat16 takes about fifteen times as long on
    most CPUs. If `found_inf` is 1, a step changes nothing, without a host synchronisation.
    """

    only_matrices = True
    reads_found_inf = True
    found_inf: Tensor | None = None

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @classmethod
    def of(cls, groups: Sequence[dict[str, Any]], optim: Optim) -> Muon:
        """Create the optimizer of some parameter groups, with the recipe's settings."""
        return cls(groups, lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            for matrices in _stacks(p for p in group["params"] if p.grad is not None):
                self._move(matrices, group["lr"], group["momentum"], group["weight_decay"])

    def _move(self, matrices: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        g = torch.stack([_gradient(p) for p in matrices])  # [n, r, c], or this rank's part of it
        going = torch.ones((), dtype=g.dtype, device=g.device)
        if self.found_inf is not None:
            going = going - self.found_inf.to(g)
            g = torch.where(going > 0, g, 0)  # they may be infinite, and infinity times zero is NaN
        kept = [_part(self.state[p]["momentum_buffer"]) for p in matrices]
        m = torch.stack(kept).lerp(g, going * (1 - momentum))
        u = _orthogonal(g.lerp(m, momentum), like=matrices[0])
        r, c = matrices[0].shape
        weights = [_part(p) for p in matrices]
        torch._foreach_copy_(kept, list(m.unbind()))
        torch._foreach_mul_(weights, 1 - lr * weight_decay * going)
        torch._foreach_sub_(weights, list((u * (0.2 * lr * max(r, c) ** 0.5 * going)).unbind()))


def _stacks(matrices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group matrices into stacks of limited size, each of one shape, dtype and placement."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for p in matrices:
        place = (p.device_mesh, p.placements) if isinstance(p, DTensor) else p.device
        alike.setdefault((p.shape, p.dtype, place), []).append(p)
    for found in alike.values():
        several = max(1, STACK // found[0].numel())
        yield from (found[i : i + several] for i in range(0, len(found), several))


def _part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(p: Tensor) -> Tensor:
    """This rank's shard of a gradient, which is sharded like its matrix."""
    gradient = p.grad
    assert gradient is not None
    if isinstance(p, DTensor) and isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=p.placements)
    return _part(gradient)


def _orthogonal(parts: Tensor, like: Tensor) -> Tensor:
    """Apply `orthogonal` to a stack of matrices that are sharded like `like`; the result is sharded in the same way."""
    arithmetic = torch.bfloat16 if parts.is_cuda else torch.promote_types(parts.dtype, torch.float32)
    x = parts.to(arithmetic)
    if not isinstance(like, DTensor):
        return orthogonal(x).to(parts.dtype)
    shape = torch.Size((len(parts), *like.shape))
    cut = [Shard(place.dim + 1) if isinstance(place, Shard) else place for place in like.placements]
    stride = (like.numel(), like.shape[1], 1)
    whole = DTensor.from_local(x, like.device_mesh, cut, run_check=False, shape=shape, stride=stride).full_tensor()
    everywhere = [Replicate()] * like.device_mesh.ndim
    update = DTensor.from_local(orthogonal(whole), like.device_mesh, everywhere, run_check=False)
    return update.redistribute(placements=cut).to_local().to(parts.dtype)
