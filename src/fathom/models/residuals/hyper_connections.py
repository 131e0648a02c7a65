"""`hyper_connections`: n residual streams, which small matrices mix for each token (manifold-constrained, mHC).

For one sub-layer F, with S_1 … S_n the streams and z their joint norm:

    x   = Σ_i H_pre[i] S_i
    S_i ← Σ_j H_res[i, j] S_j + H_post[i] F(x)

    H_pre = σ(α_pre W_pre z + b_pre)    H_post = 2σ(α_post W_post z + b_post)    H_res = Sinkhorn(α_res W_res z + b_res)

Sinkhorn keeps H_res close to doubly stochastic, so that the streams' sum neither grows nor fades. With
`sinkhorn_iterations: 0` nothing is constrained: H = α tanh(W z) + b. That is an ablation of mHC and not the model of
arXiv 2409.19606, which norms every stream by itself, makes a stream's maps from that stream alone by one projection for
all, starts that projection at zero, and sums the streams in the end.

With a `form` other than `paper` the streams are those of a released model: see `released_streams.py`.

In a loop each iteration begins with copies of its input and ends with the learned mean of the streams, which the final
norm reads: `trips/walk.py` calls `begin` and `read`. With `per_visit`, `registry.py` (`add_residuals`) gives each
iteration maps of its own. `axes/blend.py` has `blend`, and `families/lumia.py` opens the released mHC checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init

from ..axes.blend import BlendedResidual, BlendOptions, blending_cost, gate_size
from ..axes.numerics import autocasts, few, widen
from ..axes.roles import Cost, Mechanism, Residual, ResidualState, VisitOptions, WriteContext
from ..decoder.loss import is_bare
from ..decoder.rms_norm import RMSNorm
from .released_streams import FORMS, GATED, GatedStreams, ReleasedStreams, released_cost

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit

FLOOR = 1e-12
PAPER = "paper"
RANK = (320, 2048)
"""Rank and width of Qwen4-Exp's gates."""


@dataclass(frozen=True)
class HyperConnectionsOptions(VisitOptions, BlendOptions):
    """Options of `hyper_connections`."""

    streams: int = 4
    """Number of parallel residual streams."""
    sinkhorn_iterations: int = 20
    """Row and column normalisations of the stream-mixing matrix; 0 leaves all mixing unconstrained (mHC's ablation)."""
    alpha: float = 0.01
    """Initial weight of the maps' token-dependent part, in form `paper` only."""
    form: str = PAPER
    """The `paper`'s form, or that of a released model, by its model_type: `deepseek_v4`, `deepseek_v41`, `glm5_next`,
    `hy_v4` or `qwen4_exp`."""
    rank: int | None = None
    """Rows of the gates' inner projection in form `qwen4_exp`; by default 320 / 2048 of the width, as in the model."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse fewer than one stream, negative Sinkhorn iterations and unknown values of `form`."""
        super().check(config)
        self.require("streams", self.streams >= 1, "be at least 1")
        self.require_one_of("form", (PAPER, *FORMS, GATED))
        least = 1 if self.form in FORMS and FORMS[self.form].mixes else 0
        bound = f"be at least 1 in form {self.form}" if least else "not be negative"
        self.require("sinkhorn_iterations", self.sinkhorn_iterations >= least, bound)
        self.require("rank", self.rank is None or self.rank >= 1, "be at least 1")

    def resolve(self, config: DecoderConfig) -> HyperConnectionsOptions:
        """Set the default of `rank` from the hidden size."""
        if self.form != GATED or self.rank is not None:
            return self
        return replace(self, rank=max(1, config.hidden_size * RANK[0] // RANK[1]))


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Make logits `[..., n, n]` a nearly doubly stochastic matrix (Sinkhorn): columns sum to one exactly, rows nearly.

    No sum is below FLOOR: those of the first rows and columns hold n entries of at least FLOOR and FLOOR / n, and
    dividing rows by at most n leaves a column that summed to one 1 / n, and columns a row likewise.
    """
    matrix = (logits - logits.amax((-2, -1), keepdim=True)).exp().clamp(min=FLOOR)
    divide = torch.Tensor.div if torch.is_grad_enabled() else torch.Tensor.div_
    for _ in range(iterations):
        matrix = divide(matrix, matrix.sum(-1, keepdim=True))
        matrix = divide(matrix, matrix.sum(-2, keepdim=True))
    return matrix


def sinkhorn_logs(logits: Tensor, iterations: int) -> Tensor:
    """The same as `sinkhorn` in log space, for few tokens: half the operations, as a normalisation is one
    log-softmax."""
    logs = (logits - logits.amax((-2, -1), keepdim=True)).clamp(min=math.log(FLOOR))
    for _ in range(iterations - 1):
        logs = logs.log_softmax(-1).log_softmax(-2)
    return logs.log_softmax(-1).softmax(-2)


def sinkhorn_numbers(matrix: Sequence[float], iterations: int) -> list[float]:
    """The same as `sinkhorn` in Python floats, for one 4 × 4 matrix that is given flat and already exponentiated. Each
    iteration updates the factors of its rows (a to d) and of its columns (w to z)."""
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = matrix
    w = x = y = z = 1.0
    for _ in range(iterations):
        a = 1 / (a0 * w + a1 * x + a2 * y + a3 * z)
        b = 1 / (b0 * w + b1 * x + b2 * y + b3 * z)
        c = 1 / (c0 * w + c1 * x + c2 * y + c3 * z)
        d = 1 / (d0 * w + d1 * x + d2 * y + d3 * z)
        w = 1 / (a0 * a + b0 * b + c0 * c + d0 * d)
        x = 1 / (a1 * a + b1 * b + c1 * c + d1 * d)
        y = 1 / (a2 * a + b2 * b + c2 * c + d2 * d)
        z = 1 / (a3 * a + b3 * b + c3 * c + d3 * d)
    factors = (row * column for row in (a, b, c, d) for column in (w, x, y, z))
    return [factor * entry for factor, entry in zip(factors, matrix, strict=True)]


def balance(matrix: Tensor, iterations: int) -> tuple[Tensor, list[Tensor]]:
    """`sinkhorn` in place on logits `[n, n, N]`, with the tokens last so that sums read contiguous numbers; returns
    what the backward pass needs: which entries met the floor, and all sums."""
    matrix.sub_(matrix.amax((0, 1))).exp_()  # each matrix' largest entry is 1
    floored, totals = matrix <= FLOOR, []
    matrix.clamp_(min=FLOOR)
    for dim in (1, 0) * iterations:
        totals.append(matrix.sum(dim, keepdim=True))
        matrix.div_(totals[-1])
    return floored, totals


def balance_gradient(grad: Tensor, matrix: Tensor, floored: Tensor, totals: Sequence[Tensor]) -> None:
    """Backward of `balance`: replaces the matrix's gradient by that of the logits, in place, and overwrites the matrix.

    To the logarithm of a matrix a normalisation is a subtraction, and its gradient G becomes G - P ⊙ ΣG, where P is
    what it left, and the sum goes over P's rows or its columns. P itself, times their sums, is the matrix before.
    """
    grad.mul_(matrix)
    for step in reversed(range(len(totals))):
        grad.addcmul_(matrix, grad.sum(1 - step % 2, keepdim=True), value=-1)
        matrix.mul_(totals[step])
    grad.masked_fill_(floored, 0)


class HyperConnections(Residual):
    """Hyper-connections; the state is the n residual streams in one tensor, `[B, T, n, hidden_size]`."""

    no_weight_decay = ("residual_logits",)

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer)
        options = HyperConnectionsOptions.of(config)
        n = self.streams = options.streams
        self.iterations = options.sinkhorn_iterations
        self.initial_alpha = options.alpha
        self.final = sublayer == 2 * config.num_hidden_layers
        if self.final:
            self.reduce_logits = nn.Parameter(torch.empty(n))
            return
        self.norm = RMSNorm(n * config.hidden_size, eps=config.rms_norm_eps)
        self.projection = nn.Linear(n * config.hidden_size, n * n + 2 * n, bias=False)
        self.pre_logits = nn.Parameter(torch.empty(n))
        self.post_logits = nn.Parameter(torch.empty(n))
        self.residual_logits = nn.Parameter(torch.empty(n, n))
        # one element each instead of scalars, because FSDP2 cannot shard scalars
        self.alpha_pre, self.alpha_post, self.alpha_res = (nn.Parameter(torch.empty(1)) for _ in range(3))

    def init_weights(self, std: float) -> None:
        """Initialise so that the maps are near the plain residual: α, the weight of their dynamic part, starts
        small."""
        n = self.streams
        if self.final:
            init.zeros_(self.reduce_logits)
            return
        for alpha in (self.alpha_pre, self.alpha_post, self.alpha_res):
            init.constant_(alpha, self.initial_alpha)
        if self.iterations:
            init.constant_(self.pre_logits, -math.log(n - 1) if n > 1 else 20.0)  # σ = 1/n
            init.zeros_(self.post_logits)
            mostly_own = torch.full((n, n), 0.01 / max(n - 1, 1)).fill_diagonal_(0.99)
            init.copy_(self.residual_logits, mostly_own.log())
        else:
            init.copy_(self.pre_logits, torch.eye(n)[self.sublayer % n])
            init.ones_(self.post_logits)
            init.copy_(self.residual_logits, torch.eye(n))

    def begin(self, embeddings: Tensor) -> ResidualState:
        """The initial state: every stream is a copy of the embeddings."""
        return (embeddings.unsqueeze(2).expand(-1, -1, self.streams, -1),)

    @property
    def bare(self) -> bool:
        """Whether norm and projection are plain modules: they have no adapter and no hooks, and are not offloaded."""
        return is_bare(self.projection) and not (self.norm._forward_hooks or self.norm._forward_pre_hooks)

    def maps(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The weights by which a sub-layer reads, H_pre `[B, T, n]`, writes, H_post `[B, T, n]`, and mixes streams,
        H_res `[B, T, n, n]`, in float32."""
        n = self.streams
        dynamic = widen(self.projection(self.norm(streams.flatten(2))))
        pre, post, res = dynamic[..., :n], dynamic[..., n : 2 * n], dynamic[..., 2 * n :]
        res = res.view(*res.shape[:-1], n, n)
        if not self.iterations:
            pre, post, res = pre.tanh(), post.tanh(), res.tanh()
        pre = widen(self.alpha_pre) * pre + widen(self.pre_logits)
        post = widen(self.alpha_post) * post + widen(self.post_logits)
        res = widen(self.alpha_res) * res + widen(self.residual_logits)
        if not self.iterations:
            return pre, post, res
        balance = sinkhorn_logs if few(streams) else sinkhorn
        return pre.sigmoid(), 2 * post.sigmoid(), balance(res, self.iterations)

    def read(self, state: ResidualState) -> tuple[Tensor, ResidualState, WriteContext]:
        """The sub-layer's input Σ_i H_pre[i] S_i; for the final norm, a learned weighted mean of the streams."""
        (streams,) = state
        if self.final:
            weights = widen(self.reduce_logits).softmax(-1).to(streams.dtype)
            return torch.matmul(weights.expand(*streams.shape[:2], 1, -1), streams).squeeze(2), state, None
        if self.iterations and streams.shape[:3] == (1, 1, 4) and readable(streams) and self.bare:
            x, maps = self.read_token(streams)
            return x, state, (maps,)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self.bare or autocasts(streams):
            pre, post, res = (h.to(streams.dtype) for h in self.maps(streams))
            return torch.matmul(pre.unsqueeze(2), streams).squeeze(2), state, (post, res)
        x, post, res, streams = _Read.apply(
            *(streams, self.norm.weight, self.projection.weight, self.norm.variance_epsilon, self.iterations),
            *(self.alpha_pre, self.alpha_post, self.alpha_res),
            *(self.pre_logits, self.post_logits, self.residual_logits),
        )
        return x, (streams,), (post, res)

    def read_token(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The sub-layer input for a single token with four streams, and H_res with H_post as its last column, `[n, n +
        1]`. The 24 numbers are Python's own: of so few, a call of torch takes longer than the arithmetic."""
        n, z = self.streams, streams.flatten(2)[0]  # [1, n · hidden_size]
        square = F.linear(z, z).item() / z.shape[1] + self.norm.variance_epsilon
        inverse_rms = square**-0.5 if square else math.inf  # as rsqrt has it
        made = F.linear(z * self.norm.weight, self.projection.weight).flatten().tolist()
        dynamic = [inverse_rms * y for y in made]
        pre = _logits(dynamic[:n], self.alpha_pre, self.pre_logits)
        post = _logits(dynamic[n : 2 * n], self.alpha_post, self.post_logits)
        res = _logits(dynamic[2 * n :], self.alpha_res, self.residual_logits.view(-1))
        top = max(res)
        balanced = sinkhorn_numbers([max(math.exp(x - top), FLOOR) for x in res], self.iterations)
        halves = [math.tanh(x / 2) for x in (*pre, *post)]  # σ(x) = (1 + tanh(x/2)) / 2, which overflows nowhere
        numbers = [0.5 + 0.5 * h for h in halves[:n]]
        for i, h in enumerate(halves[n:]):
            numbers += (*balanced[n * i : n * i + n], 1 + h)
        maps = torch.tensor(numbers, dtype=z.dtype)
        return (maps[:n].view(1, n) @ z.view(n, -1)).unsqueeze(0), maps[n:].view(n, n + 1)

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Mix the streams, and add the sub-layer's update to each stream with its own weight."""
        assert context is not None
        (streams,) = state
        if len(context) == 1:  # of `read_token`
            return ((context[0] @ torch.cat((streams[0, 0], update[0]))).view(streams.shape),)
        post, res = context
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or autocasts(update):
            return (torch.matmul(res, streams) + post.unsqueeze(-1) * update.unsqueeze(2),)
        return (_Write.apply(streams, post, res, update),)


class BlendedHyperConnections(BlendedResidual, HyperConnections):
    """Hyper-connections with λ."""


class BlendedReleasedStreams(BlendedResidual, ReleasedStreams):
    """A released model's hyper-connections with a blending weight λ."""


class BlendedGatedStreams(BlendedResidual, GatedStreams):
    """The gated residual with λ."""


def hyper_connections(config: DecoderConfig, sublayer: int) -> Residual:
    """Build the residual of the `form` that the configuration names."""
    form = HyperConnectionsOptions.of(config).form
    if form == PAPER:
        return BlendedHyperConnections(config, sublayer)
    return (BlendedGatedStreams if form == GATED else BlendedReleasedStreams)(config, sublayer)


def readable(x: Tensor) -> bool:
    """Whether to compute with Python numbers, because `x` is small, holds real data and is not being traced."""
    return few(x) and type(x) is Tensor and not torch.jit.is_tracing()


def _logits(dynamic: Sequence[float], alpha: Tensor, base: Tensor) -> list[float]:
    """The logits α y + b of a map, as Python floats."""
    scale = alpha.item()
    return [scale * y + b for y, b in zip(dynamic, base.tolist(), strict=True)]


class _Read(torch.autograd.Function):
    """The read as an autograd function that saves the streams and the projection's outputs; returns x, H_post, H_res
    and the unchanged streams. With r = 1 / rms(S), y = (W ⊙ w) S and the maps' logits α r y + b. The streams go through
    it so that what `write` sends back to them is summed here, not in a pass of their own."""

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, norm: Tensor, weight: Tensor, eps: float, iterations: int, *affine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        streams = streams.contiguous()  # the first are one tensor expanded
        z = streams.view(-1, len(norm))  # [N, n · hidden_size]
        wide = torch.promote_types(z.dtype, torch.float32)
        squares = torch.linalg.vector_norm(z, dim=-1, dtype=wide).square_()
        inverse = squares.div_(z.shape[1]).add_(eps).rsqrt_()  # [N]
        raw = widen(z @ (weight * norm).T).T.contiguous()  # [maps, N]
        ctx.save_for_backward(streams, norm, weight, inverse, raw, *affine)
        ctx.iterations = iterations
        maps = _activate(raw * inverse, affine, iterations)[0]
        pre, post, res = (h.T.to(z.dtype).contiguous() for h in maps)  # by token
        x, (batch, length, n, _) = torch.bmm(pre.unsqueeze(1), streams.flatten(0, 1)), streams.shape
        return x.view(batch, length, -1), post.view(batch, length, n), res.view(batch, length, n, n), streams

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_x: Tensor, grad_post: Tensor, grad_res: Tensor, grad_streams: Tensor
    ) -> tuple[Tensor | None, ...]:
        streams, norm, weight, inverse, raw, *affine = ctx.saved_tensors
        z, grad_x = streams.view(-1, len(norm)), grad_x.flatten(0, 1).unsqueeze(1)
        grad_pre = torch.bmm(grad_x, streams.flatten(0, 1).mT)  # a row from the left: a column is slow on a CPU
        grad_maps = (g.flatten(0, 1).flatten(1).T for g in (grad_pre.unsqueeze(0), grad_post, grad_res))
        pre, grad_raw, grad_affine = _activate_back(
            torch.cat([widen(g) for g in grad_maps]), raw * inverse, affine, ctx.iterations
        )
        grad_raw.mul_(inverse)
        along = (grad_raw * raw).sum(0).mul_(inverse.square()).div_(-z.shape[1])  # to S itself, through its rms

        pre, grad_raw, along = (t.T.to(z.dtype) for t in (pre, grad_raw, along.unsqueeze(0)))  # by token
        # In place, since `_Write` made it for this alone: memory that is new costs more than the arithmetic.
        grad = grad_streams.flatten(0, 1).addcmul_(pre.contiguous().unsqueeze(2), grad_x).flatten(1)
        grad.addmm_(grad_raw, weight * norm).addcmul_(z, along)
        grad_folded = grad_raw.T @ z
        grad_norm, grad_weight = (grad_folded * weight).sum(0), grad_folded * norm
        return (
            grad.view(streams.shape),
            grad_norm.to(norm.dtype),
            grad_weight.to(weight.dtype),
            None,
            None,
            *grad_affine,
        )


def _activate(
    dynamic: Tensor, affine: Sequence[Tensor], iterations: int
) -> tuple[tuple[Tensor, ...], Tensor | None, list[Tensor]]:
    """The maps H_pre, H_post `[n, N]` and H_res `[n², N]` from the projection's output for N tokens `[n² + 2n, N]`,
    three scales and three shifts; also what `balance` keeps."""
    if not iterations:
        dynamic.tanh_()
    rows = zip(dynamic.split([len(b.view(-1)) for b in affine[3:]]), affine[:3], affine[3:], strict=True)
    pre, post, res = (torch.addcmul(widen(b).view(-1, 1), widen(a), part) for part, a, b in rows)
    if not iterations:
        return (pre, post, res), None, []
    n = len(pre)
    return (pre.sigmoid_(), post.sigmoid_().mul_(2), res), *balance(res.view(n, n, -1), iterations)


def _activate_back(
    grad: Tensor, dynamic: Tensor, affine: Sequence[Tensor], iterations: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Backward of `_activate` from the maps' gradients `[n² + 2n, N]`; returns H_pre too, and overwrites its
    arguments."""
    (pre, post, res), floored, totals = _activate(dynamic, affine, iterations)
    parts = grad.split((len(pre), len(post), len(res)))
    if floored is not None:
        parts[0].mul_(torch.addcmul(pre, pre, pre, value=-1))
        parts[1].mul_(post.addcmul_(post, post, value=-0.5))
        balance_gradient(parts[2].view(floored.shape), res.view(floored.shape), floored, totals)
    products = (grad * dynamic).sum(1).split([len(part) for part in parts])
    grads = [*(p.sum().view(1) for p in products), *(part.sum(1) for part in parts)]
    for part, a in zip(parts, affine, strict=False):
        part.mul_(widen(a))
    if floored is None:
        grad.addcmul_(grad * dynamic, dynamic, value=-1)
    return pre, grad, [g.view(t.shape).to(t.dtype) for g, t in zip(grads, affine, strict=True)]


class _Write(torch.autograd.Function):
    """The write S_i ← Σ_j H_res[i, j] S_j + H_post[i] u as an autograd function that saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, post: Tensor, res: Tensor, update: Tensor) -> Tensor:
        ctx.save_for_backward(streams, post, res, update)
        return torch.matmul(res, streams).addcmul_(post.unsqueeze(-1), update.unsqueeze(2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        streams, post, res, update = ctx.saved_tensors
        return (
            torch.matmul(res.mT, grad),
            torch.matmul(update.unsqueeze(2), grad.mT).squeeze(2),  # a row from the left: a column is slow on a CPU
            torch.matmul(grad, streams.mT),
            torch.matmul(post.unsqueeze(2), grad).squeeze(2),
        )


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: mainly the projection that makes the weights, and reading and writing all streams at every sub-layer."""
    options = HyperConnectionsOptions.of(config)
    n, width, iterations = options.streams, config.hidden_size, options.sinkhorn_iterations
    maps = n * n + 2 * n
    sublayers, trips = 2 * len(visits), visits[-1].trip + 1
    sets = len(visits) if options.per_visit else config.num_hidden_layers
    gates = 2 * (2 * sets + 1) * gate_size(config, options)
    blending = blending_cost(config, sublayers + trips, scalar, options) + Cost(parameters=gates)
    if options.form != PAPER:
        return blending + released_cost(config, visits, scalar)
    return blending + Cost(
        parameters=2 * sets * ((maps + 1) * n * width + maps + 3) + n,
        flops=sublayers * (2 * maps * n * width + (4 * n + 2 * n * n) * width) + 2 * n * width * trips,
        elementwise_flops=sublayers * (4 * n * width + 4 * iterations * n * n + 4 * maps),
        transient_bytes=scalar * (n - 1) * width,
        io_bytes=sublayers * scalar * width * (5 * n + 3),
    )


HYPER_CONNECTIONS = Mechanism(
    name="hyper_connections",
    axis="residual",
    summary="several residual streams, mixed per token (mHC)",
    paper="arXiv 2512.24880",
    build=hyper_connections,
    cost=cost,
    options=HyperConnectionsOptions,
    closed={"blend": 0.0},
)
