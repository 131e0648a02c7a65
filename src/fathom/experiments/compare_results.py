"""The schema of a comparison's `report.json` and `measured/*.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fathom.report.numbers import DASH
from fathom.report.provenance import Provenance
from fathom.report.statistics import Correlation, Difference
from fathom.training.results import DecodingGap, Evaluation


@dataclass(frozen=True)
class ArmBudget:
    """The cost of an arm: one run's size, and the FLOPs and hours of all its runs."""

    arm: str
    parameters: int
    tokens: int
    steps: int
    runs: int
    flops: float
    hours: float


@dataclass(frozen=True)
class ComparisonBudget:
    """The cost of a comparison."""

    arms: list[ArmBudget]
    runs: int
    flops: float
    step_seconds: float
    """Seconds per step of the control, measured."""
    hours: float
    device: str

    def __str__(self) -> str:
        """The cost in words."""
        return f"{self.runs} runs, {self.flops:.3g} FLOPs, {self.hours:.2g} hours on {self.device}."


@dataclass(kw_only=True)
class PairGap(Difference):
    """The difference of two arms other than the control."""

    a: str
    b: str


@dataclass(kw_only=True)
class ContrastGap(Difference):
    """The value of a contrast, which is a signed sum of several arms' losses."""

    name: str
    arms: str
    """The arms with their signs."""


@dataclass
class ShareOfGain:
    """The share of depth_attention's gain that uniform_depth reaches; None if it is undefined."""

    share: float | None
    low: float | None
    high: float | None
    difference: PairGap

    def __str__(self) -> str:
        """The share and its interval in words, or the statement that the share is undefined."""
        if self.share is None:
            return "the share of depth_attention's gain that uniform_depth reaches is undefined"
        ends = (self.share, self.low, self.high)
        value, low, high = (DASH if end is None else f"{100 * end:.0f}".replace("-", "−") for end in ends)
        return f"uniform_depth has {value} % of depth_attention's gain (95 % interval {low} to {high} %)"


@dataclass
class ParallelRun:
    """A run of a model that reads text in parallel, by Jacobi rounds."""

    seed: int
    jacobi_rounds: float
    gap: DecodingGap | None


@dataclass
class ArmTrips:
    """Iterations per token over an arm's runs."""

    mean: float
    most: int
    shares: list[float] | None
    """None if tokens do not halt."""
    correlations: list[Correlation]
    solved: list[ParallelRun]


@dataclass
class DomainMean:
    """The loss on a domain, averaged over an arm's runs."""

    loss: float
    bits_per_byte: float
    difference: Difference | None = None
    """Difference to the control."""


@dataclass
class TrainingLoss:
    """Training loss, step by step."""

    step: list[int]
    loss: list[float]


@dataclass
class Validation(TrainingLoss):
    """Validation loss, evaluation by evaluation."""

    tokens: list[int]
    seconds: list[float]


@dataclass(frozen=True, kw_only=True)
class RunRow(Evaluation):
    """A finished run: its last evaluation, its curves, its machine."""

    seed: int
    directory: str
    seconds: float
    epochs: float
    machine: dict[str, object] | None
    """`machine.json`: where it ran, and the sealed prediction that it ran under."""
    validation: Validation
    training_loss: TrainingLoss


@dataclass
class Curve:
    """Validation loss while training: mean, lowest and highest seed."""

    tokens: list[int] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass
class Band:
    """A loss difference during training, by tokens read: its mean, lowest and highest value over the seeds."""

    tokens: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class TimeRatio:
    """Step times of an arm divided by the control's, timed in the order A B B A."""

    median: float
    low: float
    """Lower quartile."""
    high: float
    """Upper quartile."""
    pairs: int
    seconds: tuple[float, float]
    """Median seconds of the arm and of the control."""
    clock: str
    """Which clock, in words."""


@dataclass(frozen=True)
class Measured:
    """Measured costs of an arm and of its control, as pairs (arm, control)."""

    time: TimeRatio
    memory_bytes: tuple[int, int]
    """Peak memory of a training step."""
    memory: str
    """Which memory was measured, in words."""
    cache_bytes_per_token: tuple[float, float]
    """Cache growth per decoded token."""
    shared_tensors: tuple[int, int]
    """Number of parameters of equal name and shape, and how many of them started from bitwise equal values."""
    hardware: dict[str, object]


@dataclass(frozen=True)
class Measurement:
    """`measured/ARM.json`."""

    recipes: tuple[dict[str, object], dict[str, object]]
    """The recipes of the arm and of the control."""
    measured: Measured


@dataclass
class CacheBytes:
    """Cache bytes per token, by arithmetic and from a real cache."""

    declared: int
    measured: float | None


@dataclass(kw_only=True)
class ArmResult:
    """An arm. Results exist once a seed is finished, differences for every arm but the control."""

    name: str
    mechanism: str
    overrides: Sequence[str]
    parameters: int
    flops_per_token: float
    cache_bytes_per_token: CacheBytes
    steps: int
    tokens: int
    training_flops: float
    measured: Measured | None
    runs: list[RunRow]
    loss: float = float("nan")
    perplexity: float = float("nan")
    bits_per_byte: float = float("nan")
    domains: dict[str, DomainMean] = field(default_factory=dict)
    position_loss: list[float | None] = field(default_factory=list)
    curve: Curve = field(default_factory=Curve)
    trips: ArmTrips | None = None
    difference: Difference | None = None
    difference_by_position: list[Difference | None] = field(default_factory=list)
    difference_while_training: Band | None = None

    @property
    def gap(self) -> Difference:
        """The difference of the final loss to the control; None for the control."""
        assert self.difference is not None
        return self.difference

    @property
    def direction(self) -> str:
        """How far the loss ended below or above the control's, in words."""
        if self.gap.mean == 0:
            return "at the loss of"
        return f"{abs(self.gap.mean):.4f} nats {'below' if self.gap.mean < 0 else 'above'}"


@dataclass(frozen=True)
class Failure:
    """`failed.json`: why a run failed, and at which step."""

    error: str
    step: int | None


@dataclass(frozen=True)
class FailedRun(Failure):
    """A run that failed."""

    arm: str
    seed: int


@dataclass(kw_only=True)
class ComparisonReport(Provenance):
    """`report.json`."""

    verdict: str = ""
    equal: str
    control: str
    seeds: list[int]
    seeds_planned: list[int]
    exploratory: bool
    """Whether seeds were added after a report with results: no difference counts as significant."""
    failed: list[FailedRun]
    arms: list[ArmResult]
    between: list[PairGap]
    contrasts: list[ContrastGap] = field(default_factory=list)
    """Sums of several arms' losses with signs."""
    share_of_uniform_depth: ShareOfGain | None
    recipe: dict[str, Any]
    ladder: str | None
    """The path of the ladder's report, if this is one of its sizes."""

    @property
    def compared(self) -> list[ArmResult]:
        """The arms that have finished a seed, without the control."""
        return [arm for arm in self.arms if arm.difference is not None]


@dataclass(frozen=True)
class ShownContrast:
    """A contrast that an earlier report has shown."""

    name: str
    arms: str


@dataclass(frozen=True)
class Shown:
    """The seeds and contrasts that an earlier report has shown."""

    seeds: list[int]
    seeds_planned: list[int]
    exploratory: bool
    contrasts: list[ShownContrast] = field(default_factory=list)
