"""The result of extracting text from a file: a status, and the text if there is any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Status = Literal["ok", "empty", "encrypted", "no_text_layer", "parse_error", "too_large", "too_slow"]
FAILURES: tuple[Status, ...] = ("empty", "encrypted", "no_text_layer", "parse_error", "too_large", "too_slow")

POSSIBLE_NOTES = "possible_notes"
"""In a document's `meta`: how many superscripts may be marks of notes, and are kept."""


@dataclass
class Extracted:
    """The result for one file."""

    status: Status
    text: str = ""
    detail: str = ""
    """What is wrong, in a few words."""
    meta: dict[str, object] = field(default_factory=dict)


IngestValues: TypeAlias = dict[str, Any]
"""The recipe's ingest section as plain values, as it is sent to the process that reads files."""
Extractor = Callable[[Path, IngestValues], Extracted]
"""A function that extracts the text of a file."""
