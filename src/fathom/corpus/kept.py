"""The documents that remain: cleaned, without duplicates and without those that give evaluation items away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fathom.corpus.clean import text_digest
from fathom.corpus.documents import Document, read_part
from fathom.corpus.stage import Input, Workspace
from fathom.report.files import read_json


@dataclass(frozen=True)
class KeptPart:
    """A file of documents and what was decided about its rows."""

    collection: str
    kind: str
    documents: Input
    removed: Input
    """Rows that are duplicates."""
    verdicts: Input | None
    """Rows that are dropped, and passages that are cut; None where no benchmark is named."""
    min_words: int
    """A piece of a cut document that has fewer is dropped too."""

    def inputs(self) -> tuple[Input, ...]:
        """Its files, in the order in which `kept_documents` takes them."""
        return (self.documents, self.removed, *([self.verdicts] if self.verdicts else []))


def kept_parts(workspace: Workspace) -> list[KeptPart]:
    """All files of documents, in order."""
    parts = workspace.parts("clean")
    removed = workspace.outputs("duplicates", ".npy")
    verdicts = workspace.outputs("contamination", "verdicts.json")
    found = []
    number = 0
    for task in workspace.manifest("clean")["tasks"]:
        arguments = task["arguments"]
        for name in task["outputs"]:
            if not name.startswith("part-"):
                continue
            limit = arguments["filter"]["min_words"] if arguments["filter"] else None
            verdict = verdicts[number] if verdicts else None
            ends = (parts[number], removed[number], verdict)
            found.append(KeptPart(arguments["collection"], arguments["kind"], *ends, limit or 1))
            number += 1
    return found


def kept_documents(workspace: Workspace, inputs: tuple[Input, ...], min_words: int) -> Iterator[Document]:
    """The documents of one part, one at a time; of one that is cut the pieces, each a document of its own."""
    removed = set(np.load(workspace.path(inputs[1])).tolist())
    verdicts = read_json(workspace.path(inputs[2])) if len(inputs) > 2 else {}
    for row, document in enumerate(read_part(workspace.path(inputs[0]))):
        if row in removed:
            continue
        spans = verdicts.get(str(row))
        if spans is None:
            yield document
        elif spans:
            yield from _pieces(document, spans, min_words)


def _pieces(document: Document, spans: list[list[int]], min_words: int) -> Iterator[Document]:
    edges = [0, *(edge for span in spans for edge in span), len(document.text)]
    for number, (begin, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        text = document.text[begin:end].strip("\n")
        words = len(text.split())
        if words >= min_words:
            yield replace(
                document,
                text=text,
                id=text_digest(text).hex()[:16],
                path=f"{document.path}#{number}",
                n_chars=len(text),
                n_words=words,
            )
