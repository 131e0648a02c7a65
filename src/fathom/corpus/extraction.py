"""The result of extracting text from a file: a status, and the text if there is any.

`ingest.py` lists files whose status is not `ok` in `failed.jsonl`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Status = Literal["ok", "empty", "encrypted", "no_text_layer", "parse_error", "too_large", "too_slow"]
FAILURES: tuple[Status, ...] = ("empty", "encrypted", "no_text_layer", "parse_error", "too_large", "too_slow")

ENTITY = re.compile(rb"&(?!(?:amp|lt|gt|quot|apos);)[A-Za-z][A-Za-z0-9]{1,30};")
POSSIBLE_NOTES = "possible_notes"
"""In a document's `meta`: how many superscripts may be marks of notes, and are kept."""

PAIR = "pair"
"""In the `meta` of a conversation that was made of a paper: its kind."""


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


def xml_of(path: Path) -> Element | Extracted:
    """The root element of an XML file, which may use HTML's named entities; or a failed result with the reason why it
    cannot be parsed."""
    data = path.read_bytes()
    if not data.strip():
        return Extracted("empty", detail="a file of no text")
    if b"<!ENTITY" in data:
        return Extracted("parse_error", detail="it declares entities")
    named = ENTITY.sub(lambda one: html.unescape(one[0].decode()).encode("ascii", "xmlcharrefreplace"), data)
    try:
        return ElementTree.fromstring(named)
    except ElementTree.ParseError as error:
        return Extracted("parse_error", detail=str(error))


def tag_of(element: Element) -> str:
    """An element's name without its namespace; empty for a comment."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
