"""`denseformer`: after each block, the stream becomes a learned weighted average of all block outputs so far.

The average:

    x ← Σ_{j ≤ i+1} α_{i,j} X_j        X_0 = embeddings, X_{j+1} = raw output of block j

With `dilation` δ, block i reads the X_j with j ≡ i + 1 (mod δ); with `period` p, only every p-th block averages.
α starts one-hot on the newest, so a pretrained model starts as itself.

The state keeps every block's output until the iteration ends, whatever `dilation` and `period` read. α is a vector, so
it gets no weight decay (`decays` in `training/optimizer.py`). In a loop each iteration begins with its own input as X_0
(`trips/walk.py` calls `begin`), all iterations share α, and weights without a block are not used. `families/lumia.py`
opens the released checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..axes.roles import Cost, Mechanism, Residual, ResidualOptions, ResidualState, WriteContext

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit


@dataclass(frozen=True)
class DenseFormerOptions(ResidualOptions):
    """Options of `denseformer`. The paper writes dilation × period: its 4x5 is `dilation: 4, period: 5`."""

    dilation: int = 1
    """Read every dilation-th earlier block, counted back from the newest."""
    period: int = 1
    """Average after every period-th block."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse a `dilation` or `period` outside 1 … number of layers."""
        super().check(config)
        layers = config.num_hidden_layers
        for name in ("dilation", "period"):
            within = 1 <= getattr(self, name) <= layers
            self.require(name, within, f"be between 1 and {layers} (the number of layers)")


def num_weights(config: DecoderConfig, block: int) -> int:
    """The number of outputs that are averaged after block number `block`; 0 if none are averaged there."""
    options = DenseFormerOptions.of(config)
    return (block + 1) // options.dilation + 1 if (block + 1) % options.period == 0 else 0


class DenseFormer(Residual):
    """DenseFormer's residual; the state is the stream, then the block outputs X_0, X_1, … of this iteration."""

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer)
        self.dilation = DenseFormerOptions.of(config).dilation
        self.ends_block, self.parallel = sublayer % 2 == 1, config.parallel == "sum"
        weights = num_weights(config, sublayer // 2) if self.ends_block else 0
        self.alpha = nn.Parameter(torch.empty(weights)) if weights else None

    def init_weights(self, std: float) -> None:
        """Initialise the weights to 1 for the newest block output and 0 for the others."""
        if self.alpha is not None:
            init.copy_(self.alpha, torch.eye(len(self.alpha))[-1])

    def stream_weights(self) -> dict[int, float] | None:
        """The weights α of the block outputs that are averaged; weight 1 on the newest alone if a block does not
        average."""
        newest_first = [1.0] if self.alpha is None else self.alpha.flip(0).tolist()
        return {self.sublayer // 2 + 1 - i * self.dilation: weight for i, weight in enumerate(newest_first)}

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Add the update to the stream; at the end of a block, store its raw output and average over blocks."""
        stream, *history = state
        if self.parallel and not self.ends_block:  # the MLP's update comes next: GPT-NeoX rounds the sum of both first
            return (stream, *(history or (stream,)), update)
        if self.parallel:
            update = history.pop() + update
        raw = stream + update
        if not self.ends_block:
            return (raw, *(history or (stream,)))
        history.append(raw)
        if self.alpha is None:
            return (raw, *history)
        read = history[:: -self.dilation]  # newest first; in a later trip of a loop the oldest may not exist
        mixed = self.alpha[-1] * read[0]
        for weight, x in zip(self.alpha.flip(0)[1:], read[1:], strict=False):
            mixed = mixed + weight * x
        return (mixed, *history)


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: a multiply-add for each weight and channel; all block outputs of an iteration stay in memory."""
    trips = [[visit.layer for visit in trip] for _, trip in groupby(visits, lambda visit: visit.trip)]
    parameters = sum(num_weights(config, block) for block in range(config.num_hidden_layers))
    dilation = DenseFormerOptions.of(config).dilation
    used = sum(
        min(num_weights(config, layer), (i + 1) // dilation + 1) for trip in trips for i, layer in enumerate(trip)
    )
    # at a trip's end: X_0 … X_n, and a separate stream if the last block averaged
    alive = max(len(trip) + (num_weights(config, trip[-1]) > 0) for trip in trips)
    width = config.hidden_size
    return Cost(
        parameters=parameters,
        flops=2 * width * used,
        transient_bytes=scalar * width * alive,
        io_bytes=scalar * width * (used + len(visits)),
    )


DENSEFORMER = Mechanism(
    name="denseformer",
    axis="residual",
    summary="learned static average over all block outputs",
    paper="arXiv 2402.02622",
    build=DenseFormer,
    cost=cost,
    options=DenseFormerOptions,
    closed={},
)
