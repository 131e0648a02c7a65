"""`branch_gain`: a learned gain on the update that every sub-layer adds to the residual stream.

The new stream:

    x ← x + (1 + s) u        u is the output of attention or of the MLP, s starts at zero

As the control of mechanisms with learned gates it is what a gain alone can do. With a loop and `per_visit`, the
sub-layers of further iterations have a factor that starts at zero, so that the loop starts closed and opens layer by
layer:

    x ← x + λ u              in iterations after the first

`axes/gates.py` has the gains' parameters. `mixers/value_gain.py` is the control of mixers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from ..axes.gates import Gates, gate_shapes
from ..axes.roles import Cost, Mechanism, Residual, ResidualState, VisitOptions, WriteContext

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit


@dataclass(frozen=True)
class BranchGainOptions(VisitOptions):
    """Options of `branch_gain`."""

    gates: Literal["layer", "channel"] = "layer"
    """One gain per sub-layer, or one per channel."""


class BranchGain(Residual):
    """Multiplies updates. Its state is the stream; where a parallel layer adds a sum, attention's update follows it."""

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer)
        shape = gate_shapes(config, "residual")[BranchGainOptions.of(config).gates]
        self.ends = config.parallel == "sum"
        self.waits = self.ends and sublayer % 2 == 0
        self.gates: Gates | None = Gates(shape, mixes=False) if sublayer < 2 * config.num_hidden_layers else None

    def init_weights(self, std: float) -> None:
        """Initialise the factor to 1; with `per_visit`, to 0 in all iterations after the first."""
        if self.gates is not None:
            self.gates.close()

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Add the update, multiplied by the learned factor, to the stream. A parallel layer's two updates are added up
        first, as GPT-NeoX does."""
        assert self.gates is not None
        update = self.gates(update, start=0.0 if self.trip else 1.0)
        if self.waits:
            return (*state, update)
        return (state[0] + (state[1] + update if self.ends else update),)


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: one product for each channel of an update."""
    options, width = BranchGainOptions.of(config), config.hidden_size
    sets = len(visits) if options.per_visit else config.num_hidden_layers
    return Cost(
        parameters=2 * sets * (width if options.gates == "channel" else 1),
        elementwise_flops=2 * width * len(visits),
    )


BRANCH_GAIN = Mechanism(
    name="branch_gain",
    axis="residual",
    summary="a learned gain on every sub-layer's output: the control of learned gates",
    paper="(control)",
    build=BranchGain,
    cost=cost,
    options=BranchGainOptions,
    closed={},
)
