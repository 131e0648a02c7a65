"""Hooks: what a run calls at fixed points, for displays, trackers, evaluations and whatever a user adds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fathom.errors import FathomError

if TYPE_CHECKING:
    from fathom.training.build import StepMetrics
    from fathom.training.heldout import Evaluation
    from fathom.training.loop import Run


class Hook:
    """A base class whose methods do nothing; override those you need, and pass the object to `train(callbacks=[...])`.

    `run` is the run under way: `run.step`, `run.recipe`, `run.run_dir`, `run.ranks`, `run.training` (model, optimizer,
    data), `run.log(values)` for numbers of your own, `run.say(text)`, and `run.stop()`.
    """

    every_rank: bool = False
    """Whether to run on every rank, as a collective operation must; else on the first alone."""

    def before_run(self, run: Run) -> None:
        """Before the first step of this call; the state of a checkpoint is loaded by now."""

    def before_step(self, run: Run) -> None:
        """Before step number `run.step`, counted from 0."""

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        """After a step; `run.step` counts it. The metrics are tensors on the device: reading one waits for it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the numbers on to the tracker."""

    def after_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """After the held-out split was scored."""

    def after_save(self, run: Run, checkpoint: Path) -> None:
        """Once a checkpoint is on disk. Saving goes on beside the steps, so some more may have been taken."""

    def after_run(self, run: Run, error: BaseException | None) -> None:
        """Close the tracker."""

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps of this object: JSON, such as numbers, strings and lists. Called before each save."""
        return {}

    def load(self, state: dict[str, object]) -> None:
        """Continue with what `state` returned before the checkpoint; not called if that was nothing."""


class Tracker(Protocol):
    """Receives numbers and nothing else; `train` takes these too as `callbacks`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the numbers on to the tracker."""

    def close(self) -> None:
        """The run ends here."""


class Adapter(Hook):
    """A tracker as a hook."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the numbers on to the tracker."""
        self.tracker.log(step, values)

    def after_run(self, run: Run, error: BaseException | None) -> None:
        """Close the tracker."""
        self.tracker.close()


class Hooks:
    """The hooks of one rank, called in order."""

    def __init__(self, given: Sequence[Hook | Tracker], first: bool) -> None:
        self._named: dict[str, Hook] = {}
        """By class name, the second of a class as `NAME-2`."""
        counts: dict[str, int] = {}
        for one in given:
            hook = one if isinstance(one, Hook) else Adapter(one)
            name = type(hook).__name__
            counts[name] = counts.get(name, 0) + 1
            if first or hook.every_rank:
                self._named[f"{name}-{counts[name]}" if counts[name] > 1 else name] = hook

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._named.values())

    @contextmanager
    def around(self, run: Run, states: Mapping[str, dict[str, object]]) -> Iterator[None]:
        """Every hook's state and `before_run`, and in the end `after_run` of every one, the last first."""
        error: BaseException | None = None
        try:
            for name in self.load(states):
                run.say(f"the checkpoint holds the state of a hook {name}, which this call does not have")
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
        """By name, what those hooks keep that keep anything."""
        found = {name: state for name, hook in self._named.items() if (state := hook.state())}
        for name, state in found.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise FathomError(f"the state of the hook {name} is not JSON: {error}") from error
        return found

    def load(self, states: Mapping[str, dict[str, object]]) -> list[str]:
        """Hand every hook its state; the names for which there is no hook."""
        for name, state in states.items():
            if name in self._named:
                self._named[name].load(state)
        return [name for name in states if name not in self._named]
