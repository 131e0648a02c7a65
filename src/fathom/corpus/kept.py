"""The remaining documents: cleaned, without duplicates and without contaminated ones.

`clean.py`, `duplicates.py` and `contamination.py` decide what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np

from fathom.corpus.clean import text_digest
from fathom.corpus.documents import Document, read_part
from fathom.corpus.stage import Input, Task, Workspace
from fathom.corpus.words import count_words
from fathom.report.files import read_json


@dataclass(frozen=True)
class KeptPart:
    """A file of documents, with the files that say which of its rows are dropped or cut."""

    collection: str
    kind: str
    documents: Input
    removed: Input
    """Rows that are duplicates."""
    verdicts: Input | None
    """Rows to drop and passages to cut; None if the recipe names no benchmark."""
    min_words: int
    """Minimum words of a piece that is left of a cut document; shorter pieces are dropped."""


def kept_parts(workspace: Workspace) -> list[KeptPart]:
    """All files of cleaned documents, in order, each with the decisions of deduplication and decontamination."""
    removed = workspace.outputs("duplicates", ".npy")
    verdicts = workspace.outputs("contamination", "verdicts.json")
    files = zip(clean_parts(workspace), workspace.parts("clean"), removed, verdicts or repeat(None), strict=False)
    return [
        KeptPart(arguments["collection"], arguments["kind"], part, gone, verdict, least)
        for (arguments, least), part, gone, verdict in files
    ]


def clean_parts(workspace: Workspace) -> Iterator[tuple[dict[str, Any], int]]:
    """For every file of cleaned documents: the arguments of the task that wrote it, and the minimum number of words of
    a piece of a cut document."""
    for task in workspace.manifest("clean").tasks:
        limits = task.arguments["filter"]
        for name in task.outputs:
            if name.startswith("part-"):
                yield task.arguments, (limits["min_words"] if limits else None) or 1


def part_task(parts: Sequence[KeptPart], first: Sequence[Input] = (), **arguments: object) -> Task:
    """A task whose inputs are the files `first`, followed by the files of some parts."""
    listed = [[part.collection, part.kind, part.min_words] for part in parts]
    documents, removed = ([getattr(part, name) for part in parts] for name in ("documents", "removed"))
    verdicts = [part.verdicts for part in parts if part.verdicts]
    return Task.of(first, documents, removed, verdicts, parts=listed, **arguments)


def parts_of(task: Task) -> list[KeptPart]:
    """The parts that a task made by `part_task` reads."""
    _, documents, removed, verdicts = task.groups
    files = zip(task.arguments["parts"], documents, removed, verdicts or [None] * len(removed), strict=True)
    return [
        KeptPart(collection, kind, part, gone, verdict, least)
        for (collection, kind, least), part, gone, verdict in files
    ]


def kept_documents(workspace: Workspace, part: KeptPart) -> Iterator[Document]:
    """The documents of one part, one at a time; a cut document yields its remaining pieces as documents."""
    removed = set(np.load(workspace.path(part.removed)).tolist())
    verdicts = read_json(workspace.path(part.verdicts)) if part.verdicts else {}
    for row, document in enumerate(read_part(workspace.path(part.documents))):
        if row in removed:
            continue
        spans = verdicts.get(str(row))
        if spans is None:
            yield document
        elif spans:
            yield from (piece for piece in pieces_of(document, spans) if piece.n_words >= part.min_words)


def pieces_of(document: Document, spans: Sequence[Sequence[int]]) -> Iterator[Document]:
    """The pieces that remain of a document after passages were cut out; some may have no words."""
    edges = [0, *(edge for span in spans for edge in span), len(document.text)]
    for number, (begin, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        text = document.text[begin:end].strip("\n")
        yield replace(
            document,
            text=text,
            id=text_digest(text).hex()[:16],
            path=f"{document.path}#{number}",
            n_chars=len(text),
            n_words=count_words(text),
        )
