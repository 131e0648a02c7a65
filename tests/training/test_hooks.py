"""Hooks: called at every point in order, kept in checkpoints, told of the end, and without a trace in the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fathom.errors import FathomError
from fathom.recipe import Recipe
from fathom.training import Evaluation, Hook, train
from fathom.training.build import StepMetrics, Training
from fathom.training.hooks import Hooks
from fathom.training.loop import Run
from fathom.training.tracking import read_metrics
from tests import processes
from tests.tiny import tiny_recipe

POINTS = ("before_run", "before_step", "after_step", "log", "after_evaluation", "after_save", "after_run")


class Recorder(Hook):
    """Notes every call, with the steps taken by then."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def before_run(self, run: Run) -> None:
        self.calls.append(("before_run", run.step))

    def before_step(self, run: Run) -> None:
        self.calls.append(("before_step", run.step))

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        assert isinstance(metrics.loss, Tensor) and isinstance(metrics.grad_norm, Tensor)
        assert metrics.step == run.step - 1
        self.calls.append(("after_step", run.step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("log", step))

    def after_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self.calls.append(("after_evaluation", run.step))

    def after_save(self, run: Run, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").exists() and checkpoint.parent == run.run_dir
        self.calls.append(("after_save", int(checkpoint.name.removeprefix("step-"))))

    def after_run(self, run: Run, error: BaseException | None) -> None:
        self.calls.append(("after_run", error))


class Sum(Hook):
    """The sum of all losses, kept in checkpoints; it can stop or fail at a step."""

    def __init__(self, stop: int = 0, fail: int = 0) -> None:
        self.total, self.steps, self.stop, self.fail = 0.0, 0, stop, fail

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        self.total, self.steps = self.total + float(metrics.loss), self.steps + 1
        if run.step == self.stop:
            run.stop()
        if run.step == self.fail:
            raise RuntimeError("enough")

    def state(self) -> dict[str, Any]:
        return {"total": self.total, "steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        self.total, self.steps = state["total"], state["steps"]


class Forgetful(Sum):
    """The fault: nothing is restored."""

    def load(self, state: dict[str, Any]) -> None:
        assert state["steps"]


class Best(Hook):
    """The lowest held-out loss so far."""

    def __init__(self) -> None:
        self.best = math.inf

    def state(self) -> dict[str, Any]:
        return {"best": self.best}

    def load(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def test_every_point_in_order(corpus: Path, tmp_path: Path) -> None:
    """And the weights are those of a run without hooks, bit for bit."""
    recipe = tiny_recipe(corpus, "train.steps=4", "train.checkpoint_every=2", "train.async_save=false")
    recorder = Recorder()
    train(recipe, tmp_path / "with", callbacks=[recorder])
    assert {name for name, _ in recorder.calls} == set(POINTS)
    half = [("before_step", 2), ("after_step", 3), ("before_step", 3), ("log", 3), ("log", 4), ("log", 4)]
    assert recorder.calls == [
        *(("before_run", 0), ("before_step", 0), ("after_step", 1), ("before_step", 1), ("log", 1), ("log", 2)),
        *(("after_step", 2), ("after_save", 2)),
        *(*half[:5], ("after_step", 4), half[5], ("after_evaluation", 4), ("after_save", 4), ("after_run", None)),
    ]
    train(recipe, tmp_path / "without")
    one, other = (processes.weights(tmp_path / name, 4) for name in ("with", "without"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    again = Recorder()
    train(recipe, tmp_path / "with", callbacks=[again])
    assert again.calls == [], "a finished run is not trained again"


class Counter(Hook):
    """Logs a number of its own after every step."""

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        run.log({"count": run.step})


def test_numbers_of_a_hook_wait_for_those_of_earlier_steps(recipe: Recipe, tmp_path: Path) -> None:
    """wandb ignores a step that comes after a later one."""
    train(recipe.override("train.steps=4", "train.log_every=3", "evaluate.every=0"), tmp_path, callbacks=[Counter()])
    found = [(line["step"], "loss" in line) for line in read_metrics(tmp_path) if "loss" in line or "count" in line]
    assert found == [(step, own) for step in (1, 2, 3, 4) for own in (True, False)]


@pytest.mark.quick("stop")
@pytest.mark.parametrize("ending", ["stop", "fail"])
def test_state_goes_on_with_the_run(recipe: Recipe, tmp_path: Path, ending: str) -> None:
    """Stopped in order after step 4, or lost at step 5 with the checkpoint of step 4; each save is told of once."""
    whole, recorder = Sum(), Recorder()
    train(recipe, tmp_path / "whole", callbacks=[whole, recorder])
    assert whole.steps == 8 and math.isfinite(whole.total)
    assert [step for name, step in recorder.calls if name == "after_save"] == [4, 8]
    if ending == "stop":
        assert train(recipe, tmp_path / "run", callbacks=[Sum(stop=3)]).step == 4
    else:
        with pytest.raises(RuntimeError, match="enough"):
            train(recipe, tmp_path / "run", callbacks=[Sum(fail=5)])
    kept = json.loads((tmp_path / "run" / "step-000004" / "trainer.json").read_text())["hooks"]
    assert kept["Sum"]["steps"] == 4
    again = Sum()
    assert train(recipe, tmp_path / "run", callbacks=[again]).finished
    assert (again.total, again.steps) == (whole.total, 8)
    assert processes.losses(tmp_path / "run") == processes.losses(tmp_path / "whole")


def test_an_infinite_state_comes_back(recipe: Recipe, tmp_path: Path) -> None:
    """Of the hook that restores it."""
    recipe = recipe.override("train.steps=4")
    train(recipe, tmp_path, callbacks=[Best(), Forgetful(stop=1)])
    again, forgetful = Best(), Forgetful()
    again.best = 0.0
    train(recipe, tmp_path, callbacks=[again, forgetful])
    assert again.best == math.inf and forgetful.steps == 2


def test_the_state_of_a_hook_that_is_gone_is_named(recipe: Recipe, tmp_path: Path, capsys) -> None:
    """It is not lost in silence."""
    train(recipe, tmp_path, callbacks=[Sum(stop=3)])
    train(recipe.override("track.display=lines", "train.steps=8"), tmp_path, callbacks=[Recorder(), Stop(5)])
    assert "the state of a hook Sum, which is not in callbacks now" in capsys.readouterr().err


class Stop(Hook):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        if run.step == self.step:
            run.stop()


class Asks(Hook):
    """Has the held-out split scored after a step."""

    every_rank = True

    def __init__(self, step: int) -> None:
        self.step, self.found = step, math.nan

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        if run.step == self.step:
            scored = run.held_out.score(run)
            assert scored is not None
            self.found = scored.loss


def test_a_score_on_the_way_is_not_the_last(corpus: Path, tmp_path: Path) -> None:
    """The result has the loss of the weights that it leaves, also where a hook had others scored before."""
    recipe = tiny_recipe(corpus, "train.steps=4", "evaluate.every=0", "optim.lr=0.01")
    plain = train(recipe, tmp_path / "plain")
    for step in (1, 4):
        asks = Asks(step)
        result = train(recipe, tmp_path / str(step), callbacks=[asks])
        assert result.evaluation is not None and plain.evaluation is not None
        assert result.evaluation.loss == plain.evaluation.loss
        assert (asks.found == result.evaluation.loss) == (step == 4)


class Failing(Recorder):
    """Fails at a point."""

    def __init__(self, point: str) -> None:
        super().__init__()
        self.point = point

    def __getattribute__(self, name: str) -> Any:
        if name in POINTS and name == super().__getattribute__("point"):

            def fail(*arguments: Any) -> None:
                raise RuntimeError(name)

            return fail
        return super().__getattribute__(name)


@pytest.mark.parametrize("point", POINTS)
def test_after_run_is_always_called(recipe: Recipe, tmp_path: Path, point: str) -> None:
    """Of every hook, whichever of them fails and wherever; it is told of the error."""
    before, after = Recorder(), Recorder()
    with pytest.raises(RuntimeError, match=point) as raised:
        train(recipe.override("train.steps=2"), tmp_path, callbacks=[before, Failing(point), after])
    for recorder in (before, after):
        (error,) = [given for name, given in recorder.calls if name == "after_run"]
        assert error is (None if point == "after_run" else raised.value)


class Reads(TorchDispatchMode):
    """Counts values that leave the device; what a step does inside, as AdamW on a CPU, is its own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.inside = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not self.inside and function.overloadpacket.__name__ == "_local_scalar_dense"
        return function(*args, **(kwargs or {}))


class Between(Hook):
    """Counts reads from the second step to the one before the last; `read` plants one in each."""

    def __init__(self, read: bool) -> None:
        self.read, self.reads = read, Reads()

    def before_step(self, run: Run) -> None:
        if run.step == 1:
            self.reads.__enter__()

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        if self.read:
            float(metrics.loss)
        if run.step == 7:
            self.reads.__exit__(None, None, None)


@pytest.mark.parametrize("read", [False, True])
def test_the_loop_reads_nothing(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: bool) -> None:
    """Between two looks, whatever hooks there are; and a hook that reads is seen."""
    hook, step = Between(read), Training.step

    def unwatched(*arguments: Any) -> StepMetrics:
        hook.reads.inside = True
        try:
            return step(*arguments)
        finally:
            hook.reads.inside = False

    monkeypatch.setattr(Training, "step", unwatched)
    quiet = ("train.log_every=8", "train.checkpoint_every=8", "evaluate.every=8", "train.max_skipped=8")
    train(recipe.override(*quiet), tmp_path, callbacks=[hook])
    assert hook.reads.count == (6 if read else 0)


class Odd(Hook):
    """Keeps what JSON does not know."""

    def state(self) -> dict[str, Any]:
        return {"best": torch.ones(1)}


def test_state_must_be_json(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(FathomError, match=r"^the state of the hook Odd is not JSON: .*Tensor") as raised:
        train(recipe, tmp_path, callbacks=[Odd()])
    assert "\n" not in str(raised.value)


class Everywhere(Sum):
    """On every rank."""

    every_rank = True


def test_names_and_ranks() -> None:
    """Two of a class are told apart, by the same names on every rank."""
    given = [Sum(), Everywhere(), Sum(), Everywhere()]
    first, other = Hooks(given, True), Hooks(given, False)
    assert list(first) == given and list(other) == [given[1], given[3]]
    assert first.state().keys() == {"Sum", "Everywhere", "Sum-2", "Everywhere-2"}
    state = {"total": 2.0, "steps": 1}
    run = Mock()
    with other.around(run, {"Everywhere-2": state, "Sum": state, "Gone": state}):
        assert (given[1].steps, given[3].steps) == (0, 1)
    assert [call.args[0].split()[8] for call in run.say.call_args_list] == ["Sum,", "Gone,"]


class Told(Recorder):
    """Writes what it was told, from every rank."""

    every_rank = True

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place

    def after_run(self, run: Run, error: BaseException | None) -> None:
        kinds = ("before_run", "after_step", "after_evaluation", "after_save")
        (self.place / f"{run.ranks.rank}.json").write_text(json.dumps([c for c in self.calls if c[0] in kinds]))


def train_told(corpus: Path, run_dir: Path, place: Path) -> None:
    train(tiny_recipe(corpus), run_dir, callbacks=[Told(place), Sum()])


@pytest.mark.slow
def test_two_ranks(corpus: Path, tmp_path: Path) -> None:
    processes.run_ranks(2, train_told, corpus, tmp_path / "run", tmp_path)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert [c for c in one if c[0] != "after_save"] == [c for c in other if c[0] != "after_save"]
    for calls in (one, other):
        assert [step for name, step in calls if name == "after_save"] == [4, 8]
    assert json.loads((tmp_path / "run" / "step-000008" / "trainer.json").read_text())["hooks"]["Sum"]["steps"] == 8
