"""The model directory for a path: itself, a run's model, or the model of a comparison's best run.

Only names and reports are read here, no weights, so torch is not imported.

`runs.py` opens the weights of a run's checkpoints, also for `fathom export`. `hub.py` decides which names are the
Hub's, and `untrusted.py` refuses unsafe files, and links out of a directory.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fathom.checkpoints.file_names import ARMS, CONFIG, LADDER, MODEL, RECIPE, REPORT, RESULT, run_and_step, step_number
from fathom.checkpoints.hub import local
from fathom.errors import DataError, ModelError
from fathom.report.results import read_result


@dataclass(frozen=True)
class Facts:
    """What is known of how a model was trained: the contents of its run's `result.json`, and the recipe as YAML."""

    recipe: str | None = None
    step: int | None = None
    tokens: int | None = None
    evaluation: Mapping[str, object] | None = None

    @classmethod
    def of(cls, run: Path) -> Facts:
        """The facts in a run's `result.json`; all of them None if the file does not exist."""
        path = run / RESULT
        remedy = "delete it, and `fathom train` on that directory writes it again"
        return read_result(cls, path, remedy) if path.exists() else cls()


@dataclass(frozen=True)
class Gap:
    """A variant's difference in validation loss from the control variant."""

    mean: float


@dataclass(frozen=True)
class ScoredRun:
    """One run as a comparison's report lists it."""

    loss: float
    directory: str


@dataclass(frozen=True)
class ScoredArm:
    """One variant (arm) of a comparison as the report lists it."""

    name: str
    runs: list[ScoredRun]
    loss: float | None = None
    difference: Gap | None = None


@dataclass(frozen=True)
class Scored:
    """The part of a comparison's report that is needed to find its best run."""

    arms: list[ScoredArm]

    def best(self) -> ScoredArm:
        """The variant (arm) with the lowest mean validation loss."""
        control = math.inf if self.arms[0].loss is None else self.arms[0].loss
        # by the paired difference, since the mean of an arm that lost a seed is not over all of the control's seeds
        losses = {arm.name: control + arm.difference.mean if arm.difference else arm.loss for arm in self.arms}
        known = {name: math.inf if loss is None or math.isnan(loss) else loss for name, loss in losses.items()}
        return min((arm for arm in self.arms if arm.runs), key=lambda arm: known[arm.name])


def find_model(path: str | Path) -> Path:
    """The directory of an exported model, from the path of a model directory, a run, or a comparison (its best
    variant)."""
    path = local(path)
    found = run_and_step(path)
    if found is not None and found[1] is not None:
        writes = f"`fathom export {shlex.quote(str(path))} --to DIR` writes its model"
        raise ModelError(
            f"{path} is a training checkpoint, which `fathom train --from` and model.from_pretrained read, not a model "
            f"directory: {writes}"
        )
    require_there(path)
    if (path / CONFIG).exists():
        return path
    if (model := finished_model(path)) is not None:
        return model
    if holds_comparison(path):
        return find_model(best_run(path))
    if (path / RECIPE).exists():
        raise ModelError(f"{path}: {_no_model(path)}")
    raise ModelError(f"{path}: neither a model directory ({CONFIG}) nor a run nor a comparison")


def _no_model(run: Path) -> str:
    """Why a run has no exported model, and the command that writes it, for an error message."""
    name, steps = shlex.quote(str(run)), checkpoint_steps(run)
    writes = f"`fathom export {name} --to DIR` writes the model of its last checkpoint"
    if (run / RESULT).exists():
        return f"this run is finished and train.export was false: {writes}"
    experiment = experiment_of(run)
    resumes = f"the {experiment}'s command" if experiment else f"`fathom train {name}`"
    at = f"stopped after step {steps[-1]}" if steps else "it has no checkpoint yet"
    return f"this run is unfinished, {at}: {resumes} resumes it" + (f", and {writes}" if steps else "")


def require_there(path: Path) -> None:
    """Refuse a model that does not exist."""
    if not path.exists():
        raise ModelError(f"{path}: no such {'file' if path.suffix == '.gguf' else 'directory'}")


def finished_model(run: Path) -> Path | None:
    """The export of a run, which is written after its last step."""
    return run / MODEL if (run / MODEL / CONFIG).exists() else None


def checkpoint_steps(run: Path) -> list[int]:
    """The steps at which a run has a checkpoint, ascending, whether the checkpoint is intact or not."""
    found = (step_number(path.name) for path in run.glob("step-*") if path.is_dir())
    return sorted(step for step in found if step is not None)


def experiment_of(run: Path) -> str | None:
    """The kind of experiment, `ladder` or `comparison`, that a run belongs to and whose plan fixes the run; else
    None."""
    run = run.resolve()
    if any((path / LADDER).exists() for path in run.parents[:5]):  # LADDER/rungs/1/arms/ARM/seed-0
        return "ladder"
    return "comparison" if run.parent.parent.name == ARMS else None


def name_of(model: str | Path) -> str:
    """A display name for a model: its run's name rather than `model`, preceded by the variant's name in a
    comparison."""
    place = Path(model).resolve()
    place = place.parent if place.name == MODEL else place
    return f"{place.parent.name}-{place.name}" if place.parent.parent.name == ARMS else place.name


def holds_model(path: Path) -> bool:
    """Whether a directory is a run or a comparison: it holds a model but is not itself a model directory."""
    return not (path / CONFIG).exists() and any((path / name).exists() for name in (RECIPE, REPORT, MODEL))


def holds_comparison(path: Path) -> bool:
    """Whether a directory is a comparison: it has a report and is neither a run nor a model directory."""
    return (path / REPORT).exists() and not any((path / name).exists() for name in (RECIPE, CONFIG))


def best_run(comparison: Path) -> Path:
    """The run with the lowest loss among the seeds of a comparison's best variant."""
    try:
        report = read_result(Scored, comparison / REPORT, "train it again")
    except DataError:
        raise ModelError(f"{comparison}: {REPORT} is not a comparison's, and the directory has no model") from None
    if not any(arm.runs for arm in report.arms):
        raise ModelError(f"{comparison}: no arm of this comparison is finished")
    return comparison / min(report.best().runs, key=lambda run: run.loss).directory
