"""Documents that leak evaluation items, and the items that they leak.

`benchmarks` reads, checks and indexes the benchmarks. `contamination` searches each file of documents for their items.
`flags` marks every item as clean or dirty (contaminated). `leak_rules.py` defines what counts as a leak.

`folding.py` makes the forms of a text that are searched, among them parts without their citations, notes and links.
`damaged.py` finds questions with errors. `benchmarks.py` finds a benchmark's faults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fathom.corpus.benchmarks import Item, SelfCheck, plain, read_items, self_check
from fathom.corpus.documents import Document, read_lines, read_part, write_lines
from fathom.corpus.kept import clean_parts, pieces_of
from fathom.corpus.leak_rules import Hit, Matcher, build_index, passages
from fathom.corpus.stage import REMEDY, Input, Stage, Task, Workspace, grouped
from fathom.corpus.words import BLOCK
from fathom.errors import DataError
from fathom.report.files import digest, write_json
from fathom.report.results import read_result

SNIPPET = 300
"""Characters of a document that a report quotes."""


class Benchmarks(Stage):
    """One task for each benchmark."""

    name = "benchmarks"
    version = 8
    uses = ("decontaminate.words", "decontaminate.whole", "decontaminate.shortest")

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        found = []
        for name, one in self.recipe.decontaminate.benchmarks.items():
            place = Path(one.path.partition("#")[0]).expanduser()
            if not place.is_file():
                raise DataError(f"decontaminate.benchmarks.{name}: {place}: no such file")
            entry = Input.of(str(place.absolute()), digest(place))
            arguments = {"name": name, "question": one.question, "part": one.path.partition("#")[2]}
            found.append(Task((entry,), arguments))
        return found

    def check(self) -> None:
        """Refuse, before any work, a benchmark file that cannot be read, unless an earlier run has already read it."""
        for task in self.tasks():
            if not self.done(task):
                self._items(task)

    def _items(self, task: Task) -> list[Item]:
        name, part = task.arguments["name"], task.arguments["part"]
        place = task.inputs[0].path + (f"#{part}" if part else "")
        return read_items(Path(place), name, task.arguments["question"])

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        name, items = task.arguments["name"], self._items(task)
        found = self_check(items)
        index, unfound = build_index(items, self.recipe.decontaminate)
        np.savez(folder / "index.npz", allow_pickle=False, **index)
        write_lines(folder / "items.jsonl", (asdict(item) for item in items))
        check = BenchmarkCheck(
            **vars(found), benchmark=name, template_only=unfound.template, too_short_to_find=unfound.short
        )
        write_json(folder / "check.json", check)
        return {
            "items": len(items),
            "contradictory": check.counts["contradictory"],
            "template_only": len(check.template_only),
            "too_short_to_find": len(check.too_short_to_find),
        }

    def finish(self, counts: dict[str, int]) -> None:
        """If `decontaminate.strict` is set, refuse a benchmark in which one question has two different answers."""
        if self.recipe.decontaminate.strict and counts.get("contradictory"):
            raise DataError(
                f"benchmarks: {counts['contradictory']} questions have two different answers: see check.json below "
                f"{self.workspace.stage(self.name)}; decontaminate.strict=false continues nevertheless",
                1,
            )


class Contamination(Stage):
    """One task for each file of documents: the action for each document that contains an item, and the reason."""

    name = "contamination"
    version = 8

    def settings(self) -> dict[str, object]:
        """The recipe values that this stage's results depend on."""
        return {"margin": self.recipe.decontaminate.margin, "actions": self._actions()}

    def _actions(self) -> dict[str, str]:
        leaks = self.recipe.decontaminate
        return {name: one.action or leaks.action for name, one in leaks.benchmarks.items()}

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        indices, items = (self.workspace.outputs("benchmarks", name) for name in ("index.npz", "items.jsonl"))
        names = [task.arguments["name"] for task in self.workspace.manifest("benchmarks").tasks]
        removed = self.workspace.outputs("duplicates", ".npy")
        parts = self.workspace.parts("clean") if names else []
        cuts = "cut" in self._actions().values()
        return [
            Task.of([part], [gone], indices, items, benchmarks=names, **({"min_words": least} if cuts else {}))
            for part, gone, (_, least) in zip(parts, removed, clean_parts(self.workspace), strict=False)
        ]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        names = task.arguments["benchmarks"]
        (part,), (gone,), indices, lines = ([self.workspace.path(one) for one in group] for group in task.groups)
        items = dict(zip(names, map(read_index_items, lines), strict=True))
        matcher = Matcher([dict(np.load(index)) for index in indices], list(items.values()))
        removed = set(np.load(gone).tolist())
        counts = dict.fromkeys(("documents", "hits", "dropped", "cut", "reported", "short_pieces"), 0)
        verdicts: dict[str, list[list[int]]] = {}
        short: list[dict[str, object]] = []
        with (folder / "hits.jsonl").open("w", encoding="utf-8") as out:
            for row, document, found in self._search(part, removed, (names, matcher), counts):
                action, spans = self._action(document, found)
                if action == "cut":
                    lost, some_left = _too_short(document, spans, task.arguments["min_words"])
                    short += lost
                    action = "cut" if some_left else "drop"
                counts[{"drop": "dropped", "cut": "cut", "report": "reported"}[action]] += 1
                counts["hits"] += len(found)
                if action != "report":
                    verdicts[str(row)] = spans if action == "cut" else []
                for line in _lines(row, document, found, items, action):
                    out.write(line)
        counts["short_pieces"] = len(short)
        write_json(folder / "verdicts.json", verdicts)
        write_lines(folder / "dropped.jsonl", short)
        return counts

    def _search(
        self, path: Path, removed: set[int], wanted: tuple[Sequence[str], Matcher], counts: dict[str, int]
    ) -> Iterator[tuple[int, Document, list[tuple[str, Hit]]]]:
        """Yields (row, document, hits) for each document in which a benchmark item was found."""
        names, matcher = wanted
        for batch in _row_batches(path, removed):
            counts["documents"] += len(batch)
            found = matcher.hits([document.text for _, document in batch])
            for (row, document), mine in zip(batch, found, strict=True):
                if mine:
                    yield row, document, [(names[benchmark], hit) for benchmark, hit in mine]

    def _action(self, document: Document, found: Sequence[tuple[str, Hit]]) -> tuple[str, list[list[int]]]:
        """The strictest of the actions set for the benchmarks whose items are in the document, and the passages to
        cut."""
        actions = self._actions()
        wanted = {actions[name] for name, _ in found}
        if "drop" in wanted or ("cut" in wanted and document.messages is not None):
            return "drop", []
        if "cut" not in wanted:
            return "report", []
        margin = self.recipe.decontaminate.margin
        spans: list[list[int]] = []
        for hit in sorted((hit for name, hit in found if actions[name] == "cut"), key=lambda hit: hit.start):
            low, high = max(hit.start - margin, 0), min(hit.end + margin, len(document.text))
            if spans and low <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], high)
            else:
                spans.append([low, high])
        return "cut", spans


def _too_short(document: Document, spans: Sequence[Sequence[int]], least: int) -> tuple[list[dict[str, object]], bool]:
    """Report lines on the pieces of a cut document that have too few words, and whether any long enough piece
    remains."""
    pieces = [piece for piece in pieces_of(document, spans) if piece.n_words]
    lost: list[dict[str, object]] = [
        {"id": one.id, "path": one.path, "of": document.id, "reason": "min_words", "value": one.n_words, "limit": least}
        for one in pieces
        if one.n_words < least
    ]
    return lost, len(lost) < len(pieces)


def _row_batches(path: Path, removed: set[int]) -> Iterator[list[tuple[int, Document]]]:
    left = ((row, document) for row, document in enumerate(read_part(path)) if row not in removed)
    return grouped(left, lambda one: len(one[1].text), BLOCK // 4)


def _lines(
    row: int, document: Document, found: Sequence[tuple[str, Hit]], items: Mapping[str, Sequence[Item]], action: str
) -> Iterator[str]:
    """Report lines on a document: one for each benchmark item found in it, with the longest passage that both share."""
    for (name, number), mine in sorted(passages(found).items()):
        start, end = max(mine, key=lambda span: (span[1] - span[0], -span[0]))
        item = items[name][number]
        row_values = {
            "benchmark": name,
            "item": item.id,
            "item_number": number,
            "row": row,
            "id": document.id,
            "path": document.path,
            "collection": document.collection,
            "action": action,
            "start": start,
            "end": end,
            "words": len(plain(document.text[start:end]).split()),
            "document_says": document.text[start:end][:SNIPPET],
            "item_says": f"{item.stem} {item.gold}".strip()[:SNIPPET],
        }
        yield json.dumps(row_values, ensure_ascii=False) + "\n"


def read_index_items(path: Path) -> list[Item]:
    """Read the items of a benchmark from the file that the task of this benchmark wrote."""
    return [
        Item(**{**row, "choices": tuple(row["choices"]), "accepted": tuple(row["accepted"])})
        for row in read_lines(path)
    ]


class Flags(Stage):
    """Writes one file for each benchmark, which says of each item that can be asked whether it is contaminated, and by
    which documents."""

    name = "flags"
    version = 2

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        items = self.workspace.outputs("benchmarks", "items.jsonl")
        names = [task.arguments["name"] for task in self.workspace.manifest("benchmarks").tasks]
        hits = self.workspace.outputs("contamination", "hits.jsonl")
        return [Task((one, *hits), {"benchmark": name}) for name, one in zip(names, items, strict=True)]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        name = task.arguments["benchmark"]
        items = read_index_items(self.workspace.path(task.inputs[0]))
        where: dict[int, list[dict[str, object]]] = {}
        for one in task.inputs[1:]:
            for row in read_lines(self.workspace.path(one)):
                if row["benchmark"] == name:
                    found = {key: row[key] for key in ("collection", "path", "id", "words", "action")}
                    where.setdefault(row["item_number"], []).append(found)
        rows = (
            {
                "id": item.id,
                "number": number,
                "question": f"{item.context}\n{item.stem}" if item.context else item.stem,
                "choices": list(item.choices),
                "answer": item.answer,
                "dirty": number in where,
                "documents": where.get(number, [])[:10],
            }
            for number, item in enumerate(items)
            if not item.cannot_be_asked()
        )
        written = write_lines(folder / f"{name}.jsonl", rows)
        return {"items": len(items), "dirty": len(where), "left_out": len(items) - written}


@dataclass(frozen=True, kw_only=True)
class BenchmarkCheck(SelfCheck):
    """The self-check of a benchmark, with its name and the ids of items that a search for the question alone cannot
    find."""

    benchmark: str
    template_only: list[str]
    too_short_to_find: list[str]


def checks_of(workspace: Workspace) -> list[BenchmarkCheck]:
    """The self-check of each benchmark."""
    return [
        read_result(BenchmarkCheck, workspace.path(one), REMEDY)
        for one in workspace.outputs("benchmarks", "check.json")
    ]
