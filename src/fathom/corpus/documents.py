"""Reads and writes files of documents, one line of JSON for each document, with constant memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypedDict

OPTIONAL = ("messages", "rejected")
"""Fields that a line lacks if they are None."""
PART_BYTES = 1 << 26
"""Approximate bytes of text in one file of documents, which is what a task of a later stage reads."""
LONE = re.compile("[\ud800-\udfff]")
"""Half a character, as of a file whose name is not UTF-8; a line has it as an escape."""


class ConversationMessage(TypedDict, total=False):
    """One turn of a conversation; `train: false` excludes it from the loss."""

    role: str
    content: str
    train: bool


@dataclass
class Document:
    """One document, or one conversation, with its origin."""

    text: str
    path: str
    """Its source: the file relative to the recipe's input, or to a folder above it, and the position in the file."""
    collection: str = ""
    mime: str = "text/plain"
    license: str = "unknown"
    id: str = ""
    """The first 16 hexadecimal digits of the SHA-256 of the normalised text, or of a conversation's messages."""
    lang: str = ""
    n_chars: int = 0
    n_words: int = 0
    meta: dict[str, object] = field(default_factory=dict)
    messages: list[ConversationMessage] | None = None
    """Messages of a conversation; `text` then holds their contents. None for a document."""
    rejected: list[ConversationMessage] | None = None
    """The answer that was not chosen, if the last messages of the conversation are a chosen one."""

    def to_json(self) -> str:
        """One line."""
        values = {key: value for key, value in vars(self).items() if key not in OPTIONAL or value is not None}
        line = json.dumps(values, ensure_ascii=False)
        return json.dumps(values) if LONE.search(line) else line

    @classmethod
    def from_json(cls, line: str | bytes) -> Document:
        """The inverse of `to_json`."""
        return cls(**json.loads(line))


class PartWriter:
    """Writes documents to numbered files of about `PART_BYTES` each."""

    def __init__(self, folder: Path, limit: int = PART_BYTES) -> None:
        self._folder, self._limit = folder, limit
        self._file: IO[bytes] | None = None
        self._written = 0
        self.parts = 0

    def write(self, document: Document) -> None:
        """Append one document."""
        if self._file is None or self._written >= self._limit:
            self.close()
            self._file = (self._folder / f"part-{self.parts:05d}.jsonl").open("wb")
            self._written = 0
            self.parts += 1
        self._written += self._file.write(document.to_json().encode("utf-8") + b"\n")

    def close(self) -> None:
        """Finish the last file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_part(path: Path) -> Iterator[Document]:
    """The documents of a file, one at a time."""
    with path.open("rb") as file:
        for line in file:
            yield Document.from_json(line)


def read_at(file: IO[bytes], offset: int) -> Document:
    """The document whose line of JSON begins at a byte offset of the file."""
    file.seek(offset)
    return Document.from_json(file.readline())


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Write dicts as lines of JSON; returns the number of lines."""
    count = 0
    # A lone surrogate is not valid UTF-8, so it is written as a JSON escape.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read each line of a JSON Lines file as a dict."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
