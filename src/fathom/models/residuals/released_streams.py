"""Hyper-connections as models in production compute them: `hyper_connections` with a `form` other than the paper's.

For one sub-layer F, with S_1 … S_n the streams, r their joint root mean square, ε = 1e-6 and W, s, b the parameters:

    (u, v, M) = s ⊙ (W S / r) + b        pre = σ(u) + ε        H = Sinkhorn(softmax(M) + ε)

    x   = Σ_i pre_i S_i
    S_k ← Σ_j H[j, k] S_j + 2σ(v_k) F(x)        H is applied transposed: S Hᵀ in the paper's notation

    deepseek_v4     the final norm reads Σ_i pre_i S_i with W, s, b of its own
    deepseek_v41    single pass: a sub-layer reads with the `pre` of the one before it, the first reads S_1, and the
                    final norm reads with the last sub-layer's
    glm5_next       the final norm reads the streams' mean
    hy_v4           no H:  S_k ← S_k + (2σ(v_k) + ε) F(x)

`qwen4_exp` gates each channel. With z_i = S_i / rms(S_i) ⊙ (1 + w_i), and D, U, B matrices, D of `rank` rows:

    x   = 1/n Σ_i σ(U silu(D z / n))_i ⊙ z_i        S_i ← S_i + 2σ(B z / n)_i F(x)

The final norm reads such an x, and a layer norms the x that it reads once more, which that model does not.

Around these residuals the decoder is Fathom's, so no file of `checkpoints/families/` opens these models' checkpoints.
`hyper_connections.py` has the options and the paper's form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..axes.numerics import widen, without_autocast
from ..axes.roles import Cost, Residual, ResidualState, WriteContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit

EPS = 1e-6
"""ε, added to maps and to the sums by which Sinkhorn's iterations divide."""


@dataclass(frozen=True)
class Form:
    """The properties by which a released model's hyper-connections differ from DeepSeek-V4's."""

    head: str = "token"
    """The input of the final norm: weighed by each `token`, the `mean`, or with the weights `carried` from the last
    sub-layer."""
    mixes: bool = True
    """Whether streams are mixed."""
    divides_last: bool = False
    """Whether the projection is divided by r rather than its input: another rounding."""
    rounds_maps: bool = True
    """Whether the maps are rounded to the streams' type before a write, and not its result alone."""
    scale: float = 1.0
    """The initial s."""
    even: bool = False
    """Whether `pre` starts at 1/n rather than ½."""


FORMS = {
    "deepseek_v4": Form(),
    "deepseek_v41": Form(head="carried", divides_last=True, rounds_maps=False),
    "glm5_next": Form(head="mean"),
    "hy_v4": Form(mixes=False, divides_last=True, rounds_maps=False, scale=0.01, even=True),
}
"""The forms, by the `model_type` of the model."""
GATED = "qwen4_exp"
"""The form of `GatedStreams`."""


def balanced(logits: Tensor, iterations: int) -> Tensor:
    """Balance logits `[..., n, n]` (Sinkhorn): a softmax over rows, then columns and rows are divided by their sums in
    turn."""
    matrix = logits.softmax(-1) + EPS
    matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + EPS)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    return matrix


class WideLinear(nn.Linear):
    """A linear layer for inputs in at least float32, whose weight is widened in the call: an offloaded weight exists
    only there, and an adapter acts only there."""

    def forward(self, x: Tensor) -> Tensor:
        """W x."""
        return F.linear(x, widen(self.weight))


class ReleasedStreams(Residual):
    """A released model's hyper-connections; the state is the streams `[B, T, n, hidden_size]` and, in single-pass
    forms, the next read's weights `[B, T, n]`."""

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer)
        options = config.residual_options
        n = self.streams = options["streams"]
        self.iterations, self.form = options["sinkhorn_iterations"], FORMS[options["form"]]
        self.eps, self.final = config.rms_norm_eps, sublayer == 2 * config.num_hidden_layers
        self.carries = self.form.head == "carried"
        self.sizes = [n] if self.final else [n, n, n * n] if self.form.mixes else [n, n]  # of u, v, M
        self.maps_made = not self.final or self.form.head == "token"
        if self.maps_made:
            self.projection = WideLinear(n * config.hidden_size, sum(self.sizes), bias=False)  # W
            self.shift = nn.Parameter(torch.empty(sum(self.sizes)))  # b
            self.scale = nn.Parameter(torch.empty(len(self.sizes)))  # s

    def init_weights(self, std: float) -> None:
        """Initialise like the released model's own code."""
        if not self.maps_made:
            return
        init.constant_(self.scale, self.form.scale)
        start = torch.zeros(sum(self.sizes))
        if self.form.even:
            start[: self.streams] = -math.log(max(self.streams - 1, 1))
        init.copy_(self.shift, start)

    def begin(self, embeddings: Tensor) -> ResidualState:
        """The initial state: every stream is a copy of the embeddings."""
        streams = embeddings.unsqueeze(2).expand(-1, -1, self.streams, -1)
        if not self.carries:
            return (streams,)
        wide = torch.promote_types(streams.dtype, torch.float32)
        first = torch.eye(1, self.streams, dtype=wide, device=streams.device)  # S_1 alone
        return (streams, first.expand(*streams.shape[:2], -1))

    def maps(self, streams: Tensor) -> list[Tensor]:
        """The maps' logits: u (read) and v (write) `[B, T, n]`, M (mix) `[B, T, n²]`, in at least float32."""
        flat = widen(streams.flatten(2))
        inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        dynamic = self.projection(flat) * inverse if self.form.divides_last else self.projection(flat * inverse)
        shifts, scales = widen(self.shift).split(self.sizes), widen(self.scale).unbind(0)
        parts = zip(dynamic.split(self.sizes, dim=-1), scales, shifts, strict=True)
        return [part * scale + shift for part, scale, shift in parts]

    def read(self, state: ResidualState) -> tuple[Tensor, ResidualState, WriteContext]:
        """The sub-layer's input Σ_i pre_i S_i; what the final norm reads depends on the form."""
        streams = state[0]
        if self.final and self.form.head == "mean":
            return streams.mean(dim=2), state, None
        with without_autocast(streams):
            if self.final and self.carries:
                return self.collapsed(streams, state[1]), state, None
            pre, *others = self.maps(streams)
            pre = pre.sigmoid() + EPS
            x = self.collapsed(streams, state[1] if self.carries else pre)
            if self.final:
                return x, state, None
            post = 2 * others[0].sigmoid()
            if not self.form.mixes:
                return x, state, (post + EPS,)
            res = balanced(others[1].unflatten(-1, (self.streams, self.streams)), self.iterations)
            return x, state, (post, res, pre) if self.carries else (post, res)

    def collapsed(self, streams: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of streams Σ_i w_i S_i, `[B, T, hidden_size]`."""
        return (weights.unsqueeze(-1) * streams).sum(dim=2).to(streams.dtype)

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Update each stream k to Σ_j H[j, k] S_j + post_k F(x), where F(x) is the sub-layer's output."""
        assert context is not None
        streams, (post, *rest) = state[0], context
        with without_autocast(streams):
            if self.form.rounds_maps:
                added = post.to(streams.dtype).unsqueeze(-1) * update.to(streams.dtype).unsqueeze(-2)
                return (added + torch.matmul(rest[0].to(streams.dtype).transpose(-1, -2), streams),)
            added, wide = post.unsqueeze(-1) * widen(update).unsqueeze(-2), widen(streams)
            kept = torch.matmul(rest[0].transpose(-1, -2), wide) if self.form.mixes else wide
            return ((added + kept).to(streams.dtype), *rest[1:])


class GatedStreams(Residual):
    """Qwen4-Exp's gated residual. State: the streams `[B, T, n, hidden_size]`."""

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer)
        n, rank = config.residual_options["streams"], config.residual_options["rank"]
        self.streams, self.eps, width = n, config.rms_norm_eps, n * config.hidden_size
        self.norm_weight = nn.Parameter(torch.empty(width))  # w
        self.down = nn.Linear(width, rank, bias=False)  # D
        self.up = nn.Linear(rank, width, bias=False)  # U
        final = sublayer == 2 * config.num_hidden_layers
        self.inject = None if final else nn.Linear(width, n, bias=False)  # B

    def init_weights(self, std: float) -> None:
        """Initialise the norms' weights to one (stored as 0)."""
        init.zeros_(self.norm_weight)

    def begin(self, embeddings: Tensor) -> ResidualState:
        """The initial state: every stream is a copy of the embeddings."""
        return (embeddings.unsqueeze(2).expand(-1, -1, self.streams, -1),)

    def read(self, state: ResidualState) -> tuple[Tensor, ResidualState, WriteContext]:
        """The input of a sub-layer: the mean of the streams after norm and per-channel gates."""
        (streams,) = state
        wide = widen(streams)
        unit = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)
        z = (unit * (1.0 + widen(self.norm_weight))).to(streams.dtype)  # [B, T, n · hidden_size]
        gates = self.up(F.silu(self.down(z) / self.streams)).sigmoid()
        x = (gates.view(streams.shape) * z.view(streams.shape)).mean(dim=-2)
        return x, state, None if self.inject is None else (2 * (self.inject(z) / self.streams).sigmoid(),)

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Add the sub-layer's update to each stream with its own weight."""
        assert context is not None
        return (state[0] + (update.unsqueeze(-2) * context[0].unsqueeze(-1)).to(state[0].dtype),)


def released_cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost of `ReleasedStreams` or `GatedStreams`: projections of all streams, and reading and writing them at every
    sub-layer."""
    options, width = config.residual_options, config.hidden_size
    n, rank, form = options["streams"], options["rank"], FORMS.get(options["form"], Form(mixes=False))
    gated, wide = options["form"] == GATED, n * width
    maps = 2 * n + n * n * form.mixes
    vectors = wide * (2 * rank + n if gated else maps)  # of one sub-layer's matrices
    own = wide if gated else maps + 2 + form.mixes  # its other parameters
    last = wide * (2 * rank if gated else n * (form.head == "token"))
    last_own = wide if gated else (n + 1) * (form.head == "token")
    sublayers, trips = 2 * len(visits), visits[-1].trip + 1
    sets = len(visits) if options["per_visit"] else config.num_hidden_layers
    balancing = 4 * options["sinkhorn_iterations"] * n * n * form.mixes
    return Cost(
        parameters=2 * sets * (vectors + own) + last + last_own,
        flops=sublayers * (2 * vectors + 4 * wide + 2 * n * wide * form.mixes) + trips * (2 * last + 2 * wide),
        elementwise_flops=sublayers * (4 * wide + 4 * maps + balancing + 3 * wide * gated),
        transient_bytes=scalar * (n - 1) * width + 4 * n * (form.head == "carried"),
        io_bytes=sublayers * scalar * width * (5 * n + 3),
    )
