"""The schema of a comparison's `report.json` and `measured/*.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from fathom.report.provenance import Provenance
from fathom.training.results import CorrelationValues, DecodingGap, TripsValues

CurveAxis = Literal["tokens", "flops", "seconds"]
"""The x axis of a learning curve."""


class PairedGap(TypedDict):
    """A paired difference of two arms, in the unit of what was paired."""

    mean: float
    pairs: int
    half_width: float | None
    p: float | None
    low: float | None
    high: float | None


class GapValues(PairedGap):
    """A paired difference, and whether its interval excludes zero."""

    excludes_zero: bool


class TestedGap(GapValues, total=False):
    """A difference of the final loss, with p adjusted for all tests."""

    p_holm: float | None


class PairGap(TestedGap):
    """The difference of two arms other than the control."""

    a: str
    b: str


class ShareOfGain(TypedDict):
    """The share of depth_attention's gain that uniform_depth reaches."""

    share: float | None
    low: float | None
    high: float | None
    defined: bool
    difference: PairGap


class ParallelRun(TypedDict):
    """A run that reads text by Jacobi rounds."""

    seed: int
    jacobi_rounds: float
    gap: DecodingGap | None


class ArmTrips(TypedDict):
    """Iterations per token over an arm's runs; `shares` is None if tokens do not halt."""

    mean: float
    most: int
    shares: list[float] | None
    correlations: list[CorrelationValues]
    solved: list[ParallelRun]


class DomainValues(TypedDict, total=False):
    """The loss on a domain; in an arm's mean over runs, with the difference to the control."""

    loss: float
    bits_per_byte: float
    accuracy: float | None
    tokens: int
    difference: GapValues


class Columns(TypedDict, total=False):
    """Points of a run's curve, column by column; `training_loss` has steps and losses alone."""

    step: list[int]
    tokens: list[int]
    seconds: list[float]
    loss: list[float]


class Evaluated(TypedDict):
    """An evaluation of a finished run; a part of the context without targets has no loss."""

    loss: float
    perplexity: float
    bits_per_byte: float
    domains: dict[str, DomainValues]
    position_loss: list[float | None]


class RunRow(Evaluated, total=False):
    """A finished run: its last evaluation, its curves, its machine."""

    seed: int
    directory: str
    accuracy: float | None
    evaluated_tokens: int
    coverage: float | None
    trips: TripsValues | None
    jacobi_rounds: float | None
    gap: DecodingGap | None
    seconds: float
    epochs: float | None
    machine: dict[str, object] | None
    validation: Columns
    training_loss: Columns


class Curve(TypedDict):
    """Validation loss while training: mean, lowest and highest seed."""

    tokens: list[int]
    flops: list[float]
    seconds: list[float]
    loss: list[float]
    low: list[float]
    high: list[float]


class Band(TypedDict):
    """A difference over tokens: mean, lowest and highest seed."""

    tokens: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


class Time(TypedDict):
    """Step times of an arm and the control, measured in turns: ratio with quartiles, seconds of both, and the clock."""

    median: float
    low: float
    high: float
    pairs: int
    seconds: Sequence[float]
    clock: str


class MeasuredValues(TypedDict, total=False):
    """The cost of an arm and of the control; in every pair the arm comes first."""

    time: Time
    memory_bytes: Sequence[int]
    memory: str
    cache_bytes_per_token: Sequence[float]
    shared_tensors: Sequence[int]
    hardware: dict[str, object]
    recipes: list[dict[str, object]]


class CacheBytes(TypedDict):
    """Cache bytes per token, by arithmetic and from a real cache."""

    declared: int
    measured: float | None


class ArmBasics(TypedDict):
    """Facts about an arm that are known before it has run."""

    name: str
    mechanism: str
    overrides: Sequence[str]
    parameters: int
    flops_per_token: float
    cache_bytes_per_token: CacheBytes
    steps: int
    tokens: int
    training_flops: float
    measured: MeasuredValues | None
    runs: list[RunRow]


class ArmResult(ArmBasics, total=False):
    """An arm. Results exist once a seed is finished, differences for every arm but the control."""

    loss: float
    perplexity: float
    bits_per_byte: float
    domains: dict[str, DomainValues]
    position_loss: list[float | None]
    curve: Curve
    trips: ArmTrips
    difference: TestedGap
    difference_bits_per_byte: GapValues
    difference_by_position: list[GapValues | None]
    difference_while_training: Band


class Failure(TypedDict):
    """Why a run failed, and at which step."""

    error: str
    step: int


class FailedRun(Failure):
    """A run that failed."""

    arm: str
    seed: int | None


class ComparisonResults(Provenance, total=False):
    """All of `report.json` but its verdict."""

    equal: str
    control: str
    seeds: list[int]
    seeds_planned: list[int]
    exploratory: bool
    """Whether seeds were added after a report with results: no difference counts as significant."""
    failed: list[FailedRun]
    arms: list[ArmResult]
    between: list[PairGap]
    share_of_uniform_depth: ShareOfGain | None
    recipe: dict[str, object]
    ladder: str | None
    """The path of the ladder's report, if this is one of its sizes."""


class ComparisonReport(ComparisonResults):
    """`report.json`."""

    verdict: str
