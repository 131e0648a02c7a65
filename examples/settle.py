"""A recurrence: feed back the hidden state until it no longer moves. `fathom.add_mechanism(SETTLE)` makes it known."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fathom.models.axes.roles import Mechanism, RecurrenceOptions, View
from fathom.models.recurrences.pondering import Pondering, trips_cost


@dataclass(frozen=True)
class SettleOptions(RecurrenceOptions):
    """Options of `settle`."""

    trips: int = 4
    """How many iterations a token makes at most, the first included."""
    tau: float = 0.1
    """Mean square below which a state has settled."""


class Settle(Pondering[SettleOptions]):
    """Halts by itself: nothing is trained for it."""

    options_class = SettleOptions
    halts = True
    reads = View.DUO

    def gate(self, out, state):
        before = state["hidden"] if out.trip else torch.zeros_like(out.hidden)
        moved = (out.hidden - before).square().mean(-1)
        return {"hidden": out.hidden, "alive": moved > self.options.tau}

    def feed(self, x, out, state):
        return out.hidden


SETTLE = Mechanism(
    name="settle",
    axis="recurrence",
    summary="feed back the hidden state until it no longer moves",
    paper="this example",
    build=Settle,
    cost=trips_cost,
    options=SettleOptions,
)
