"""The contents of `report.json` of `fathom evaluate caches`.

`evaluate.py` measures the parts; `kept` in `evaluation/scoring.py` stores each part and skips it when resuming.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fathom.evaluation.caches.needles import Recall
from fathom.evaluation.caches.spectrum import Spectrum
from fathom.kvcache.schedule import Schedule
from fathom.report.provenance import Provenance
from fathom.report.statistics import Difference


@dataclass
class Load:
    """Measurements of a cache after a number of tokens: its entries, bytes, peak memory and speed."""

    tokens: int
    entries: int
    """Entries of the layer that holds most: layers with a window hold fewer, and those with a state none."""
    cache_bytes: int
    peak_bytes: int | None
    """Peak memory above that before the text, so without weights; None where the system does not report it."""
    prefill_tokens_per_second: float
    """Speed over the tokens of all rows."""
    decode_ms: dict[str, float]
    """Milliseconds for a step: p50, p90 and max, compressions included."""
    clock: str
    """The name of the clock."""


@dataclass(frozen=True)
class Answer:
    """The answer of a model with one cache to one question."""

    task: str
    place: str
    """`outside` or `inside`: whether the question came after or before the last compression."""
    compressions: int
    beyond: bool
    """Whether the answer is older than the tokens that `drop` still holds at the end of the prompt."""
    score: float
    """1 for an exact answer; of RULER's tasks, the share of the expected strings."""
    nats: float | None
    """Nats per token of the answer, if it is scored token by token."""


@dataclass
class Questions:
    """The questions that every cache was asked."""

    asked: int
    left_out: dict[str, str]
    """Tasks that do not fit, and why."""
    reference: list[Answer]
    """The answers of the full cache."""


@dataclass
class CacheRow:
    """The measurements of one cache of one checkpoint, with the losses if texts were given."""

    nats: list[list[float]]
    """Nats by document, over stretches of positions."""
    recall: dict[str, Recall]
    chance: float
    answers: list[Answer]
    loads: list[Load]
    loss: list[float] | None = None
    spans: list[list[float]] | None = None
    beyond: list[float] | None = None


@dataclass(kw_only=True)
class CacheGap(Difference):
    """The loss beyond the window of one cache minus that of another cache, paired over documents, or over the
    clusters that they name."""

    method: str
    other: str


@dataclass
class CheckpointCaches:
    """The results of one checkpoint with every cache."""

    directory: str
    tuned: dict[str, object] | None
    schedule: Schedule
    documents: int
    haystack: str
    questions: Questions
    caches: dict[str, CacheRow]
    spectrum: Spectrum
    differences: list[CacheGap] = field(default_factory=list)
    clusters: list[str | None] | None = None
    """The cluster of each document; None if no document names one."""


@dataclass(kw_only=True)
class CacheReport(Provenance):
    """`report.json` of caches."""

    verdict: str = ""
    methods: list[str]
    at: list[int]
    checkpoints: dict[str, CheckpointCaches]
