"""Paired differences of lm-eval runs that were made elsewhere, from the files that `--log_samples` writes.

lm-eval writes `samples_TASK_DATE.jsonl`, a line for every question with its value of each metric, next to
`results_DATE.json`. Runs are paired by question: by its number and the hash of its document. Questions that a run lacks
are left out of all. How a metric adds up is not in these files, so a metric is shown only if a mean of its values, or
the exponential of one, gives the number that lm-eval reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from fathom._version import __version__
from fathom.data.sources import CLUSTER
from fathom.errors import DataError, SettingsError
from fathom.evaluation.paired import AGGREGATIONS, Items, aggregated, rows, same
from fathom.evaluation.results import ScoreRow
from fathom.evaluation.scores_page import interval_notes, score_table
from fathom.evaluation.tasks import json_rows
from fathom.report.tables import line_width, terminal_table

FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
Question: TypeAlias = tuple[object, object]
"""A question: its number in the task, and the hash of its document."""


@dataclass(frozen=True)
class Logged:
    """One task of a run under one filter: its questions, and lm-eval's own numbers."""

    documents: Mapping[Question, dict[str, Any]]
    reported: Mapping[str, Any]


@dataclass
class SamplesReport:
    """What `fathom evaluate samples --json` prints."""

    fathom: str
    runs: dict[str, str]
    """The folder of each run; all are compared with the first."""
    rows: list[ScoreRow]
    notes: list[str] = field(default_factory=list)


Tasks: TypeAlias = dict[tuple[str, str], Logged]
"""By task and filter."""


def compare_samples(folders: Sequence[str | Path], cluster: str = CLUSTER) -> SamplesReport:
    """Compare lm-eval runs with the first of them.

    Args:
        folders: Folders that lm-eval wrote with `--log_samples`, or `NAME=FOLDER`; at least two.
        cluster: A field of the documents: those that have the same value in it are no independent draws.
    """
    places = _named(folders)
    if len(places) < 2:
        raise SettingsError("a comparison needs two runs or more")
    runs = {name: read(place) for name, place in places.items()}
    first = next(iter(runs.values()))
    shared = [key for key in first if all(key in run for run in runs.values())]
    if not shared:
        raise DataError(f"no task is in all of {', '.join(map(str, places.values()))}")
    left = sorted({task for run in runs.values() for task, _ in run.keys() - {*shared}})
    notes = [f"not in every run: {', '.join(left)}"] if left else []
    scores: dict[str, dict[tuple[str, str], list[Items]]] = {name: {} for name in runs}
    for task, chosen in shared:
        logged = {name: run[task, chosen] for name, run in runs.items()}
        common = _common(task, logged, notes)
        for metric in _metrics(logged.values()):
            ways = {_way(one, metric, chosen) for one in logged.values()}
            if len(ways) > 1 or None in ways:
                notes.append(f"{task}: {metric} is left out: it is no mean over questions")
                continue
            label = metric if chosen == "none" else f"{metric},{chosen}"
            for name, one in logged.items():
                scores[name][task, label] = [_items([one.documents[key] for key in common], metric, ways, cluster)]
    return SamplesReport(__version__, {name: str(place) for name, place in places.items()}, rows(scores), notes)


def _named(folders: Sequence[str | Path]) -> dict[str, Path]:
    """`[NAME=]FOLDER` by name; by default the name of the folder."""
    made: dict[str, Path] = {}
    for entry in map(str, folders):
        name, equals, path = entry.partition("=")
        if not equals or "/" in name or Path(entry).exists():
            name, path = Path(entry).resolve().name, entry
        if not Path(path).is_dir():
            raise DataError(f"{path}: no such folder")
        if name in made:
            raise SettingsError(f"two runs are called {name!r}; name them: NAME=FOLDER")
        made[name] = Path(path)
    return made


def read(folder: Path) -> Tasks:
    """The questions of a run; of a task that was run several times, the last."""
    newest: dict[str, tuple[str, Path]] = {}
    for path in sorted(folder.rglob("samples_*.jsonl")):
        if (found := FILE.fullmatch(path.name)) is None:
            continue
        task, date = found["task"], found["date"]
        if task in newest and newest[task][1].parent != path.parent:
            places = f"{newest[task][1].parent} and {path.parent}"
            raise DataError(f"{folder}: {task} is in {places}: give the folder of one run")
        newest[task] = max(newest.get(task, ("", path)), (date, path))
    if not newest:
        raise DataError(f"{folder}: no samples_TASK_DATE.jsonl in it: run lm-eval with --log_samples --output_path")
    made: Tasks = {}
    for task, (date, path) in newest.items():
        reported = _reported(path.parent / f"results_{date}.json", task)
        documents: dict[str, dict[Question, dict[str, Any]]] = {}
        for number, row in enumerate(json_rows(path), 1):
            if "doc_id" not in row:
                raise DataError(f"{path}: line {number}: no doc_id, so it is no sample of lm-eval")
            mine = documents.setdefault(str(row.get("filter", "none")), {})
            key = row["doc_id"], row.get("doc_hash")
            if key in mine:
                raise DataError(f"{path}: question {row['doc_id']} is in it twice")
            mine[key] = row
        made.update({(task, chosen): Logged(found, reported) for chosen, found in documents.items()})
    return made


def _reported(path: Path, task: str) -> dict[str, Any]:
    """lm-eval's numbers of a task; empty if its file is not there."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["results"][task]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no results of {task}") from error
    return found if isinstance(found, dict) else {}


def _common(task: str, logged: Mapping[str, Logged], notes: list[str]) -> list[Question]:
    """The questions that all runs were asked, in the first run's order."""
    tables = [one.documents for one in logged.values()]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    if not common:
        raise DataError(f"{task}: no question is in all runs; the data or its version differ")
    if most := max(map(len, tables)) - len(common):
        notes.append(f"{task}: {len(common):,} questions are in all runs; up to {most:,} of a run are left out")
    prompts = [[table[key].get("prompt_hash") for key in common] for table in tables]
    if differ := sum(len(set(some)) > 1 for some in zip(*prompts, strict=True)):
        notes.append(f"{task}: {differ:,} of {len(common):,} prompts differ between runs: shots, template or wording")
    return common


def _metrics(logged: Iterable[Logged]) -> list[str]:
    """The metrics that every run has of every question."""
    rows = [row for one in logged for row in one.documents.values()]
    named = dict.fromkeys(str(metric) for row in rows for metric in row.get("metrics") or ())
    return [metric for metric in named if all(metric in row for row in rows)]


def _way(logged: Logged, metric: str, chosen: str) -> str | None:
    """How the values of a metric add up to the number that lm-eval reported; a mean if that is not there."""
    values, reported = [row[metric] for row in logged.documents.values()], logged.reported.get(f"{metric},{chosen}")
    for aggregation in AGGREGATIONS if isinstance(reported, int | float) else AGGREGATIONS[:1]:
        try:
            items = aggregated(values, aggregation)
        except (TypeError, ValueError):  # of another kind
            continue
        if items is not None and (not isinstance(reported, int | float) or same(items.score, float(reported))):
            return aggregation
    return None


def _items(documents: Sequence[dict[str, Any]], metric: str, ways: set[str | None], cluster: str) -> Items:
    """The items of a metric, with the clusters that the documents name."""
    (way,) = ways
    items = aggregated([row[metric] for row in documents], str(way))
    assert items is not None
    found = [(row.get("doc") or {}).get(cluster) for row in documents]
    return replace(items, clusters=found) if any(one is not None for one in found) else items


def show(report: SamplesReport) -> None:
    """The table and how to read it."""
    from rich.console import Console

    Console(highlight=False, width=line_width()).print(
        terminal_table(*score_table(list(report.runs), report.rows), left=2)
    )
    for note in (*interval_notes(report.rows), *report.notes):
        print(note)
