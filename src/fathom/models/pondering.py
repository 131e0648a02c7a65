"""What the pondering recurrences share: a number of trips, and the Jacobi solver of those with the view ALL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .draws import between, draw
from .loss import IGNORE
from .numerics import lowest_mean
from .roles import Recurrence

if TYPE_CHECKING:
    from .configuration import FathomConfig


@dataclass(frozen=True)
class SolverOptions:
    """How many rounds the solver makes where all tokens are computed at once. Decoding is exact without it."""

    jacobi_train: list = field(default_factory=lambda: [2, 3])
    """`[least, most]` rounds in training, drawn for every step."""
    jacobi_eval: int = 3
    """Rounds of a forward pass without a cache."""
    jacobi_prefill: int = 10
    """Rounds when a prompt is read into a cache."""
    prefill: str = "jacobi"
    """`jacobi`, or `exact`: evaluation and prefill then equal decoding token by token, at its price."""
    seed: int | None = None
    """Of everything that is drawn for a step; training fills in its own."""

    def check_solver(self) -> None:
        """Refuse impossible rounds."""
        if self.prefill not in ("jacobi", "exact"):
            raise ValueError(f"recurrence_options.prefill must be jacobi or exact, got {self.prefill!r}")
        check_range("jacobi_train", self.jacobi_train)
        for name in ("jacobi_eval", "jacobi_prefill"):
            if getattr(self, name) < 0:
                raise ValueError(f"recurrence_options.{name} must not be negative, got {getattr(self, name)}")


class Pondering(Recurrence):
    """A recurrence of `depth` trips beyond the first, which may need the solver."""

    def __init__(self, config: FathomConfig) -> None:
        super().__init__(config)
        self.options = config.recurrence_options
        Pondering.set_step(self, 0)

    @staticmethod
    def extra_trips(config: FathomConfig) -> int:
        """`depth`."""
        return config.recurrence_options["depth"]

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Draw this step's number of rounds, the same on every rank."""
        if "jacobi_train" in self.options:
            self.drawn_rounds = between(self.options["jacobi_train"], self.options["seed"], step, "rounds")

    def rounds(self, purpose: str, length: int) -> int:
        """As the options say."""
        if purpose == "train":
            return self.drawn_rounds
        return self.options["jacobi_eval" if purpose == "evaluate" else "jacobi_prefill"]

    def exact(self) -> bool:
        """Whether `prefill` is `exact`."""
        return self.options.get("prefill") == "exact"


class Sampled(Pondering):
    """A recurrence with a penalty that looks at a part of the tokens, so that the head runs on few more."""

    def __init__(self, config: FathomConfig) -> None:
        super().__init__(config)
        # A tensor, since a Python number that changes every step would recompile every step.
        self.first = nn.Buffer(torch.zeros((), dtype=torch.long), persistent=False)

    @property
    def every(self) -> int:
        """One token in so many."""
        return max(1, round(1 / self.options["penalty_token_fraction"]))

    def init_weights(self, std: float) -> None:
        """The sample of step 0."""
        init.zeros_(self.first)

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Another sample, the same on every rank."""
        super().set_step(step, steps)
        self.first.fill_(draw(self.options["seed"], step, "tokens") % (1 << 32))

    def sample(self, length: int) -> Tensor:
        """Columns of the tokens that are looked at."""
        count = max(1, length // self.every)
        return (torch.arange(count, device=self.first.device) * self.every + self.first) % length


def per_item(total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """A sum over tokens as the cross-entropy would weigh it."""
    if num_items_in_batch is None:
        return total / (targets != IGNORE).sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def lowest_sum(values: Tensor, targets: Tensor, fraction: Tensor | float, over: str) -> Tensor:
    """Mean of the lowest fraction, once per valid token: over each row, or over the whole batch.

    Args:
        values: `[B, T, n]`
        targets: `[B, T]`
        fraction: One number, or one for every row.
        over: `row` or `batch`.
    """
    valid = targets != IGNORE
    several = valid.unsqueeze(2).expand_as(values)
    if over == "batch":
        whole = fraction if isinstance(fraction, float) else fraction.mean()
        return lowest_mean(values.reshape(1, -1), several.reshape(1, -1), whole).sum() * valid.sum()
    return (lowest_mean(values.flatten(1), several.flatten(1), fraction) * valid.sum(1)).sum()


def check_over(over: str) -> None:
    """A quantile is taken over something."""
    if over not in ("row", "batch"):
        raise ValueError(f"recurrence_options.penalty_over must be row or batch, got {over!r}")


def ramp(now: float, start: float, stop: float) -> float:
    """From 0 at `start` to 1 at `stop`."""
    if now >= stop:
        return 1.0
    return 0.0 if now <= start else (now - start) / (stop - start)


def check_positive(name: str, value: float) -> None:
    """A price, not a reward."""
    if value < 0:
        raise ValueError(f"recurrence_options.{name} must not be negative, got {value}")


def check_range(name: str, value: Any) -> list[int]:
    """Two whole numbers, the smaller first."""
    whole = isinstance(value, Sequence) and len(value) == 2 and all(type(v) is int for v in value)
    if not whole or not 0 <= value[0] <= value[1]:
        raise ValueError(f"recurrence_options.{name} must be [least, most], got {value!r}")
    return list(value)


def check_depth(depth: int) -> None:
    """No negative number of trips."""
    if depth < 0:
        raise ValueError(f"recurrence_options.depth must not be negative, got {depth}")


def check_fraction(name: str, value: float) -> None:
    """More than nothing, and at most all."""
    if not 0 < value <= 1:
        raise ValueError(f"recurrence_options.{name} must lie in (0, 1], got {value}")
