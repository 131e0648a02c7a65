"""lm-eval's tasks with their documents from a folder instead of the network.

Prompts, metrics and versions are lm-eval's own; only the documents come from the folder instead of a download. The
folder holds, for a task T whose data set is ORG/BASE with the subset SUB (see docs/how-to/evaluate.md)::

    T/SPLIT*.jsonl          or SUB/, or BASE/ if T has no subset or each line names it as `subject`
    BASE/SUB.jsonl          one file per subset, as for BLiMP and LongBench
    wikitext/SPLIT.tokens   or .raw; WikiText's own files, cut into articles

Each file may be compressed (`.xz`, `.gz`, `.bz2` or `.zst`). Fields have the data set's names.

`harness.py` runs the tasks, and refuses few-shot prompts for which the folder has no examples. `tuned.py` reads the
questions of a `--benchmark` directory.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fathom.data.sources import CLUSTER, lines_of
from fathom.errors import DataError

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

SPLITS = ("train", "validation", "test", "dev")
OTHER_NAMES = {"wikitext": "wikitext2"}
ON_DISK = ("json", "csv", "parquet", "text")
LINES = re.compile(r"\.(jsonl|raw|tokens)(\.(xz|gz|bz2|zst))?$")


TaskRow: TypeAlias = dict[str, Any]
"""A parsed document of a task's data; each task has fields of its own."""


@lru_cache(maxsize=4)
def task_manager(include: Path | None = None, named: bool = True) -> TaskManager:
    """lm-eval's index of tasks, read once per process because it takes 13 seconds.

    Args:
        include: A folder of further tasks, as lm-eval's own YAML.
        named: Whether lm-eval's own tasks are in it. A task of a file needs none of them.
    """
    from lm_eval.tasks import TaskManager

    if include is not None and not include.is_dir():
        raise DataError(f"include={include}: no such folder")
    return TaskManager(include_path=None if include is None else str(include), include_defaults=named)


def task_names(words: Iterable[str], include: Path | None = None) -> list[str]:
    """The requested tasks: names of tasks, groups and tags, with `*` resolved, and `choice:FILE` or `cloze:FILE`; each
    is one unit of work."""
    names: list[str] = []
    for word in words:
        if file_task(word):
            task_manager(include, named=False)  # which refuses a folder that is not there
            names.append(word)
            continue
        manager = task_manager(include)
        found = manager.match_tasks([word]) if "*" in word else [word] if word in manager.task_index else []
        if not found:
            near = difflib.get_close_matches(word, manager.all_tasks, 3)
            raise DataError(f"tasks={word}: lm-eval has no such task" + (f"; near: {', '.join(near)}" if near else ""))
        names += found
    return list(dict.fromkeys(names))


def load_task(name: str, folder: Path | None, include: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """The result of lm-eval's `TaskManager.load` for a name, and notes on missing data.

    Args:
        name: A task, group or tag, or `choice:FILE` or `cloze:FILE`.
        folder: Where the documents are; from the Hub without one.
        include: A folder of further tasks.
    """
    own = file_task(name)
    manager = task_manager(include, named=own is None)
    if own is not None:
        return manager.load([_of_file(name, *own)]), []
    if folder is None:
        return manager.load([name]), []
    notes: list[str] = []
    with _local_documents(folder, notes), _only_present(manager, name, folder, notes):
        return manager.load([name]), notes


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_target": "answer",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
CLOZE = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{' ' + answer}}",  # lm-eval puts a space before choices, but not here
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
    ],
}
KINDS = {"choice": CHOICE, "cloze": CLOZE}


def file_task(word: str) -> tuple[str, Path] | None:
    """Kind and file of `choice:FILE` or `cloze:FILE`; None for the name of an lm-eval task."""
    kind, colon, file = word.partition(":")
    return (kind, Path(file)) if colon and kind in KINDS else None


def _of_file(name: str, kind: str, path: Path) -> dict[str, object]:
    """The configuration of a task over a JSONL file, as lm-eval's YAML would have it; every line is checked first."""
    from datasets import Dataset

    if not path.is_file():
        raise DataError(f"tasks={name}: no such file")
    data = {"test": Dataset.from_list(file_rows(kind, path))}
    return {**KINDS[kind], "task": name, "custom_dataset": lambda **_: data, "test_split": "test"}


def file_rows(kind: str, path: Path) -> list[dict[str, object]]:
    """The documents of the file of a `choice:` or `cloze:` task, with the fields that lm-eval reads, and with their
    clusters if any names one."""
    found = list(json_rows(path))
    for number, row in enumerate(found, 1):
        if (problem := problem_of(kind, row)) is not None:
            raise DataError(f"{path}: document {number}: {problem}")
    if not found:
        raise DataError(f"{path}: no documents")
    fields = ["question", "choices", "text", "answer"]
    rows: list[dict[str, object]] = [{key: row[key] for key in fields if key in row} for row in found]
    clusters = [row.get(CLUSTER) for row in found]
    if all(cluster is None for cluster in clusters):
        return rows
    names = [None if cluster is None else str(cluster) for cluster in clusters]  # a column has one type
    return [{**row, CLUSTER: name} for row, name in zip(rows, names, strict=True)]


def problem_of(kind: str, row: Mapping[str, object]) -> str | None:
    """An error message about what a document of a `choice:` or `cloze:` task lacks; None if it is complete."""
    text, answer = ("question" if kind == "choice" else "text"), row.get("answer")
    if not isinstance(row.get(text), str):
        return f"needs `{text}`, a text"
    if kind == "cloze":
        return None if isinstance(answer, str) and answer else "needs `answer`, a text"
    choices = row.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        return "needs `choices`, a list of two or more texts"
    if type(answer) is not int or not 0 <= answer < len(choices):
        return f"needs `answer`, the index of the right choice, 0 to {len(choices) - 1}"
    return None


@contextmanager
def _only_present(manager: TaskManager, name: str, folder: Path, notes: list[str]) -> Iterator[None]:
    """Within a `with` block, reduce a group to those of its tasks that have data in the folder, if any has.

    The group is averaged over these tasks, and a note gives their number.
    """
    index = manager.task_index
    entry = index[name]
    members: Any = (entry.cfg or {}).get("task")
    flat = isinstance(members, list) and all(isinstance(m, str) and m in index for m in members)
    # A group of groups must be complete.
    if not flat or not all("dataset_path" in (index[member].cfg or {}) for member in members):
        yield
        return
    here = [member for member in members if _find(folder, index[member].cfg)]
    if here and len(here) < len(members):
        notes.append(f"{name}: {len(here)} of its {len(members)} tasks have data here and are averaged")
        index[name] = replace(entry, yaml_path=None, cfg={**entry.cfg, "task": here})
    try:
        yield
    finally:
        index[name] = entry


@contextmanager
def _local_documents(folder: Path, notes: list[str]) -> Iterator[None]:
    from lm_eval.api.task import ConfigurableTask

    def download(task: Task, *given: object, **named: object) -> None:
        if task.config.dataset_path in ON_DISK:  # a task of the user's own that names its files
            original(task, *given, **named)
        else:
            _fill(task, folder, notes)

    original = ConfigurableTask.download
    ConfigurableTask.download = download
    try:
        yield
    finally:
        ConfigurableTask.download = original


def _fill(task: Task, folder: Path, notes: list[str]) -> None:
    """Give an lm-eval task its documents from a folder, and set the splits that are available.

    A task is scored on the split that lm-eval scores, or on another one that has a file, with a note. Few-shot examples
    come from the task's split for them (`train`, or `dev` for MMLU).
    """
    from datasets import Dataset

    config = task.config
    fields = {key: getattr(config, key) for key in ("task", "dataset_path", "dataset_name")}
    files = _find(folder, fields)
    if not files:
        raise DataError(
            f"{config.task}: no data in {folder}; expected {config.task}/SPLIT.jsonl, or a file name that "
            "docs/how-to/evaluate.md lists"
        )
    own = config.test_split or config.validation_split
    scored: str | None = (
        own if own in files or "" in files else next((s for s in ("validation", "test") if s in files), None)
    )
    if scored is None:
        raise DataError(f"{config.task}: no {own} split in {folder}, only {', '.join(files)}")
    if scored != own:
        notes.append(f"{config.task}: scored on {scored} because there is no {own} split")
        config.test_split = scored
    shots: str | None = next((s for s in (config.fewshot_split, config.training_split) if s and s in files), None)
    config.training_split = shots
    config.fewshot_split = task.fewshot_cfg.split = shots if config.fewshot_split else None
    config.validation_split = config.validation_split if config.validation_split == scored else None
    task.dataset = {}
    for split in {scored, shots or scored}:
        rows = [_adapted(row) for row in _rows(files.get(split) or files[""], config.dataset_name)]
        if not rows:
            raise DataError(f"{config.task}: no documents in {files.get(split) or files['']}")
        task.dataset[split] = Dataset.from_list(rows)
        if "choices" in rows[0] and "query" in rows[0]:  # HellaSwag as lm-eval itself prepares it
            config.process_docs = task.fewshot_cfg.process_docs = None


def _find(folder: Path, config: Mapping[str, Any]) -> dict[str, Path]:
    """A task's data files by split, or under an empty name one file that serves every split."""
    name, subset = config["task"], config.get("dataset_name")
    base = str(config.get("dataset_path") or "").rsplit("/", 1)[-1]
    if subset and (single := _files(folder / base, subset)):
        return {"": single[0]}
    subject = base and (folder / base).is_dir() and subset and _has_subject(folder / base)
    for place in (name, OTHER_NAMES.get(name), subset, base if subject or not subset else None):
        if place and (folder / place).is_dir():
            found = {split: _files(folder / place, split, others=True) for split in SPLITS}
            if any(found.values()):
                return {split: files[0] for split, files in found.items() if files}
    return {}


def _files(directory: Path, name: str, others: bool = False) -> list[Path]:
    """The files called `NAME.jsonl` in a directory, compressed or not; with `others` also `wiki.NAME.raw` and
    `NAME_500.jsonl`."""
    if not directory.is_dir():
        return []
    start = rf"(wiki\.)?{re.escape(name)}(?![a-z])" if others else re.escape(name) + r"\."
    found = [p for p in sorted(directory.iterdir()) if re.match(start, p.name) and LINES.search(p.name)]
    return sorted(found, key=lambda p: (".raw" not in p.name, len(p.name)))


def _has_subject(directory: Path) -> bool:
    first = (next(json_rows(path)) for split in SPLITS for path in _files(directory, split)[:1])
    return any("subject" in row for row in first)


def _rows(path: Path, subset: str | None) -> list[TaskRow]:
    if not LINES.search(path.name)[0].startswith(".jsonl"):  # type: ignore[index]
        return [{"page": page} for page in _articles(line.decode() for line in _lines(path))]
    rows = list(json_rows(path))
    return [row for row in rows if row["subject"] == subset] if rows and "subject" in rows[0] and subset else rows


def json_rows(path: Path) -> Iterator[TaskRow]:
    """The documents of a file of JSON lines or of a table, compressed or not."""
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise DataError(f"{path}:{number}: bad JSON: {error}") from None
        if isinstance(row, dict):
            yield row
        elif row is not None:
            raise DataError(f"{path}:{number}: expected a JSON object")


def _lines(path: Path) -> Iterator[bytes]:
    return (line for line in lines_of(path) if line is not None)


def _adapted(row: TaskRow) -> TaskRow:
    """A document of a task with the fields that lm-eval's prompts read: HellaSwag's `gold` and BoolQ's true or false
    `answer` become `label`, and LongBench's `input` becomes `question`."""
    if "label" not in row and "gold" in row:
        return {**row, "label": str(row["gold"])}
    if "label" not in row and isinstance(row.get("answer"), bool):
        return {**row, "label": int(row["answer"])}
    if "question" not in row and {"input", "context", "all_classes"} <= row.keys():  # LongBench's own files
        return {**row, "question": row["input"]}
    return row


def _articles(lines: Iterable[str]) -> list[str]:
    """WikiText's lines as the documents of `EleutherAI/wikitext_document_level`: cut before every top heading."""
    pages: list[str] = []
    page: list[str] = []
    for line in (*"".join(lines).split("\n"), " = end = "):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if "\n".join(page).strip():
                pages.append("\n".join(page))
            page = []
        page.append(line)
    return pages
