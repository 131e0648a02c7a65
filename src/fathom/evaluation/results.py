"""The schema of `report.json` of `fathom evaluate`: for scores, for a pair on a benchmark, and for caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from fathom.report.provenance import Provenance
from fathom.training.results import DecodingGap

WHOLE = "all text"
"""The name of all texts together, where there are several."""


class ItemValues(TypedDict, total=False):
    """`Items` as they are stored; `weights` and `log` only if they are not the default."""

    values: list[float]
    weights: list[float]
    log: bool


class ScoreGap(TypedDict):
    """A checkpoint's score relative to the first one's, paired over items: a `difference`, or a `ratio` of
    perplexities."""

    kind: str
    value: float | None
    low: float | None
    high: float | None
    confidence: float
    pairs: int
    p: float | None
    p_holm: float | None


class ScoreRow(TypedDict):
    """One task and metric: scores by checkpoint, and gaps of all but the first."""

    task: str
    metric: str
    scores: dict[str, float]
    differences: dict[str, ScoreGap]


PlaceLoss = TypedDict("PlaceLoss", {"from": int, "to": int, "loss": float, "tokens": int})
"""Loss of tokens predicted from `from` to `to` tokens of context."""


class TextScore(TypedDict, total=False):
    """The loss on a text; `trips_per_token` for a model with iterations, `decoding` if it reads text in rounds."""

    documents: int
    tokens: int
    bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float
    by_context: list[PlaceLoss]
    trips_per_token: float
    decoding: DecodingGap


class CheckpointScores(TypedDict):
    """One checkpoint: lm-eval's JSON by task, why tasks failed, and its text scores."""

    directory: str
    max_trips: int | None
    tasks: dict[str, dict[str, object]]
    failed: dict[str, str]
    notes: list[str]
    perplexity: dict[str, TextScore]


class ScoresReport(TypedDict):
    """`report.json` of scores."""

    fathom: str
    checkpoints: dict[str, CheckpointScores]
    context: int | None
    stride: int | None
    rows: list[ScoreRow]


class RatioValues(TypedDict):
    """A ratio of means with its 95 % interval; both ends are None if there are too few items."""

    value: float
    low: float | None
    high: float | None


class TextPair(TypedDict):
    """Bits per byte of two models on the same documents."""

    documents: int
    bytes: int
    base: float
    new: float
    difference: RatioValues


class QuestionRow(TypedDict):
    """The answers of two models to the same questions, counted."""

    benchmark: str
    way: str
    part: str
    asked: int
    right: Sequence[int]
    lost: int
    won: int
    p: float
    intervals: list[tuple[float, float]]


class NamedModel(TypedDict):
    """A model and where it is."""

    name: str
    directory: str


class ExampleRow(TypedDict):
    """A question, and whether base and new answer it correctly."""

    question: str
    answer: str
    wrong: list[str]
    right: tuple[bool, bool]


class PhaseShares(TypedDict):
    """Shares by collection, and the step from which they hold."""

    step: int
    data: dict[str, float]


class RunBetween(TypedDict):
    """A training run between a base and a new model; None for what its directory does not hold."""

    run: str
    data: dict[str, float]
    """Shares by collection, of the first phase."""
    later: list[PhaseShares]
    """The phases after it."""
    epochs: dict[str, float | None]
    steps: int | None
    tokens: int | None
    seconds: float | None
    rate: float
    adapters: int | None
    first_loss: float | None
    last_loss: float | None
    held_out_loss: float | None


class CorpusCounts(TypedDict):
    """How many documents of a corpus were read, left out and why, and what is left."""

    read: int
    unreadable: int
    filtered: int
    duplicate: int
    dropped: int
    cut: int
    tokens: int
    conversations: int


class Asking(TypedDict):
    """How many of a benchmark's questions were asked, and why the others were not."""

    asked: int
    of: int
    skipped: dict[str, int]
    """how many, by reason"""
    checked: bool
    """whether contamination was checked"""


class PairResults(Provenance):
    """All of a pair's `report.json` but its verdict."""

    base: NamedModel
    new: NamedModel
    texts: dict[str, TextPair]
    questions: list[QuestionRow]
    asked: dict[str, Asking]
    guessing: dict[str, dict[str, float]]
    examples: list[ExampleRow]
    runs: list[RunBetween]
    corpus: CorpusCounts | None


class PairReport(PairResults):
    """`report.json` of a pair on a benchmark."""

    verdict: str


class ScheduleValues(TypedDict):
    """When a cache is compressed: `freed` entries at a time, read in pieces of `chunk`."""

    window: int
    sinks: int
    kept: int
    freed: int
    chunk: int


class RecallValues(TypedDict):
    """Right answers and questions, by the number of compressions."""

    right: list[int]
    asked: list[int]


class Load(TypedDict):
    """A cache after a number of tokens: what it holds and how fast it is."""

    tokens: int
    entries: int
    """Entries of each layer."""
    cache_bytes: int
    peak_bytes: int | None
    """Peak memory above that before the text, so without weights; None where the system does not report it."""
    prefill_tokens_per_second: float
    """Speed over the tokens of all rows that were read in chunks so far."""
    decode_ms: dict[str, float]
    """Milliseconds for a step: p50, p90 and max, compressions included."""
    clock: str
    """Which clock, in words."""


class AnswerValues(TypedDict):
    """The answer of a model with one cache to one question."""

    task: str
    place: str
    """`outside` or `inside`: whether the question came after or before the last compression."""
    compressions: int
    beyond: bool
    """Whether the answer is older than the entries that `drop` keeps."""
    score: float
    """1 for an exact answer; of RULER's tasks, the share of the expected strings."""
    nats: float | None
    """Per token of the answer, where it is scored token by token."""


class QuestionValues(TypedDict):
    """The questions that every cache was asked."""

    asked: int
    left_out: dict[str, str]
    """Tasks that do not fit, and why."""
    reference: list[AnswerValues]
    """The answers of the full cache."""


class CacheValues(TypedDict):
    """One cache of one checkpoint, as measured."""

    nats: list[list[float]]
    """By document, over stretches of positions."""
    recall: dict[str, RecallValues]
    chance: float
    answers: list[AnswerValues]
    loads: list[Load]


class CacheRow(CacheValues, total=False):
    """With the losses made of it, where there were texts."""

    loss: list[float]
    spans: list[list[float]]
    beyond: list[float] | None


class ShareValues(TypedDict):
    """Shares of energy by layer."""

    mean: list[float]
    kept: list[float]


class SpectrumValues(TypedDict, total=False):
    """Shares of what a cache holds, or why there are none (`left_out`)."""

    keys: ShareValues
    values: ShareValues
    unmixed_values: ShareValues | None
    white: float
    left_out: str


class CacheGap(TypedDict):
    """Loss of a cache minus another's beyond the window, paired over documents."""

    method: str
    other: str
    mean: float
    pairs: int
    half_width: float | None
    p: float | None


class CheckpointCaches(TypedDict):
    """The results of one checkpoint with every cache."""

    directory: str
    tuned: dict[str, object] | None
    schedule: ScheduleValues
    documents: int
    haystack: str
    questions: QuestionValues
    caches: dict[str, CacheRow]
    spectrum: SpectrumValues


class CheckpointCacheRow(CheckpointCaches):
    """With the differences between its caches."""

    differences: list[CacheGap]


class CacheResults(Provenance):
    """All of `report.json` of caches but its verdict."""

    methods: list[str]
    at: list[int]
    checkpoints: dict[str, CheckpointCacheRow]


class CacheReport(CacheResults):
    """`report.json` of caches."""

    verdict: str
