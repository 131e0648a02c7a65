"""`fathom corpus audit`: finds benchmark questions in a folder of text, and measures how many such leaks this search
misses.

The documents are read as `fathom corpus` reads them, rows of data sets with all of their fields, and searched as they
are: nothing is filtered before. Then the audit plants each benchmark's own questions in excerpts of these documents, in
every form of `forms.py`, and counts how many it finds. The result is the same for every number of workers, because
neither the tasks nor the planted questions (`--seed`) depend on it.

`search.py` searches, `planting.py` plants, `leak_rules.py` and `damaged.py` decide what is found, and `benchmarks.py`
reads a benchmark's files. `cli/corpus_audit.py` sets the exit code.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathom.corpus.contamination import checks_of
from fathom.corpus.documents import read_lines
from fathom.corpus.executor import executing
from fathom.corpus.forms import ALL
from fathom.corpus.ingest import DIGESTS
from fathom.corpus.pipeline import carry_out
from fathom.corpus.planting import LENGTHS
from fathom.corpus.recipe import BenchmarkFile, Collection, Decontaminate, Executor, IngestOptions
from fathom.corpus.search import AuditRecipe, names_of
from fathom.corpus.stage import STAGES, WorkspaceOf, owned, sweep
from fathom.corpus.stages import AUDIT
from fathom.data.sources import ALL_FIELDS, find_files, reader_of
from fathom.errors import DataError, SettingsError
from fathom.report import PAGE, REPORT
from fathom.report.files import LOCK, write_atomically, write_json
from fathom.report.html import page, section, table

SPLITS = ("train", "test", "dev", "val")
"""How files are named that only their folder tells apart."""
ALL_FORMS = "all forms"
SHOWN = 1000
"""Findings that the page lists; `report.json` has all."""
QUOTE = 300
"""Characters of each."""
QUOTED = ("text", "question", "answer")


@dataclass(frozen=True)
class Audited:
    """The result for one benchmark."""

    questions: int
    leaked: int
    """Questions found in the documents."""
    documents: int
    """Documents in which one was found."""
    unfindable: int
    """Questions too short to be found in any form."""
    template_only: int
    """Questions that are found only next to their answer, since others share their words."""
    recall: dict[str, dict[str, tuple[int, int]]]
    """Planted and found questions by form, and by length of the question."""

    def by_length(self) -> dict[str, tuple[int, int]]:
        """For each question length: how many questions were planted and how many of them were found, over all forms of
        leak."""
        cells = [row for row in self.recall.values()]
        return {
            length: (sum(row[length][0] for row in cells), sum(row[length][1] for row in cells)) for length in LENGTHS
        }


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    documents: int
    characters: int
    unread: int
    """Files and rows that could not be read."""
    benchmarks: dict[str, Audited]
    findings: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        """A few lines for people."""
        read = f"{self.documents:,} documents read, {self.characters / 1e6:,.1f} million characters"
        lines = [read + (f"; {self.unread:,} could not be read" if self.unread else "")]
        for name, one in self.benchmarks.items():
            lines.append(
                f"{name}: {one.leaked:,} of {one.questions:,} questions found, in {one.documents:,} documents; "
                f"{one.unfindable:,} are too short to find"
            )
            shares = ", ".join(f"{words} words {_share(*cell)}" for words, cell in one.by_length().items() if cell[0])
            lines += [f"  planted questions found: {shares}"] if shares else []
        for row in self.findings[:10]:
            said = " ".join(row["text"].split())[:100]
            lines.append(f"  {row['document']} {row['start']}–{row['end']}: {row['benchmark']} {row['item']}: {said}")
        if len(self.findings) > 10:
            lines.append(f"  and {len(self.findings) - 10:,} more")
        return "\n".join(lines)


def _share(planted: int, found: int) -> str:
    return f"{100 * found / planted:.1f} %" if planted else "–"


def audit(
    inputs: Sequence[str],
    benchmarks: Sequence[str],
    out: Path,
    plants: int = 20,
    seed: int = 0,
    workers: int | None = None,
) -> Audit:
    """Audit documents, and write `report.json` and `report.html` into a directory. A killed audit resumes.

    Args:
        inputs: Files, folders and globs of documents.
        benchmarks: `[NAME=]PATH` of each benchmark: a file, or a folder of the files of its splits.
        out: The directory.
        plants: Questions that are planted for each form and length.
        seed: Of the planted questions.
        workers: Processes; the result does not depend on it.
    """
    whole = AuditRecipe(
        collections={"documents": Collection(inputs=tuple(inputs), text_field=ALL_FIELDS)},
        ingest=IngestOptions(html="plain"),
        decontaminate=Decontaminate(benchmarks=dict(_benchmark_files(benchmarks))),
        executor=Executor(workers=workers),
        plants=plants,
        seed=seed,
    )
    workspace: WorkspaceOf[Any] = WorkspaceOf(out, whole)
    with owned(out, _is_ours, "audited"), _removed_if_refused(out / STAGES):
        sweep(out)
        with executing(whole.executor) as execute:
            reports = {stage.name: carry_out(stage(workspace), execute) for stage in AUDIT}
        ingested, searched = reports["ingest"].counts, reports["search"].counts
        if not ingested.get("ok"):
            raise DataError(f"no document to search{_first_failure(workspace)}")
        found = Audit(
            searched.get("documents", 0),
            searched.get("characters", 0),
            ingested.get("documents", 0) - ingested.get("ok", 0) - ingested.get("empty", 0),
            *_findings(workspace),
        )
        write_json(out / REPORT, found)
        write_atomically(out / PAGE, audit_page(found, inputs))
    return found


@contextmanager
def _removed_if_refused(stages: Path) -> Iterator[None]:
    """If the input is unusable, remove the files that this audit wrote; files of an earlier audit that was killed are
    kept, and that audit can be resumed."""
    new = not stages.exists()
    try:
        yield
    except DataError as error:
        if new and error.exit_code == 2:
            shutil.rmtree(stages, ignore_errors=True)
        raise


def _first_failure(workspace: WorkspaceOf[Any]) -> str:
    rows = (row for one in workspace.outputs("ingest", "failed.jsonl") for row in read_lines(workspace.path(one)))
    return next((f": {row['path']}: {row['detail'] or row['status']}" for row in rows), "")


def _is_ours(directory: Path) -> bool:
    names = {one.name for one in directory.iterdir()}
    return names <= {LOCK, DIGESTS} or (STAGES in names and names <= {STAGES, REPORT, PAGE, LOCK, DIGESTS})


def _benchmark_files(given: Sequence[str]) -> Iterator[tuple[str, BenchmarkFile]]:
    """(name, file) of each benchmark; a file in a folder is named after both the folder and the file."""
    seen: set[str] = set()
    for text in given:
        name, _, path = text.partition("=")
        if not path or "/" in name or Path(text.partition("#")[0]).exists():  # a path may hold the sign, too
            name, path = "", text
        place, _, key = path.partition("#")
        files = find_files(place, lambda file: reader_of(file) is not None, "JSON lines, JSON, CSV, Parquet")
        for file in files:
            stem = file.name.partition(".")[0]
            several = len(files) > 1 or (not name and stem.startswith(SPLITS))
            label = re.sub(r"[^\w-]+", "-", f"{name or file.parent.name}-{stem}" if several else name or stem)
            if label in seen:
                raise SettingsError(
                    f"--benchmark: two benchmarks are called {label}; rename one, with NAME=PATH or its file"
                )
            seen.add(label)
            yield label, BenchmarkFile(path=f"{file}#{key}" if key else str(file))


def _findings(workspace: WorkspaceOf[Any]) -> tuple[dict[str, Audited], list[dict[str, Any]]]:
    found = [row for one in workspace.outputs("search", "found.jsonl") for row in read_lines(workspace.path(one))]
    found.sort(key=lambda row: (row["benchmark"], row["number"], row["document"]))
    cells: dict[str, dict[str, dict[str, tuple[int, int]]]] = {name: {} for name in names_of(workspace)}
    for task, one in zip(workspace.manifest("plant").tasks, workspace.outputs("plant", "recall.jsonl"), strict=True):
        for row in read_lines(workspace.path(one)):
            mine = cells[task.arguments["benchmark"]].setdefault(row["form"], {})
            mine[row["length"]] = row["planted"], row["found"]
    benchmarks = {}
    for check in checks_of(workspace):
        its = [row for row in found if row["benchmark"] == check.benchmark]
        benchmarks[check.benchmark] = Audited(
            check.items,
            len({row["number"] for row in its}),
            len({row["document"] for row in its}),
            len(check.too_short_to_find),
            len(check.template_only),
            {form: cells[check.benchmark][form] for form in ALL if form in cells[check.benchmark]},
        )
    return benchmarks, found


def audit_page(found: Audit, inputs: Sequence[str]) -> str:
    """The page of an audit."""
    leaked = sum(one.leaked for one in found.benchmarks.values())
    of = sum(one.questions for one in found.benchmarks.values())
    noun = "document" if found.documents == 1 else "documents"
    verdict = f"{leaked:,} of {of:,} questions were found in a search of {found.documents:,} {noun}. {_recall(found)}"
    columns = ("benchmark", "questions", "found", "in documents", "too short to find", "only with their answer")
    counts = {
        name: (one.questions, one.leaked, one.documents, one.unfindable, one.template_only)
        for name, one in found.benchmarks.items()
    }
    rows = [(name, *(f"{count:,}" for count in some)) for name, some in counts.items()]
    note = "Questions too short to find are missed in every form. Paraphrases and translations are not searched for."
    listed = [
        (*(str(row[key]) for key in ("document", "benchmark", "item")), *(row[key][:QUOTE] for key in QUOTED))
        for row in found.findings[:SHOWN]
    ]
    more = f"The first {SHOWN:,} of {len(found.findings):,}; {REPORT} has all." if len(found.findings) > SHOWN else ""
    blocks = [
        section("Benchmarks", table("Questions found", columns, rows, note=note)),
        section(
            "What was found",
            table("Passages", ("document", "benchmark", "item", "the document says", "question", "answer"), listed,
                  ("the document says", "question", "answer"), more),
        ),
    ]  # fmt: skip
    for name, one in found.benchmarks.items():
        if any(planted for planted, _ in one.by_length().values()):
            blocks.append(section(f"How much the search finds: {name}", _recall_table(name, one)))
    return page(f"Audit of {', '.join(inputs)}", verdict, *blocks)


def _recall(found: Audit) -> str:
    """A sentence for the report: what share of the planted questions the search finds."""
    cells = [cell for one in found.benchmarks.values() for cell in one.by_length().values()]
    planted, seen = (sum(column) for column in zip(*cells, strict=True)) if cells else (0, 0)
    return f"The search finds {100 * seen / planted:.1f} % of planted ones." if planted else "No question was planted."


def _recall_table(name: str, one: Audited) -> str:
    lengths = [length for length, (planted, _) in one.by_length().items() if planted]
    findable = [length for length in lengths if one.by_length()[length][1]]
    cells: list[tuple[str, Mapping[str, tuple[int, int]]]] = [(ALL_FORMS, one.by_length()), *one.recall.items()]
    rows = [
        (form, *(f"{row[length][1]} of {row[length][0]}" if row[length][0] else "–" for length in lengths))
        for form, row in cells
        if form == ALL_FORMS or any(row[length][1] < row[length][0] for length in findable)
    ]
    note = (
        "Questions of the benchmark were planted with their answers in excerpts of the documents, at random. Forms "
        f"that were all found at the lengths where any was are left out; {REPORT} has all {len(one.recall)}."
    )
    return table(f"Planted questions found, by words of the question: {name}", ("form", *lengths), rows, (), note)
