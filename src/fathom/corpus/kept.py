"""The remaining documents: cleaned, without duplicates and without contaminated ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from fathom.corpus.clean import text_digest
from fathom.corpus.documents import Document, read_part
from fathom.corpus.stage import Input, Workspace
from fathom.report.files import read_json


@dataclass(frozen=True)
class KeptPart:
    """A file of documents, and the decisions on its rows."""

    collection: str
    kind: str
    documents: Input
    removed: Input
    """Rows that are duplicates."""
    verdicts: Input | None
    """Rows to drop and passages to cut; None if the recipe names no benchmark."""
    min_words: int
    """Minimum words of a piece that is left of a cut document; shorter pieces are dropped."""

    def inputs(self) -> tuple[Input, ...]:
        """Its files, in the order that `kept_documents` takes."""
        return (self.documents, self.removed, *([self.verdicts] if self.verdicts else []))


def kept_parts(workspace: Workspace) -> list[KeptPart]:
    """All files of documents, in order."""
    parts = workspace.parts("clean")
    removed = workspace.outputs("duplicates", ".npy")
    verdicts = workspace.outputs("contamination", "verdicts.json")
    found = []
    for number, (arguments, least) in enumerate(clean_parts(workspace)):
        verdict = verdicts[number] if verdicts else None
        ends = (parts[number], removed[number], verdict)
        found.append(KeptPart(arguments["collection"], arguments["kind"], *ends, least))
    return found


def clean_parts(workspace: Workspace) -> Iterator[tuple[dict[str, Any], int]]:
    """For every file of cleaned documents: its task's arguments, and the minimum words of a piece."""
    for task in workspace.manifest("clean").tasks:
        limits = task.arguments["filter"]
        for name in task.outputs:
            if name.startswith("part-"):
                yield task.arguments, (limits["min_words"] if limits else None) or 1


def by_part(inputs: Iterable[Input], counts: Iterable[int]) -> list[tuple[Input, ...]]:
    """A task's inputs as the files of each part, which `KeptPart.inputs` gave."""
    files = iter(inputs)
    return [tuple(islice(files, count)) for count in counts]


def kept_documents(workspace: Workspace, inputs: tuple[Input, ...], min_words: int) -> Iterator[Document]:
    """The documents of one part, one at a time; a cut document yields its remaining pieces as documents."""
    removed = set(np.load(workspace.path(inputs[1])).tolist())
    verdicts = read_json(workspace.path(inputs[2])) if len(inputs) > 2 else {}
    for row, document in enumerate(read_part(workspace.path(inputs[0]))):
        if row in removed:
            continue
        spans = verdicts.get(str(row))
        if spans is None:
            yield document
        elif spans:
            yield from (piece for piece in pieces_of(document, spans) if piece.n_words >= min_words)


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
            n_words=len(text.split()),
        )
