"""`ponder2` (PonderLM-2): every token is followed by latent thoughts, whose input is the previous thought's hidden
state.

The recurrence:

    x_{t,k+1} = h_{t,k}      (after the final norm; iteration k reads every iteration of every earlier token: view ALL)

Decoding makes one iteration after another. In training all slots go through the stack interleaved by token, and Jacobi
rounds replace the order in time. No parameters and no additional loss.

`trips/reading.py` decides what a slot of view ALL reads. `pondering.py` has the options of the Jacobi rounds and draws
their number, `trips/slots.py` (`jacobi`) makes them, and `models/cost.py` counts them. `registry.py` refuses a mixer's
`across_trips`, and `generation.py` prompts in chunks unless `prefill` is `exact`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..axes.roles import Mechanism, View
from .pondering import Solved, SolverOptions, trips_cost


@dataclass(frozen=True)
class Ponder2Options(SolverOptions):
    """Options of `ponder2`."""

    trips: int = 2
    """Number of iterations of a token, the first included: one more than its latent thoughts."""


class Ponder2(Solved[Ponder2Options]):
    """Feeds the normed hidden state back, and lets later tokens attend to all iterations of a token."""

    options_class = Ponder2Options
    reads = View.ALL


PONDER2 = Mechanism(
    name="ponder2",
    axis="recurrence",
    summary="follow every token with its own hidden state as a thought",
    paper="arXiv 2509.23184",
    build=Ponder2,
    cost=trips_cost,
    options=Ponder2Options,
)
