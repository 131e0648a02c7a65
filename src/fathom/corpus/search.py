"""The audit stage that searches documents for benchmark items, and the recipe and helpers that all audit stages
share.

`leak_rules.py` decides what is found; `audit.py` writes the document, question and passage of each finding to the
report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fathom.corpus.benchmarks import Item
from fathom.corpus.contamination import read_index_items
from fathom.corpus.documents import Document, read_part
from fathom.corpus.leak_rules import Matcher, passages
from fathom.corpus.recipe import CorpusRecipe, TokenizeOptions
from fathom.corpus.stage import Input, StageOf, Task, WorkspaceOf, grouped
from fathom.corpus.words import BLOCK


@dataclass(frozen=True)
class AuditRecipe(CorpusRecipe):
    """The benchmarks to audit, and how many questions are planted."""

    tokenize: TokenizeOptions = field(default_factory=lambda: TokenizeOptions(train=300))
    """No stage of an audit reads it."""
    plants: int = 20
    """Questions that are planted for each form and length."""
    seed: int = 0
    """Of the planted questions."""


def parts_of(workspace: WorkspaceOf[Any]) -> list[Input]:
    """The files of documents."""
    return workspace.parts("ingest")


def indices_of(workspace: WorkspaceOf[Any]) -> tuple[list[Input], list[Input]]:
    """The index and the items of each benchmark."""
    return workspace.outputs("benchmarks", "index.npz"), workspace.outputs("benchmarks", "items.jsonl")


def names_of(workspace: WorkspaceOf[Any]) -> list[str]:
    """The names of the benchmarks."""
    return [task.arguments["name"] for task in workspace.manifest("benchmarks").tasks]


class Search(StageOf[AuditRecipe]):
    """Makes one task for each file of documents, which finds the benchmark items in this file."""

    name = "search"
    version = 2
    recipe_class: ClassVar[type[Any]] = AuditRecipe

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        indices, items = indices_of(self.workspace)
        return [
            Task.of([part], indices, items, benchmarks=names_of(self.workspace)) for part in parts_of(self.workspace)
        ]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        (part,), indices, lines = ([self.workspace.path(one) for one in group] for group in task.groups)
        items, names = list(map(read_index_items, lines)), task.arguments["benchmarks"]
        matcher = Matcher([dict(np.load(index)) for index in indices], items)
        counts = {"documents": 0, "characters": 0}
        with (folder / "found.jsonl").open("w", encoding="utf-8") as out:
            for batch in grouped(read_part(part), lambda one: len(one.text), BLOCK // 4):
                for document, hits in zip(batch, matcher.hits([one.text for one in batch]), strict=True):
                    counts["documents"] += 1
                    counts["characters"] += len(document.text)
                    for (benchmark, item), spans in sorted(passages(hits).items()):
                        row = _finding(document, names[benchmark], items[benchmark][item], item, spans)
                        out.write(json.dumps(row, ensure_ascii=False) + "\n")
        return counts


def _finding(
    document: Document, name: str, item: Item, number: int, spans: Sequence[Sequence[int]]
) -> dict[str, object]:
    start, end = max(spans, key=lambda span: (span[1] - span[0], -span[0]))
    place = {"document": document.path, "id": document.meta.get("id"), "start": start, "end": end}
    said = {"text": document.text[start:end], "question": item.stem, "answer": item.gold}
    return {"benchmark": name, "item": item.id, "number": number, **place, **said}
