"""The schema of a ladder's `report.json`, `prediction.json` and dry run.

`ladder_page.py` writes `report.json`, and `stages.py` writes `prediction.json` (`State.seal`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fathom.experiments.compare_results import Failure
from fathom.experiments.rungs import Added, LadderPlan, Size, rounded
from fathom.experiments.scaling import Interval
from fathom.experiments.tuning import Bowl
from fathom.report.provenance import Provenance
from fathom.report.statistics import Difference

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class CrossedInterval(Interval):
    """A factor with its intervals by the grid estimator and by the cross-check; the cross-check's fields (`t…`) are
    None if there are only two rungs."""

    t: float | None
    t_low: float | None
    t_high: float | None


@dataclass(frozen=True, kw_only=True)
class Multiplier(CrossedInterval):
    """The compute multiplier M at a point: a size, the middle of the ladder, or beyond the largest size."""

    kind: str
    ln_flops: float


@dataclass(frozen=True)
class CurvePoint:
    """The posterior at a number of training FLOPs: the losses of the control and the arm, and the compute multiplier
    M."""

    ln_flops: float
    control: Interval
    arm: Interval
    m: Interval


@dataclass(frozen=True, kw_only=True)
class RungRow(Size):
    """One rung of a ladder: the control's shape, token budget and learning rate at that size."""

    batch: int
    sealed: bool
    seeds: list[int]
    flops: float
    rate: float | None


@dataclass
class Cell:
    """The results of an arm at a rung under one token budget; budgets are numbered from 0."""

    index: int
    budget: int
    tokens: int
    rate: float
    weight_decay: float
    layers: int
    parameters: int
    flops: float
    seeds: list[int]
    loss: list[float]
    difference: Difference | None = None
    ln_m: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Check:
    """The losses at half and twice the chosen learning rate, at the largest size."""

    rates: list[float]
    losses: list[float]
    better: bool
    excess: float | None


@dataclass(frozen=True, kw_only=True)
class TimedInterval(Interval):
    """The compute multiplier in seconds instead of FLOPs, and how the seconds were measured."""

    clock: str
    hardware: dict[str, object]


@dataclass(frozen=True)
class Views:
    """The compute multiplier at the largest size, with time, parameters or bytes in place of FLOPs."""

    time: TimedInterval | None
    parameters: Interval
    bytes_weights_once: Interval
    bytes_weights_each_trip: Interval


@dataclass(frozen=True)
class SeedNoise:
    """Standard deviations over seeds, of a run's loss and of a paired difference, and the correlation of two arms'
    losses."""

    single: float
    paired: float
    correlation: float


@dataclass(kw_only=True)
class ArmRow:
    """The results of an arm; `multiplier` and the fields after it are empty if the arm has no posterior."""

    name: str
    mechanism: str
    overrides: Sequence[str]
    matched: bool
    learning_rate_ratio: float
    rungs: list[Cell]
    further: list[Cell]
    """The rungs under further token budgets, which are for φ alone."""
    flags: list[str]
    diverged: tuple[int, int]
    """Number of its runs that diverged for good, and number of all its runs."""
    check: Check | None
    p: float | None = None
    p_holm: float | None = None
    multiplier: list[Multiplier] = field(default_factory=list)
    per_decade: CrossedInterval | None = None
    curve: list[CurvePoint] = field(default_factory=list)
    floor: Interval | None = None
    slope: Interval | None = None
    own_deviation: Interval | None = None
    noise: SeedNoise | None = None
    views: Views | None = None

    @property
    def top(self) -> Multiplier:
        """The compute multiplier at the last rung; the arm must have a posterior."""
        return next(row for row in reversed(self.multiplier) if row.kind == "rung")


@dataclass(frozen=True, kw_only=True)
class Tuned(Bowl):
    """The losses of one arm at each learning rate tried at a tuned rung; a learning rate is given by its doublings
    above the centre."""

    centre: float
    losses: dict[int, list[float]]
    rates: dict[int, float] = field(init=False)
    rate: float = field(init=False)
    """The learning rate at the optimum."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", {place: rounded(self.centre * 2.0**place) for place in self.losses})
        object.__setattr__(self, "rate", self.centre * 2**self.place)


@dataclass(frozen=True)
class Law:
    """The control's floor and exponent."""

    E: Interval
    alpha: Interval


@dataclass(frozen=True)
class Forecast:
    """The prediction of an arm's loss difference and ln M (M: the compute multiplier) at the last rung, made from the
    earlier rungs."""

    arm: str
    difference: Interval | None = None
    ln_m: Interval | None = None


@dataclass(frozen=True)
class Prediction:
    """`prediction.json`."""

    ladder: str
    estimator: str
    rung: int
    rows: list[Forecast]
    results: dict[str, str]
    seeds: list[int]
    """Seeds of the rungs before, at that time."""
    sha256: str = ""
    """The digest of all the above, once it is sealed."""


@dataclass(frozen=True, kw_only=True)
class Outcome(Forecast):
    """A forecast and the observed value."""

    observed: float | None
    inside: bool | None


@dataclass(frozen=True)
class PredictionRow:
    """The sealed rung."""

    sha256: str
    stale: bool
    rows: list[Outcome]


@dataclass(frozen=True)
class SeedControlRung:
    """The loss difference of the seed control to the control at one size."""

    index: int
    difference: Difference


@dataclass(frozen=True)
class SeedControl:
    """The seed control: the baseline compared with itself under other initial values."""

    rungs: list[SeedControlRung]
    multiplier: Interval | None
    covers: bool | None


@dataclass(frozen=True)
class ContrastRow:
    """A contrast of several arms at each size at which the arms share a seed; the keys are the sizes' indices."""

    name: str
    arms: str
    """The arms with their signs."""
    rungs: dict[int, Difference]


@dataclass(frozen=True)
class Phi:
    """φ, the value of an extra loop iteration, with its 95 % interval, or the reason why φ was not estimated."""

    refused: str | None = None
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    budgets: int = 0
    cells: int = 0


@dataclass(frozen=True)
class Sooner:
    """The ratio of the control's FLOPs to solve a puzzle to an arm's FLOPs, over pairs of runs with equal seeds."""

    median: tuple[float, float]
    """The median over the pairs lies between these."""
    low: float
    high: float
    level: float
    """Confidence of the interval `low` to `high`: a little over 95 % with six pairs or more; with fewer, that of their
    whole range."""
    pairs: int
    p: float
    """Two-sided p-value of the sign test. A pair that does not show which of the two needs fewer FLOPs counts against a
    difference."""

    @property
    def basis(self) -> str:
        """Describes how the ratio of FLOPs and its interval were computed, for a caption."""
        if self.pairs == 1:
            return "one pair of seeds"
        return f"median of {self.pairs} pairs of seeds and an interval of ranks ({self.level:.0%})"

    def __str__(self) -> str:
        """The ratio of the control's FLOPs to an arm's, with its interval, for a table."""
        middle, whole = between(*self.median), between(self.low, self.high)
        return middle if self.pairs == 1 or middle in (UNKNOWN, whole) else f"{middle} ({whole})"


def between(low: float, high: float) -> str:
    """An interval as text; a single number if both ends round to the same one."""
    if math.isinf(high):
        return f"> {low:.2f}" if low else UNKNOWN
    if not low:
        return f"< {high:.2f}"
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


@dataclass(frozen=True)
class PuzzleShares:
    """Accuracy of runs on a puzzle's difficulty, and how many runs solved it, with the Wilson interval of the share
    that did. A run that diverged has an accuracy of 0."""

    accuracy: list[float]
    curves: list[list[tuple[float, float]]]
    """Training FLOPs and accuracy of every run at every evaluation."""
    median: float | None
    solved: int
    low: float
    high: float
    sooner: Sooner | None


@dataclass(frozen=True)
class PuzzleRow:
    """The results of an arm on a puzzle at one rung, by difficulty."""

    index: int
    arm: str
    flops: float
    seeds: list[int]
    domains: dict[str, PuzzleShares]


@dataclass(frozen=True)
class PuzzleResult:
    """Results of runs on a puzzle."""

    domains: list[str]
    chance: float
    rows: list[PuzzleRow]


@dataclass(frozen=True)
class DivergedRun(Failure):
    """A run that failed."""

    stage: str
    run: str


@dataclass(kw_only=True)
class LadderReport(Provenance):
    """`report.json`."""

    verdict: str = ""
    ladder: str
    estimator: str
    stage: str
    pending: int
    control: str
    tokens_per_parameter: list[float]
    rungs: list[RungRow]
    arms: list[ArmRow]
    tuning: list[dict[str, Tuned]]
    law: Law | None
    prediction: PredictionRow | None
    seed_control: SeedControl | None
    contrasts: list[ContrastRow]
    phi: Phi | None
    puzzle: PuzzleResult | None
    diverged: list[DivergedRun]
    seeds_added: tuple[Added, ...]
    plan: LadderPlan


@dataclass(frozen=True)
class BudgetRow:
    """The cost of a rung."""

    rung: str
    parameters: int
    tokens: int
    steps: int
    runs: int
    flops: float
    step_seconds: float
    hours: float


@dataclass(frozen=True)
class Width:
    """Half-widths of the 95 % interval, as factors."""

    last_rung: float
    per_decade: float


@dataclass(frozen=True)
class Resolution:
    """The expected precision, from simulated ladders with the noise of long runs (`text`) and of short ones (`toy`)."""

    decades: float
    text: Width
    toy: Width


@dataclass(frozen=True)
class LadderBudget:
    """The cost of a ladder."""

    rungs: list[BudgetRow]
    runs: int
    flops: float
    hours: float
    device: str
    resolution: Resolution | None

    def __str__(self) -> str:
        """The cost of a ladder, and the precision to expect of it, in words."""
        text = f"{self.runs} runs, {self.flops:.3g} FLOPs, {self.hours:.2g} hours on {self.device}."
        width = self.resolution
        if width is None:
            return text + " No multiplier can be estimated: that needs two model sizes, one of them with two seeds."
        return (
            f"{text} Over {width.decades:.2f} decades, the expected 95 % interval of the multiplier at the largest "
            "size is × ÷ "
            f"{width.text.last_rung:.2f} with the noise of long runs, × ÷ {width.toy.last_rung:.2f} with that "
            f"of short ones; its trend to × ÷ {width.text.per_decade:.2f} and {width.toy.per_decade:.2f} per "
            "decade."
        )
