"""`ponder` (PonderingLM): the model reads its own next-token distribution before it predicts.

    μ_{k+1} = softmax(head(h_k)) · αU          x_{k+1} = x_k + μ_{k+1}          loss on the last trip only

αU is the input embedding table at the scale of x_0. Every trip is an ordinary causal pass (view SAME) with a bank of
its own. `feed` and `view` open the grid of what is fed back and what it may read; the paper's own model is
(mixture, same).

With `blend` λ, x_{k+1} = x_k + λ μ_{k+1}, or x_k + λ (h_k - x_k) where hidden states are fed. At λ = 0 every trip
repeats the first one, so under the view SAME the model computes what it did without pondering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..axes.blend import Blended, BlendOptions
from ..axes.roles import Cost, Mechanism, TripState, View
from .draws import DrawnOptions, DrawnTrips
from .early_loss import EarlyLossOptions, EarlyReadout
from .pondering import MixtureOptions, Solved, SolverOptions, mixed, mixture_cost, trips_cost

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Out, Visit


@dataclass(frozen=True)
class PonderOptions(MixtureOptions, SolverOptions, DrawnOptions, EarlyLossOptions, BlendOptions):
    """Options of `ponder`."""

    learns = False

    trips: int = 4
    """Number of trips of a token, the first included."""
    feed: str = "mixture"
    """What is fed back: the vocabulary `mixture`, or the `hidden` state."""
    view: str = "same"
    """Which trips of earlier tokens a trip reads: `same`, `duo` or `all`."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse unknown feeds and views."""
        super().check(config)
        self.require_one_of("feed", ("mixture", "hidden"))
        self.require_one_of("view", [view.value for view in View])


class Ponder(Blended, DrawnTrips, EarlyReadout, Solved[PonderOptions]):
    """Feeds back a mixture of word embeddings."""

    options_class = PonderOptions

    @classmethod
    def additions(cls, config: DecoderConfig) -> int:
        """All trips add to one stream, unless a hidden state is fed back, which replaces it."""
        return 1 if PonderOptions.of(config).feed == "hidden" else cls.trips_of(config)

    @classmethod
    def sees(cls, config: DecoderConfig) -> View:
        """The option `view`."""
        return View(PonderOptions.of(config).view)

    @staticmethod
    def needs_head(config: DecoderConfig) -> bool:
        """Only if the mixture, which needs logits, is fed back."""
        return PonderOptions.of(config).feed == "mixture"

    def feed(self, x: Tensor, out: Out, state: TripState) -> Tensor:
        """x_k + μ_{k+1}, or h_k."""
        if self.options.feed == "hidden":
            return self.blended(x, out.hidden)
        return x + self.opened(mixed(out, self.options))


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: the stack again, and a mixture if it is fed back."""
    mixtures = mixture_cost(config, visits) if PonderOptions.of(config).feed == "mixture" else Cost()
    return trips_cost(config, visits, scalar) + mixtures


PONDER = Mechanism(
    name="ponder",
    axis="recurrence",
    summary="feed back a mixture of the predicted tokens' embeddings",
    paper="arXiv 2505.20674",
    build=Ponder,
    cost=cost,
    options=PonderOptions,
    closed={"blend": 0.0},
)
