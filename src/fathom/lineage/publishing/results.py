"""What the report of `fathom lineage compare`, a card and a commitment hold, key by key."""

from __future__ import annotations

from typing import TypedDict


class Content(TypedDict):
    """SHA-256 of a model's local files, and a root over them; None for what a commit names."""

    files: dict[str, str | None]
    root: str | None


class ModelIdentity(TypedDict):
    """The identity of a model: a commit, or the hashes of its files."""

    revision: str | None
    content: Content | None


class ModelEntry(ModelIdentity):
    """One of the two models."""

    origin: str
    headers_sha256: str
    file_bytes: int
    bytes_read: int
    structure: dict[str, object]
    extra_tensors: list[str]


class ControlEntry(ModelIdentity):
    """A control and its scores with each of the two."""

    model: str
    scores: list[dict[str, float]]


class ToolEntry(TypedDict):
    """The program that made the report."""

    version: str
    numpy: str
    platform: str
    command: str


class GivenEntry(TypedDict):
    """Further inputs of the comparison."""

    null: str | None
    adapter_base: str | None
    max_bytes: int | None


class OptionsEntry(TypedDict):
    """`Options`, as the report repeats them."""

    mode: str
    layers: int | None
    align: list[str]
    reorder: bool
    seed: int
    extras: bool | None


class Bounds(TypedDict):
    """An upper bound on the false-positive rate, from controls without a false positive."""

    unrelated_pairs: int
    models: int
    false_positive_rate_below: float
    note: str


class PortraitEntry(TypedDict):
    """A sketch, with its words and hashes."""

    pixels_sha256: str
    sketch_sha256: str
    words: list[str]
    sketch: str


class LineageReport(TypedDict):
    """`report.json`; entries of type `object` are written and compared as a whole."""

    fathom_lineage_report: int
    tool: ToolEntry
    inputs: list[ModelEntry]
    given: GivenEntry
    base: str
    structure: dict[str, object]
    canonicalisation: list[str]
    options: OptionsEntry
    scores: dict[str, object]
    tests: list[object]
    controls: list[ControlEntry]
    null: dict[str, object] | None
    bounds: Bounds
    inherited: dict[str, float] | None
    tampering: object
    verdict: dict[str, object]
    portraits: dict[str, PortraitEntry]
    seconds: float


class CardOutline(TypedDict):
    """Shape of the model that a card is of."""

    type: str
    layers: int
    width: int
    heads: int
    vocab: int


class Card(TypedDict):
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
