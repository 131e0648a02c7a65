"""`hyper_connections`: n residual streams, mixed per token by small matrices (mHC).

For one sub-layer F, with S_1 … S_n the streams and z their joint norm:

    x   = Σ_i H_pre[i] S_i
    S_i ← Σ_j H_res[i, j] S_j + H_post[i] F(x)

    H_pre = σ(α_pre W_pre z + b_pre)    H_post = 2σ(α_post W_post z + b_post)    H_res = Sinkhorn(α_res W_res z + b_res)

Sinkhorn keeps H_res close to doubly stochastic, so that the streams' sum neither grows nor fades. With
`sinkhorn_iterations: 0` nothing is constrained: H = α tanh(W z) + b. That is an ablation of mHC and not the model of
arXiv 2409.19606, which norms every stream by itself, makes a stream's maps from that stream alone by one projection for
all, starts that projection at zero, and sums the streams in the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init

from .loss import is_bare
from .numerics import widen
from .rms_norm import RMSNorm
from .roles import Cost, Mechanism, Residual, ResidualOptions, ResidualState, WriteContext

if TYPE_CHECKING:
    from .configuration import FathomConfig
    from .slots import Visit

FLOOR = 1e-12


@dataclass(frozen=True)
class HyperConnectionsOptions(ResidualOptions):
    """Options of `hyper_connections`."""

    streams: int = 4
    """Parallel residual streams."""
    sinkhorn_iterations: int = 20
    """Row and column normalisations of the stream-mixing matrix; 0 leaves all mixing unconstrained (mHC's ablation)."""
    alpha: float = 0.01
    """Initial weight of what depends on the token."""

    def resolve(self, config: FathomConfig) -> HyperConnectionsOptions:
        """At least one stream; no negative iterations."""
        if self.streams < 1:
            raise ValueError(f"residual_options.streams must be at least 1, got {self.streams}")
        if self.sinkhorn_iterations < 0:
            raise ValueError(
                f"residual_options.sinkhorn_iterations must not be negative, got {self.sinkhorn_iterations}"
            )
        return self


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Exponentiate and balance `[..., n, n]`: columns sum to one exactly, rows nearly.

    No sum is below FLOOR: those of the first rows and columns hold n entries of at least FLOOR and FLOOR / n, and
    dividing rows by at most n leaves a column that summed to one 1 / n, and columns a row likewise.
    """
    matrix = (logits - logits.amax((-2, -1), keepdim=True)).exp().clamp(min=FLOOR)
    divide = torch.Tensor.div if torch.is_grad_enabled() else torch.Tensor.div_
    for _ in range(iterations):
        matrix = divide(matrix, matrix.sum(-1, keepdim=True))
        matrix = divide(matrix, matrix.sum(-2, keepdim=True))
    return matrix


class _Balance(torch.autograd.Function):
    """`sinkhorn` as alternating scalings, u = 1 / (K v) and v = 1 / (Kᵀ u), which leave u ⊙ K ⊙ v: one step of autograd
    that keeps the logits alone. Matrices lie along the last dimension, `[n, n, N]`, so that every sum is over numbers
    side by side."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations = iterations
        kernel = _kernel(logits)
        u, v = _scalings(kernel, iterations)
        return u[-1].unsqueeze(1) * kernel * v[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        kernel = _kernel(*ctx.saved_tensors)
        us, vs = _scalings(kernel, ctx.iterations)
        grad_kernel = grad * us[-1].unsqueeze(1) * vs[-1]
        grad_u, grad_v = _rows(grad * kernel, vs[-1]), _columns(grad * kernel, us[-1])
        for step in range(ctx.iterations, 0, -1):
            back = -grad_v * vs[step].square()  # to Kᵀ u
            grad_u = grad_u + _rows(kernel, back)
            grad_kernel = torch.addcmul(grad_kernel, us[step].unsqueeze(1), back)
            back = -grad_u * us[step].square()  # to K v, with the v before
            grad_v, grad_u = _columns(kernel, back), torch.zeros_like(grad_u)
            grad_kernel = torch.addcmul(grad_kernel, back.unsqueeze(1), vs[step - 1])
        return (grad_kernel * kernel).masked_fill_(kernel <= FLOOR, 0), None


def _kernel(logits: Tensor) -> Tensor:
    """exp of `[n, n, N]`, each matrix' largest entry 1 and none below FLOOR."""
    return (logits - logits.amax((0, 1))).exp_().clamp_(min=FLOOR)


def _rows(kernel: Tensor, v: Tensor) -> Tensor:
    """K v, `[n, N]`."""
    total = kernel[:, 0] * v[0]
    for j in range(1, len(v)):
        total.addcmul_(kernel[:, j], v[j])
    return total


def _columns(kernel: Tensor, u: Tensor) -> Tensor:
    """Kᵀ u, `[n, N]`."""
    total = kernel[0] * u[0]
    for i in range(1, len(u)):
        total.addcmul_(kernel[i], u[i])
    return total


def _scalings(kernel: Tensor, iterations: int) -> tuple[list[Tensor], list[Tensor]]:
    """u and v after every iteration, `[n, N]` each, ones before the first."""
    one = torch.ones_like(kernel[0])
    us, vs = [one], [one]
    for _ in range(iterations):
        us.append(_rows(kernel, vs[-1]).reciprocal_())
        vs.append(_columns(kernel, us[-1]).reciprocal_())
    return us, vs


class HyperConnections(Residual):
    """Its state: the streams, one tensor `[B, T, n, hidden_size]`."""

    no_weight_decay = ("residual_logits",)

    def __init__(self, config: FathomConfig, sublayer: int) -> None:
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
        # One element each, not none: FSDP2 cannot shard a scalar.
        self.alpha_pre, self.alpha_post, self.alpha_res = (nn.Parameter(torch.empty(1)) for _ in range(3))

    def init_weights(self, std: float) -> None:
        """With α = 0 this is the plain residual; α starts small, not at zero."""
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
        """Every stream starts as the embeddings."""
        return (embeddings.unsqueeze(2).expand(-1, -1, self.streams, -1),)

    @property
    def bare(self) -> bool:
        """Whether norm and projection are their weights and nothing else: no adapter, no hook, not offloaded."""
        return is_bare(self.projection) and not (self.norm._forward_hooks or self.norm._forward_pre_hooks)

    def maps(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre `[B, T, n]`, H_post `[B, T, n]` and H_res `[B, T, n, n]`, in float32."""
        n = self.streams
        dynamic = widen(self.projection(self.norm(streams.flatten(2))))
        pre, post, res = dynamic.split((n, n, n * n), dim=-1)
        res = res.unflatten(-1, (n, n))
        if not self.iterations:
            pre, post, res = pre.tanh(), post.tanh(), res.tanh()
        pre = widen(self.alpha_pre) * pre + widen(self.pre_logits)
        post = widen(self.alpha_post) * post + widen(self.post_logits)
        res = widen(self.alpha_res) * res + widen(self.residual_logits)
        if not self.iterations:
            return pre, post, res
        return pre.sigmoid(), 2 * post.sigmoid(), sinkhorn(res, self.iterations)

    def read(self, state: ResidualState) -> tuple[Tensor, WriteContext]:
        """Σ_i H_pre[i] S_i; before the final norm, the streams' learned mean."""
        (streams,) = state
        if self.final:
            weights = widen(self.reduce_logits).softmax(-1).to(streams.dtype)
            return torch.einsum("n,btnd->btd", weights, streams), None
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self.bare or autocast(streams):
            pre, post, res = (h.to(streams.dtype) for h in self.maps(streams))
            return torch.matmul(pre.unsqueeze(2), streams).squeeze(2), (post, res)
        n = self.streams
        alphas = (self.alpha_pre.expand(n), self.alpha_post.expand(n), self.alpha_res.expand(n * n))
        bases = (self.pre_logits, self.post_logits, self.residual_logits.flatten())
        x, post, res = _Read.apply(
            *(streams, self.norm.weight, self.projection.weight, torch.cat(alphas), torch.cat(bases)),
            *(self.norm.variance_epsilon, self.iterations),
        )
        return x, (post, res)

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Mix the streams and give each its share of the update."""
        assert context is not None
        post, res = context
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or autocast(update):
            return (torch.matmul(res, state[0]) + post.unsqueeze(-1) * update.unsqueeze(2),)
        return (_Write.apply(state[0], post, res, update),)


def autocast(x: Tensor) -> bool:
    """Whether autocast chooses the precision of products on the device of `x`."""
    return torch.is_autocast_enabled(x.device.type)


class _Read(torch.autograd.Function):
    """x, H_post and H_res with the backward pass written out: it keeps the streams and, of every token, the numbers
    that the projection makes. With r = 1 / rms(S), y = (W ⊙ w) S and the maps' logits a r y + b."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        norm: Tensor,
        weight: Tensor,
        alpha: Tensor,
        base: Tensor,
        eps: float,
        iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, n, _ = streams.shape
        z = streams.flatten(2).flatten(0, 1)  # [N, n · hidden_size]
        wide = torch.promote_types(z.dtype, torch.float32)
        squares = torch.linalg.vector_norm(z, dim=-1, dtype=wide).square()
        inverse = torch.rsqrt(squares / z.shape[1] + eps)  # [N]
        raw = widen((weight * norm) @ z.T)  # [maps, N]
        pre, post, res = _activate(raw * inverse, alpha, base, n, iterations)
        ctx.save_for_backward(streams, norm, weight, alpha, base, inverse, raw)
        ctx.iterations = iterations
        x = torch.bmm(pre.T.contiguous().unsqueeze(1).to(z.dtype), z.unflatten(1, (n, -1))).squeeze(1)
        post, res = (h.movedim(-1, 0).to(z.dtype).unflatten(0, (batch, length)).contiguous() for h in (post, res))
        return x.unflatten(0, (batch, length)), post, res

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_post: Tensor, grad_res: Tensor) -> tuple[Tensor | None, ...]:
        streams, norm, weight, alpha, base, inverse, raw = ctx.saved_tensors
        n, z = streams.shape[2], streams.flatten(2).flatten(0, 1)
        slots, grad_x = z.unflatten(1, (n, -1)), grad_x.flatten(0, 1)
        grad_maps = (
            widen(torch.bmm(slots, grad_x.unsqueeze(2)).squeeze(2)).T,  # to H_pre: [n, N]
            widen(grad_post).flatten(0, 1).T,
            widen(grad_res).flatten(0, 1).movedim(0, -1).contiguous(),
        )
        with torch.enable_grad():
            dynamic, alphas, bases = (t.detach().requires_grad_() for t in (raw * inverse, widen(alpha), widen(base)))
            maps = _activate(dynamic, alphas, bases, n, ctx.iterations)
        grad_dynamic, grad_alpha, grad_base = torch.autograd.grad(maps, (dynamic, alphas, bases), grad_maps)

        grad_raw = grad_dynamic * inverse
        along = (grad_dynamic * raw).sum(0) * inverse.pow(3) / -z.shape[1]  # to S itself, through its rms
        narrow = grad_raw.to(z.dtype)
        grad = (maps[0].detach().T.contiguous().unsqueeze(2).to(z.dtype) * grad_x.unsqueeze(1)).flatten(1)
        grad = grad.addmm_(narrow.T, weight * norm).addcmul_(z, along.to(z.dtype).unsqueeze(1))
        grad_folded = narrow @ z
        return (
            grad.view(streams.shape),
            (grad_folded * weight).sum(0).to(norm.dtype),
            (grad_folded * norm).to(weight.dtype),
            grad_alpha.to(alpha.dtype),
            grad_base.to(base.dtype),
            None,
            None,
        )


def _activate(dynamic: Tensor, alpha: Tensor, base: Tensor, n: int, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """H_pre and H_post `[n, N]`, H_res `[n, n, N]`, of what the projection made of N tokens, `[n² + 2n, N]`."""
    if not iterations:
        dynamic = dynamic.tanh()
    logits = torch.addcmul(widen(base).unsqueeze(1), widen(alpha).unsqueeze(1), dynamic)
    pre, post, res = logits.split((n, n, n * n))
    if not iterations:
        return pre, post, res.unflatten(0, (n, n))
    return pre.sigmoid(), 2 * post.sigmoid(), _Balance.apply(res.unflatten(0, (n, n)), iterations)


class _Write(torch.autograd.Function):
    """S_i ← Σ_j H_res[i, j] S_j + H_post[i] u, which keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, post: Tensor, res: Tensor, update: Tensor) -> Tensor:
        ctx.save_for_backward(streams, post, res, update)
        written = torch.matmul(res, streams)
        return written.addcmul_(post.unsqueeze(-1), update.unsqueeze(2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        streams, post, res, update = ctx.saved_tensors
        return (
            torch.matmul(res.transpose(2, 3), grad),
            torch.matmul(grad, update.unsqueeze(3)).squeeze(3),
            torch.matmul(grad, streams.transpose(2, 3)),
            torch.matmul(post.unsqueeze(2), grad).squeeze(2),
        )


def cost(config: FathomConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """The dynamic projection dominates; the streams must be read and written around every sub-layer."""
    options = HyperConnectionsOptions.of(config)
    n, width, iterations = options.streams, config.hidden_size, options.sinkhorn_iterations
    maps = n * n + 2 * n
    sublayers, trips = 2 * len(visits), visits[-1].trip + 1
    return Cost(
        parameters=2 * config.num_hidden_layers * ((maps + 1) * n * width + maps + 3) + n,
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
    build=HyperConnections,
    cost=cost,
    options=HyperConnectionsOptions,
)
