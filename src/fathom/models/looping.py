"""`loop`: the same stack again.

    x_{k+1} = r_k        (the residual stream as the last layer left it, un-normed)

With this feed and no halting the model is a plain decoder of `trips` times the depth whose weights repeat; each trip
has keys and values of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .arithmetic import layer_cache_bytes, layer_flops
from .early_loss import EarlyReadout, check_early_loss
from .roles import Cost, Mechanism, RecurrenceOptions, TripState

if TYPE_CHECKING:
    from .configuration import FathomConfig
    from .slots import Out, Visit


@dataclass(frozen=True)
class LoopOptions(RecurrenceOptions):
    """Options of `loop`."""

    trips: int = 3
    """How often the looped layers run."""
    prelude: int = 0
    """Layers that run once, before the loop."""
    coda: int = 0
    """Layers that run once, after the loop."""
    early_loss: float = 0.0
    """Weight of the mean loss of what earlier trips would say; for drafts (`generate(draft_trips=...)`)."""

    def resolve(self, config: FathomConfig) -> LoopOptions:
        """Refuse a loop without layers."""
        self.check_trips()
        check_early_loss(self.early_loss)
        if self.early_loss and self.coda:
            raise ValueError("recurrence_options.early_loss: a coda belongs to the last trip alone; set coda to 0")
        if self.prelude < 0 or self.coda < 0 or self.prelude + self.coda >= config.num_hidden_layers:
            raise ValueError(
                f"recurrence_options.prelude + coda must leave at least one of the {config.num_hidden_layers} layers "
                f"to loop, got {self.prelude} + {self.coda}"
            )
        return self


class Loop(EarlyReadout):
    """Feeds the residual stream back into the stack."""

    def __init__(self, config: FathomConfig) -> None:
        super().__init__(config)
        self.recompute = LoopOptions.of(config).recompute

    @staticmethod
    def trips_of(config: FathomConfig) -> int:
        """As the option says."""
        return LoopOptions.of(config).trips

    @classmethod
    def additions(cls, config: FathomConfig) -> int:
        """All trips add to one stream."""
        return cls.trips_of(config)

    @staticmethod
    def span(config: FathomConfig) -> tuple[int, int]:
        """What is left between prelude and coda."""
        options = LoopOptions.of(config)
        return options.prelude, config.num_hidden_layers - options.coda

    def feed(self, x: Tensor, out: Out, state: TripState) -> Tensor:
        """The un-normed stream, so that nothing is normalised twice."""
        return out.residual


def cost(config: FathomConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Every extra trip pays the looped layers again, in arithmetic and in cache."""
    again = len(visits) - config.num_hidden_layers
    return Cost(flops=again * layer_flops(config), cache_bytes=again * layer_cache_bytes(config, scalar))


LOOP = Mechanism(
    name="loop",
    axis="recurrence",
    summary="run the stack several times on its own output",
    paper="arXiv 1807.03819",
    build=Loop,
    cost=cost,
    options=LoopOptions,
)
