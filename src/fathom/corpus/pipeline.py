"""`fathom corpus`: runs every stage in order, but only tasks that changed, and publishes the result.

`stage.py` names the folder of a task's result by a hash, renames it into place, and removes results of earlier recipes.
`_discard_damaged` removes a result with a changed file, which it names, and the result is made again. Stages list
their tasks in this process, so `ingest.py` hashes the inputs on one machine. `budget.py` refuses an infeasible mixture
before `publish.py` writes anything.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom.checkpoints.file_names import PLAN, RECIPE
from fathom.checkpoints.places import LITTER, contents
from fathom.corpus.budget import Budget, plan_budget
from fathom.corpus.card import write_card
from fathom.corpus.contamination import Benchmarks
from fathom.corpus.converse import check_template
from fathom.corpus.counts import CorpusCounts, conversations_left
from fathom.corpus.executor import Executing, executing, write_plan
from fathom.corpus.ingest import collection_files, size_of
from fathom.corpus.publish import budget_of, publish
from fathom.corpus.recipe import CorpusRecipe, load_corpus_recipe
from fathom.corpus.stage import (
    MANIFEST,
    TASK,
    Stage,
    StageOf,
    Task,
    Times,
    Workspace,
    conclude,
    owned,
    require_ours,
    sweep,
    times_of,
)
from fathom.corpus.stages import ORDER
from fathom.corpus.tokens import Tokenizer
from fathom.errors import DataError
from fathom.report.files import LOCK, write_atomically, write_json
from fathom.report.progress import ProgressBar
from fathom.report.provenance import versions
from fathom.settings import kind_of, read_values

RUN = "run.json"
READERS = 4
"""Threads that read results of earlier runs to check them."""
PACKAGES = (
    "numpy",
    "tokenizers",
    "transformers",
    "pypdfium2",
    "trafilatura",
    "py3langid",
    "warcio",
    "fsspec",
    "pyarrow",
    "datatrove",
    "ray",
)
BYTES_PER_TOKEN = 4.0
"""For English and a large vocabulary: a dry run's estimate before any token is counted."""


@dataclass
class StageReport:
    """How many tasks of a stage this run executed and how long they took, with the stage's counts."""

    tasks: int
    done: int
    """Tasks that this run executed; the others were finished before."""
    seconds: float
    """Time of this run."""
    counts: dict[str, int]
    times: Times
    """Time of all tasks, including earlier runs."""


@dataclass
class Report:
    """The result of `fathom corpus`."""

    directory: Path
    stages: dict[str, StageReport]
    budget: Budget | None
    """None if there are only conversations."""
    card: Path

    def __str__(self) -> str:
        """A few lines for people."""
        counts = {name: stage.counts for name, stage in self.stages.items()}
        seconds, done = (sum(getattr(one, key) for one in self.stages.values()) for key in ("seconds", "done"))
        talk, text = counts["converse"], counts["tokenize"]
        made = f"{text.get('tokens', 0):,} tokens of {text.get('documents', 0):,} documents"
        if talk and not text.get("documents"):
            made = f"{talk['tokens']:,} tokens of {conversations_left(talk):,} conversations"
        lines = [
            f"{self.directory}: {made}; " + (f"{done} tasks in {seconds:.1f} s" if done else "nothing had changed")
        ]
        lines.append(f"  {CorpusCounts.of(counts)}")
        if talk:
            lines.append(
                f"  {conversations_left(talk):,} conversations: {talk['targets']:,} of {talk['tokens']:,} trained "
                f"tokens; rejected: too long {talk['too_long']:,}, without an answer {talk['no_target']:,}, "
                f"refused by the template {talk['no_template']:,}"
            )
        if self.budget:
            epochs = ", ".join(f"{name} {value:.2f}" for name, value in self.budget.epochs.items())
            lines.append(f"  a budget of {self.budget.tokens:,} tokens reads, in epochs: {epochs}")
        lines.append(f"  {self.card}")
        return "\n".join(lines)


def build(recipe: CorpusRecipe, directory: Path) -> Report:
    """Build a corpus. A build that was killed resumes with the same call, and ends with the same bytes.

    Args:
        recipe: The corpus to make.
        directory: Where everything goes; created if it does not exist.
    """
    require_ours(directory, _is_ours)
    check_template(recipe)
    workspace = Workspace(directory, recipe)
    Benchmarks(workspace).check()
    Tokenizer(workspace).check()
    with owned(directory, _is_ours, "built"):
        sweep(directory)
        write_atomically(directory / RECIPE, recipe.to_yaml())
        with executing(recipe.executor) as execute:
            reports = {stage.name: carry_out(stage(workspace), execute) for stage in ORDER}
        budget = publish(workspace)
        card = write_card(workspace)
        report = Report(directory, reports, budget, card)
        write_json(directory / RUN, {**vars(report), "versions": versions(PACKAGES)})
    return report


def carry_out(stage: StageOf[Any], execute: Executing) -> StageReport:
    """Run the tasks of a stage that are not finished yet."""
    started = time.perf_counter()
    tasks = stage.tasks()
    place = stage.workspace.stage(stage.name)
    sweep(place)
    _discard_damaged(stage, tasks)
    todo = [task for task in tasks if not stage.done(task)]
    if todo:
        write_plan(stage.workspace, stage.name, todo)
        with ProgressBar(stage.name, len(todo)) as bar:
            finished = 0

            def tick() -> None:
                nonlocal finished
                finished += 1
                bar.update(finished, f"{finished} of {len(todo)} tasks")

            execute(stage.workspace, stage.name, todo, tick)
        if missing := [task for task in todo if not stage.done(task)]:
            raise DataError(
                f"{stage.name}: {len(missing)} of {len(todo)} tasks are not done; run the same command to resume", 1
            )
    manifest = conclude(stage, tasks)
    (place / PLAN).unlink(missing_ok=True)
    seconds = round(time.perf_counter() - started, 3)
    return StageReport(len(tasks), len(todo), seconds, manifest.counts, times_of(stage, tasks))


def _discard_damaged(stage: StageOf[Any], tasks: list[Task]) -> None:
    """Check the results of earlier runs, and remove each result with a file that differs from what its task wrote."""
    with ProgressBar(f"{stage.name}: checking", len(tasks)) as bar, ThreadPoolExecutor(READERS) as pool:
        for number, (task, files) in enumerate(zip(tasks, pool.map(stage.damaged, tasks), strict=True), 1):
            bar.update(number)
            for file in files:
                warnings.warn(f"{file}: damaged: it does not have the hash in {TASK}; it is made again", stacklevel=2)
            if files:
                shutil.rmtree(stage.folder(task))


def _is_ours(directory: Path) -> bool:
    """Whether a directory is empty or holds a corpus, finished or not; a lone recipe file counts as a corpus if a build
    wrote it."""
    held = contents(directory)
    if held == ("a recipe", RECIPE):
        path = directory / RECIPE
        return kind_of(read_values(path), "train") == "corpus" and _is_written(path)
    begun = {LOCK, f"{LOCK}.held", *(path.name for path in directory.glob(f".{RECIPE}.*.new"))}
    return {path.name for path in directory.iterdir()} <= begun | LITTER or (held is not None and held[0] == "a corpus")


def _is_written(path: Path) -> bool:
    return path.read_text(encoding="utf-8") == load_corpus_recipe(path).to_yaml()


@dataclass(frozen=True)
class StagePreview:
    """Whether a stage is finished, and how many of its tasks a build would still run."""

    state: str
    to_do: int | None = None
    key: str = ""
    """Changes with any of its tasks."""


@dataclass(frozen=True)
class PreviewBudget:
    """A preview of the mixture's token budget, from counted tokens or from an estimate."""

    counted: bool
    budget: Budget | None = None
    """None if there are only conversations."""
    infeasible: str | None = None
    """Why there is no budget."""

    def __str__(self) -> str:
        """The budget in a line."""
        origin = "counted" if self.counted else "estimated from the size of the inputs"
        if self.infeasible is not None:
            return f"infeasible, by tokens {origin}: {self.infeasible}"
        if self.budget is None:
            return "only conversations, which have no budget"
        epochs = ", ".join(f"{name} {value:.2f}" for name, value in self.budget.epochs.items())
        return f"a budget of {self.budget.tokens:,} tokens reads, in epochs ({origin}): {epochs}"


@dataclass(frozen=True)
class InputFiles:
    """The files of a collection."""

    files: int
    bytes: int


@dataclass(frozen=True)
class Preview:
    """A plan of `build`."""

    recipe: str
    inputs: dict[str, InputFiles]
    stages: dict[str, StagePreview]
    budget: PreviewBudget

    def __str__(self) -> str:
        """The plan as text."""
        lines = [f"recipe {self.recipe}"]
        for name, facts in self.inputs.items():
            lines.append(f"  {name}: {facts.files:,} files, {facts.bytes / 1e6:,.1f} MB")
        width = max(map(len, self.stages))
        lines += [f"  {name:<{width}}  {stage.state}  {stage.key}" for name, stage in self.stages.items()]
        return "\n".join([*lines, str(self.budget)])


def preview(recipe: CorpusRecipe, directory: Path) -> Preview:
    """Plan a `build` without writing anything: inputs, stages, budget."""
    require_ours(directory, _is_ours)
    check_template(recipe)
    workspace = Workspace(directory, recipe)
    Benchmarks(workspace).check()
    Tokenizer(workspace).check()
    inputs: dict[str, InputFiles] = {}
    for name, collection in recipe.collections.items():
        files = collection_files(name, collection, directory)
        inputs[name] = InputFiles(len(files), sum(size_of(path) for _, path, _ in files))
    stages: dict[str, StagePreview] = {}
    known = True
    for kind in ORDER:
        stage = kind(workspace)
        if not known:
            stages[stage.name] = StagePreview("waits for the stages before")
            continue
        tasks = stage.tasks()
        todo = sum(not stage.done(task) for task in tasks)
        state = f"{todo} of {len(tasks)} tasks to do" if todo else "unchanged"
        stages[stage.name] = StagePreview(state, todo, _key(stage, tasks))
        known = not todo and _is_current(stage, tasks)
    return Preview(recipe.digest(), inputs, stages, _expected(workspace, inputs, known))


def _key(stage: Stage, tasks: list[Task]) -> str:
    return hashlib.sha256(json.dumps([stage.key(task) for task in tasks]).encode()).hexdigest()[:16]


def _is_current(stage: Stage, tasks: list[Task]) -> bool:
    """Whether a stage's manifest matches these tasks."""
    if not (stage.workspace.stage(stage.name) / MANIFEST).is_file():
        return False
    return [entry.key for entry in stage.workspace.manifest(stage.name).tasks] == [stage.key(one) for one in tasks]


def _expected(workspace: Workspace, inputs: dict[str, InputFiles], known: bool) -> PreviewBudget:
    """The mixture's token budget, computed from counted tokens, or from an estimate if the tokens are not counted
    yet."""
    mix = workspace.recipe.mix
    if all(one.kind != "documents" for one in workspace.recipe.collections.values()):
        return PreviewBudget(known)
    try:
        if known:
            return PreviewBudget(True, budget_of(workspace))
        names = [name for name, one in workspace.recipe.collections.items() if one.kind == "documents"]
        guess = {name: int(inputs[name].bytes / BYTES_PER_TOKEN) for name in names}
        return PreviewBudget(False, plan_budget(guess, mix.shares, mix.tokens, mix.epochs))
    except DataError as error:
        return PreviewBudget(known, infeasible=str(error))
