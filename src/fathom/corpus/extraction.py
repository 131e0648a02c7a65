"""What comes of a file that is no plain text: a status, and its text where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Status = Literal["ok", "empty", "encrypted", "no_text_layer", "parse_error", "too_large", "too_slow"]
FAILURES: tuple[Status, ...] = ("empty", "encrypted", "no_text_layer", "parse_error", "too_large", "too_slow")


@dataclass
class Extracted:
    """The outcome for one file."""

    status: Status
    text: str = ""
    detail: str = ""
    """What is wrong, in a few words."""
    meta: dict[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """As plain values, for JSON."""
        return asdict(self)


IngestValues: TypeAlias = dict[str, Any]
"""The recipe's ingest section as plain values, in which shape it travels to the process that reads."""
Extractor = Callable[[Path, IngestValues], Extracted]
"""Reads a file."""
