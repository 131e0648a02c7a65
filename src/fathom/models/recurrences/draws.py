"""Random numbers for a training step that are the same on every rank and after resuming.

All other draws of a step are seeded in `training/build.py`, with (seed, step, rank).

`pretrained.py` (`set_step`) passes the step on. `training/build.py` sets the option `seed` to `train.seed` where it is
null. `pondering.py` draws Jacobi rounds and the tokens of a penalty, and `growth.py` limits a draw to the iterations
grown so far.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..axes.roles import Recurrence, RecurrenceOptions

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig


def draw(seed: int | None, step: int, what: str) -> int:
    """A pseudo-random 64-bit number: a hash of seed, training step and purpose."""
    return int.from_bytes(hashlib.blake2b(f"{seed or 0}/{step}/{what}".encode(), digest_size=8).digest(), "little")


def between(bounds: list[int], seed: int | None, step: int, what: str) -> int:
    """An integer drawn uniformly from `[least, most]`, both included."""
    least, most = bounds
    return least + draw(seed, step, what) % (most - least + 1)


@dataclass(frozen=True)
class DrawnOptions(RecurrenceOptions):
    """Options of a recurrence whose number of iterations may be drawn at random for each training step."""

    trips_range: list | None = None
    """`[least, most]`: in training, `trips` is drawn anew for every step."""
    seed: int | None = None
    """Seed of all random draws of training, which differ by step; null: training sets it to `train.seed`."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse a range without `trips`."""
        super().check(config)
        if self.trips_range is not None:
            self.require_range("trips_range")
            least, most = self.trips_range
            self.require("trips", 1 <= least <= self.trips <= most, f"lie in trips_range {[least, most]}")


class DrawnTrips(Recurrence):
    """Base class of recurrences that can draw the number of iterations for every training step (`trips_range`)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        drawn = DrawnOptions.of(config)
        self.trips_range, self.seed = drawn.trips_range, drawn.seed

    @classmethod
    def training_trips(cls, config: DecoderConfig) -> tuple[int, int]:
        """The two ends of `trips_range`."""
        least, most = DrawnOptions.of(config).trips_range or [cls.trips_of(config)] * 2
        return least, most

    @property
    def scheduled(self) -> bool:
        """Whether iterations are drawn for each step, or the base class changes something over training."""
        return self.trips_range is not None or super().scheduled

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Draw the number of iterations for this step, the same on every rank."""
        super().set_step(step, steps)
        if self.trips_range:
            self.drawn_trips = between(self.trips_range, self.seed, step, "depth")
