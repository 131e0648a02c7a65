"""Norm and rotate a layer's queries and keys and mix its values over depth, in one Triton kernel (and one for
backward).

Raw queries and keys come in; normed and rotated ones go out for attention, and with them the value that `depth_mix`
would give, made while they are still in registers. Sources come in as they are, normed and rotated once, by their own
layer, whatever the number of layers that read them. A row is one token and one key-value head with its group of
queries. Rotation joins the two halves of a head, so each half is a tile of its own.

The kernel is not used with `norm_scores`, mixed keys or learned gates (`fused` in `models/mixers/depth_attention.py`).
A layer must rotate whole heads after or before a per-head RMS norm, without `rope_float32`, and unless keys are normed
after rotation, all layers must rotate alike (`fusible` in `models/modeling.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fathom.kernels.depth_mix import by_token, empty_by_token
from fathom.kernels.online import Context, absorb, nothing, read, through_values, tile

TILE = 1024
"""Numbers of one tensor that a program holds at a time: half of what `depth_mix` takes, as it holds more of them."""
REGISTERS = 128
"""That a thread may take. Where nothing is said, ptxas spills eight bytes to get by with 64."""


@triton.jit
def halves(x, at, inside, HALF: tl.constexpr):
    """Load both halves of the heads that begin at these offsets."""
    return read(x + at, inside), read(x + at + HALF, inside)


@triton.jit
def keep(x, at, low, high, inside, HALF: tl.constexpr):
    """Store both halves."""
    tl.store(x + at, low.to(x.dtype.element_ty), mask=inside)
    tl.store(x + at + HALF, high.to(x.dtype.element_ty), mask=inside)


@triton.jit
def along(a_low, a_high, b_low, b_high):
    """The dot product of each row of one tile with the same row of another."""
    return tl.sum(a_low * b_low, 1) + tl.sum(a_high * b_high, 1)


@triton.jit
def inverse_rms(low, high, HALF: tl.constexpr, EPS: tl.constexpr):
    """The inverse root mean square of each row, `[rows, 1]`."""
    return (1.0 / tl.sqrt(along(low, high, low, high) / (2 * HALF) + EPS))[:, None]


@triton.jit
def weight_of(norm, half, HALF: tl.constexpr):
    """Load a norm's weight as two halves, `[1, D / 2]` each."""
    return halves(norm, half[None, :], (half < HALF)[None, :], HALF)


@triton.jit
def angles_of(angles, row, half, within, turns, HEADS: tl.constexpr, HALF: tl.constexpr):
    """The rotary cosines and sines for each row's token, both halves of a head."""
    at = (row // HEADS % turns)[:, None] * 2 * HALF + half[None, :]
    cos_low, cos_high = halves(angles[0], at, within, HALF)
    sin_low, sin_high = halves(angles[1], at, within, HALF)
    return cos_low, cos_high, sin_low, sin_high


@triton.jit
def turned(low, high, c):
    """Rotated by `angles_of`."""
    return low * c[0] + high * c[2], high * c[1] + low * c[3]


@triton.jit
def turned_back(low, high, c):
    """Rotated by the transpose."""
    return low * c[0] + high * c[3], high * c[1] + low * c[2]


@triton.jit
def forth(low, high, w, c, HALF: tl.constexpr, EPS: tl.constexpr, LAST: tl.constexpr):
    """Norm and rotate a head; rotate it first and then norm it if `LAST` is set."""
    if LAST:
        low, high = turned(low, high, c)
    inverse = inverse_rms(low, high, HALF, EPS)
    low, high = low * inverse * w[0], high * inverse * w[1]
    if not LAST:
        low, high = turned(low, high, c)
    return low, high


@triton.jit
def back(d_low, d_high, low, high, w, c, HALF: tl.constexpr, EPS: tl.constexpr, LAST: tl.constexpr):
    """Backward of `forth`: the gradient of its input and, summed over rows, of the norm's weight."""
    if LAST:
        low, high = turned(low, high, c)
    else:
        d_low, d_high = turned_back(d_low, d_high, c)
    inverse = inverse_rms(low, high, HALF, EPS)
    low, high = low * inverse, high * inverse
    of_low, of_high = tl.sum(d_low * low, 0), tl.sum(d_high * high, 0)
    d_low, d_high = d_low * w[0], d_high * w[1]
    mean = (along(d_low, d_high, low, high) / (2 * HALF))[:, None]
    d_low, d_high = inverse * (d_low - low * mean), inverse * (d_high - high * mean)
    if LAST:
        d_low, d_high = turned_back(d_low, d_high, c)
    return d_low, d_high, of_low, of_high


@triton.jit
def pooled(query, out, norm, c, row, half, within, GROUP: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr):
    """For each row, the mean of its group of queries, normed and rotated; the queries are stored in `out` unless it is
    None."""
    w = weight_of(norm, half, HALF)
    q_low = tl.zeros(within.shape, c[0].dtype)
    q_high = tl.zeros(within.shape, c[0].dtype)
    for g in tl.static_range(GROUP):
        there = (row * GROUP + g)[:, None] * 2 * HALF + half[None, :]
        low, high = halves(query, there, within, HALF)
        low, high = forth(low, high, w, c, HALF, EPS, False)
        if out is not None:
            keep(out, there, low, high, within, HALF)
        q_low += low / GROUP
        q_high += high / GROUP
    return q_low, q_high


@triton.jit(do_not_specialize=["rows", "turns"])
def norm_rotate_mix_forward(
    own,  # raw: the query [rows, G, D] and the key [rows, D]
    sources,  # the keys of earlier layers, [rows, D] each
    values,  # theirs, and last the layer's own
    norms,  # weights of the query's norm and of the key's, [D]
    angles,  # cosines and sines, [turns, D]
    bias,  # one number, or None
    made,  # q̂ [rows, G, D], k̂ and ṽ [rows, D], α [sources + 1, rows]
    rows,
    turns,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    EPS: tl.constexpr,
    LAST: tl.constexpr,
):
    """Forward kernel, for a tile of rows: normed and rotated query q̂ and key k̂, mixed value ṽ and weights α. LAST:
    the key is normed after it is rotated."""
    HALF: tl.constexpr = WIDTH // 2
    row, _, live, inside, at = tile(tl.program_id(0).to(tl.int64), rows, TALL, WIDTH)
    half = tl.arange(0, triton.next_power_of_2(HALF))
    within, place = live[:, None] & (half < HALF)[None, :], row[:, None] * WIDTH + half[None, :]
    c = angles_of(angles, row, half, within, turns, HEADS, HALF)
    q_low, q_high = pooled(own[0], made[0], norms[0], c, row, half, within, GROUP, HALF, EPS)
    low, high = halves(own[1], place, within, HALF)
    low, high = forth(low, high, weight_of(norms[1], half, HALF), c, HALF, EPS, LAST)
    keep(made[1], place, low, high, within, HALF)

    top, total, sum_ = nothing(live, inside, q_low.dtype)
    scores = ()
    last = along(q_low, q_high, low, high) * WIDTH**-0.5
    if bias is not None:
        last += tl.load(bias).to(last.dtype)
    for j in tl.static_range(len(sources)):
        low, high = halves(sources[j], place, within, HALF)
        score = along(q_low, q_high, low, high) * WIDTH**-0.5
        top, total, sum_ = absorb(top, total, sum_, score, read(values[j] + at, inside))
        scores = scores + (score,)  # noqa: RUF005
    top, total, sum_ = absorb(top, total, sum_, last, read(values[len(sources)] + at, inside))
    scores = scores + (last,)  # noqa: RUF005
    tl.store(made[2] + at, (sum_ / total[:, None]).to(made[2].dtype.element_ty), mask=inside)
    for j in tl.static_range(len(values)):
        tl.store(made[3] + j * rows + row, tl.exp(scores[j] - top) / total, mask=live)


@triton.jit
def queries_back(own, grads, made, partial, norms, c, a_low, a_high, row, half, within, GROUP, HALF, EPS):
    """Gradients of the raw queries: attention's plus a share of the mean query's, back through rotation and norm."""
    w = weight_of(norms[0], half, HALF)
    total_low = tl.zeros(half.shape, a_low.dtype)
    total_high = tl.zeros(half.shape, a_low.dtype)
    for g in tl.static_range(GROUP):
        there = (row * GROUP + g)[:, None] * (2 * HALF) + half[None, :]
        d_low, d_high = halves(grads[0], there, within, HALF)
        low, high = halves(own[0], there, within, HALF)
        d_low, d_high = d_low + a_low / GROUP, d_high + a_high / GROUP
        d_low, d_high, of_low, of_high = back(d_low, d_high, low, high, w, c, HALF, EPS, False)
        keep(made[0], there, d_low, d_high, within, HALF)
        total_low += of_low
        total_high += of_high
    keep(made[2], partial, total_low, total_high, half < HALF, HALF)


@triton.jit(do_not_specialize=["rows", "turns"])
def norm_rotate_mix_backward(
    own,  # as forward
    sources,
    values,
    norms,
    angles,
    weights,  # α
    grads,  # of q̂, k̂ and ṽ
    made,  # gradients of the raw query and key, and of both norms by tile, [tiles, 2, D]
    of_sources,
    of_values,
    rows,
    turns,
    LAST: tl.constexpr,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
):
    """Backward kernel, for a tile of rows: the gradients of the mix and, adding attention's, of the raw query and
    key."""
    HALF: tl.constexpr = WIDTH // 2
    number = tl.program_id(0).to(tl.int64)
    row, _, live, inside, at = tile(number, rows, TALL, WIDTH)
    d = read(grads[2] + at, inside)
    mean, gains = through_values(values, weights, of_values, d, row, live, inside, at, rows)

    half = tl.arange(0, triton.next_power_of_2(HALF))
    within, place = live[:, None] & (half < HALF)[None, :], row[:, None] * WIDTH + half[None, :]
    c = angles_of(angles, row, half, within, turns, HEADS, HALF)
    q_low, q_high = pooled(own[0], None, norms[0], c, row, half, within, GROUP, HALF, EPS)
    last = read(weights + len(sources) * rows + row, live) * (gains[len(sources)] - mean) * WIDTH**-0.5
    key_low, key_high = halves(own[1], place, within, HALF)
    w = weight_of(norms[1], half, HALF)
    low, high = forth(key_low, key_high, w, c, HALF, EPS, LAST)
    a_low, a_high = last[:, None] * low, last[:, None] * high  # the mean query's gradient
    for j in tl.static_range(len(sources)):
        score = (read(weights + j * rows + row, live) * (gains[j] - mean) * WIDTH**-0.5)[:, None]
        low, high = halves(sources[j], place, within, HALF)
        a_low += score * low
        a_high += score * high
        keep(of_sources[j], place, score * q_low, score * q_high, within, HALF)

    d_low, d_high = halves(grads[1], place, within, HALF)
    d_low, d_high = d_low + last[:, None] * q_low, d_high + last[:, None] * q_high
    d_low, d_high, of_low, of_high = back(d_low, d_high, key_low, key_high, w, c, HALF, EPS, LAST)
    keep(made[1], place, d_low, d_high, within, HALF)
    partial = number * 2 * WIDTH + half
    keep(made[2], partial + WIDTH, of_low, of_high, half < HALF, HALF)
    queries_back(own, grads, made, partial, norms, c, a_low, a_high, row, half, within, GROUP, HALF, EPS)


def constants(heads: int, group: int, width: int, eps: float, last: bool) -> dict[str, float]:
    """A kernel's compile-time constants: key-value heads, query heads per key-value head, head size, rows per tile, and
    the norms' ε and order."""
    tall = max(1, TILE // triton.next_power_of_2(width))
    return {"HEADS": heads, "GROUP": group, "WIDTH": width, "TALL": tall, "EPS": eps, "LAST": last}


def limits() -> dict[str, int]:
    """Compile options that limit registers per thread; empty on AMD, whose compiler rejects `maxnreg`."""
    return {} if torch.version.hip else {"maxnreg": REGISTERS}


def norm_rotate_mix(
    own: tuple[Tensor, Tensor, Tensor],
    sources: tuple[Tensor, ...],
    norms: tuple[nn.Module, nn.Module],
    rotation: tuple[Tensor, Tensor],
    last: bool,
    self_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed and rotated queries `[B, H, T, D]` and keys `[B, H_kv, T, D]`, and the mixed value ṽ `[B, H_kv, T,
    D]`.

    Args:
        own: The layer's raw query `[B, T, H, D]`, key and value `[B, T, H_kv, D]`.
        sources: As `depth_mix` takes them.
        norms: Of queries and of keys.
        rotation: Cosines and sines of `fathom.models.decoder.rotary`, `[1 or B, T, D]`.
        last: Whether keys are normed after they are rotated.
        self_bias: As `depth_mix` takes it.
    """
    weights = [norm.weight for norm in norms]
    query, key, mixed, _ = mix([*own], [*sources], weights, [*rotation], self_bias, norms[0].variance_epsilon, last)
    return query.transpose(1, 2), key.transpose(1, 2), mixed.transpose(1, 2)


def _laid_out(
    own: Sequence[Tensor], sources: Sequence[Tensor], norms: Sequence[Tensor], rotation: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], ...]:
    """The kernels' inputs in memory order `[B, T, H, D]`: query and key, sources' keys, all values, norm weights,
    rotation."""
    query, key, value = (x.contiguous() for x in own)
    values = (*map(by_token, sources[1::2]), value)
    return (query, key), tuple(map(by_token, sources[::2])), values, (*norms,), tuple(x.contiguous() for x in rotation)


@torch.library.custom_op("fathom::norm_rotate_mix", mutates_args=())
def mix(
    own: Sequence[Tensor],
    sources: Sequence[Tensor],
    norms: Sequence[Tensor],
    rotation: Sequence[Tensor],
    self_bias: Tensor | None,
    eps: float,
    last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The query q̂ and key k̂ (normed, rotated) and mixed value ṽ, laid out `[B, T, H, D]`, and weights α `[sources +
    1, B, T, H_kv]`.

    Args:
        own: `[B, T, H, D]`, and `[B, T, H_kv, D]` twice.
        sources: (key, mixed value, key, mixed value, …), `[B, H_kv, T, D]` each.
        norms: Weights of the query's norm and of the key's, `[D]`.
        rotation: `[1 or B, T, D]` each.
        self_bias: One number, added to the logit of the own layer.
        eps: Of the norms.
        last: Whether keys are normed after they are rotated.
    """
    made = _outputs(own, sources, norms, rotation)
    query, key, _ = own
    batch, length, heads, width = key.shape
    rows, fixed = batch * length * heads, constants(heads, query.shape[2] // heads, width, eps, last)
    if rows:
        with torch.cuda.device_of(query):
            norm_rotate_mix_forward[(triton.cdiv(rows, fixed["TALL"]),)](
                *_laid_out(own, sources, norms, rotation),
                self_bias,
                made,
                rows,
                rotation[0].shape[0] * length,
                **limits(),
                **fixed,
            )
    return made


mix.register_fake(lambda own, sources, norms, rotation, self_bias, eps, last: _outputs(own, sources, norms, rotation))


@torch.library.custom_op("fathom::norm_rotate_mix_backward", mutates_args=())
def mix_backward(
    own: Sequence[Tensor],
    sources: Sequence[Tensor],
    norms: Sequence[Tensor],
    rotation: Sequence[Tensor],
    weights: Tensor,
    grads: Sequence[Tensor],
    eps: float,
    last: bool,
) -> list[Tensor]:
    """The gradients of the query, key and value (`own`), of the norms' weights, and of the sources, in this order.

    Args:
        own: As `mix` takes it, and so are what is not named here.
        weights: α.
        grads: Of q̂, k̂ and ṽ.
    """
    query, key, _ = own
    batch, length, heads, width = key.shape
    rows, fixed = batch * length * heads, constants(heads, query.shape[2] // heads, width, eps, last)
    tiles = triton.cdiv(rows, fixed["TALL"])
    of_query, of_key, of_value, *rest = _gradients(own, norms, sources)
    of_sources = [x.transpose(1, 2) for x in rest[2:]]
    of_norms = weights.new_zeros((tiles, 2, width))
    if rows:
        with torch.cuda.device_of(query):
            norm_rotate_mix_backward[(tiles,)](
                *_laid_out(own, sources, norms, rotation),
                weights,
                tuple(x.contiguous() for x in grads),
                (of_query, of_key, of_norms),
                tuple(of_sources[::2]),
                (*of_sources[1::2], of_value),
                rows,
                rotation[0].shape[0] * length,
                **fixed,
            )
    of_weights = [of_norms[:, i].sum(0).to(norm.dtype) for i, norm in enumerate(norms)]
    return [of_query, of_key, of_value, *of_weights, *rest[2:]]


mix_backward.register_fake(
    lambda own, sources, norms, rotation, weights, grads, eps, last: _gradients(own, norms, sources)
)


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    own, sources, norms, rotation, _, ctx.eps, ctx.last = inputs
    ctx.count = len(sources)
    ctx.save_for_backward(*own, *norms, *rotation, output[3], *sources)
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def _back(ctx: Context, *grads: Tensor | None) -> tuple[object, ...]:
    saved = ctx.saved_tensors  # once: recomputation gives each tensor a single time
    own, norms, rotation, (weights, *sources) = saved[:3], saved[3:5], saved[5:7], saved[7:]
    if all(grad is None for grad in grads):
        return [None] * 3, [None] * ctx.count, [None] * 2, [None] * 2, None, None, None
    whole = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, own, strict=False)]
    made = mix_backward(own, sources, norms, rotation, weights, whole, ctx.eps, ctx.last)
    return made[:3], made[5:], made[3:5], [None] * 2, None, None, None


mix.register_autograd(_back, setup_context=_keep)


def _outputs(
    own: Sequence[Tensor], sources: Sequence[Tensor], norms: Sequence[Tensor], rotation: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value = own
    wide = torch.promote_types(value.dtype, torch.float32)
    normed = [torch.promote_types(x.dtype, norm.dtype) for x, norm in zip((query, key), norms, strict=True)]
    types = [torch.promote_types(dtype, rotation[0].dtype) for dtype in normed]
    return (
        query.new_empty(query.shape, dtype=types[0]),
        key.new_empty(key.shape, dtype=types[1]),
        value.new_empty(value.shape),
        value.new_empty((len(sources) // 2 + 1, *key.shape[:3]), dtype=wide),
    )


def _gradients(own: Sequence[Tensor], norms: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    flat = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*own, *norms)]
    return [*flat, *(empty_by_token(x) for x in sources)]
