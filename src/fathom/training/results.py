"""What a run's `result.json` and a checkpoint's `trainer.json` hold, key by key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypedDict, cast

from fathom.checkpoints.layout import RESULT
from fathom.report.files import read_written


class CorrelationValues(TypedDict):
    """Spearman's rank correlation with its bootstrap interval over `clusters` rows."""

    value: float
    low: float
    high: float
    clusters: int


class TripsValues(TypedDict):
    """Iterations of held-out tokens: per token, and the share of tokens with one, two, …"""

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
    """The loss on some text; `accuracy` is for puzzles."""

    loss: float
    bits_per_byte: float
    tokens: int
    accuracy: float | None


class EvaluationValues(ScoreValues, total=False):
    """A held-out evaluation."""

    perplexity: float
    domains: dict[str, ScoreValues]
    position_loss: list[float | None]
    trips: TripsValues | None
    coverage: float | None
    jacobi_rounds: float | None
    gap: DecodingGap | None


class RunResult(TypedDict, total=False):
    """`result.json` of a finished run; `evaluation` is None without held-out text."""

    step: int
    tokens: int
    seconds: float
    epochs: float
    collections: dict[str, float]
    evaluation: EvaluationValues | None


class TrainerState(TypedDict, total=False):
    """The part of a checkpoint's `trainer.json` that is read again."""

    seconds: float
    corpus: str
    hooks: dict[str, dict[str, object]]


def read_result(run_dir: Path) -> RunResult:
    """The result of a finished run: `numbers` are in its evaluation, where there is one."""
    remedy = "delete it and run the same command to evaluate again"
    values: RunResult = read_written(run_dir / RESULT, "evaluation", remedy=remedy)
    scores = values["evaluation"]
    return values if scores is None else {**values, "evaluation": numbers(scores)}


def held_out(run_dir: Path) -> EvaluationValues:
    """The evaluation of a finished run that has held-out text, as every run of a comparison has."""
    scores = read_result(run_dir)["evaluation"]
    assert scores is not None, f"{run_dir}: a run of a comparison needs held-out text"
    return scores


def numbers(scores: EvaluationValues) -> EvaluationValues:
    """Scores from JSON: a null loss becomes NaN, and a part of the context without targets None."""
    domains = {name: cast(ScoreValues, {**score, **_losses(score)}) for name, score in scores["domains"].items()}
    stretches = [None if loss is None or math.isnan(loss) else loss for loss in scores["position_loss"]]
    return cast(EvaluationValues, {**scores, **_losses(scores), "domains": domains, "position_loss": stretches})


def _losses(score: ScoreValues) -> dict[str, float]:
    found = {"loss": score["loss"], "bits_per_byte": score["bits_per_byte"]}
    return {name: math.nan if value is None else value for name, value in found.items()}
