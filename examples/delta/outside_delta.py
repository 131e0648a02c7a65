"""Delta Attention Residuals as a package of its own: each sub-layer reads the stream x and, in addition, a weighted sum
of what earlier sub-layers wrote.

    α = softmax_s( q · s / rms(s) )        h = x + g Σ_s α_s s        s: the embeddings, then every output so far
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from fathom.models.axes.roles import Cost, Mechanism, Residual, ResidualOptions, ResidualState, WriteContext

if TYPE_CHECKING:  # an export imports this file while it imports these two
    from fathom.models.axes.fields import DecoderConfig
    from fathom.models.axes.visit import Visit


@dataclass(frozen=True)
class OutsideDeltaOptions(ResidualOptions):
    """Options of `outside_delta`."""

    gate: float = 1.0
    """Initial value of the gates g; with 0 a pretrained model starts as itself."""

    def resolve(self, config: DecoderConfig) -> OutsideDeltaOptions:
        """Refuse layers whose two sub-layers read the same state."""
        if config.parallel_residual:
            raise ValueError("residual=outside_delta needs parallel_residual=False")
        return self


class OutsideDelta(Residual):
    """State: the stream x, then the sources, oldest first; x alone until the first output."""

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer)
        self.eps, self.initial_gate = config.rms_norm_eps, OutsideDeltaOptions.of(config).gate
        self.adds = 0 < sublayer < 2 * config.num_hidden_layers  # the final norm reads x
        if self.adds:
            self.query = nn.Parameter(torch.empty(config.hidden_size))
            self.gate = nn.Parameter(torch.empty(1))  # FSDP2 cannot shard a scalar

    def init_weights(self, std: float) -> None:
        """A zero query weighs all sources equally."""
        if self.adds:
            init.zeros_(self.query)
            init.constant_(self.gate, self.initial_gate)

    def read(self, state: ResidualState) -> tuple[Tensor, ResidualState, WriteContext]:
        """h of the module's docstring."""
        stream, *sources = state
        if not self.adds or not sources:  # a later trip of a loop starts without sources
            return stream, state, None
        s = torch.stack(sources, 2)  # [B, T, S, hidden_size]
        scores = (s * self.query).sum(-1, True) * (s.square().mean(-1, True) + self.eps).rsqrt()
        return stream + self.gate * (scores.softmax(2) * s).sum(2), state, None

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Add to the stream; the update becomes a source."""
        stream, *sources = state
        return (stream + update, *(sources or [stream]), update)


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """A score and a term of the sum for each source of each read."""
    width, reads = config.hidden_size, 2 * config.num_hidden_layers - 1
    outputs = [2 * len(list(trip)) for _, trip in groupby(visits, lambda visit: visit.trip)]
    sources = sum(n * (n + 1) // 2 - 1 for n in outputs)  # read i of a trip has i + 1, but none before the first
    return Cost(
        parameters=reads * (width + 1),
        flops=4 * width * sources,
        elementwise_flops=2 * width * (sources + sum(n - 1 for n in outputs)),
        transient_bytes=scalar * width * (max(outputs) + 1),
        io_bytes=scalar * width * 2 * sources,
    )


OUTSIDE_DELTA = Mechanism(
    name="outside_delta",
    axis="residual",
    summary="the stream plus a softmax over what earlier sub-layers wrote",
    paper="this example",
    build=OutsideDelta,
    cost=cost,
    options=OutsideDeltaOptions,
    closed={"gate": 0.0},
)
