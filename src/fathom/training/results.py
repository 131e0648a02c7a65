"""Measurements of a step, and the contents of a run's `result.json` and a checkpoint's `trainer.json`.

`Evaluation.flat` names an evaluation's entries in the log, such as `val/papers/loss` for the held-out loss of a domain.
`meter.py` names those of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.checkpoints.file_names import RESULT
from fathom.report.results import read_result
from fathom.report.statistics import Correlation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StepMetrics:
    """Numbers of one step. Tensors stay on the device until they are read."""

    step: int
    lr: float
    tokens: int
    loss: Tensor
    """Mean loss of the global batch, with auxiliary losses."""
    grad_norm: Tensor
    """Global norm before clipping."""
    skipped: Tensor
    """1.0 if the step was skipped and the weights did not change."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """The mechanism's auxiliary losses, which `loss` includes, and the means of its metrics."""


@dataclass(frozen=True)
class Score:
    """The loss on some text."""

    loss: float
    """Nats per token."""
    bits_per_byte: float
    """Bits per byte of the text: comparable across tokenizers."""
    tokens: int
    """Tokens predicted."""
    accuracy: float | None = field(default=None, kw_only=True)
    """Accuracy on a puzzle; None for text."""


@dataclass(frozen=True)
class Trips:
    """Statistics of the loop iterations of a model whose tokens may halt."""

    mean: float
    """Mean per token."""
    shares: list[float]
    """Share of tokens that made one iteration, two, …"""
    correlation: Correlation | None
    """Correlation of loss and iterations of tokens, over sequences. If positive, hard tokens get more iterations."""


@dataclass(frozen=True)
class DecodingGap:
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

    @property
    def with_interval(self) -> str:
        """The gap between parallel reading and decoding as text, with its interval if there is one."""
        ends = "" if self.low is None else f" [{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.value:+.4f}{ends}"

    def __str__(self) -> str:
        """The gap between parallel reading and decoding, as the end of a line of output."""
        against = f"{self.with_interval} nats per token more than decoding on {self.tokens:,} tokens"
        return f"{self.rounds:g} Jacobi rounds, {against}"


@dataclass(frozen=True)
class Evaluation(Score):
    """The loss on a held-out split."""

    domains: dict[str, Score]
    position_loss: list[float | None]
    """Nats per token over equal parts of the context, in order; None for a part without targets."""
    trips: Trips | None = None
    """Iterations, if tokens may halt."""
    coverage: float | None = None
    """The share of the split's windows that were read, spread evenly over every domain."""
    jacobi_rounds: float | None = None
    """Mean Jacobi rounds to read the text; None for a model that needs none."""
    gap: DecodingGap | None = None
    """For such a model, at the last evaluation: the gap of the loss to decoding."""
    perplexity: float = field(init=False)
    """exp(loss)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "perplexity", math.exp(self.loss) if not self.loss >= 700 else math.inf)

    @property
    def bytes(self) -> int:
        """Bytes of the text that was read, by which two evaluations of the same text are recognised; 0 if unknown."""
        count = self.loss * self.tokens / math.log(2) / self.bits_per_byte if self.bits_per_byte else 0.0
        return round(count) if math.isfinite(count) else 0

    @property
    def how(self) -> str:
        """The text after the perplexity in a line of output: iterations if tokens may halt, and Jacobi rounds if there
        were any."""
        words = [] if self.trips is None else [f"{self.trips.mean:.2f} iterations per token"]
        if self.jacobi_rounds is not None:
            words.append(str(self.gap or f"{self.jacobi_rounds:g} Jacobi rounds"))
        return "".join(f", {word}" for word in words)

    def flat(self) -> dict[str, float]:
        """The evaluation as a flat mapping of names to numbers, for trackers."""
        values = {"val/loss": self.loss, "val/perplexity": self.perplexity, "val/bits_per_byte": self.bits_per_byte}
        for name, score in self.domains.items():
            values[f"val/{name}/loss"], values[f"val/{name}/bits_per_byte"] = score.loss, score.bits_per_byte
        for name, score in {"": self, **{f"{name}/": score for name, score in self.domains.items()}}.items():
            if score.accuracy is not None:
                values[f"val/{name}accuracy"] = score.accuracy
        if self.trips is not None:
            values["val/trips"] = self.trips.mean
            values |= {f"val/trips_{k}": share for k, share in enumerate(self.trips.shares, 1)}
            if self.trips.correlation is not None:
                values["val/trips_loss_correlation"] = self.trips.correlation.value
        if self.jacobi_rounds is not None:
            values["val/jacobi_rounds"] = self.jacobi_rounds
        if self.gap is not None:
            values["val/decoding_gap"] = self.gap.value
        places = {f"val/position/{i}": loss for i, loss in enumerate(self.position_loss) if loss is not None}
        return {**values, **places}


@dataclass(frozen=True)
class RunResult:
    """`result.json` of a finished run."""

    step: int
    tokens: int
    seconds: float
    epochs: float
    evaluation: Evaluation | None
    """None without held-out text."""
    collections: dict[str, float] = field(default_factory=dict)
    """Epochs over each collection of a mixture."""

    @classmethod
    def of(cls, run_dir: Path) -> RunResult:
        """The result of a finished run."""
        return read_result(cls, run_dir / RESULT, "delete it and run the same command to evaluate again")


CROSS_ENTROPY, DIVERGENCE = "cross_entropy", "distill"
"""Among a step's numbers, if `loss` has further terms: the cross-entropy, and the divergence from a teacher."""


@dataclass(frozen=True)
class TrainerState:
    """`trainer.json` of a checkpoint."""

    step: int
    seconds: float
    """In steps, over the life of the run."""
    tokens: int
    corpus: int
    """Fingerprint of the tokens."""
    tokenizer: str | None
    world_size: int
    torch: str
    hooks: dict[str, dict[str, object]]
    """States of the hooks that have one."""
    teacher: str | None = None
    """Fingerprint of a teacher."""


def held_out(run_dir: Path) -> Evaluation:
    """The evaluation of a finished run that has held-out text, as every run of a comparison has."""
    scores = RunResult.of(run_dir).evaluation
    assert scores is not None, f"{run_dir}: a run of a comparison needs held-out text"
    return scores
