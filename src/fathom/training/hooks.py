"""Hooks: objects that a run calls at fixed points, for displays, trackers, evaluations and your own code.

`loop.py` calls the hooks. An exception in a hook ends the run: `Hooks.around` calls every `after_run` and raises the
exception again, and `loop.py` does not catch it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fathom.data.batches import BatchPlan
from fathom.data.shards import TokenDataset
from fathom.errors import FathomError
from fathom.models.configuration import FathomConfig
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import Recipe
from fathom.training.optimizer import Optimizer
from fathom.training.parallel import Ranks
from fathom.training.results import Evaluation, StepMetrics

if TYPE_CHECKING:
    from peft import PeftModel


class Trained(Protocol):
    """The model, optimizer and data that hooks may use, as `run.training`."""

    model: FathomForCausalLM
    config: FathomConfig
    optimizer: Optimizer
    data: TokenDataset
    plan: BatchPlan
    ranks: Ranks
    adapters: PeftModel | None

    @property
    def micro_batch(self) -> int:
        """Sequences per forward pass of a rank."""


class Clock(Protocol):
    """The parts of the run's meter that hooks may use."""

    seconds: float

    def paused(self) -> AbstractContextManager[None]:
        """A context manager for a block whose time does not count as training time."""


class ObservedRun(Protocol):
    """The parts of a run that hooks may use."""

    recipe: Recipe
    run_dir: Path
    ranks: Ranks
    step: int

    @property
    def training(self) -> Trained:
        """Model, optimizer and adapters."""

    @property
    def meter(self) -> Clock:
        """The time spent in steps."""

    @property
    def hooks(self) -> Iterable[Hook]:
        """The run's hooks, in order."""

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""

    def due(self, every: int) -> bool:
        """Whether an action that is due every `every` steps is due after the current step."""

    def log(self, values: Mapping[str, float]) -> None:
        """Log numbers of your own with the current step."""

    def say(self, text: str) -> None:
        """Print a line above the progress display."""

    def stop(self) -> None:
        """End the run after the next training step, with a checkpoint."""

    def read(self) -> None:
        """Read the numbers of the steps so far from the device, and log them."""


class Hook:
    """A base class whose methods do nothing; override those you need, and pass the object to `train(callbacks=[...])`.

    `run` is the current run: `run.step`, `run.recipe`, `run.run_dir`, `run.ranks`, `run.training` (model, optimizer,
    data), `run.log(values)` for numbers of your own, `run.say(text)`, and `run.stop()`.
    """

    every_rank: bool = False
    """Whether to run on every rank, as collective operations need; else on the first rank only."""

    def before_run(self, run: ObservedRun) -> None:
        """Called before the first step of this process, after the checkpoint was loaded."""

    def before_step(self, run: ObservedRun) -> None:
        """Called before step number `run.step`, counted from 0."""

    def after_step(self, run: ObservedRun, metrics: StepMetrics) -> None:
        """Called after a step; `run.step` counts this step. The metrics are tensors on the device, and reading one
        waits for it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Called once for each step, when its numbers are read from the device (every `train.log_every` steps), and
        after evaluations."""

    def after_evaluation(self, run: ObservedRun, evaluation: Evaluation) -> None:
        """Called after the held-out split was scored."""

    def after_save(self, run: ObservedRun, checkpoint: Path) -> None:
        """Called once a checkpoint is on disk. Saving runs in the background, so further steps may have been taken."""

    def after_run(self, run: ObservedRun, error: BaseException | None) -> None:
        """Called at the end of the run; `error` is None if the run succeeded."""

    def state(self) -> dict[str, object]:
        """State to keep in checkpoints, as JSON (numbers, strings, lists). Called before each save."""
        return {}

    def load(self, state: dict[str, object]) -> None:
        """Restore the state that the method `state` returned for the checkpoint; not called if that state was empty."""


class Hooks:
    """The hooks of one rank, called in order."""

    def __init__(self, given: Sequence[Hook], first: bool) -> None:
        self._named: dict[str, Hook] = {}
        """Hooks by class name; the second of a class is `NAME-2`."""
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        """Numbers to log once those of earlier steps are read, with their steps."""
        counts: dict[str, int] = {}
        for hook in given:
            name = type(hook).__name__
            counts[name] = counts.get(name, 0) + 1
            if first or hook.every_rank:
                self._named[f"{name}-{counts[name]}" if counts[name] > 1 else name] = hook

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._named.values())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass numbers to every hook, after those of earlier steps that wait."""
        self.log_waiting(before=step)
        for hook in self:
            hook.log(step, values)

    def log_later(self, step: int, values: Mapping[str, float]) -> None:
        """Let numbers wait for those of earlier steps."""
        self._waiting.append((step, dict(values)))

    def log_waiting(self, before: float = math.inf) -> None:
        """Pass on the numbers that wait, of steps before a given one."""
        while self._waiting and self._waiting[0][0] < before:
            step, values = self._waiting.pop(0)
            for hook in self:
                hook.log(step, values)

    @contextmanager
    def around(self, run: ObservedRun, states: Mapping[str, dict[str, object]]) -> Iterator[None]:
        """Load every hook's state and call `before_run`; at the end call `after_run` of all, in reverse order."""
        error: BaseException | None = None
        try:
            for name, state in states.items():
                if name in self._named:
                    self._named[name].load(state)
                else:
                    run.say(f"the checkpoint holds the state of a hook {name}, which is not in callbacks now")
            for hook in self:
                hook.before_run(run)
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            with ExitStack() as stack:
                for hook in self:
                    stack.callback(hook.after_run, run, error)

    def state(self) -> dict[str, dict[str, object]]:
        """The states of the hooks that have one, by name."""
        found = {name: state for name, hook in self._named.items() if (state := hook.state())}
        for name, state in found.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise FathomError(f"the state of the hook {name} is not JSON: {error}") from error
        return found
