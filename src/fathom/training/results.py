"""What a run's `result.json` and a checkpoint's `trainer.json` hold, key by key."""

from __future__ import annotations

from typing import TypedDict


class CorrelationValues(TypedDict):
    """Spearman's rank correlation with its bootstrap interval over `clusters` rows."""

    value: float
    low: float
    high: float
    clusters: int


class TripsValues(TypedDict):
    """Trips that tokens of held-out text made: per token, and the share of tokens that made one, two, …"""

    mean: float
    shares: list[float]
    correlation: CorrelationValues | None


class DecodingGap(TypedDict):
    """The loss of the parallel reading minus that of decoding, nats per token."""

    value: float
    low: float | None
    """Lower end of the 95 % interval over windows; None with one window."""
    high: float | None
    rounds: float
    """Mean Jacobi rounds of the parallel reading."""
    tokens: int
    """Tokens predicted both ways."""
    windows: int


class ScoreValues(TypedDict):
    """The loss on some text; `accuracy` is of puzzles, and missing in results of older versions."""

    loss: float
    bits_per_byte: float
    tokens: int
    accuracy: float | None


class EvaluationValues(ScoreValues, total=False):
    """A held-out evaluation; what follows `position_loss` is missing in results of older versions."""

    perplexity: float
    domains: dict[str, ScoreValues]
    position_loss: list[float]
    trips: TripsValues | None
    coverage: float | None
    jacobi_rounds: float | None
    gap: DecodingGap | None


class RunResult(TypedDict, total=False):
    """`result.json` of a finished run; `evaluation` is None for a run that has no held-out text."""

    step: int
    tokens: int
    seconds: float
    epochs: float
    collections: dict[str, float]
    evaluation: EvaluationValues | None


class TrainerState(TypedDict, total=False):
    """What of a checkpoint's `trainer.json` is read again; older checkpoints have no `hooks`."""

    seconds: float
    corpus: str
    hooks: dict[str, dict[str, object]]
