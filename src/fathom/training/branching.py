"""Branch a run: another run that continues from its checkpoint with changes, such as more steps or a cooldown.

A run itself keeps its recipe for life. A step depends only on the recipe, the step number and what a checkpoint holds
(`Training.step` in `build.py`). So if the branch's recipe would have given the same steps up to the checkpoint, the
branch equals a run that had this recipe from the start.

`loop.py` refuses another corpus or teacher for branches too. `optimizer.py` has the schedules.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypedDict

from fathom.checkpoints.file_names import HISTORY, METRICS, RECIPE, step_name
from fathom.checkpoints.find import checkpoint_steps
from fathom.checkpoints.runs import Saved, find_checkpoint
from fathom.errors import SettingsError
from fathom.models.registry import recurrence_class
from fathom.recipe import FREE_ON_RESUME, Recipe, differences, load_recipe, values_of
from fathom.report.files import sync_directory, write_atomically
from fathom.settings import show
from fathom.training.optimizer import learning_rate, leaves_peak

# Keys that a branch may change, because weights, optimizer state and data order do not depend on them.
CHANGEABLE = (
    *("evaluate", "data.phases", "train.steps", "train.precision", "train.skip_spikes"),
    *(f"optim.{key}" for key in ("lr", "betas", "eps", "momentum", "weight_decay", "clip", "schedule", "floor")),
    *(f"optim.{key}" for key in ("warmup", "warmup_steps", "decay", "decay_steps", "groups")),
    *FREE_ON_RESUME,
)


@dataclass(frozen=True)
class Branch:
    """A run that continues from the checkpoint of another run."""

    recipe: Recipe
    run_dir: Path
    before: Recipe
    """The recipe of the other run."""
    origin: Saved

    @property
    def begins(self) -> bool:
        """Whether the branch has yet to begin, i.e. its directory holds no recipe."""
        return not (self.run_dir / RECIPE).exists()

    @property
    def changes(self) -> dict[str, tuple[object, object]]:
        """Every key that differs, as (old value, new value)."""
        old, new = values_of(self.before), values_of(self.recipe)
        return {key: (old.get(key), new.get(key)) for key in differences(self.before, self.recipe, ignore=())}

    @property
    def changes_in_words(self) -> list[str]:
        """`changes`, as a text for each key."""
        return [f"{key} {show(old)} → {show(new)}" for key, (old, new) in self.changes.items()]

    def __str__(self) -> str:
        step = self.origin.step
        old, new = _rate(self.before, step), _rate(self.recipe, step)
        return f"learning rate of step {step + 1}: {old:.4g} as planned before, {new:.4g} now"


def branch(
    origin: str | Path, run_dir: str | Path, overrides: Sequence[str] = (), cooldown: int | None = None
) -> Branch:
    """Start a new run from the weights, optimizer state and data position of another run's checkpoint.

    Args:
        origin: `RUN` (its newest checkpoint), `RUN@step-400` or `RUN/step-000400`.
        run_dir: The new run's directory. If it already holds the same branch, the branch is resumed.
        overrides: `key=value` words: the changes.
        cooldown: Decay the learning rate linearly to the floor over this many steps, and end.
    """
    run_dir = Path(run_dir)
    saved = find_checkpoint(origin)
    name = _name(saved)
    before = load_recipe(saved.directory / RECIPE)
    overrides = [*overrides, *_cooldown(before, saved.step, cooldown, overrides)]
    after = _continued(name, before, _changed(before, overrides), saved.step, overrides)
    if not (run_dir / RECIPE).exists():
        if checkpoint_steps(run_dir) and not read_history(run_dir):
            raise SettingsError(f"{run_dir} contains checkpoints of another run; choose another directory")
        return Branch(after, run_dir, before, saved)
    begun = [entry.get("from") for entry in read_history(run_dir)]
    if begun[-1:] != [name] or differences(load_recipe(run_dir / RECIPE), after):
        raise SettingsError(f"{run_dir} already contains another run; `fathom train {run_dir}` resumes it")
    return Branch(after, run_dir, before, saved)


def _cooldown(before: Recipe, step: int, length: int | None, overrides: Sequence[str]) -> list[str]:
    """The overrides for a linear decay of the learning rate over the next `length` steps."""
    if length is None:
        return []
    if length < 1:
        raise SettingsError(f"cooldown={length}: allowed: 1 or more steps")
    given = {word.partition("=")[0] for word in overrides}
    for key in ("train.steps", "optim.schedule", "optim.decay", "optim.decay_steps"):
        if key in given:
            raise SettingsError(f"`cooldown={length}` sets {key}; use one of the two")
    keys = [f"train.steps={step + length}", "optim.schedule=wsd", f"optim.decay_steps={length}"]
    if "optim.lr" not in given and leaves_peak(before.optim, step - 1, before.train.steps):
        keys.append(f"optim.lr={_rate(before, step - 1)!r}")
    return keys


def _changed(before: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with its changes. Phases of the data mixture keep their steps, and those after the last step are left
    out, unless the branch gives new phases."""
    if not before.data.phases or any(word.startswith("data.phases=") for word in overrides):
        return before.override(*overrides)
    steps = before.override("data.phases=[]", *overrides).train.steps
    if steps == before.train.steps:
        return before.override(*overrides)
    kept = [{"at": at, "mixture": mix} for at, mix in before.data.later(before.train.steps) if at < steps]
    return before.override(f"data.phases={json.dumps(kept)}", *overrides)


def _continued(name: str, before: Recipe, after: Recipe, step: int, overrides: Sequence[str]) -> Recipe:
    """The recipe of a branch, which keeps the original run's warm-up; a `SettingsError` if a branch cannot make the
    changes."""
    if fixed := differences(before, after, ignore=CHANGEABLE):
        raise SettingsError(
            f"{name}: {', '.join(fixed)} cannot change in a branch; a new run with model.from_pretrained={name} can "
            "change this"
        )
    given = {word.partition("=")[0] for word in overrides}
    warmup = before.optim.rising(before.train.steps)
    if not given & {"optim.warmup", "optim.warmup_steps"} and warmup != after.optim.rising(after.train.steps):
        after = after.override(f"optim.warmup_steps={warmup}")
    if after.train.steps <= step:
        raise SettingsError(
            f"train.steps={after.train.steps}: {name} has already taken {step} steps; allowed: more; "
            "for fewer steps, branch from an earlier checkpoint"
        )
    if _begun(before, step) != _begun(after, step):
        raise SettingsError(f"{name}: data.phases cannot change before step {step}; allowed: other phases from then on")
    if before.train.steps == after.train.steps:
        return after
    _require_same_progress(name, before.train.steps, after, step)
    if given & {"optim.schedule"}:
        return after
    schedule, planned = before.optim.schedule, before.train.steps
    if schedule in ("cosine", "linear") or leaves_peak(before.optim, step - 1, planned):
        now, then = (f"{_rate(recipe, step):.4g}" for recipe in (before, after))
        change = f"go from {now} to {then}" if now != then else f"stay at {now}, fallen too early"
        raise SettingsError(
            f"train.steps={after.train.steps}: {name} follows a {schedule} schedule made for {planned} steps; the "
            f"learning rate of step {step + 1} would {change}; set optim.schedule to constant, wsd, linear or cosine"
        )
    return after


def _require_same_progress(name: str, planned: int, after: Recipe, step: int) -> None:
    """Refuse another number of steps if iterations that grow, or another schedule of the model, would jump."""
    config, steps = after.config(), after.train.steps
    progress = recurrence_class(config).progress
    if progress(config, step, planned) != progress(config, step, steps):
        raise SettingsError(
            f"train.steps={steps}: {name} has recurrence={config.recurrence} with a schedule made for {planned} steps, "
            f"which would jump at step {step + 1}; allowed: {planned}, or a checkpoint where the schedule has ended "
            "for both lengths"
        )


def _begun(recipe: Recipe, step: int) -> list[tuple[int, list[tuple[str, float]]]]:
    """The phases of the data mixture that begin before a step, with their shares in order."""
    return [(at, list(mix.items())) for at, mix in recipe.data.later(recipe.train.steps) if at < step]


def _rate(recipe: Recipe, step: int) -> float:
    return learning_rate(recipe.optim, step, recipe.train.steps)


def begin(branch: Branch, command: str) -> None:
    """Write a branch's first files: its history, the checkpoint, and the metrics up to it. If the process dies here,
    the directory has no recipe, and the same branch starts over.
    """
    source, target = branch.origin.directory.parent, branch.run_dir / step_name(branch.origin.step)
    _write_history(branch, command)
    for old in branch.run_dir.glob("step-*"):
        shutil.rmtree(old)
    new = branch.run_dir / f".unfinished-{target.name}"
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(branch.origin.directory, new, copy_function=_link)
    sync_directory(new)
    os.replace(new, target)
    if (source / METRICS).exists():
        shutil.copyfile(source / METRICS, branch.run_dir / METRICS)
    sync_directory(branch.run_dir)


def _link(source: str, target: str) -> None:
    """Hard-link a file of a checkpoint, which never changes; copy it where links are not possible."""
    try:
        os.link(source, target)
    except OSError:
        with open(source, "rb") as read, open(target, "wb") as write:
            shutil.copyfileobj(read, write)
            write.flush()
            os.fsync(write.fileno())


def _write_history(branch: Branch, command: str) -> None:
    """Write the history of the original run up to the checkpoint, and a line for the branch: time, step, command, the
    checkpoint, and the old and new value of every key that changed.
    """
    origin = branch.origin
    line: HistoryLine = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": origin.step,
        "command": command,
        "from": _name(origin),
        "changes": {key: list(values) for key, values in branch.changes.items()},
    }
    lines = [*(known for known in read_history(origin.directory.parent) if known["step"] < origin.step), line]
    write_atomically(branch.run_dir / HISTORY, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))


HistoryLine = TypedDict(
    "HistoryLine",
    {"time": str, "step": int, "command": str, "from": str, "changes": dict[str, list[object]]},
    total=False,
)
"""A branch: `from` names its checkpoint."""


def read_history(run_dir: Path) -> list[HistoryLine]:
    """The branches that led to a run, oldest first; empty if the run is not a branch."""
    path = run_dir / HISTORY
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        return [{**line, "step": int(line["step"]), "changes": dict(line["changes"])} for line in lines]
    except (ValueError, KeyError, TypeError):
        raise SettingsError(f"{path} is damaged: move it away to resume without it") from None


def _name(saved: Saved) -> str:
    return f"{saved.directory.parent}@step-{saved.step}"
