"""Cross-entropy of a linear head, computed in chunks so that a whole batch's logits are never in memory.

Rows are taken in chunks. While a chunk's logits are at hand, their gradient is formed in place and multiplied out,
so backward has nothing left to compute and `[B, T, V]` never exists. It costs the same three matrix products as the
plain way.

In a run, `training/build.py` passes the number of targets of the global batch, by which the loss is divided.

`modeling.py` decides when labels give a loss and no logits: in training, unless `return_logits=True`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..axes.numerics import IGNORE, widen
from ..axes.replaceable import faster

CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Logits per chunk: small enough to stay in a processor's cache, large enough to fill a GPU."""
CHUNK_ROWS = 128
"""Fewest rows of a chunk, since every chunk reads the whole weight."""


def causal_lm_loss(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Next-token cross-entropy in float32: the sum over targets, divided by their number or by `num_items_in_batch`.

    Args:
        hidden: `[B, T, hidden_size]`, the head's input.
        head: The output projection. Anything but a plain linear layer, such as a LoRA adapter, is called as a module.
        targets: `[B, T]`, each position's next token (see `shifted`); -100 is ignored.
        num_items_in_batch: Targets of the whole batch if it is spread over several forward passes.
    """
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"labels have shape {list(targets.shape)}, but the input has shape {list(hidden.shape[:-1])}")
    rows, targets = hidden.flatten(0, -2), targets.flatten().to(hidden.device)
    if isinstance(head, nn.Linear) and is_bare(head):
        total = linear_cross_entropy(rows, head.weight, targets)
    else:
        total = _chunked(rows, head, targets)
    return per_item(total, targets, num_items_in_batch)


def per_item(total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Divide a sum over tokens by the number of targets, or by `num_items_in_batch` if it is given."""
    if num_items_in_batch is None:
        return total / (targets != IGNORE).sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def weighted_lm_loss(
    readouts: Sequence[tuple[Tensor, Tensor]],
    head: nn.Module,
    targets: Tensor,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Weighted sum of several readouts' losses, Σ_k ω_k CE_k, averaged like `causal_lm_loss`; the weights get gradients
    too.

    The backward pass recomputes chunks of logits, which costs a fourth matrix product for each readout.

    Args:
        readouts: Hidden states `[B, T, hidden_size]` and weights ω `[B, T]`.
        head: See `causal_lm_loss`.
        targets: `[B, T]`, shifted; -100 is ignored.
        num_items_in_batch: See `causal_lm_loss`.
    """
    flat, pieces = targets.flatten().to(readouts[0][0].device), []
    for hidden, weights in readouts:
        rows, weight = hidden.flatten(0, -2), weights.flatten()
        for part in _chunks(rows, head):
            chunk = rows[part], head, flat[part], weight[part]
            pieces.append(checkpoint(_weighted, *chunk, use_reentrant=False))
    return per_item(torch.stack(pieces).sum(), targets, num_items_in_batch)


def _weighted(rows: Tensor, head: nn.Module, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(widen(head(rows)), targets, ignore_index=IGNORE, reduction="none")
    return (weights * losses).sum()


def target_mean(values: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """The mean of values `[B, T]` over positions that have a target, divided like a loss (see `num_items_in_batch`)."""
    return per_item(values.where(targets != IGNORE, 0).sum(), targets, num_items_in_batch)


@torch.no_grad()
def token_losses(hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    """Next-token cross-entropy of every position in float32, `[B, T]`; 0 where the target is -100.

    The arguments are those of `causal_lm_loss`. Here too, only the logits of one chunk exist at a time.
    """
    rows, flat = hidden.flatten(0, -2), targets.flatten().to(hidden.device)
    found = rows.new_empty(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
    for part in _chunks(rows, head):
        found[part] = F.cross_entropy(widen(head(rows[part])), flat[part], ignore_index=IGNORE, reduction="none")
    return found.view(targets.shape)


@torch.no_grad()
def top_probability(hidden: Tensor, head: nn.Module) -> Tensor:
    """The likeliest next token's probability at each position, `[B, T]` in float32, from hidden states `[B, T,
    hidden_size]`."""
    rows = hidden.flatten(0, -2)
    logits = (widen(head(rows[part])) for part in _chunks(rows, head))
    return torch.cat([(z.amax(-1) - z.logsumexp(-1)).exp() for z in logits]).view(hidden.shape[:-1])


def shifted(labels: Tensor) -> Tensor:
    """Labels `[B, T]` moved one to the left, so that each position holds its next token."""
    return F.pad(labels, (0, 1), value=IGNORE)[..., 1:]


def is_bare(head: nn.Linear) -> bool:
    """Whether a head is a plain `nn.Linear`: it has no bias, no adapter and no hooks, and is not offloaded."""
    if type(head) is not nn.Linear or head.bias is not None or "forward" in vars(head):
        return False
    return not (head._forward_hooks or head._forward_pre_hooks or head.weight.is_meta)


def linear_cross_entropy(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of the logits `rows @ weight.T` (`[N, D]`, `[V, D]`) for `targets` `[N]`."""
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
    if not torch.is_grad_enabled():  # an autograd.Function sees requires_grad, not whether gradients are enabled
        rows, weight = rows.detach(), weight.detach()
    with torch.autocast(rows.device.type, enabled=False):
        kernel = faster("linear_cross_entropy", rows) or _LinearCrossEntropy.apply
        return kernel(rows, weight, targets)


def chunk_rows(count: int, vocabulary: int, device: str) -> int:
    """Token positions per chunk, such that all chunks of a batch except the last are of equal size."""
    most = max(CHUNK_ROWS, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // vocabulary)
    return -(-count // -(-count // most)) if count else 1


def _chunks(rows: Tensor, head: nn.Module) -> list[slice]:
    """Slices that split token positions into chunks, for a head that is called as a module."""
    size = chunk_rows(len(rows), getattr(head, "out_features", 50_000), rows.device.type)
    return [slice(start, start + size) for start in range(0, len(rows), size)]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        need_rows, need_weight = ctx.needs_input_grad[:2]
        total = rows.new_zeros((), dtype=torch.promote_types(rows.dtype, torch.float32))
        grad_rows = torch.empty_like(rows) if need_rows else None
        grad_weight = torch.zeros_like(weight, dtype=total.dtype) if need_weight else None
        size = chunk_rows(len(rows), len(weight), rows.device.type)
        for start in range(0, len(rows), size):
            x, target = rows[start : start + size], targets[start : start + size]
            valid = target != IGNORE
            index = target.where(valid, 0).unsqueeze(1)
            log_p = F.log_softmax(widen(x @ weight.T), -1)
            total = total - log_p.gather(1, index).squeeze(1).where(valid, 0).sum()
            if not (need_rows or need_weight):
                continue
            # d loss / d logits = p - onehot, formed where the log-probabilities are
            grad = log_p.exp_().scatter_add_(1, index, log_p.new_full((), -1.0).expand_as(index)).to(rows.dtype)
            if grad_rows is not None:
                grad_rows[start : start + size] = (grad @ weight) * valid.unsqueeze(1)
            if grad_weight is not None:
                grad_weight += grad.T @ (x * valid.unsqueeze(1))
        ctx.save_for_backward(grad_rows, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_rows, grad_weight = ctx.saved_tensors
        return (
            # In half precision 1 / num_items could be off by up to 0.4 % for every row alike.
            None if grad_rows is None else (widen(grad_rows) * grad).to(grad_rows.dtype),
            None if grad_weight is None else (grad_weight * grad).to(ctx.weight_dtype),
            None,
        )


def _chunked(rows: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    def part(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(widen(head(x)), target, ignore_index=IGNORE, reduction="sum")

    pieces = [checkpoint(part, rows[one], targets[one], use_reentrant=False) for one in _chunks(rows, head)]
    return torch.stack(pieces).sum() if pieces else rows.new_zeros(())
