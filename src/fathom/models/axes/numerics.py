"""Sums that several mechanisms use, over lists of tensors instead of stacks, so that a compiler can fuse them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
"""The label of a token that is not predicted."""


def widen(x: Tensor) -> Tensor:
    """Convert half precision to float32 for sums; leave float32 and float64 as they are."""
    if x.dtype is torch.float32:
        return x
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocasts(x: Tensor) -> bool:
    """Whether autocast is enabled on the device of `x`. The meta device has no autocast."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on the device of `x`."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


FEW = 2**14
"""Numbers in a tensor up to which a CPU's time goes to the calls, not to memory."""


def few(x: Tensor) -> bool:
    """Whether tensors like `x` are mixed faster as one stack than as a list: small ones, in eager mode on a CPU,
    without gradients. Half precision keeps to the list, whose sums are wider, and so does autocast, which would narrow
    them."""
    return (
        not torch.is_grad_enabled()
        and x.is_cpu
        and x.numel() <= FEW
        and (x.dtype is torch.float32 or x.dtype is torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def softmax_list(scores: Sequence[Tensor]) -> list[Tensor]:
    """Softmax across equally shaped tensors, element by element."""
    top = scores[0]
    for score in scores[1:]:
        top = torch.maximum(top, score)
    weights = [(score - top).exp() for score in scores]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    return [weight / total for weight in weights]


def weighted_sum(weights: Sequence[Tensor] | Tensor, terms: Sequence[Tensor]) -> Tensor:
    """The sum Σ_j weights_j · terms_j of a list or stack of weights; accumulated in place if no gradient is
    recorded."""
    recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
    total, add = weights[0] * terms[0], torch.addcmul if recorded else Tensor.addcmul_
    for weight, term in zip(weights[1:], terms[1:], strict=True):
        total = add(total, weight, term)
    return total


def head_sum(query: Tensor, num_key_value_heads: int) -> Tensor:
    """Sum of each key-value head's contiguous group of queries, widened: `[B, H, T, D]` to `[B, H_kv, T, D]`."""
    return reduce(torch.add, map(widen, query.unflatten(1, (num_key_value_heads, -1)).unbind(2)))


def head_pool(query: Tensor, num_key_value_heads: int) -> Tensor:
    """The mean of each key-value head's group of queries, in at least float32."""
    group = query.shape[1] // num_key_value_heads
    return head_sum(query, num_key_value_heads) / group if group > 1 else widen(query)


def lowest_mean(values: Tensor, valid: Tensor, fraction: Tensor | float) -> Tensor:
    """Mean of the lowest `fraction` of each row's valid values, `[R, N]` to `[R]`.

    A value at the edge of the fraction counts partially. A fraction below one value gives that part of the lowest
    value, so the mean falls to 0 with the fraction.
    """
    order = values.masked_fill(~valid, torch.inf).argsort(dim=1)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(values.shape[1], device=values.device).expand_as(order)
    )
    count = valid.sum(1, keepdim=True) * (fraction if isinstance(fraction, float) else fraction.reshape(-1, 1))
    share = (count - rank).clamp(0, 1).where(valid, 0)
    return (values.where(valid, 0) * share).sum(1) / share.sum(1).clamp(min=1)
