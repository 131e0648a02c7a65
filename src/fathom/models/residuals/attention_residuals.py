"""`attention_residuals`: each sub-layer's input is a sum of earlier blocks' outputs, weighted by softmax scores of a
learned query.

The weights and the input:

    α = softmax_s( (w ⊙ p) · s / rms(s) )        h = Σ_s α_s s        over the sources s

The published variants differ in what a source is. `block_sum`: the embeddings, the *sum* of each completed block's
sub-layer outputs, and the sum of the current block so far. `snapshot`: the embeddings, a snapshot of the running
stream at each block's end, and the running stream itself, which is never reset and has a learned `recency_bias` on
its logit. `block_size` counts sub-layers.

Delta Attention Residuals keep the running stream x and add to it what they read:

    h = x + λ Σ_s α_s s        before each sub-layer; the final norm reads x

`delta`: the sources are the embeddings and the output of each earlier sub-layer. `delta_block`: the embeddings and the
sum of each completed block. A source enters with the write after the read that follows it, so the open block, and the
embeddings before the first write, are in x alone. The public code of `delta_block` stores other sources from the third
on: x at a block's end minus the source before, not minus x at the block's start.

In a loop each iteration begins with its own input in place of the embeddings (`trips/walk.py` calls `begin`), and all
iterations share the queries. Blocks are counted by layer, so after a prelude an iteration may begin inside a block.

`normed_pooling.py` has Inkling-2's form (`inkling2`), which adds up an unfinished block in float32. `axes/blend.py` has
`blend`. A released checkpoint does not name its variant: `families/lumia.py` recognises it by the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init

from ..axes.blend import Blended, BlendedResidual, BlendOptions, blending_cost, gate_size
from ..axes.numerics import few, softmax_list, weighted_sum, widen, without_autocast
from ..axes.replaceable import faster
from ..axes.roles import Cost, Mechanism, Residual, ResidualOptions, ResidualState, WriteContext, direct
from .normed_pooling import NormedPooling, queries_of

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit

DELTAS = ("delta", "delta_block")
NORMED = "inkling2"
VARIANTS = ("block_sum", "snapshot", *DELTAS, NORMED)


@dataclass(frozen=True)
class AttentionResidualsOptions(ResidualOptions, BlendOptions):
    """Options of `attention_residuals`."""

    block_size: int = 12
    """Sub-layers per block (two per layer); `delta` has no blocks."""
    variant: str = "block_sum"
    """The sources: the sum of each block (`block_sum`), or the running sum after each block (`snapshot`); or, added to
    the running stream, each sub-layer's output (`delta`) or each completed block (`delta_block`). `inkling2` is
    Inkling-2's form of `block_sum`."""
    queries: int = 3
    """In `inkling2`: the number of sums that a full-attention layer reads, 3 (for queries, keys and values) or 1."""
    recency_bias: float = 3.0
    """Initial bias on the running stream in `snapshot`."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse a `block_size` below 1 and unknown values of `variant` or `queries`."""
        super().check(config)
        self.require("block_size", self.block_size >= 1, "be at least 1")
        self.require_one_of("variant", VARIANTS)
        self.require("queries", self.queries in (1, 3), "be 1 or 3")


class SourceNorm(nn.Module):
    """The weight w of the norm in the sources' scores. The sources themselves are not normed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, query: Tensor) -> Tensor:
        """The scoring vector w ⊙ p: its dot product with a source, divided by the source's root mean square, is the
        score."""
        return widen(self.weight) * widen(query)


class Pooling(Residual):
    """Base class of residuals whose sub-layers read a softmax-weighted sum of sources (earlier blocks' outputs)."""

    def __init__(self, config: DecoderConfig, sublayer: int, chooses: bool = True) -> None:
        super().__init__(config, sublayer)
        options = AttentionResidualsOptions.of(config)
        self.starts_block = sublayer % options.block_size == 0
        self.ends_block = (sublayer + 1) % options.block_size == 0
        self.eps = config.rms_norm_eps
        self.recency_bias: nn.Parameter | None = None
        self.chooses = chooses
        """Whether it ever has more than one source; else no query could be trained."""
        if chooses:
            self.pseudo_query = nn.Parameter(torch.empty(config.hidden_size))
            self.norm = SourceNorm(config.hidden_size)

    def init_weights(self, std: float) -> None:
        """Initialise the query to zero, so that all sources have equal weight."""
        super().init_weights(std)
        if self.chooses:
            init.zeros_(self.pseudo_query)
            init.ones_(self.norm.weight)

    def pooled(self, sources: ResidualState) -> tuple[Tensor, ResidualState]:
        """Returns the weighted sum of the un-normed sources, and the sources themselves for the next read."""
        query = direct(self.norm)(self.pseudo_query)  # [hidden_size]
        if (kernel := faster("depth_pool", sources[0])) is not None:
            return kernel(sources, query, self.eps, self.recency_bias), sources
        if few(sources[0]):
            return pool_stacked(sources, query, self.eps, self.recency_bias), sources
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return pool(sources, query, self.eps, self.recency_bias), sources
        h, *through = _Pool.apply(query, self.recency_bias, self.eps, *sources)
        return h, tuple(through)


class AttentionResiduals(Pooling):
    """Attention residuals (`block_sum`, `snapshot`); the state is the list of sources, oldest first, starting with the
    embeddings."""

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer)
        options = AttentionResidualsOptions.of(config)
        self.snapshot = options.variant == "snapshot"
        self.initial_bias = options.recency_bias
        # one element instead of a scalar, because FSDP2 cannot shard a scalar
        self.recency_bias = nn.Parameter(torch.empty(1)) if self.snapshot else None

    def init_weights(self, std: float) -> None:
        """Also initialise the recency bias."""
        super().init_weights(std)
        if self.recency_bias is not None:
            init.constant_(self.recency_bias, self.initial_bias)

    def begin(self, embeddings: Tensor) -> ResidualState:
        """The initial state: the embeddings; with `snapshot` also the running stream, which starts as a copy of
        them."""
        return (embeddings, embeddings) if self.snapshot else (embeddings,)

    def read(self, state: ResidualState) -> tuple[Tensor, ResidualState, WriteContext]:
        """The weighted sum."""
        if len(state) == 1 and not torch.is_grad_enabled():
            return state[0], state, None  # its weight is 1
        return *self.pooled(state), None

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Add the update to the current block's sum, or start the sum of a new block. `snapshot` adds to the stream and
        keeps a copy at a block's end."""
        if self.snapshot:
            stream = state[-1] + update
            return (*state[:-1], stream, stream) if self.ends_block else (*state[:-1], stream)
        if self.starts_block or len(state) == 1:  # a trip of a loop may begin inside a block
            return (*state, update)
        return (*state[:-1], state[-1] + update)


class BlendedAttentionResiduals(BlendedResidual, AttentionResiduals):
    """Attention residuals with λ."""


class BlendedNormedPooling(BlendedResidual, NormedPooling):
    """Inkling-2's attention residuals with λ."""


class Delta(Blended, Pooling):
    """Delta Attention Residuals; the state is the running stream, the sources (oldest first) and, in `delta_block`, the
    sum of the unfinished block."""

    adds = True

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer, self.has_several(config, sublayer))
        self.by_block = AttentionResidualsOptions.of(config).variant == "delta_block"
        self.final = sublayer == 2 * config.num_hidden_layers

    @staticmethod
    def has_several(config: DecoderConfig, sublayer: int) -> bool:
        """Whether a sub-layer has more than one source to choose from (more than the embeddings)."""
        options = AttentionResidualsOptions.of(config)
        written = sublayer - sublayer % 2 if config.parallel else sublayer
        first = options.block_size if options.variant == "delta_block" else 0
        return first < written and Delta.reads(config, sublayer)

    def read(self, state: ResidualState) -> tuple[Tensor, ResidualState, WriteContext]:
        """The input of a sub-layer: the stream plus the pooled sources; the final norm reads the stream alone."""
        stream, *rest = state
        if self.final or not rest:
            return stream, state, None
        sources, open_block = (rest[:-1], rest[-1:]) if self.by_block else (rest, [])
        if not self.chooses:
            return self.added(stream, sources[0]), state, None  # its weight is 1
        h, through = self.pooled(tuple(sources))
        return self.added(stream, h), (stream, *through, *open_block), None

    def added(self, stream: Tensor, h: Tensor) -> Tensor:
        """Add what a sub-layer reads to the stream: x + λ h, or (1 + g) x + λ h with learned gates."""
        return stream + self.opened(h) if self.blend_gates is None else self.blend_gates(stream, h)

    @classmethod
    def gated(cls, config: DecoderConfig, *place: int) -> bool:
        """Whether a read has learned gates: not the read before the first update, and not that of the final norm."""
        return cls.reads(config, place[0])

    @staticmethod
    def reads(config: DecoderConfig, sublayer: int) -> bool:
        """Whether a sub-layer reads sources in addition to the stream."""
        written = sublayer - sublayer % 2 if config.parallel else sublayer  # before it reads
        return written > 0 and sublayer < 2 * config.num_hidden_layers

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Add to the stream. The update becomes a source, or part of the open block."""
        stream, *rest = state
        made = stream + update
        if not rest:  # the trip's input becomes a source
            return (made, stream, update)
        if not self.by_block or self.starts_block:
            return (made, *rest, update)
        return (made, *rest[:-1], rest[-1] + update)


def attention_residuals(config: DecoderConfig, sublayer: int) -> Residual:
    """Build the residual of the variant that the configuration names."""
    variant = AttentionResidualsOptions.of(config).variant
    if variant in DELTAS:
        return Delta(config, sublayer)
    return (BlendedNormedPooling if variant == NORMED else BlendedAttentionResiduals)(config, sublayer)


def pool(sources: Sequence[Tensor], query: Tensor, eps: float, recency_bias: Tensor | None = None) -> Tensor:
    """The weighted sum of sources Σ_s α_s s, `[B, T, hidden_size]`, with softmax weights α from the query.

    Args:
        sources: `[B, T, hidden_size]` each.
        query: w ⊙ p, `[hidden_size]`.
        eps: Of the sources' rms.
        recency_bias: Added to the last source's score, `[1]`.
    """
    scores = []
    for source in sources:
        x = widen(source)
        inverse_rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        scores.append((x * query).sum(-1, keepdim=True) * inverse_rms)  # [B, T, 1]
    if recency_bias is not None:
        scores[-1] = scores[-1] + recency_bias
    return weighted_sum([weight.to(sources[0].dtype) for weight in softmax_list(scores)], sources)


def pool_stacked(sources: Sequence[Tensor], query: Tensor, eps: float, recency_bias: Tensor | None = None) -> Tensor:
    """The same as `pool` by fewer operations, which is faster for few tokens."""
    stacked = torch.stack(tuple(sources), 2)  # [B, T, S, hidden_size]
    scores = (stacked * query).sum(-1, True) * ((stacked * stacked).mean(-1, True) + eps).rsqrt()
    if recency_bias is not None:
        scores[:, :, -1] += recency_bias
    return (scores.softmax(2) * stacked).sum(2)


class _Pool(torch.autograd.Function):
    """`pool` with a hand-written backward pass, which saves the sources and three numbers for each; also returns the
    sources. They go through it so that the gradients of later reads are summed here, not in a pass of their own.

    With r_s = 1 / rms(s), z_s = (q · s) r_s, d = ∂loss/∂h and dz_s = α_s (d · s - Σ_j α_j d · j):

        ds = … + α_s d + dz_s r_s (q - z_s r_s s / D)        dq = Σ_s dz_s r_s s
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, recency_bias: Tensor | None, eps: float, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        inverse_rms, scores = query.new_empty(2, len(sources), *sources[0].shape[:-1])  # [S, B, T]
        with without_autocast(query):  # else the product is rounded to half precision
            for s, norm, score in zip(sources, inverse_rms, scores, strict=True):
                torch.linalg.vector_norm(s, dim=-1, dtype=query.dtype, out=norm)
                torch.matmul(widen(s), query, out=score)
        inverse_rms.square_().mul_(1 / len(query)).add_(eps).rsqrt_()
        scores.mul_(inverse_rms)
        biased = scores if recency_bias is None else torch.cat((scores[:-1], scores[-1:] + recency_bias))
        weights = biased.softmax(0)
        ctx.save_for_backward(query, recency_bias, inverse_rms, scores, weights, *sources)
        ctx.set_materialize_grads(False)  # a source that is never read again has no gradient, not a zero gradient
        return weighted_sum(weights.to(sources[0].dtype).unsqueeze(-1), sources), *sources

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *later: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, *later
        query, recency_bias, inverse_rms, scores, weights, *sources = ctx.saved_tensors
        wide = widen(grad).contiguous()
        made, gains = torch.empty_like(wide), torch.empty_like(scores)  # one buffer for all products
        for s, gain in zip(sources, gains, strict=True):
            torch.sum(torch.mul(wide, s, out=made), -1, out=gain)
        grad_scores = gains.sub_((weights * gains).sum(0)).mul_(weights)
        grad_bias = None if recency_bias is None else grad_scores[-1].sum().reshape(1).to(recency_bias.dtype)
        along = grad_scores.mul_(inverse_rms)
        back = (along * scores).mul_(inverse_rms).mul_(-1 / len(query))
        grad_query, grad_sources = torch.zeros_like(query), []
        with without_autocast(query):
            scalars = (t.unsqueeze(-1) for t in (weights, along, back))
            for source, after, weight, a, b in zip(sources, later, *scalars, strict=True):
                x = widen(source)
                grad_query.addmv_(x.flatten(0, -2).T, a.flatten())
                made = wide * weight if after is None else torch.addcmul(widen(after), wide, weight)
                grad_sources.append(made.addcmul_(x, b).addcmul_(a, query).to(source.dtype))
        return grad_query, grad_bias, None, *grad_sources


def source_counts(config: DecoderConfig, visits: Sequence[Visit]) -> list[tuple[int, int]]:
    """The number of sources, and of distinct tensors in the state, at each read of a forward pass; the last read is
    that of the final norm."""
    trips = [[visit.layer for visit in trip] for _, trip in groupby(visits, lambda visit: visit.trip)]
    return [pair for trip in trips for pair in _counts(config, [s for i in trip for s in (2 * i, 2 * i + 1)])]


def _counts(config: DecoderConfig, sublayers: list[int]) -> list[tuple[int, int]]:
    """The same as `source_counts`, for one iteration through these sub-layers."""
    options = AttentionResidualsOptions.of(config)
    variant, block, counts = options.variant, options.block_size, []
    for read in range(len(sublayers) + 1):
        written = sublayers[: read - read % 2 if config.parallel else read]
        begun = sum(s % block == 0 for s in written[1:])  # blocks after the first
        if variant == "snapshot":
            ended = [(s + 1) % block == 0 for s in written]
            sources = 2 + sum(ended)
            counts.append((sources, sources - (not written or ended[-1])))
        elif variant in ("block_sum", NORMED):
            sources = 1 + bool(written) + begun
            counts.append((sources, sources))
        else:
            by_block = variant == "delta_block"
            sources = 1 + (begun if by_block else len(written)) if written else 0
            found = sources if read < len(sublayers) else 0  # the final read pools nothing
            counts.append((found, 1 + sources + (by_block and bool(written))))
    return counts


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost for each source: a dot product with the query, and its part in the weighted sum."""
    counts, width = source_counts(config, visits), config.hidden_size
    options = AttentionResidualsOptions.of(config)
    if options.variant == NORMED:
        return _normed_cost(config, visits, scalar)
    delta, snapshot = options.variant in DELTAS, options.variant == "snapshot"
    reads = sum(sources for sources, _ in counts if sources > 1 or not delta)
    if delta:
        added = sum(sources > 0 for sources, _ in counts)
        choosing = sum(Delta.has_several(config, s) for s in range(2 * config.num_hidden_layers))
        sums = 2 * len(visits) * (options.variant == "delta_block")
        gated = sum(Delta.reads(config, s) for s in range(2 * config.num_hidden_layers))
        own = Cost(
            parameters=choosing * 2 * width + 2 * gated * gate_size(config, options),
            elementwise_flops=width * (added * (1 + options.blends + options.learned) + sums),
            io_bytes=scalar * width * 2 * added,
        )
    else:
        own = blending_cost(config, len(counts), scalar, options)
        each = 2 * width + snapshot + 2 * gate_size(config, options)
        own += Cost(parameters=(2 * config.num_hidden_layers + 1) * each)
    return own + Cost(
        flops=4 * width * reads,
        elementwise_flops=2 * width * reads,  # the sources' rms
        transient_bytes=scalar * width * (max(different for _, different in counts) - 1),
        io_bytes=scalar * width * (2 * reads + len(counts) - 1),
    )


def _normed_cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """The cost of `inkling2`: a score and a weighted sum for each pair of source and query, and the gains of keys and
    values."""
    width, options, layers = config.hidden_size, AttentionResidualsOptions.of(config), config.num_hidden_layers
    trips = [[visit.layer for visit in trip] for _, trip in groupby(visits, lambda visit: visit.trip)]
    read = [s for trip in trips for s in (*(s for i in trip for s in (2 * i, 2 * i + 1)), 2 * layers)]
    asked = [queries_of(config, sublayer) for sublayer in read]
    counts = source_counts(config, visits)
    reads = sum(queries * sources for queries, (sources, _) in zip(asked, counts, strict=True))
    normed = sum(sources for queries, (sources, _) in zip(asked, counts, strict=True) if queries)
    made = [queries_of(config, sublayer) for sublayer in range(2 * layers + 1)]
    gates = 2 * len(made) * gate_size(config, options)
    return blending_cost(config, sum(asked), scalar, options) + Cost(
        parameters=width * (sum(made) + 2 * made.count(3)) + gates,
        flops=4 * width * reads,
        elementwise_flops=width * (3 * normed + 2 * asked.count(3)),
        transient_bytes=scalar * width * (max(different for _, different in counts) - 1),
        io_bytes=scalar * width * (2 * reads + len(counts) - 1),
    )


ATTENTION_RESIDUALS = Mechanism(
    name="attention_residuals",
    axis="residual",
    summary="softmax over earlier blocks, scored by a learned query",
    paper="arXiv 2603.15031",
    build=attention_residuals,
    cost=cost,
    options=AttentionResidualsOptions,
    closed={"blend": 0.0},
)
