"""The pooling over sources of `attention_residuals` in Triton: one kernel for forward and one for backward.

A row is one token. A program holds it whole, for one source after another: the source's rms, its score and its share of
the sum come from one read. Backward reads the sources of its row twice, the second time from the cache: what the
softmax takes off each gradient is a mean over all of them, and the gradient times the output, which would give it in
one read, is off by a hundredth where the output was rounded to half precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.online import Context, absorb, nothing, read, tile

TILE = 1024
"""Numbers that a program holds at a time, of one source: a row, or several short ones; with two of 1024, the loads of
nine sources do not fit its registers."""
THREAD = 8
"""Numbers to a thread: with 16, the loads of 25 sources do not fit its registers."""
PROGRAMS = 528
"""The most programs of a backward pass, each with a sum of the query's gradient: four a multiprocessor of an H200."""


@triton.jit(do_not_specialize=["rows"])
def depth_pool_forward(
    query, bias, sources, mixed, weights, rows, WIDTH: tl.constexpr, TALL: tl.constexpr, EPS: tl.constexpr
):
    """Forward kernel, for a tile of rows: `mixed` (h) `[rows, D]` and `weights` (α) `[sources, rows]`.

    `query` is `[D]`, `bias` one number or None, and `sources` a tuple of `[rows, D]`."""
    row, column, live, inside, at = tile(tl.program_id(0).to(tl.int64), rows, TALL, WIDTH)
    q = read(query + column, column < WIDTH)[None, :]
    top, total, sum_ = nothing(live, inside, q.dtype)
    scores = ()
    for j in tl.static_range(len(sources)):
        x = read(sources[j] + at, inside)
        score = tl.sum(x * q, 1) / tl.sqrt(tl.sum(x * x, 1) / WIDTH + EPS)
        if bias is not None and j == len(sources) - 1:
            score += tl.load(bias).to(score.dtype)
        top, total, sum_ = absorb(top, total, sum_, score, x)
        scores = scores + (score,)  # noqa: RUF005
    tl.store(mixed + at, (sum_ / total[:, None]).to(mixed.dtype.element_ty), mask=inside)
    for j in tl.static_range(len(sources)):
        tl.store(weights + j * rows + row, tl.exp(scores[j] - top) / total, mask=live)


@triton.jit
def three_sums(a, b, c):
    """Sum each row of three tensors `[R, D]`; returns three tensors `[R]`. Together they cross the warps once and
    through one register, where each alone would wait three times and keep a register of its own for all of an unrolled
    loop."""
    both, last = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, tl.zeros_like(c))), 1))
    first, second = tl.split(both)
    third, _ = tl.split(last)
    return first, second, third


@triton.jit(do_not_specialize=["rows", "programs"])
def depth_pool_backward(
    query,
    sources,
    weights,
    grad,  # [rows, D]
    grad_query,  # [programs, D], of which the sum is wanted
    grad_bias,  # [programs], or None
    grad_sources,
    rows,
    programs,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    EPS: tl.constexpr,
):
    """Backward kernel, for every `programs`-th tile: the sources' gradients, and its share of those of the query and
    the bias."""
    first = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    q = read(query + column, column < WIDTH)[None, :]
    of_query = tl.zeros((TALL, triton.next_power_of_2(WIDTH)), q.dtype)
    of_bias = tl.zeros((TALL,), q.dtype)
    for number in range(first, tl.cdiv(rows, TALL), programs):
        row, _, live, inside, at = tile(number, rows, TALL, WIDTH)
        d = read(grad + at, inside)
        pooled = tl.zeros_like(d)  # h again, unrounded
        weight_at = weights + row
        for j in tl.static_range(len(sources)):
            pooled += read(weight_at, live)[:, None] * read(sources[j] + at, inside)
            weight_at += rows
        _, _, mean = three_sums(d, d, d * pooled)  # as the gains are summed: a single source's back is 0, not nearly
        weight_at = weights + row
        for j in tl.static_range(len(sources)):
            x = read(sources[j] + at, inside)
            square, score, gain = three_sums(x * x, x * q, d * x)
            inverse = 1.0 / tl.sqrt(square / WIDTH + EPS)
            score *= inverse
            weight = read(weight_at, live)
            weight_at += rows
            back = weight * (gain - mean)
            along = back * inverse
            made = weight[:, None] * d + along[:, None] * q - (along * score * inverse / WIDTH)[:, None] * x
            tl.store(grad_sources[j] + at, made.to(grad_sources[j].dtype.element_ty), mask=inside)
            of_query += along[:, None] * x
            if grad_bias is not None and j == len(sources) - 1:
                of_bias += back
    tl.store(grad_query + first * WIDTH + column, tl.sum(of_query, 0), mask=column < WIDTH)
    if grad_bias is not None:
        tl.store(grad_bias + first, tl.sum(of_bias, 0))


def constants(width: int, eps: float) -> dict[str, float]:
    """A kernel's compile-time constants: the width of a row, the rows per tile, and the ε of the sources' RMS norm."""
    return {"WIDTH": width, "TALL": max(1, TILE // triton.next_power_of_2(width)), "EPS": eps}


def warps(width: int) -> int:
    """Warps to a program."""
    return min(16, max(TILE, triton.next_power_of_2(width)) // (32 * THREAD))


def depth_pool(sources: Sequence[Tensor], query: Tensor, eps: float, recency_bias: Tensor | None = None) -> Tensor:
    """The weighted sum Σ_s α_s s over sources, as `fathom.models.residuals.attention_residuals.pool` computes it."""
    return pool(list(sources), query, recency_bias, eps)[0]


@torch.library.custom_op("fathom::depth_pool", mutates_args=())
def pool(sources: Sequence[Tensor], query: Tensor, recency_bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The pooled sources h `[B, T, hidden_size]` and their weights α `[sources, B, T]`.

    Args:
        sources: `[B, T, hidden_size]` each.
        query: w ⊙ p, `[hidden_size]`.
        recency_bias: Added to the last source's score, `[1]`.
        eps: Of the sources' rms.
    """
    mixed, weights = _outputs(sources)
    rows = weights[0].numel()
    if rows:
        width = query.shape[0]
        fixed = constants(width, eps)
        with torch.cuda.device_of(mixed):
            depth_pool_forward[(triton.cdiv(rows, fixed["TALL"]),)](
                query.contiguous(),
                recency_bias,
                tuple(s.contiguous() for s in sources),
                mixed,
                weights,
                rows,
                num_warps=warps(width),
                **fixed,
            )
    return mixed, weights


pool.register_fake(lambda sources, query, recency_bias, eps: _outputs(sources))


@torch.library.custom_op("fathom::depth_pool_backward", mutates_args=())
def pool_backward(
    sources: Sequence[Tensor],
    query: Tensor,
    weights: Tensor,
    grad: Tensor,
    eps: float,
    biased: bool,
) -> list[Tensor]:
    """The gradients of the query, of the recency bias (if `biased`) and of all sources, in this order."""
    rows, width = weights[0].numel(), query.shape[0]
    fixed = constants(width, eps)
    programs = max(1, min(triton.cdiv(rows, fixed["TALL"]), PROGRAMS))
    of_query = weights.new_zeros((programs, width))
    of_bias = weights.new_zeros(programs) if biased else None
    made = _like(sources)
    if rows:
        with torch.cuda.device_of(grad):
            depth_pool_backward[(programs,)](
                query.contiguous(),
                tuple(s.contiguous() for s in sources),
                weights,
                grad.contiguous(),
                of_query,
                of_bias,
                tuple(made),
                rows,
                programs,
                num_warps=warps(width),
                **fixed,
            )
    bias = [] if of_bias is None else [of_bias.sum(0, keepdim=True)]
    return [of_query.sum(0).to(query.dtype), *bias, *made]


pool_backward.register_fake(
    lambda sources, query, weights, grad, eps, biased: _gradients(sources, query, weights, biased)
)


def _keep(
    ctx: Context, inputs: tuple[Sequence[Tensor], Tensor, Tensor | None, float], output: tuple[Tensor, Tensor]
) -> None:
    sources, query, bias, ctx.eps = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(query, output[1], *sources)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else every backward pass fills a gradient of the weights with zeros


def _back(ctx: Context, grad: Tensor | None, _: None) -> tuple[object, ...]:
    query, weights, *sources = ctx.saved_tensors
    if grad is None:
        return [None] * len(sources), None, None, None
    biased = ctx.bias_dtype is not None
    of_query, *rest = pool_backward(sources, query, weights, grad, ctx.eps, biased)
    bias = rest.pop(0).to(ctx.bias_dtype) if biased else None
    return rest, of_query, bias, None


pool.register_autograd(_back, setup_context=_keep)


def _outputs(sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    like = sources[0]
    wide = torch.promote_types(like.dtype, torch.float32)
    mixed = torch.empty_like(like, memory_format=torch.contiguous_format)
    return mixed, like.new_empty((len(sources), *like.shape[:-1]), dtype=wide)


def _like(sources: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(s, memory_format=torch.contiguous_format) for s in sources]


def _gradients(sources: Sequence[Tensor], query: Tensor, weights: Tensor, biased: bool) -> list[Tensor]:
    bias = [weights.new_empty(1)] if biased else []
    return [torch.empty_like(query), *bias, *_like(sources)]
