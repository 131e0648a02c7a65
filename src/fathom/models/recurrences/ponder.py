"""`ponder` (PonderingLM): before it predicts, a model adds a mixture of embeddings, weighted by its own next-token
distribution, to its input, several times.

The recurrence:

    μ_{k+1} = softmax(head(h_k)) · αU          x_{k+1} = x_k + μ_{k+1}          loss on the last iteration only

αU is the input embedding table at the scale of x_0. Every iteration is an ordinary causal pass (view SAME) with a bank
of its own. `feed` and `view` open the grid of what is fed back and what it may read; the paper's own model is (mixture,
same), and its baselines are the other feeds:

    hidden      x_{k+1} = h_k
    projected   x_{k+1} = W h_k
    pause       x_{k+1} = α p        a learned vector p, under the views DUO and ALL

With `blend` λ, x_{k+1} = x_k + λ μ_{k+1}, or x_k + λ (y - x_k) where y of another feed replaces the input. At λ = 0
every iteration repeats the first one, so under the view SAME the model computes what it did without pondering.

`vocabulary_mixture.py` computes the mixture in chunks, and its FLOPs. `pondering.py` has the options of mixture and
Jacobi solver, and scales the mixture (`mixed`). `trips/slots.py` runs the iterations; pauses, whose inputs are known
(`foresees`), take one exact pass under the view ALL (`jacobi`). `checkpoints/families/ponderlm.py` opens released
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

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
    """Number of iterations of a token, the first included."""
    feed: str = "mixture"
    """What is fed back: the vocabulary `mixture`, the `hidden` state, the hidden state `projected` by a matrix, or
    nothing but a learned vector (`pause`)."""
    view: str = "same"
    """Which iterations of earlier tokens an iteration reads: `same`, `duo` or `all`."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse unknown feeds and views."""
        super().check(config)
        self.require_one_of("feed", FEEDS)
        self.require_one_of("view", [view.value for view in View])
        if self.feed == "pause" and View(self.view) is View.SAME:
            raise ValueError(
                "recurrence_options.feed=pause: under view=same a further iteration reads nothing but pauses; set view "
                "to all or duo"
            )


FEEDS = ("mixture", "hidden", "projected", "pause")


class Ponder(Blended, DrawnTrips, EarlyReadout, Solved[PonderOptions]):
    """Feeds a mixture of word embeddings back into the layers, or another `feed`."""

    options_class = PonderOptions

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        width, self.embedding_scale = config.hidden_size, config.embedding_scale
        self.projector = nn.Linear(width, width, bias=False) if self.options.feed == "projected" else None
        self.pause = nn.Parameter(torch.empty(width)) if self.options.feed == "pause" else None

    def init_weights(self, std: float) -> None:
        """Initialise the projection, and the pause vector like a word embedding."""
        super().init_weights(std)
        if self.projector is not None:
            init.normal_(self.projector.weight, std=std)
        if self.pause is not None:
            init.normal_(self.pause, std=std)

    @classmethod
    def foresees(cls, config: DecoderConfig) -> bool:
        """A pause depends on nothing."""
        return PonderOptions.of(config).feed == "pause"

    @classmethod
    def additions(cls, config: DecoderConfig) -> int:
        """The number of iterations that add to one stream: all if a mixture is fed back, else 1, as other feeds replace
        the stream."""
        return cls.trips_of(config) if PonderOptions.of(config).feed == "mixture" else 1

    @classmethod
    def sees(cls, config: DecoderConfig) -> View:
        """The option `view`."""
        return View(PonderOptions.of(config).view)

    @staticmethod
    def needs_head(config: DecoderConfig) -> bool:
        """Whether the mixture is fed back, which needs logits."""
        return PonderOptions.of(config).feed == "mixture"

    def feed(self, x: Tensor, out: Out, state: TripState) -> Tensor:
        """The next iteration's input by the option `feed`: x_k + μ_{k+1}, h_k, W h_k or α p."""
        if self.options.feed == "mixture":
            return x + self.opened(mixed(out, self.options))
        if self.pause is not None:
            return self.blended(x, self(x))
        return self.blended(x, out.hidden if self.projector is None else self.projector(out.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """The pause at every position, α p, `[B, T, hidden_size]`. A call of the module, since hooks run only on
        calls."""
        assert self.pause is not None
        return (self.pause * self.embedding_scale).to(x.dtype).expand_as(x)


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost of every extra iteration: the layers again, and the mixture or projection that is fed back."""
    feed, width = PonderOptions.of(config).feed, config.hidden_size
    mixtures = mixture_cost(config, visits) if feed == "mixture" else Cost()
    projected = width * width if feed == "projected" else 0
    parameters = width if feed == "pause" else projected
    return trips_cost(config, visits, scalar, 2 * projected, parameters) + mixtures


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
