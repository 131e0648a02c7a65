"""`ponder` (PonderingLM): before it answers, the model reads what it would have said.

    μ_{k+1} = softmax(head(h_k)) · αU          x_{k+1} = x_k + μ_{k+1}          loss on the last trip only

αU is the input embedding table at the scale of x_0. Every trip is an ordinary causal pass (view SAME) with a bank of
its own. `feed` and `view` open the grid of what is fed back and what it may read; the paper's own model is
(mixture, same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from .draws import between
from .pondering import MixtureOptions, Pondering, SolverOptions, check_range, mixed, mixture_cost, trips_cost
from .roles import Cost, Mechanism, View

if TYPE_CHECKING:
    from .configuration import FathomConfig
    from .slots import Out, Visit


@dataclass(frozen=True)
class PonderOptions(MixtureOptions, SolverOptions):
    """Options of `ponder`."""

    depth_range: list | None = None
    """`[least, most]`: in training, `depth` is drawn anew for every step."""
    feed: str = "mixture"
    """`mixture` of the vocabulary, or the `hidden` state itself."""
    view: str = "same"
    """`same`, `duo` or `all`: which trips of earlier tokens a trip reads."""

    def resolve(self, config: FathomConfig) -> PonderOptions:
        """Refuse what is impossible."""
        self.check(config)
        self.check_solver()
        if self.feed not in ("mixture", "hidden"):
            raise ValueError(f"recurrence_options.feed must be mixture or hidden, got {self.feed!r}")
        if self.view not in [view.value for view in View]:
            raise ValueError(f"recurrence_options.view must be same, duo or all, got {self.view!r}")
        if self.depth_range is None:
            return self
        least, most = check_range("depth_range", self.depth_range)
        if not least <= self.depth <= most:
            raise ValueError(f"recurrence_options.depth must lie in depth_range {[least, most]}, got {self.depth}")
        return replace(self, depth_range=[least, most])


class Ponder(Pondering):
    """Feeds back a mixture of word embeddings."""

    @classmethod
    def most_trips(cls, config: FathomConfig) -> int:
        """The most that training drew."""
        return 1 + (config.recurrence_options["depth_range"] or [0, cls.extra_trips(config)])[1]

    @classmethod
    def additions(cls, config: FathomConfig) -> int:
        """All, unless what is fed back starts anew."""
        return 1 if config.recurrence_options["feed"] == "hidden" else cls.extra_trips(config) + 1

    @staticmethod
    def sees(config: FathomConfig) -> View:
        """As the option says."""
        return View(config.recurrence_options["view"])

    @staticmethod
    def needs_head(config: FathomConfig) -> bool:
        """For the mixture."""
        return config.recurrence_options["feed"] == "mixture"

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Draw this step's depth, the same on every rank."""
        super().set_step(step, steps)
        if self.options["depth_range"]:
            self.drawn = between(self.options["depth_range"], self.options["seed"], step, "depth")

    def feed(self, x: Tensor, out: Out, state: dict[str, Tensor]) -> Tensor:
        """x_k + μ_{k+1}, or h_k."""
        return out.hidden if self.options["feed"] == "hidden" else x + mixed(out, self.options)


def cost(config: FathomConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """The stack again, and a mixture where that is what is fed back."""
    mixtures = mixture_cost(config, visits) if config.recurrence_options["feed"] == "mixture" else Cost()
    return trips_cost(config, visits, scalar) + mixtures


PONDER = Mechanism(
    name="ponder",
    axis="recurrence",
    summary="feed back a mixture of the words it would say",
    paper="arXiv 2505.20674",
    build=Ponder,
    cost=cost,
    options=PonderOptions,
)
