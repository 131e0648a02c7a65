"""Which model a path means: a model directory itself, a run's, or that of a comparison's best run.

Only names and reports are read here, no weights, so torch is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import yaml

from fathom.checkpoints.hub import local
from fathom.checkpoints.layout import ARMS, CONFIG, LADDER, MODEL, RECIPE, REPORT, RESULT, step_number
from fathom.errors import ModelError
from fathom.report.files import read_json


class _Mean(TypedDict):
    mean: float


class _Run(TypedDict):
    loss: float
    directory: str


class _Arm(TypedDict, total=False):
    name: str
    loss: float
    runs: list[_Run]
    difference: _Mean


class _Report(TypedDict):
    """The part of a comparison's report that is read here."""

    arms: list[_Arm]


def find_model(path: str | Path) -> Path:
    """The exported model behind a path: a model directory, a run, or a comparison, whose best arm is taken."""
    path = local(path)
    require_there(path)
    if (path / CONFIG).exists():
        return path
    if (model := finished_model(path)) is not None:
        return model
    if holds_comparison(path):
        return find_model(best_run(path))
    if (path / RECIPE).exists():
        raise ModelError(
            f"{path}: this run wrote no model at its last step; it is unfinished, or train.export was false"
        )
    raise ModelError(f"{path}: neither a model directory ({CONFIG}) nor a run nor a comparison")


def require_there(path: Path) -> None:
    """Refuse a model that does not exist."""
    if not path.exists():
        raise ModelError(f"{path}: no such {'file' if path.suffix == '.gguf' else 'directory'}")


def finished_model(run: Path) -> Path | None:
    """The export of a run, if it is of the run's last step; a run that goes on leaves the earlier one behind."""
    model, steps = run / MODEL, checkpoint_steps(run)
    if not (model / CONFIG).exists():
        return None
    # The export is written before the result, and the result is gone before a further step is taken. A run that was
    # shortened keeps a damaged checkpoint beyond its last step.
    finished = finished_step(run) if steps else 0
    return model if not steps or finished >= steps[-1] or finished == _planned_steps(run) else None


def finished_step(run: Path) -> int:
    """The step at which a run has finished, by its result; -1 without one."""
    try:
        return int(read_json(run / RESULT)["step"])
    except FileNotFoundError:
        return -1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{run / RESULT} cannot be read: {error}") from None


def _planned_steps(run: Path) -> int | None:
    """`train.steps` of a run's recipe; None where it cannot be read."""
    try:
        return int(yaml.safe_load((run / RECIPE).read_text(encoding="utf-8"))["train"]["steps"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def checkpoint_steps(run: Path) -> list[int]:
    """Steps with a checkpoint, ascending, intact or not."""
    found = (step_number(path.name) for path in run.glob("step-*") if path.is_dir())
    return sorted(step for step in found if step is not None)


def experiment_of(run: Path) -> str | None:
    """What a run is part of and stays as planned for: a ladder, a comparison, or nothing."""
    run = run.resolve()
    if any((path / LADDER).exists() for path in run.parents[:5]):  # LADDER/rungs/1/arms/ARM/seed-0
        return "ladder"
    return "comparison" if run.parent.parent.name == ARMS else None


def holds_model(path: Path) -> bool:
    """Whether a directory is a run or a comparison: it holds a model but is not itself a model directory."""
    return not (path / CONFIG).exists() and any((path / name).exists() for name in (RECIPE, REPORT, MODEL))


def holds_comparison(path: Path) -> bool:
    """Whether a directory is a comparison: it has a report and is neither a run nor a model directory."""
    return (path / REPORT).exists() and not any((path / name).exists() for name in (RECIPE, CONFIG))


def best_run(comparison: Path) -> Path:
    """The run with the lowest loss of a comparison's best arm."""
    try:
        report: _Report = read_json(comparison / REPORT)
        finished = any(arm["runs"] for arm in report["arms"])
        best = min(best_arm(report)["runs"], key=lambda run: run["loss"])["directory"] if finished else ""
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"{comparison}: its {REPORT} is not a comparison's, and there is no model beside it") from None
    if not finished:
        raise ModelError(f"{comparison}: no arm of this comparison is finished")
    return comparison / str(best)


def best_arm(report: _Report) -> _Arm:
    """The arm of a comparison's report with the lowest mean validation loss."""
    control = report["arms"][0]
    scored = [arm for arm in report["arms"] if arm["runs"]]

    def loss(arm: _Arm) -> float:
        # By the paired difference, since the mean of an arm that lost a seed is not over all of the control's seeds.
        return control["loss"] + arm["difference"]["mean"] if "difference" in arm else arm["loss"]

    return min(scored, key=loss)
