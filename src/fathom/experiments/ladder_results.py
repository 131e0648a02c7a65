"""The schema of a ladder's `report.json`, `prediction.json` and dry run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from fathom.experiments.compare_results import Failure, PairedGap
from fathom.report.provenance import Provenance


class Span(TypedDict):
    """A median with its 50 % and 95 % intervals."""

    median: float
    q25: float
    q75: float
    low: float
    high: float


class CrossedSpan(Span):
    """A factor by the grid estimator, and by the cross-check (`t`), which is None with only two rungs."""

    t: float | None
    t_low: float | None
    t_high: float | None


class Multiplier(CrossedSpan):
    """M at a point: a size, the middle of the ladder, or beyond the largest size."""

    kind: str
    ln_flops: float


class RungRow(TypedDict):
    """One rung: the control's sizes and rate."""

    index: int
    budget: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    parameters: int
    tokens: int
    rows: int
    steps: int
    head_dim: int
    batch: int
    sealed: bool
    seeds: list[int]
    directory: str
    flops: float
    rate: float | None


class Cell(TypedDict):
    """An arm at a rung, under one token budget; the first is 0."""

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
    difference: PairedGap | None
    ln_m: float | None
    error: float | None


class Check(TypedDict):
    """Half and twice the chosen learning rate at the largest size."""

    rates: list[float]
    losses: list[float]
    better: bool
    excess: float | None


class TimedSpan(Span):
    """M in seconds, and how they were measured."""

    clock: str
    hardware: dict[str, object]


class Views(TypedDict):
    """M at the largest size in other costs than FLOPs (time, parameters, bytes)."""

    time: TimedSpan | None
    parameters: Span
    bytes_weights_once: Span
    bytes_weights_each_trip: Span


Currency = Literal["time", "parameters", "bytes_weights_once", "bytes_weights_each_trip"]


class SeedNoise(TypedDict):
    """Standard deviations over seeds of a run and of a paired difference, and the correlation of two arms."""

    single: float
    paired: float
    correlation: float


class LadderArmBasics(TypedDict):
    """The part of an arm's results that needs no posterior."""

    name: str
    mechanism: str
    overrides: Sequence[str]
    matched: bool
    rate_ratio: float
    rungs: list[Cell]
    further: list[Cell]
    """The rungs under further token budgets, which are for φ alone."""
    flags: list[str]
    diverged: list[int]
    check: Check | None
    p: float | None
    p_holm: float | None


class Fitted(TypedDict):
    """The results of an arm's posterior."""

    multiplier: list[Multiplier]
    per_decade: CrossedSpan
    curve: list[dict[str, float]]
    """`ln_flops`, and `control`, `arm` and `m`, each with `_median`, `_q25`, `_q75`, `_low` and `_high`."""
    floor: Span
    slope: Span
    own_deviation: Span
    noise: SeedNoise


class ArmRow(LadderArmBasics, total=False):
    """An arm; the keys of `Fitted` are there if there is a posterior, else `multiplier` is empty."""

    multiplier: list[Multiplier]
    per_decade: CrossedSpan | None
    curve: list[dict[str, float]]
    floor: Span
    slope: Span
    own_deviation: Span
    noise: SeedNoise
    views: Views


class TunedRow(TypedDict):
    """One arm's learning rates at a tuned rung, by place: doublings above the centre."""

    centre: float
    rates: dict[str, float]
    losses: dict[str, list[float]]
    rate: float
    place: float
    low: float
    high: float
    curvature: float | None
    least: float | None
    flags: Sequence[str]
    extended: int


class Law(TypedDict):
    """The control's floor and exponent."""

    E: Span
    alpha: Span


class NoiseRow(TypedDict):
    """Noise over seeds: of a run by rung; of each arm's pairs, correlation and own deviation."""

    single_by_rung: list[float | None]
    paired: dict[str, float]
    correlation: dict[str, float]
    own_deviation: dict[str, Span]


class Forecast(TypedDict):
    """An arm's difference and ln M at the last rung, as predicted from the rungs before it."""

    arm: str
    difference: Span | None
    ln_m: Span | None


class PredictionBody(TypedDict):
    """The contents of a sealed prediction."""

    ladder: str
    estimator: str
    rung: int
    rows: list[Forecast]
    results: dict[str, str]
    seeds: list[int]
    """Seeds of the rungs before, at that time."""


class SealedPrediction(PredictionBody):
    """`prediction.json`."""

    sha256: str


class Outcome(Forecast):
    """A forecast and the observed value."""

    observed: float | None
    inside: bool | None


class PredictionRow(TypedDict):
    """The sealed rung."""

    sha256: str
    stale: bool
    rows: list[Outcome]


class TwinRung(TypedDict):
    """The seed control's difference at a size."""

    index: int
    difference: PairedGap


class Twin(TypedDict):
    """The seed control: the baseline compared with itself under other initial values."""

    rungs: list[TwinRung]
    multiplier: Span | None
    covers: bool | None


class Phi(TypedDict, total=False):
    """φ, the worth of an iteration; `refused` says why it was not estimated, else None."""

    refused: str | None
    value: float
    low: float
    high: float
    budgets: int
    cells: int
    without: Sequence[float]


class PuzzleSooner(TypedDict):
    """The control's FLOPs to solve a difficulty over an arm's, by pairs of seeds; null where there is no upper end."""

    median: tuple[float, float | None]
    low: float
    high: float | None
    level: float
    pairs: int
    p: float


class PuzzleShares(TypedDict):
    """Accuracy of runs on a difficulty, and how many solved it, with the Wilson interval of their share. A run that
    diverged has an accuracy of 0."""

    accuracy: list[float]
    curves: Sequence[Sequence[tuple[float, float]]]
    """Of every run: training FLOPs and accuracy, as it was evaluated."""
    median: float | None
    solved: int
    low: float
    high: float
    flops_to_solve: list[float | None]
    sooner: PuzzleSooner | None


class PuzzleRow(TypedDict):
    """An arm at a rung, by difficulty."""

    index: int
    arm: str
    flops: float
    seeds: list[int | None]
    domains: dict[str, PuzzleShares]


class PuzzleResult(TypedDict):
    """Results of runs on a puzzle."""

    domains: list[str]
    chance: float
    solved_at: float
    rows: list[PuzzleRow]


class DivergedRun(Failure):
    """A run that failed."""

    stage: str
    run: str


class LadderResults(Provenance):
    """All of `report.json` but its verdict."""

    ladder: str
    estimator: str
    stage: str
    pending: int
    control: str
    tokens_per_parameter: list[float]
    rungs: list[RungRow]
    arms: list[ArmRow]
    tuning: list[dict[str, TunedRow]]
    law: Law | None
    noise: NoiseRow | None
    prediction: PredictionRow | None
    twin: Twin | None
    phi: Phi | None
    puzzle: PuzzleResult | None
    diverged: list[DivergedRun]
    seeds_added: list[AddedSeeds]
    plan: PlanValues


class AddedSeeds(TypedDict):
    """Seeds added after the plan: the new number for each rung, and how many runs had finished by then."""

    seeds: Sequence[int]
    date: str
    finished: int


class RulesValues(TypedDict):
    """The rules of a plan that the page shows."""

    layers: Sequence[int]
    hidden: Sequence[int]
    tune_points: Sequence[int]
    tokens: int | None


class ArmValues(TypedDict):
    """An arm as a plan names it."""

    name: str
    mechanism: str
    overrides: Sequence[str]


class PlanValues(TypedDict):
    """`ladder.json` without its hashes."""

    recipe: dict[str, object]
    rules: RulesValues
    arms: list[ArmValues]
    estimator: str


class LadderReport(LadderResults):
    """`report.json`."""

    verdict: str


class BudgetRow(TypedDict):
    """The cost of a rung."""

    rung: str
    parameters: int
    tokens: int
    steps: int
    runs: int
    flops: float
    step_seconds: float
    hours: float


class Width(TypedDict):
    """Half-widths of the 95 % interval, as factors."""

    last_rung: float
    per_decade: float


class Resolution(TypedDict):
    """The precision of simulated ladders, with the noise of long runs (`text`) and of short ones (`toy`)."""

    decades: float
    text: Width
    toy: Width


class LadderBudget(TypedDict):
    """The cost of a ladder."""

    rungs: list[BudgetRow]
    runs: int
    flops: float
    hours: float
    device: str
    resolution: Resolution | None
    words: str
