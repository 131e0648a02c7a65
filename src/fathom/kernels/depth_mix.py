"""`depth_attention` in Triton: one kernel for forward and one for backward, each of which reads every source once.

A row is one token and one key-value head. Tensors are stored token by token, so a row's key and value are D contiguous
numbers and its group of queries G times as many. A program takes a tile of rows; the sources are a tuple of pointers
over which the loop is unrolled, so nothing is stacked. Sums are in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.online import Context, absorb, nothing, read, through_values, tile

TILE = 2048
"""Numbers of one tensor that a program holds at a time."""


@triton.jit
def pooled(query, row, column, inside, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """For each row, the mean of the queries that share its key-value head, `[rows, D]`."""
    total = read(query + (row * GROUP)[:, None] * WIDTH + column[None, :], inside)
    for g in tl.static_range(1, GROUP):
        total += read(query + (row * GROUP + g)[:, None] * WIDTH + column[None, :], inside)
    return total / GROUP


@triton.jit(do_not_specialize=["rows"])
def depth_mix_forward(
    query,  # [rows, G, D]
    bias,  # one number, or None
    keys,  # a tuple of [rows, D], the layer's own last
    values,  # as keys
    mixed,  # [rows, D]
    weights,  # [sources, rows]
    rows,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
):
    """Forward kernel: the mixed value ṽ and the weights α of a tile of rows."""
    row, column, live, inside, at = tile(tl.program_id(0).to(tl.int64), rows, TALL, WIDTH)
    q = pooled(query, row, column, inside, GROUP, WIDTH)
    top, total, sum_ = nothing(live, inside, q.dtype)
    scores = ()
    for j in tl.static_range(len(keys)):
        score = tl.sum(q * read(keys[j] + at, inside), 1) * WIDTH**-0.5
        if bias is not None and j == len(keys) - 1:
            score += tl.load(bias).to(score.dtype)
        top, total, sum_ = absorb(top, total, sum_, score, read(values[j] + at, inside))
        scores = scores + (score,)  # noqa: RUF005
    tl.store(mixed + at, (sum_ / total[:, None]).to(mixed.dtype.element_ty), mask=inside)
    for j in tl.static_range(len(keys)):
        tl.store(weights + j * rows + row, tl.exp(scores[j] - top) / total, mask=live)


@triton.jit(do_not_specialize=["rows"])
def depth_mix_backward(
    query,
    keys,
    values,
    weights,
    grad,  # [rows, D], of the mixed value
    grad_query,  # [rows, G, D]
    grad_keys,
    grad_values,
    rows,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
):
    """Backward kernel, for a tile of rows: the gradients of the values and the weights, then of the keys and the
    query."""
    row, column, live, inside, at = tile(tl.program_id(0).to(tl.int64), rows, TALL, WIDTH)
    d = read(grad + at, inside)
    mean, gains = through_values(values, weights, grad_values, d, row, live, inside, at, rows)
    q = pooled(query, row, column, inside, GROUP, WIDTH)
    along = tl.zeros(inside.shape, q.dtype)
    for j in tl.static_range(len(keys)):
        weight = read(weights + j * rows + row, live)
        score = weight * (gains[j] - mean) * WIDTH**-0.5
        along += score[:, None] * read(keys[j] + at, inside)
        tl.store(grad_keys[j] + at, (score[:, None] * q).to(grad_keys[j].dtype.element_ty), mask=inside)
    shared = (along / GROUP).to(grad_query.dtype.element_ty)
    for g in tl.static_range(GROUP):
        tl.store(grad_query + (row * GROUP + g)[:, None] * WIDTH + column[None, :], shared, mask=inside)


def constants(group: int, width: int) -> dict[str, int]:
    """Compile-time constants: query heads per key-value head, head size, and the rows of a tile."""
    return {"GROUP": group, "WIDTH": width, "TALL": max(1, TILE // triton.next_power_of_2(width))}


def depth_mix(
    query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...], self_bias: Tensor | None = None
) -> Tensor:
    """The mixed value ṽ, as `fathom.models.mixers.depth_attention.mix` computes it."""
    return mix(query, [*sources[::2], key], [*sources[1::2], value], self_bias)[0]


@torch.library.custom_op("fathom::depth_mix", mutates_args=())
def mix(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], self_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The mixed value ṽ `[B, H_kv, T, D]` and the weights α `[sources, B, T, H_kv]`.

    Args:
        query: `[B, H, T, D]`
        keys: `[B, H_kv, T, D]` each, the layer's own last.
        values: As `keys`.
        self_bias: One number, added to the logit of the own layer.
    """
    like = values[-1]
    batch, heads, length, width = like.shape
    mixed, weights = _outputs(like, len(keys))
    rows, fixed = batch * heads * length, constants(query.shape[1] // heads, width)
    if rows:
        with torch.cuda.device_of(query):
            depth_mix_forward[(triton.cdiv(rows, fixed["TALL"]),)](
                by_token(query),
                self_bias,
                tuple(map(by_token, keys)),
                tuple(map(by_token, values)),
                mixed.transpose(1, 2),
                weights,
                rows,
                **fixed,
            )
    return mixed, weights


mix.register_fake(lambda query, keys, values, self_bias: _outputs(values[-1], len(keys)))


@torch.library.custom_op("fathom::depth_mix_backward", mutates_args=())
def mix_backward(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], weights: Tensor, grad: Tensor
) -> list[Tensor]:
    """Gradients of the query, of all keys and of all values, in this order."""
    batch, heads, length, width = grad.shape
    made = _gradients(query, keys, values)
    rows, fixed = batch * heads * length, constants(query.shape[1] // heads, width)
    flat = [x.transpose(1, 2) for x in made]
    if rows:
        with torch.cuda.device_of(query):
            depth_mix_backward[(triton.cdiv(rows, fixed["TALL"]),)](
                by_token(query),
                tuple(map(by_token, keys)),
                tuple(map(by_token, values)),
                weights,
                by_token(grad),
                flat[0],
                tuple(flat[1 : 1 + len(keys)]),
                tuple(flat[1 + len(keys) :]),
                rows,
                **fixed,
            )
    return made


mix_backward.register_fake(lambda query, keys, values, weights, grad: _gradients(query, keys, values))


def _keep(
    ctx: Context, inputs: tuple[Tensor, Sequence[Tensor], Sequence[Tensor], float], output: tuple[Tensor, Tensor]
) -> None:
    query, keys, values, _ = inputs
    ctx.count = len(keys)
    ctx.save_for_backward(query, *keys, *values, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else every backward pass fills a gradient of the weights with zeros


def _back(ctx: Context, grad: Tensor | None, _: None) -> tuple[object, ...]:
    if grad is None:
        return None, [None] * ctx.count, [None] * ctx.count, None
    query, *pairs, weights = ctx.saved_tensors
    keys, values = pairs[: ctx.count], pairs[ctx.count :]
    made = mix_backward(query, keys, values, weights, grad)
    return made[0], made[1 : 1 + ctx.count], made[1 + ctx.count :], None


mix.register_autograd(_back, setup_context=_keep)


def by_token(x: Tensor) -> Tensor:
    """Transpose `[B, H, T, D]` to contiguous `[B, T, H, D]`: projections have this layout, so there is usually no
    copy."""
    return x.transpose(1, 2).contiguous()


def empty_by_token(like: Tensor) -> Tensor:
    """An empty tensor `[B, H, T, D]` whose memory is laid out as `[B, T, H, D]`."""
    batch, heads, length, width = like.shape
    return like.new_empty((batch, length, heads, width)).transpose(1, 2)


def _outputs(like: Tensor, count: int) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = like.shape
    wide = torch.promote_types(like.dtype, torch.float32)
    return empty_by_token(like), like.new_empty((count, batch, length, heads), dtype=wide)


def _gradients(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    return [empty_by_token(x) for x in (query, *keys, *values)]
