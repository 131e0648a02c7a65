"""The vocabulary mixture: the input embeddings averaged by a model's next-token probabilities.

The mixture is

    p = softmax(z / temperature),  z = the top_k largest logits (all of them with 0)        μ = Σ_v p_v · U_v

The logits of a batch never exist at once: rows are processed in chunks, and the backward pass recomputes them. If only
a small part of the vocabulary is mixed, the backward pass touches only the used rows of the two tables.

`pondering.py` has the options, such as `top_k`, and scales the mixture to the embeddings' scale (`mixed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..axes.numerics import widen
from ..decoder.loss import chunk_rows, is_bare

SPARSE = 16
"""From this many times `top_k` words on, gathering the words in use is cheaper than whole products."""


def is_sparse(words: int, top_k: int) -> bool:
    """Whether the mixture gathers the `top_k` words' embeddings, because they are a small part of the vocabulary."""
    return 0 < top_k < words and words >= SPARSE * top_k


def mixture_flops(width: int, words: int, top_k: int, called: bool = False) -> tuple[int, int]:
    """FLOPs of one token's mixture: a forward pass, and a training step, forward and backward.

    Sparse: the head once, without a gradient, then per word a share of the sum. In training per word a probability too,
    and backward the probability again, what it gains, and a share of the gradients of the row and of both tables.
    Dense: two whole products, and five backward; so trains every mixture of logits with a bias, a scale or a cap, whose
    head is `called`.
    """
    product, word = 2 * width * words, 2 * width * top_k
    if not is_sparse(words, top_k):
        return 2 * product, 7 * product
    return product + word, 7 * product if called else product + 7 * word


def mixture(
    hidden: Tensor,
    head: nn.Module,
    table: Tensor,
    top_k: int = 0,
    temperature: float = 1.0,
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The vocabulary mixture μ for every token, `[B, T, hidden_size]`.

    Args:
        hidden: `[B, T, hidden_size]`, the head's input.
        head: Projection to logits. Anything but a plain linear layer is called as a module.
        table: U, `[V, hidden_size]`.
        top_k: Number of words in the mixture; 0 for all.
        temperature: Temperature of the softmax.
        norm: The norm of embeddings, where the model has one.
    """
    rows = hidden.flatten(0, -2)
    top_k = 0 if top_k >= len(table) else top_k
    if norm is not None and top_k and not torch.is_grad_enabled():
        mixed = _normed(rows, head, table, top_k, temperature, norm)
        return mixed.view(*hidden.shape[:-1], table.shape[1])
    if norm is not None:
        table = norm(table)
    if isinstance(head, nn.Linear) and is_bare(head):
        mixed = _bare(rows, head.weight, table, top_k, temperature)
    elif rows.dtype == torch.float32 and _by_words(head, len(table), top_k) and not torch.is_grad_enabled():
        mixed = _sparse(rows, head, table, top_k, temperature)
    else:

        def part(x: Tensor) -> Tensor:
            return (probabilities(head(x), top_k, temperature) @ widen(table)).to(x.dtype)

        mixed = torch.cat([checkpoint(part, x, use_reentrant=False) for x in _chunks(rows, len(table))])
    return mixed.view(*hidden.shape[:-1], table.shape[1])


def _by_words(head: nn.Module, words: int, top_k: int) -> bool:
    """Whether to sum only the embeddings of the `top_k` words; also done for heads that are not `nn.Linear`, such as
    int8."""
    return is_sparse(words, top_k) or (top_k > 0 and not isinstance(head, nn.Linear))


def _chunks(rows: Tensor, words: int) -> Sequence[Tensor]:
    """Split token positions into chunks; not during `torch.export`, where their number is symbolic."""
    if torch.compiler.is_exporting():
        return [rows]
    return rows.split(chunk_rows(len(rows), words, rows.device.type))


def probabilities(logits: Tensor, top_k: int, temperature: float) -> Tensor:
    """Softmax over the `top_k` largest logits; all other probabilities are 0."""
    logits = widen(logits) / temperature
    if top_k:
        chosen, words = logits.topk(top_k)
        return torch.zeros_like(logits).scatter(-1, words, chosen.softmax(-1))
    return logits.softmax(-1)


def _bare(rows: Tensor, weight: Tensor, table: Tensor, top_k: int, temperature: float) -> Tensor:
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight, table = rows.to(dtype), weight.to(dtype), table.to(dtype)
    with torch.autocast(rows.device.type, enabled=False):
        if is_sparse(len(table), top_k):
            if torch.is_grad_enabled():
                with torch.no_grad():
                    _, words = _likeliest(rows, partial(F.linear, weight=weight), len(table), top_k)
                return _Words.apply(rows, weight, table, words, temperature)
            return _sparse(rows, partial(F.linear, weight=weight), table, top_k, temperature)
        return _Dense.apply(rows, weight, table, top_k, temperature)


def _sparse(rows: Tensor, head: Callable[[Tensor], Tensor], table: Tensor, top_k: int, temperature: float) -> Tensor:
    """The mixture without gradients: a weighted sum over the `top_k` likeliest words only."""
    logits, words = _likeliest(rows, head, len(table), top_k)
    return _sum_of(words, (widen(logits) / temperature).softmax(-1), table)


def _normed(
    rows: Tensor,
    head: Callable[[Tensor], Tensor],
    table: Tensor,
    top_k: int,
    temperature: float,
    norm: Callable[[Tensor], Tensor],
) -> Tensor:
    """The mixture without gradients where embeddings are normed: only the `top_k` likeliest words' are."""
    logits, words = _likeliest(rows, head, len(table), top_k)
    p, step = (widen(logits) / temperature).softmax(-1), _word_rows(words, table)
    parts = zip(words.split(step), p.split(step), strict=True)
    return torch.cat([(q.to(table.dtype).unsqueeze(1) @ norm(table[w])).squeeze(1) for w, q in parts])


def _likeliest(rows: Tensor, head: Callable[[Tensor], Tensor], words: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` largest logits at each position, and their vocabulary indices, `[N, k]` each."""
    found = [head(x).topk(top_k) for x in _chunks(rows, words)]
    logits, chosen = (torch.cat([one[i] for one in found]) for i in (0, 1))
    return logits, chosen


class _Dense(torch.autograd.Function):
    """The mixture μ = p U by dense matrix products, with gradient dz = p (dp - Σ p dp) / temperature where dp = dμ
    Uᵀ."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, table: Tensor, top_k: int, temperature: float) -> Tensor:
        ctx.save_for_backward(rows, weight, table)
        ctx.top_k, ctx.temperature = top_k, temperature
        chunks = _chunks(rows, len(table))
        parts = [probabilities(x @ weight.T, top_k, temperature).to(table.dtype) @ table for x in chunks]
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, table = ctx.saved_tensors
        wide = torch.promote_types(weight.dtype, torch.float32)
        need = ctx.needs_input_grad
        grad_weight = torch.zeros_like(weight, dtype=wide) if need[1] else None
        grad_table = torch.zeros_like(table, dtype=wide) if need[2] else None
        grad_rows = []
        size = chunk_rows(len(rows), len(table), rows.device.type)
        for x, g in zip(rows.split(size), grad.split(size), strict=True):
            p = probabilities(x @ weight.T, ctx.top_k, ctx.temperature)
            dp = widen(g @ table.T)
            dz = (p * (dp - (p * dp).sum(-1, keepdim=True)) / ctx.temperature).to(x.dtype)
            grad_rows.append(dz @ weight)
            if grad_weight is not None:
                grad_weight += dz.T @ x
            if grad_table is not None:
                grad_table += p.to(g.dtype).T @ g
        return torch.cat(grad_rows), _like(grad_weight, weight), _like(grad_table, table), None, None


class _Words(torch.autograd.Function):
    """The mixture μ = Σ_i p_i U[w_i] over the used words, `words` `[N, k]`, with a sparse backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, table: Tensor, words: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(rows, weight, table, words)
        ctx.temperature = temperature
        parts = []
        for x, w in zip(*(t.split(_word_rows(words, table)) for t in (rows, words)), strict=True):
            parts.append(_sum_of(w, _word_probabilities(x, weight[w], temperature), table))
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, table, words = ctx.saved_tensors
        wide = torch.promote_types(weight.dtype, torch.float32)
        need = ctx.needs_input_grad
        grad_weight = torch.zeros_like(weight, dtype=wide) if need[1] else None
        grad_table = torch.zeros_like(table, dtype=wide) if need[2] else None
        grad_rows = []
        for x, w, g in zip(*(t.split(_word_rows(words, table)) for t in (rows, words, grad)), strict=True):
            used = weight[w]  # [n, k, D]
            p = _word_probabilities(x, used, ctx.temperature)
            dp = widen((table[w] @ g.unsqueeze(2)).squeeze(2))
            dz = p * (dp - (p * dp).sum(-1, keepdim=True)) / ctx.temperature
            grad_rows.append((dz.to(x.dtype).unsqueeze(1) @ used).squeeze(1))
            flat = w.flatten()
            if grad_weight is not None:
                grad_weight.index_add_(0, flat, (dz.unsqueeze(2) * widen(x).unsqueeze(1)).flatten(0, 1))
            if grad_table is not None:
                grad_table.index_add_(0, flat, (p.unsqueeze(2) * widen(g).unsqueeze(1)).flatten(0, 1))
        return torch.cat(grad_rows), _like(grad_weight, weight), _like(grad_table, table), None, None


def _like(grad: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(parameter.dtype)


def _word_probabilities(rows: Tensor, used: Tensor, temperature: float) -> Tensor:
    """Probabilities `[n, k]` of the used words, from hidden states `[n, D]` and the words' head rows `[n, k, D]`."""
    return (widen((used @ rows.unsqueeze(2)).squeeze(2)) / temperature).softmax(-1)


def _sum_of(words: Tensor, p: Tensor, table: Tensor) -> Tensor:
    return F.embedding_bag(words, table, per_sample_weights=p.to(table.dtype), mode="sum")


def _word_rows(words: Tensor, table: Tensor) -> int:
    return max(1, (1 << 22) // (words.shape[1] * table.shape[1]))
