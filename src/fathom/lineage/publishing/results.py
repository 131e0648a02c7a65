"""The classes of data in the reports of `fathom lineage compare`, and in cards."""

from __future__ import annotations

from dataclasses import dataclass

from fathom.lineage.comparison import Given, Options
from fathom.lineage.verdict import Verdict


@dataclass(frozen=True)
class Content:
    """SHA-256 of a model's local files, and a root over them; None for files that a commit identifies."""

    files: dict[str, str | None]
    root: str | None


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a model: a commit, or the hashes of its files."""

    revision: str | None
    content: Content | None


@dataclass(frozen=True)
class ModelEntry(ModelIdentity):
    """One of the two models."""

    origin: str
    headers_sha256: str
    file_bytes: int
    bytes_read: int
    structure: dict[str, object]
    extra_tensors: list[str]


@dataclass(frozen=True)
class ControlEntry(ModelIdentity):
    """A control and its scores with each of the two models."""

    model: str
    scores: list[dict[str, float]]


@dataclass(frozen=True)
class ToolEntry:
    """The versions of Fathom and numpy, the platform and the command that made the report."""

    version: str
    numpy: str
    platform: str
    command: str


@dataclass(frozen=True)
class Bounds:
    """An upper bound on the false-positive rate, from controls without a false positive."""

    unrelated_pairs: int
    models: int
    false_positive_rate_below: float
    note: str


@dataclass(frozen=True)
class PortraitEntry:
    """The published form of a sketch: hashes of its picture and its numbers, its words, and the numbers."""

    pixels_sha256: str
    sketch_sha256: str
    words: list[str]
    sketch: str


@dataclass(frozen=True)
class LineageReport:
    """The contents of `report.json`; entries of type `object` are written and compared as a whole."""

    fathom_lineage_report: int
    tool: ToolEntry
    inputs: list[ModelEntry]
    given: Given
    base: str
    structure: dict[str, object]
    canonicalisation: list[str]
    options: Options
    scores: dict[str, object]
    tests: list[object]
    controls: list[ControlEntry]
    null: dict[str, object] | None
    bounds: Bounds
    inherited: dict[str, float] | None
    tampering: object
    verdict: Verdict
    portraits: dict[str, PortraitEntry]
    seconds: float


@dataclass(frozen=True)
class CardOutline:
    """The shape of the model that a card describes."""

    type: str
    layers: int
    width: int
    heads: int
    vocab: int


@dataclass(frozen=True)
class Card:
    """A model's card."""

    fathom_card: int
    tool: str
    name: str
    revision: str | None
    structure: CardOutline
    tokenizer: bool
    anchors: int
    low_coverage: bool
    sketches: dict[str, str]
    """By kind, 512 bytes in hexadecimal."""
    sketch_sha256: str
    words: list[str]
