"""`ponder2` (PonderLM-2): every token is followed by thoughts, each the hidden state of the one before.

    x_{t,k+1} = h_{t,k}        (after the final norm; trip k reads every trip of every earlier token: view ALL)

Decoding is one trip after another. In training all slots go through the stack interleaved by token, and Jacobi
rounds stand for the order in time. No parameters, no further loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .pondering import Pondering, SolverOptions, trips_cost
from .roles import Cost, Mechanism, TripState, View

if TYPE_CHECKING:
    from .configuration import FathomConfig
    from .slots import Out, Visit


@dataclass(frozen=True)
class Ponder2Options(SolverOptions):
    """Options of `ponder2`."""

    trips: int = 2
    """How many trips a token makes, the first included: one more than its thoughts."""

    def resolve(self, config: FathomConfig) -> Ponder2Options:
        """Refuse what is impossible."""
        self.check_trips()
        self.check_solver()
        return self


class Ponder2(Pondering[Ponder2Options]):
    """Feeds back the normed hidden state, and shows every trip to all later tokens."""

    options_class = Ponder2Options
    reads = View.ALL

    def feed(self, x: Tensor, out: Out, state: TripState) -> Tensor:
        """The thought itself: no projection, no residual."""
        return out.hidden


def cost(config: FathomConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """The stack again for every thought, when decoding."""
    return trips_cost(config, visits, scalar)


PONDER2 = Mechanism(
    name="ponder2",
    axis="recurrence",
    summary="follow every token with its own hidden state as a thought",
    paper="arXiv 2509.23184",
    build=Ponder2,
    cost=cost,
    options=Ponder2Options,
)
