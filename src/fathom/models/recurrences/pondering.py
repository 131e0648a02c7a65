"""Shared parts of the pondering recurrences: options, penalties, the mixture that is fed back, and the cost of an
iteration.

`ponder.py` and `adaponder.py` decide what they feed back, for the others `Pondering.feed` does. `adaponder.py`,
`latent_cot.py` and `ponder3.py` decide which tokens halt, and `trips/slots.py` keeps their results. `trips/slots.py`
also makes the Jacobi rounds (`jacobi`). `trips/walk.py` decides the passes of `prefill: exact`, without which
`generation.py` refuses to read a prompt in chunks under the view ALL. `draws.py` has the random numbers of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..axes.numerics import IGNORE, lowest_mean, widen
from ..axes.roles import Cost, HaltingOptions, Recurrence, RecurrenceOptions, TripState
from ..decoder.arithmetic import head_flops, layer_cache_bytes, layer_flops
from ..decoder.head import is_called
from .draws import between, draw
from .vocabulary_mixture import mixture, mixture_flops

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Out, Visit


@dataclass(frozen=True)
class SolverOptions(RecurrenceOptions):
    """Options of the Jacobi solver, which computes all tokens at once under the view ALL (all iterations of earlier
    tokens are read). Decoding needs no solver."""

    jacobi_train: list = field(default_factory=lambda: [2, 3])
    """`[least, most]`: range from which the number of Jacobi rounds of each training step is drawn."""
    jacobi_eval: int = 3
    """Number of Jacobi rounds of a forward pass without a cache."""
    jacobi_prefill: int = 10
    """Number of Jacobi rounds when a prompt is read into a cache."""
    gradient_passes: int = 0
    """Number of last passes of a training step that gradients flow through; 0 for all passes, as in the papers. Earlier
    passes cost only a forward pass and keep no activations. The gradient then differs from that of all passes."""
    prefill: str = "jacobi"
    """How evaluation and prefill read a text: `jacobi` approximates token-by-token decoding in parallel rounds; `exact`
    gives the same numbers as token-by-token decoding, and costs as much."""
    seed: int | None = None
    """Seed of all random draws of training, which differ by step; null: training sets it to `train.seed`."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse invalid settings of the solver."""
        super().check(config)
        self.require_one_of("prefill", ("jacobi", "exact"))
        self.require_range("jacobi_train")
        for name in ("jacobi_eval", "jacobi_prefill", "gradient_passes"):
            self.require(name, getattr(self, name) >= 0, "not be negative")


@dataclass(frozen=True)
class MixtureOptions(RecurrenceOptions):
    """Options of recurrences that feed back a mixture of the vocabulary."""

    top_k: int = 100
    """Number of likeliest tokens in the mixture, with renormalised weights; 0 for the whole vocabulary."""
    temperature: float = 1.0
    """Temperature of the mixture's softmax."""
    mixture_gain: float = 1.0
    """Factor on the mixture, relative to the scale of the embeddings."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse invalid mixtures."""
        super().check(config)
        self.require("top_k", self.top_k >= 0, "be 0 (the whole vocabulary) or more")
        self.require("temperature", self.temperature > 0, "be positive")


@dataclass(frozen=True)
class SampleOptions(RecurrenceOptions):
    """Options of a penalty that is measured on a sample of the tokens."""

    penalty_token_fraction: float = 0.125
    """Share of the tokens on which the penalty is measured, drawn for every step."""
    seed: int | None = None
    """Seed of all random draws of training, which differ by step; null: training sets it to `train.seed`."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse a sample of nothing."""
        super().check(config)
        self.require("penalty_token_fraction", 0 < self.penalty_token_fraction <= 1, "lie in (0, 1]")


OVER = ("row", "batch")
"""The sets from which a penalty takes its lowest values."""
Chosen = TypeVar("Chosen", bound=RecurrenceOptions)
ChosenSolved = TypeVar("ChosenSolved", bound=SolverOptions)
ChosenSampled = TypeVar("ChosenSampled", bound=SampleOptions)


class Pondering(Recurrence, Generic[Chosen]):
    """Base class of pondering recurrences, whose number of iterations is the option `trips`."""

    options_class: type[Chosen]
    """The dataclass of the options."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.options = self.options_class.of(config)
        if isinstance(self.options, SolverOptions) and not isinstance(self, Solved):
            raise TypeError(f"{type(self).__name__}: the options of the Jacobi solver need the base class Solved")
        self.recompute = self.options.recompute
        self.skip_dead_rows = isinstance(self.options, HaltingOptions) and self.options.skip_dead_rows

    def feed(self, x: Tensor, out: Out, state: TripState) -> Tensor:
        """The next iteration's input (a latent thought): the normed hidden state, unprojected and not added to the
        input."""
        return out.hidden

    @staticmethod
    def trips_of(config: DecoderConfig) -> int:
        """The option `trips`."""
        return RecurrenceOptions.of(config).trips


class Solved(Pondering[ChosenSolved]):
    """Base class of recurrences that use the Jacobi solver under the view ALL (all iterations of earlier tokens are
    read)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.gradient_passes = self.options.gradient_passes
        self._draw_rounds(0)

    @classmethod
    def training_rounds(cls, config: DecoderConfig) -> tuple[int, int]:
        """The two ends of `jacobi_train`."""
        least, most = SolverOptions.of(config).jacobi_train
        return least, most

    @classmethod
    def kept_passes(cls, config: DecoderConfig) -> int:
        """The option `gradient_passes`."""
        return SolverOptions.of(config).gradient_passes

    @property
    def scheduled(self) -> bool:
        """Whether Jacobi rounds are drawn for each step, or the base class changes something over training."""
        least, most = self.options.jacobi_train
        return least < most or super().scheduled

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Also draw the number of Jacobi rounds for this step, the same on every rank."""
        super().set_step(step, steps)
        self._draw_rounds(step)

    def _draw_rounds(self, step: int) -> None:
        self.drawn_rounds = between(self.options.jacobi_train, self.options.seed, step, "rounds")

    def rounds(self, purpose: str, length: int) -> int:
        """The rounds of the options."""
        if purpose == "train":
            return self.drawn_rounds
        return self.options.jacobi_eval if purpose == "evaluate" else self.options.jacobi_prefill

    def exact(self) -> bool:
        """Whether `prefill` is `exact`."""
        return self.options.prefill == "exact"


class Sampled(Pondering[ChosenSampled]):
    """Base class of recurrences whose penalty runs the head, on a sample of the tokens only."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.every = sample_every(self.options.penalty_token_fraction)
        # a tensor, because a Python number that changes every step would trigger a recompilation every step
        self.first = nn.Buffer(torch.zeros((), dtype=torch.long), persistent=False)

    def init_weights(self, std: float) -> None:
        """The sample of step 0."""
        init.zeros_(self.first)

    @property
    def scheduled(self) -> bool:
        """Whether a sample is drawn for each step, or the base class changes something over training."""
        return self.every > 1 or super().scheduled

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Draw the sample of tokens for this step, the same on every rank."""
        super().set_step(step, steps)
        self.first.fill_(draw(self.options.seed, step, "tokens") % (1 << 32))

    @classmethod
    def penalty_flops(cls, config: DecoderConfig, sequence_length: int) -> float:
        """Forward FLOPs of the head on the sampled tokens, after every iteration but the last."""
        every = sample_every(SampleOptions.of(config).penalty_token_fraction)
        share = sample_size(sequence_length, every) / sequence_length
        return (cls.trips_of(config) - 1) * share * head_flops(config)

    def sample(self, length: int) -> Tensor:
        """Columns of the sampled tokens."""
        count = sample_size(length, self.every)
        return (torch.arange(count, device=self.first.device) * self.every + self.first) % length


class GateMLP(nn.Module):
    """A two-layer MLP, `[B, T, hidden_size]` to a logit `[B, T, 1]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, 1)

    def init_weights(self, std: float, bias: float) -> None:
        """Initialise the MLP to give a nearly constant logit: a bias, and a last layer with small weights."""
        init.normal_(self.up.weight, std=std)
        init.zeros_(self.up.bias)
        init.normal_(self.down.weight, std=0.1 * std)
        init.constant_(self.down.bias, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """The logit of every token, `[B, T, 1]`."""
        return self.down(nn.functional.gelu(self.up(hidden)))


def gate_mlp_size(width: int) -> tuple[int, int]:
    """The number of parameters of a `GateMLP`, and its FLOPs per token."""
    return 4 * width * width + 8 * width + 1, 8 * width * width + 8 * width


def sample_every(fraction: float) -> int:
    """The spacing of sampled tokens: one token in this many is in the sample."""
    return max(1, round(1 / fraction))


def sample_size(length: int, every: int) -> int:
    """Number of sampled tokens per row."""
    return max(1, length // every)


def mixed(out: Out, options: MixtureOptions) -> Tensor:
    """The vocabulary mixture μ of an iteration's output, at the scale of the input embeddings, `[B, T,
    hidden_size]`."""
    head, table = out.tables
    gain = out.embedding_scale * options.mixture_gain
    norm = out.norm if out.norms_embedding else None
    return mixture(out.hidden, head, table, options.top_k, options.temperature, norm) * gain


def mixture_cost(config: DecoderConfig, visits: Sequence[Visit]) -> Cost:
    """Cost of a vocabulary mixture after every iteration but the last."""
    top_k, called = MixtureOptions.of(config).top_k, is_called(config)
    forward, step = mixture_flops(config.hidden_size, config.vocab_size, top_k, called)
    made = visits[-1].trip
    return Cost(flops=made * forward, training_flops=made * (step - 3 * forward))


def spread(before: Tensor | None, mass: Tensor, hidden: Tensor) -> Tensor:
    """Add iteration k's term q_k h_k to the readout Σ_k q_k h_k.

    Args:
        before: The sum so far, `[B, T, hidden_size]`; None before the first term.
        mass: q_k, `[B, T]`.
        hidden: h_k, `[B, T, hidden_size]`.
    """
    term = mass.unsqueeze(-1) * widen(hidden)
    return (term if before is None else widen(before) + term).to(hidden.dtype)


def entropy(gates: Tensor) -> Tensor:
    """Entropy of every gate, in nats."""
    g = gates.float().clamp(1e-6, 1 - 1e-6)
    return -(g * g.log() + (1 - g) * (1 - g).log())


def trips_cost(
    config: DecoderConfig, visits: Sequence[Visit], scalar: int, flops_per_trip: float = 0.0, parameters: int = 0
) -> Cost:
    """Cost of the extra iterations: each runs the stack again and stores its own keys and values."""
    again = len(visits) - config.num_hidden_layers
    return Cost(
        parameters=parameters,
        flops=again * layer_flops(config) + visits[-1].trip * flops_per_trip,
        cache_bytes=again * layer_cache_bytes(config, scalar),
    )


def lowest_sum(values: Tensor, targets: Tensor, fraction: Tensor | float, over: str) -> Tensor:
    """The mean of the lowest fraction of values, per sequence or over the batch, times the number of valid tokens.

    Args:
        values: `[B, T, n]`
        targets: `[B, T]`; tokens whose target is ignored are not valid.
        fraction: One number, or one for every row.
        over: `row` takes the lowest of each row, `batch` those of the whole batch.
    """
    valid = targets != IGNORE
    several = valid.unsqueeze(2).expand_as(values)
    if over == "batch":
        whole = fraction if isinstance(fraction, float) else fraction.mean()
        return lowest_mean(values.reshape(1, -1), several.reshape(1, -1), whole).sum() * valid.sum()
    return (lowest_mean(values.flatten(1), several.flatten(1), fraction) * valid.sum(1)).sum()


def ramp(now: float, start: float, stop: float) -> float:
    """A factor that rises linearly from 0 at `start` to 1 at `stop`."""
    if now >= stop:
        return 1.0
    return 0.0 if now <= start else (now - start) / (stop - start)
