"""`growth`: a loop that adds iterations during training; each starts with weight 0, so the loss does not jump.

With s of S steps made, K the option `trips`, a = `growth_from` and c = `growth_share`:

    trips(s) = a + ⌈(K - a) f(min(1, s / (c S)))⌉          f(t) = t (`linear`), or 1 - √(1 - t) (`sqrt`)

`sqrt`, slow first, is the curriculum of arXiv 2511.07384. With `trips_range` the number is drawn up to trips(s). A new
iteration opens over `growth_open` of the steps: λ rises from 0 at the first step with it, and the loop ends at

    x_{k-1} + λ (x_k - x_{k-1})          k is the last iteration, x_k what the looped layers leave after it

So at that step the loss is that of one iteration fewer, to the last bit. All of it is a function of s and S: a resumed
run continues as it would have.

`looping.py` refuses `growth` with injection, norms between iterations, damping, `early_loss` or exits. A model saved
during growth has the iterations so far (`settle`, called by `pretrained.py` on saving).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .draws import DrawnOptions, DrawnTrips, between

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig

CURVES = ("none", "linear", "sqrt")
PARTS = 1000
"""The number of points of a training run at which the mean cost of its steps is taken."""


@dataclass(frozen=True)
class GrowthOptions(DrawnOptions):
    """Options of a recurrence whose number of iterations may grow over training."""

    growth: str = "none"
    """How the number of iterations grows over training: `none`, `linear`, or `sqrt` (slowly at first)."""
    growth_from: int = 1
    """Iterations at the first step: 1, or as many as a loop was trained with."""
    growth_share: float = 0.5
    """The fraction of training after which all iterations are made."""
    growth_open: float = 0.05
    """The fraction of training over which a new iteration's weight rises from 0 to 1."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse an unknown `growth` curve, and settings that do not fit into the training run."""
        super().check(config)
        self.require_one_of("growth", CURVES)
        self.require("growth_from", 1 <= self.growth_from <= self.trips, f"lie in 1..{self.trips} (trips)")
        self.require("growth_share", 0 < self.growth_share <= 1, "lie above 0 and be at most 1")
        within = 0 <= self.growth_open <= 1 - self.growth_share
        self.require("growth_open", within, f"lie in 0..{1 - self.growth_share:g} (1 - growth_share)")

    @property
    def grows(self) -> bool:
        """Whether they do."""
        return self.growth != "none"

    def most(self, step: int, steps: int) -> int:
        """The maximum number of iterations at a training step."""
        last = self.trips_range[1] if self.trips_range else self.trips
        t = min(1.0, step / (self.growth_share * steps)) if steps else 1.0
        t = t if self.growth == "linear" else 1 - math.sqrt(1 - t)
        return self.growth_from + math.ceil((last - self.growth_from) * t - 1e-9)

    def opened(self, step: int, steps: int) -> float:
        """The weight λ of the newest iteration at a training step."""
        newest, over = self.most(step, steps), self.growth_open * steps
        if newest == self.growth_from or not over:
            return 1.0
        born = bisect_left(range(steps), newest, key=lambda s: self.most(s, steps))
        return min(1.0, (step - born) / over)


class GrowingTrips(DrawnTrips):
    """Base class of recurrences whose number of iterations grows over training if the option `growth` is set."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.growth, self.newest_now = GrowthOptions.of(config), (1.0, 1.0)
        # λ of a training step, and of evaluation, which makes no fewer trips than have grown. Tensors, because a Python
        # number that changes every step would trigger a recompilation every step
        self.newest = nn.Buffer(torch.ones(2), persistent=False) if self.growth.grows else None

    def init_weights(self, std: float) -> None:
        """Also initialise the newest iteration's weight λ, since checkpoints do not contain it."""
        super().init_weights(std)
        if self.newest is not None:
            init.copy_(self.newest, self.newest.new_tensor(self.newest_now))

    @classmethod
    def training_trips(cls, config: DecoderConfig) -> tuple[int, int]:
        """From the first step's on."""
        least, most = super().training_trips(config)
        options = GrowthOptions.of(config)
        return (min(least, options.growth_from) if options.grows else least), most

    @classmethod
    def training_shares(cls, config: DecoderConfig) -> dict[int, float]:
        """The share of a run's steps with each number of iterations."""
        options = GrowthOptions.of(config)
        if not options.grows:
            return super().training_shares(config)
        found: dict[int, float] = {}
        for part in range(PARTS):
            least, most = _bounds(options, options.most(part, PARTS))
            for trips in range(least, most + 1):
                found[trips] = found.get(trips, 0.0) + 1 / (most - least + 1) / PARTS
        return dict(sorted(found.items()))

    @classmethod
    def progress(cls, config: DecoderConfig, step: int, steps: int) -> tuple[float, ...]:
        """The number of iterations and the weight of the newest."""
        options, others = GrowthOptions.of(config), super().progress(config, step, steps)
        return (*others, options.most(step, steps), options.opened(step, steps)) if options.grows else others

    @property
    def scheduled(self) -> bool:
        """Whether iterations grow over training, or the base class changes something over training."""
        return self.growth.grows or super().scheduled

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Also set the number of iterations for this step; if `steps` is unknown, that of the end of training."""
        super().set_step(step, steps)
        if not self.growth.grows or self.newest is None:
            return
        made = step, steps or 0
        most = self.growth.most(*made)
        self.grown, drawn = min(self.trips, most), self.growth.trips_range is not None
        self.drawn_trips = between(_bounds(self.growth, most), self.seed, step, "depth") if drawn else most
        opened = self.growth.opened(*made)
        self.newest_now = (opened if self.drawn_trips == most else 1.0), opened
        for place, number in zip(self.newest, self.newest_now, strict=True):
            place.fill_(number)

    def settle(self, config: DecoderConfig) -> None:
        """Fix the number of iterations at its current value in `config`."""
        super().settle(config)
        if self.growth.grows:
            grown = self.grown - (self.newest_now[1] == 0.0)  # a trip that is still shut is none
            changes = {} if grown == self.trips else {"trips": grown, "trips_range": None}
            config.recurrence_options.update(growth="none", growth_from=1, **changes)

    def opening(self, x: Tensor, stream: Tensor, trip: int) -> Tensor:
        """Blend the input and the output of the newest iteration by λ, `[B, T, hidden_size]`; return the output of
        older iterations unchanged."""
        if self.newest is None or trip + 1 < (self.drawn_trips if self.training else self.grown):
            return stream
        return torch.lerp(x, stream, self.newest[0 if self.training else 1].to(stream.dtype))


def _bounds(options: GrowthOptions, most: int) -> list[int]:
    """The fewest and the most iterations that a step may draw."""
    least = options.trips_range[0] if options.trips_range else most
    return [min(least, most), most]
