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
from transformers import initialization as init

from .numerics import widen
from .rms_norm import RMSNorm
from .roles import Cost, Mechanism, Residual, ResidualOptions, ResidualState

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
    """Exponentiate and balance `[..., n, n]`: columns sum to one exactly, rows nearly."""
    matrix = (logits - logits.amax((-2, -1), keepdim=True)).exp().clamp(min=FLOOR)
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-1, keepdim=True).clamp(min=FLOOR)
        matrix = matrix / matrix.sum(-2, keepdim=True).clamp(min=FLOOR)
    return matrix


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

    def read(self, state: ResidualState) -> tuple[Tensor, Any]:
        """Σ_i H_pre[i] S_i; before the final norm, the streams' learned mean."""
        (streams,) = state
        if self.final:
            weights = widen(self.reduce_logits).softmax(-1).to(streams.dtype)
            return torch.einsum("n,btnd->btd", weights, streams), None
        pre, post, res = (h.to(streams.dtype) for h in self.maps(streams))
        return torch.einsum("btn,btnd->btd", pre, streams), (post, res)

    def write(self, state: ResidualState, update: Tensor, context: Any) -> ResidualState:
        """Mix the streams and give each its share of the update."""
        post, res = context
        return (torch.einsum("btij,btjd->btid", res, state[0]) + post.unsqueeze(-1) * update.unsqueeze(2),)


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
