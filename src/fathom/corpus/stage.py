"""Stages of a corpus: each is a pure function of files, divided into tasks that any scheduler may run.

A task's key is a hash of the stage's name, version and settings and of the contents that the task reads. The task
writes to a temporary folder, which is then renamed to the key. A folder that exists is therefore complete, even if a
process was killed, and a task whose folder exists is not run again, as long as its files have the hashes in its record
(`TaskOutcome`: the SHA-256 of each). The same command, run again, runs only tasks that are unfinished or
damaged, or whose key changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from fathom.checkpoints.file_names import MANIFEST
from fathom.checkpoints.places import contents
from fathom.corpus.recipe import CorpusRecipe
from fathom.errors import DataError
from fathom.report.files import Digest, asdict, claimed, digest, sync_directory, write_json
from fathom.report.results import read_result

R = TypeVar("R")
T = TypeVar("T")

STAGES = "stages"
TASK, TIMES = "task.json", "times.json"
DRAFT = ".new"
REMEDY = "delete its folder, and the same command makes it again"


@dataclass(frozen=True)
class Input:
    """A file that a task reads, with a digest of its contents."""

    path: str
    """relative to the corpus directory, or a user's path"""
    sha256: str
    bytes: int = 0

    @classmethod
    def of(cls, path: str, facts: Digest) -> Input:
        """A file with its digest."""
        return cls(path, facts.sha256, facts.bytes)


@dataclass(frozen=True)
class Task:
    """One task of a stage, as plain data that any scheduler can pass to a worker."""

    inputs: tuple[Input, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    """every other value that the result depends on"""

    @classmethod
    def of(cls, *groups: Iterable[Input], **arguments: object) -> Task:
        """A task that reads several groups of input files."""
        files = [tuple(group) for group in groups]
        return cls(tuple(chain(*files)), {**arguments, "sizes": [len(group) for group in files]})

    @property
    def groups(self) -> list[tuple[Input, ...]]:
        """The groups of input files of a task that `Task.of` made."""
        files = iter(self.inputs)
        return [tuple(islice(files, size)) for size in self.arguments["sizes"]]


@dataclass(frozen=True)
class TaskOutcome:
    """The record that a task writes to its folder."""

    key: str
    counts: dict[str, int]
    outputs: dict[str, Digest]


@dataclass(frozen=True)
class TaskEntry(TaskOutcome):
    """A task in a manifest."""

    arguments: dict[str, Any]
    """as returned by the stage"""
    inputs: list[Input]


@dataclass(frozen=True)
class StageManifest:
    """The manifest of a finished stage: its settings, counts, and the inputs and outputs of its tasks."""

    stage: str
    version: int
    settings: dict[str, object]
    counts: dict[str, int]
    tasks: list[TaskEntry]


@dataclass(frozen=True)
class Times:
    """Run time and peak memory of one or several tasks."""

    seconds: float
    cpu_seconds: float
    input_bytes: int
    peak_bytes: int


def stage_folder(directory: Path, name: str) -> Path:
    """The folder of a stage of the corpus in a directory."""
    return directory / STAGES / name


@dataclass(frozen=True)
class WorkspaceOf(Generic[R]):
    """The directory of a corpus and the recipe that makes it."""

    directory: Path
    recipe: R

    def stage(self, name: str) -> Path:
        """The folder of a stage."""
        return stage_folder(self.directory, name)

    def manifest(self, name: str) -> StageManifest:
        """The manifest of a finished stage."""
        return read_result(StageManifest, self.stage(name) / MANIFEST, REMEDY)

    def outputs(self, stage: str, suffix: str) -> list[Input]:
        """Output files of a finished stage with this suffix, in the order of its tasks."""
        found = []
        for task in self.manifest(stage).tasks:
            for name, facts in task.outputs.items():
                if name.endswith(suffix):
                    found.append(Input.of(f"{STAGES}/{stage}/{task.key}/{name}", facts))
        return found

    def parts(self, stage: str) -> list[Input]:
        """Files of documents of a finished stage."""
        return [part for _, parts in self.parts_by_task(stage) for part in parts]

    def parts_by_task(self, stage: str) -> Iterator[tuple[TaskEntry, list[Input]]]:
        """The tasks of a finished stage, each with its files of documents."""
        for task in self.manifest(stage).tasks:
            folder = f"{STAGES}/{stage}/{task.key}"
            named = [(name, facts) for name, facts in task.outputs.items() if name.startswith("part-")]
            yield task, [Input.of(f"{folder}/{name}", facts) for name, facts in named]

    def path(self, one: Input) -> Path:
        """The path of an input; a user's own file may be absolute."""
        return self.directory / one.path


Workspace = WorkspaceOf[CorpusRecipe]


class StageOf(ABC, Generic[R]):
    """A stage: one processing step on the way from documents to tokens."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Version of the computation; a change invalidates all tasks of the stage."""
    uses: ClassVar[tuple[str, ...]] = ()
    """Keys of the recipe that the results of all tasks depend on."""
    recipe_class: ClassVar[type[Any]]
    """The class of the recipe, as which a worker reads the plan."""

    def __init__(self, workspace: WorkspaceOf[R]) -> None:
        self.workspace = workspace

    @property
    def recipe(self) -> R:
        """The recipe of the corpus."""
        return self.workspace.recipe

    def settings(self) -> dict[str, object]:
        """The recipe values that the results of all tasks of this stage depend on."""
        return {key: asdict(attrgetter(key)(self.recipe)) for key in self.uses}

    @abstractmethod
    def tasks(self) -> list[Task]:
        """This stage's tasks, the same list on every machine; call it only after the earlier stages have finished."""

    @abstractmethod
    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task: write files into an empty folder and return counts, which are summed over tasks."""

    def finish(self, counts: dict[str, int]) -> None:
        """Raise an error if the result of the whole stage cannot be used."""

    def key(self, task: Task) -> str:
        """A hash of the stage's name, version and settings and of the task's inputs and arguments."""
        content = [self.name, self.version, self.settings(), [one.sha256 for one in task.inputs], task.arguments]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]

    def folder(self, task: Task) -> Path:
        """The folder of a task's result."""
        return self.workspace.stage(self.name) / self.key(task)

    def done(self, task: Task) -> bool:
        """Whether a task's result exists and is complete; the contents of its files are not read."""
        folder = self.folder(task)
        if not (folder / TASK).is_file():
            return False
        outputs = read_result(TaskOutcome, folder / TASK, REMEDY).outputs
        return all(_size(folder / name) == facts.bytes for name, facts in outputs.items())

    def damaged(self, task: Task) -> list[Path]:
        """Files of a finished task that were changed or lost: their SHA-256 is not the one in the task's record."""
        folder = self.folder(task)
        if not (folder / TASK).is_file():
            return []
        outputs = read_result(TaskOutcome, folder / TASK, REMEDY).outputs
        return [path for name, facts in outputs.items() if not is_file_of(path := folder / name, facts)]


class Stage(StageOf[CorpusRecipe]):
    """A stage of `fathom corpus`."""

    recipe_class = CorpusRecipe


def grouped(
    items: Iterable[T],
    size: Callable[[T], int],
    limit: int,
    most: int = sys.maxsize,
    key: Callable[[T], object] = lambda _: None,
) -> Iterator[list[T]]:
    """Yields groups of consecutive items up to a size limit; an item over the limit forms a group by itself.

    Args:
        items: The items, in order.
        size: The size of one.
        limit: The largest sum of sizes in a group.
        most: The largest number of items in a group.
        key: What the items of a group have in common.
    """
    for _, run in groupby(items, key):
        group: list[T] = []
        total = 0
        for item in run:
            if group and (total + size(item) > limit or len(group) >= most):
                yield group
                group, total = [], 0
            group.append(item)
            total += size(item)
        yield group


@contextmanager
def owned(directory: Path, is_ours: Callable[[Path], bool], made: str) -> Iterator[None]:
    """Lock an output directory for this process; the operating system unlocks it however the process ends.

    Args:
        directory: The directory, which need not exist.
        is_ours: Whether an existing directory may be overwritten.
        made: What is done there, for the error if another process does it.
    """
    require_ours(directory, is_ours)
    with claimed(directory, f" is being {made} by another process", DataError):
        yield


def require_ours(directory: Path, is_ours: Callable[[Path], bool]) -> None:
    """Refuse an existing directory that may not be overwritten, and a name in which no tokenizer can be saved."""
    try:
        str(directory).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{str(directory)!a}: its name is not UTF-8: choose another directory with `out`") from None
    if directory.exists() and not directory.is_dir():
        raise DataError(f"{directory} is not a directory")
    try:
        ours = not directory.exists() or is_ours(directory)
        held = None if ours else contents(directory)
    except OSError as error:
        raise DataError(f"{directory}: {error.strerror}") from None
    if not ours:
        holds = f"holds {held[0]} ({held[1]})" if held else "contains other files"
        raise DataError(f"{directory} {holds}: choose another directory with `out`")


def sweep(place: Path) -> None:
    """Remove unfinished folders of killed processes."""
    for draft in place.glob(f".*{DRAFT}"):
        shutil.rmtree(draft) if draft.is_dir() and not draft.is_symlink() else draft.unlink()


def sync_tree(folder: Path) -> None:
    """Fsync a folder with everything in it."""
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)
        else:
            sync_directory(path)
    sync_directory(folder)


def is_file_of(path: Path, facts: Digest) -> bool:
    """Whether a file has this size and SHA-256."""
    return _size(path) == facts.bytes and digest(path) == facts


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def perform(stage: StageOf[Any], task: Task) -> None:
    """Run one task unless it is finished; its folder appears whole or not at all."""
    if stage.done(task):
        return
    final = stage.folder(task)
    draft = final.with_name(f".{final.name}.{os.getpid()}{DRAFT}")
    for remains in (final, draft):  # a damaged result, or an unfinished folder of an earlier process with the same id
        shutil.rmtree(remains, ignore_errors=True)
    draft.mkdir(parents=True)
    forget_peak()
    started, busy = time.perf_counter(), time.process_time()
    try:
        counts = stage.run(task, draft)
    except OSError as error:
        if error.errno is None or error.filename:
            raise
        raise OSError(error.errno, error.strerror, str(final.parent)) from error  # a full disk has no name
    times = Times(
        seconds=round(time.perf_counter() - started, 4),
        cpu_seconds=round(time.process_time() - busy, 4),
        input_bytes=sum(one.bytes for one in task.inputs),
        peak_bytes=peak_memory(),
    )
    names = sorted(path.relative_to(draft).as_posix() for path in draft.rglob("*") if path.is_file())
    outputs = {name: digest(draft / name) for name in names}
    for name in names:
        _sync(draft / name)
    write_json(draft / TASK, TaskOutcome(final.name, counts, outputs))
    write_json(draft / TIMES, times)
    try:
        draft.rename(final)
    except OSError:
        # Another process finished the same task meanwhile, with the same bytes.
        if not (final / TASK).is_file():
            raise
        shutil.rmtree(draft)
    sync_directory(final.parent)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def forget_peak() -> None:
    """Reset the operating system's peak memory counter for this process, if possible."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Peak memory of this process in bytes, since `forget_peak` if the reset works; 0 if unknown."""
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def conclude(stage: StageOf[Any], tasks: Sequence[Task]) -> StageManifest:
    """Write the manifest of a finished stage, and remove results of earlier recipes."""
    place = stage.workspace.stage(stage.name)
    place.mkdir(parents=True, exist_ok=True)
    entries: list[TaskEntry] = []
    totals: dict[str, int] = {}
    for task in tasks:
        outcome = read_result(TaskOutcome, stage.folder(task) / TASK, REMEDY)
        for name, count in outcome.counts.items():
            totals[name] = totals.get(name, 0) + count
        inputs = [_named(one) for one in task.inputs]
        entries.append(TaskEntry(**vars(outcome), arguments=task.arguments, inputs=inputs))
    counts = dict(sorted(totals.items()))
    manifest = StageManifest(stage.name, stage.version, stage.settings(), counts, entries)
    stage.finish(totals)
    write_json(place / MANIFEST, manifest)
    keep = {entry.key for entry in entries}
    for path in place.iterdir():
        if path.is_dir() and path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
    return manifest


def _named(one: Input) -> Input:
    """An input as a manifest records it: a user's file by its name only, without its directory."""
    return replace(one, path=Path(one.path).name) if Path(one.path).is_absolute() else one


def times_of(stage: StageOf[Any], tasks: Sequence[Task]) -> Times:
    """Time and memory of all tasks of a stage, including earlier runs."""
    found = [read_result(Times, stage.folder(task) / TIMES, REMEDY) for task in tasks]
    return Times(
        seconds=sum(one.seconds for one in found),
        cpu_seconds=sum(one.cpu_seconds for one in found),
        input_bytes=sum(one.input_bytes for one in found),
        peak_bytes=max((one.peak_bytes for one in found), default=0),
    )
