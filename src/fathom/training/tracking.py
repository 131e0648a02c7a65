"""Experiment trackers: metrics.jsonl always, wandb, trackio or TensorBoard by name, and the terminal.

`meter.py` computes speed and MFU (`track.peak_flops`), and `heldout.py` the held-out losses.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fathom.checkpoints.file_names import ARMS, IDENTITY, METRICS
from fathom.errors import SettingsError, to_install
from fathom.recipe import Recipe
from fathom.report.files import read_json, write_atomically, write_json
from fathom.report.numbers import duration
from fathom.training.hooks import Hook, ObservedRun
from fathom.training.results import CROSS_ENTROPY, DIVERGENCE, StepMetrics


class JsonLines(Hook):
    """One JSON object per line. With a full disk, lines wait in memory and the run continues."""

    def __init__(self, path: Path, step: int, say: Callable[[str], None]) -> None:
        self.path, self.say = path, say
        self._waiting: list[str] = []
        self._complained = False
        if damaged := _forget_after(path, step):
            say(f"{path}: {damaged} damaged lines are skipped")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        # JSON has no NaN: null stands for any number that is not finite, and `read_metrics` returns NaN for it.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._waiting.append(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        # Whole lines in one write: a killed process leaves at most one broken line, the last.
        text = "".join(self._waiting).encode()
        try:
            before = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("ab") as file:
                    file.write(text)
            except OSError:
                os.truncate(self.path, before)
                raise
            self._waiting.clear()
        except OSError as error:
            if not self._complained:
                self.say(f"{self.path}: {error.strerror}; metrics wait in memory")
            self._complained = True


@dataclass(frozen=True)
class Identity:
    """The identity of a run in a tracking service."""

    id: str
    """An id in the run directory: the same after a resume, different for every run."""
    name: str
    """The displayed name: the directory, in a comparison with the arm."""
    group: str | None
    """The comparison that a run is part of."""

    @classmethod
    def of(cls, run_dir: Path) -> Identity:
        """The identity that a run directory has in a tracking service."""
        path = run_dir / IDENTITY
        if not path.exists():
            write_json(path, {"id": uuid.uuid4().hex[:16]})
        place = run_dir.resolve()
        if place.parent.parent.name != ARMS:
            return cls(read_json(path)["id"], place.name, None)
        return cls(read_json(path)["id"], f"{place.parent.name} {place.name}", place.parents[2].name)


class TrackingService(Hook):
    """A tracking service that receives the numbers of a step together."""

    _run: Any
    """With `log(values, step=…)` and `finish()`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self._run.log(dict(values), step=step)

    def after_run(self, run: ObservedRun, error: BaseException | None) -> None:
        """Finish the run."""
        self._run.finish()


class Wandb(TrackingService):
    """Weights & Biases."""

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        import wandb

        run = Identity.of(run_dir)
        project, config = recipe.track.project, recipe.to_dict()
        self._run = wandb.init(
            project=project, id=run.id, name=run.name, group=run.group, resume="allow", config=config
        )


class Trackio(TrackingService):
    """Hugging Face trackio."""

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        import trackio

        run = Identity.of(run_dir)
        # trackio identifies a run by its name.
        name, group = f"{run.name} {run.id[:6]}", {} if run.group is None else {"group": run.group}
        trackio.init(project=recipe.track.project, name=name, config=recipe.to_dict(), resume="allow", **group)
        self._run = trackio


class TensorBoard(Hook):
    """TensorBoard event files in the run directory."""

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def after_run(self, run: ObservedRun, error: BaseException | None) -> None:
        """Flush."""
        self._writer.close()


BACKENDS: dict[str, Callable[[Path, Recipe], Hook]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
}


def require_backends(recipe: Recipe) -> None:
    """Reject a recipe that names a tracker which is not installed."""
    for name in recipe.track.backends:
        if importlib.util.find_spec(name) is None:
            raise SettingsError(f"track.backends={name}: not installed; {to_install(name)}")


def open_trackers(recipe: Recipe, run_dir: Path, step: int, say: Callable[[str], None]) -> list[Hook]:
    """Open the trackers that a recipe names, to continue after `step`."""
    return [
        JsonLines(run_dir / METRICS, step, say),
        *(BACKENDS[name](run_dir, recipe) for name in recipe.track.backends),
    ]


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl; lines that were damaged are left out."""
    found = (_parsed(line) for line in _lines(run_dir / METRICS))
    return [line for line in found if line is not None]


def _parsed(line: bytes) -> dict[str, float] | None:
    """The numbers in a line of metrics.jsonl, with null as NaN; None if the line is damaged."""
    try:
        values = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        return None
    return {name: math.nan if value is None else value for name, value in values.items()}


def _forget_after(path: Path, step: int) -> int:
    """Drop damaged lines and lines after `step`, which a resumed run writes again; returns the number of damaged
    lines."""
    lines = _lines(path)
    parsed = [(line, _parsed(line)) for line in lines]
    kept = [line for line, values in parsed if values is not None and values["step"] <= step]
    if kept != lines:
        write_atomically(path, "".join(line.decode("utf-8") + "\n" for line in kept))
    # A crash may leave the last line broken, which is not reported.
    return sum(values is None for _, values in parsed[:-1])


def _lines(path: Path) -> Sequence[bytes]:
    return path.read_bytes().removesuffix(b"\n").split(b"\n") if path.exists() and path.stat().st_size else []


SLOW = 5.0
"""Seconds of a step after which the display says how long the run will take."""


class Display(Hook):
    """The display of a run: a line on standard error for each log interval."""

    def __init__(self, mode: str, steps: int) -> None:
        self.mode, self.steps = mode, steps
        self._began = 0.0
        """When the step began."""
        self._done = 0
        """Steps of this process."""

    def before_run(self, run: ObservedRun) -> None:
        """Print the run directory, the model's size, the device and the amount of data."""
        self.say(f"{opening(run)}; Ctrl-C stops and saves")

    def before_step(self, run: ObservedRun) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def after_step(self, run: ObservedRun, metrics: StepMetrics) -> None:
        """Say early how long a slow run will take: its first line of numbers may be an hour away. The first step sets
        up much, so the second is the measure."""
        took = time.perf_counter() - self._began
        self._done += 1
        if self._done > 2 or took < SLOW or run.due(run.recipe.train.log_every):
            return
        told = "" if self._done == 1 else f", about {duration(took * (self.steps - run.step))} to go"
        self.say(f"step {run.step}/{self.steps} took {duration(took)}{told}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print a step's numbers if they include the speed, which they do once per log interval."""
        if "tokens_per_second" in values:
            self.say("  ".join([f"step {step}/{self.steps}", *(f"{k} {v}" for k, v in readable(values).items())]))

    def say(self, text: str) -> None:
        """Show a message."""
        if self.mode != "none":
            print(text, file=sys.stderr, flush=True)


def opening(run: ObservedRun) -> str:
    """The run directory, the model's size, the device and the amount of data, in a line."""
    training, train = run.training, run.recipe.train
    every = sum(p.numel() for p in training.model.parameters())
    trained = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    size = f"{every:,} parameters" + (f" ({trained:,} trained)" if trained < every else "")
    device = run.ranks.device
    threads = torch.get_num_threads()
    where = "cpu, 1 thread" if threads == 1 else f"cpu, {threads} threads"
    where = where if device.type == "cpu" else torch.cuda.get_device_name(device)
    ranks = f" x {run.ranks.world_size}" if run.ranks.world_size > 1 else ""
    amount = f"{train.steps:,} steps of {train.tokens_per_step:,} tokens, corpus of {training.data.num_tokens:,}"
    return f"{run.run_dir}: {size} on {where}{ranks}; {amount}"


def readable(values: Mapping[str, float]) -> dict[str, str]:
    """The main numbers of a step, in readable units."""
    shown = {"loss": f"{values['loss']:.4f}"}
    if CROSS_ENTROPY in values and DIVERGENCE in values:  # what the loss of distillation is made of
        shown |= {"ce": f"{values[CROSS_ENTROPY]:.4f}", "kl": f"{values[DIVERGENCE]:.4f}"}
    shown |= {"lr": f"{values['lr']:.2e}", "grad": f"{values['grad_norm']:.2f}"}
    shown["tok/s"] = f"{values['tokens_per_second']:,.0f}"
    if "trips" in values:
        shown["trips"] = f"{values['trips']:.2f}"
    if "mfu" in values:
        shown["MFU"] = f"{100 * values['mfu']:.1f} %"
    shown["memory"] = f"{values['memory_bytes'] / 2**30:.1f} GiB"
    shown["ETA"] = duration(values["eta_seconds"])
    return shown
