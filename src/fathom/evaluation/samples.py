"""Paired differences of lm-eval runs that were made elsewhere, from the files that `--log_samples` writes.

lm-eval writes `samples_TASK_DATE.jsonl`, a line for every question with its value of each metric, next to
`results_DATE.json`. Runs are paired by question: by its number and the hash of its document. Questions that a run lacks
are left out of all. How a metric adds up is not in these files, so a metric is shown only if a mean of its values, or
the exponential of one, gives the number that lm-eval reported.

`paired.py` computes intervals and corrected p-values, as for `fathom evaluate`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from fathom._version import __version__
from fathom.data.sources import CLUSTER
from fathom.errors import DataError, SettingsError
from fathom.evaluation.paired import AGGREGATIONS, Items, aggregated, rows
from fathom.evaluation.results import ScoreRow
from fathom.evaluation.scores_page import interval_notes, score_table
from fathom.evaluation.tasks import json_rows
from fathom.report.tables import line_width, terminal_table

FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
OWN = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
OWN |= {"doc_hash", "prompt_hash", "target_hash", "bypass"}
"""Keys of a row that are no metrics; `bypass` is what lm-eval scores where it was told not to score."""
Question: TypeAlias = tuple[object, object]
"""A question: its number in the task, and the hash of its document."""


@dataclass(frozen=True)
class Answer:
    """The part of a logged sample that is kept in memory, without its long texts."""

    values: Mapping[str, Any]
    """Values by metric."""
    prompt: object
    cluster: object


@dataclass(frozen=True)
class Logged:
    """One task of a run under one filter: the answers by question, and the numbers that lm-eval reported."""

    answers: Mapping[Question, Answer]
    reported: Mapping[str, Any]


@dataclass
class SamplesReport:
    """The report that `fathom evaluate samples --json` prints."""

    fathom: str
    runs: dict[str, str]
    """The folder of each run; all are compared with the first."""
    rows: list[ScoreRow]
    notes: list[str] = field(default_factory=list)


Tasks: TypeAlias = dict[tuple[str, str], Logged]
"""Answers by task and filter."""


def compare_samples(folders: Sequence[str | Path], cluster: str = CLUSTER) -> SamplesReport:
    """Compare lm-eval runs with the first of them.

    Args:
        folders: Folders that lm-eval wrote with `--log_samples`, or `NAME=FOLDER`; at least two.
        cluster: A field of the documents: those that have the same value in it are no independent draws.
    """
    places = _named(folders)
    if len(places) < 2:
        raise SettingsError("a comparison needs two runs or more")
    runs = {name: read(place, cluster) for name, place in places.items()}
    first = next(iter(runs.values()))
    shared = [key for key in first if all(key in run for run in runs.values())]
    if not shared:
        raise DataError(f"no task is common to {', '.join(map(str, places.values()))}")
    left = sorted({task for run in runs.values() for task, _ in run.keys() - {*shared}})
    notes = [f"not in every run: {', '.join(left)}"] if left else []
    scores: dict[str, dict[tuple[str, str], list[Items]]] = {name: {} for name in runs}
    for task, chosen in shared:
        logged = {name: run[task, chosen] for name, run in runs.items()}
        common = _common(task, logged, notes)
        for metric in _metrics(task, list(logged.values()), notes):
            way, why = _way(list(logged.values()), metric, chosen)
            if way is None:
                notes.append(f"{task}: {metric} is left out: {why}")
                continue
            label = metric if chosen == "none" else f"{metric},{chosen}"
            for name, one in logged.items():
                scores[name][task, label] = [_items([one.answers[key] for key in common], metric, way)]
    if not scores[next(iter(scores))]:
        raise DataError("; ".join(["no metric can be compared", *notes]))
    return SamplesReport(__version__, {name: str(place) for name, place in places.items()}, rows(scores), notes)


def _named(folders: Sequence[str | Path]) -> dict[str, Path]:
    """Parse `[NAME=]FOLDER` entries into folders by name; by default a folder's own name is used."""
    made: dict[str, Path] = {}
    for entry in map(str, folders):
        name, equals, path = entry.partition("=")
        if not equals or not name or "/" in name or Path(entry).exists():
            name, path = Path(entry).resolve().name, entry
        if not Path(path).is_dir():
            raise DataError(f"{path}: no such folder")
        if name in made:
            raise SettingsError(f"two runs are called {name!r}; name them: NAME=FOLDER")
        made[name] = Path(path)
    return made


def read(folder: Path, cluster: str = CLUSTER) -> Tasks:
    """Read the answers of a run by task; if a task was run several times, its last answers.

    Args:
        folder: Where lm-eval wrote one model's files, or a folder above it.
        cluster: The field of the documents that is kept.
    """
    paths = [Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names]
    found = [(match["task"], match["date"], path) for path in paths if (match := FILE.fullmatch(path.name))]
    if not found:
        raise DataError(f"{folder}: no samples_TASK_DATE.jsonl in it: run lm-eval with --log_samples --output_path")
    if len(several := sorted({path.parent for *_, path in found})) > 1:
        raise DataError(f"{folder}: runs of {several[0].name} and {several[1].name}: give the folder of one model")
    newest = {task: (date, path) for task, date, path in sorted(found)}
    results = {date: _results(path.parent, date) for date, path in newest.values()}
    models = {
        json.dumps(_within(found, "config").get("model_args"), sort_keys=True) for found in results.values() if found
    }
    if len(models) > 1:
        raise DataError(f"{folder}: its tasks were run with different models, {' and '.join(sorted(models))}")
    made: Tasks = {}
    for task, (date, path) in newest.items():
        reported = _within(_within(results[date], "results"), task)
        made.update({(task, chosen): Logged(some, reported) for chosen, some in _answers(path, cluster).items()})
    return made


def _results(folder: Path, date: str) -> dict[str, Any]:
    """lm-eval's results of a date, whatever their file's name begins with; empty if there is no such file."""
    for path in sorted(folder.glob(f"*_{date}.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: bad JSON: {error}") from error
        if isinstance(found, dict) and isinstance(found.get("results"), dict):
            return found
    return {}


def _within(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The JSON object under a key; an empty object if the key is missing or has another type."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _answers(path: Path, cluster: str) -> dict[str, dict[Question, Answer]]:
    """Read the answers in a file of samples, by filter and question."""
    made: dict[str, dict[Question, Answer]] = {}
    for number, row in enumerate(json_rows(path), 1):
        if not isinstance(row.get("doc_id"), int | str):
            raise DataError(f"{path}: line {number}: no doc_id, so it is no sample of lm-eval")
        if not all(isinstance(row.get(name), str | None) for name in ("doc_hash", "prompt_hash")):
            raise DataError(f"{path}: line {number}: in a sample of lm-eval, doc_hash and prompt_hash must be strings")
        mine = made.setdefault(str(row.get("filter", "none")), {})
        key = row["doc_id"], row.get("doc_hash")
        if key in mine:
            why = "" if "filter" in row else ", and without its filter: log it with a later lm-eval"
            raise DataError(f"{path}: question {row['doc_id']} occurs twice{why}")
        metrics, doc = row.get("metrics"), row.get("doc")
        named = metrics if isinstance(metrics, list) else [name for name in row if name not in OWN]
        values = {name: row[name] for name in map(str, named) if name in row and name not in OWN}
        mine[key] = Answer(values, row.get("prompt_hash"), doc.get(cluster) if isinstance(doc, dict) else None)
    return made


def _common(task: str, logged: Mapping[str, Logged], notes: list[str]) -> list[Question]:
    """The questions that all runs were asked, in the first run's order."""
    tables = [one.answers for one in logged.values()]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    if not common:
        raise DataError(f"{task}: no question is in all runs; the data or its version differ")
    if most := max(map(len, tables)) - len(common):
        notes.append(f"{task}: {len(common):,} questions are in all runs; up to {most:,} of a run are left out")
    if differ := sum(len({table[key].prompt for table in tables}) > 1 for key in common):
        notes.append(f"{task}: {differ:,} of {len(common):,} prompts differ between runs: shots, template or wording")
    return common


def _metrics(task: str, logged: Sequence[Logged], notes: list[str]) -> list[str]:
    """The metrics for which every run has a value of every question."""
    answers = [answer for one in logged for answer in one.answers.values()]
    named = dict.fromkeys(metric for answer in answers for metric in answer.values)
    whole = [metric for metric in named if all(metric in answer.values for answer in answers)]
    notes += [f"{task}: {metric} is not known of every question" for metric in named if metric not in whole]
    return whole


def _way(logged: Sequence[Logged], metric: str, chosen: str) -> tuple[str | None, str]:
    """The aggregation that reproduces lm-eval's reported number from a metric's values in every run, or why it is not
    known.

    Without lm-eval's numbers only shares of right answers are shown: what lies between 0 and 1 is a mean.
    """
    found = [one.reported.get(f"{metric},{chosen}") for one in logged]
    values = [[answer.values[metric] for answer in one.answers.values()] for one in logged]
    flat = [value for some in values for value in some]
    if any(isinstance(value, float) and not math.isfinite(value) for value in flat):
        return None, "some values are not finite"
    known = [(some, n) for some, n in zip(values, found, strict=True) if isinstance(n, int | float)]
    if len(known) < len(found) and not all(isinstance(value, int | float) and 0 <= value <= 1 for value in flat):
        return None, "lm-eval's results are not next to the samples of every run"
    for way in AGGREGATIONS if len(known) == len(found) else AGGREGATIONS[:1]:
        if all(_adds_up(some, way, float(number)) for some, number in known):
            return way, ""
    return None, "it is no mean over questions"


def _adds_up(values: Sequence[Any], way: str, reported: float) -> bool:
    try:
        items = aggregated(values, way)
        return items is not None and math.isclose(items.score, reported, rel_tol=1e-6, abs_tol=1e-9)
    except (TypeError, ValueError, ZeroDivisionError):  # values of another kind
        return False


def _items(answers: Sequence[Answer], metric: str, way: str) -> Items:
    """The items of a metric, with the clusters that the documents name."""
    items = aggregated([answer.values[metric] for answer in answers], way)
    assert items is not None
    found = [answer.cluster for answer in answers]
    return replace(items, clusters=found) if any(one is not None for one in found) else items


def show(report: SamplesReport) -> None:
    """Print the table of scores, and notes on how to read it."""
    from rich.console import Console

    Console(highlight=False, width=line_width()).print(
        terminal_table(*score_table(list(report.runs), report.rows), left=2)
    )
    for note in (*interval_notes(report.rows), *report.notes):
        print(note)
