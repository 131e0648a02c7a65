"""Ratios of interleaved steps, memory and caches against what can be worked out by hand."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from fathom.evaluation.clock import Clock
from fathom.experiments.arms import Arm
from fathom.experiments.dry_run import _step_seconds
from fathom.experiments.timing import cache_growth, interleaved, measure, saved_bytes, step_memory
from fathom.models.cost import cache_bytes_per_token
from fathom.recipe import Recipe
from fathom.training import Training, build_training
from tests.models.cases import build, config_of


@pytest.fixture(autouse=True)
def fast_memory(poisoned_memory):
    """Poisoning is not what is timed."""
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False


def test_drift_cancels():
    """On a machine that slows down steadily, A B B A still sees what is there."""
    now = itertools.count()
    state = {"time": 0.0, "slow": 1.0}

    def step(cost: float) -> None:
        next(now)
        state["slow"] *= 1.01
        state["time"] += cost * state["slow"]

    clock = Clock(torch.device("cpu"))
    clock.now = lambda: state["time"]
    ratio = interleaved(lambda: step(1.2), lambda: step(1.0), 9, clock=clock)
    assert ratio.median == pytest.approx(1.2, rel=1e-3)
    assert ratio.low <= ratio.median <= ratio.high and ratio.pairs == 9


@pytest.mark.slow
def test_an_arm_costs_as_much_as_itself(small: Recipe):
    control = small.override("train.tokens_per_step=1024", "train.micro_batch=32", "model.hidden_size=128")
    again = Arm("again", "vanilla").recipe(control)
    # A stranger may sit on the core for a whole measurement; he has to do so three times to be taken for the arm.
    found = [measure(again, control, pairs=21)]
    while not 0.97 < found[-1].time.median < 1.03 and len(found) < 3:
        found.append(measure(again, control, pairs=21))
    measured = found[-1]
    assert 0.97 < measured.time.median < 1.03, found
    assert measured.time.clock == "thread CPU time"
    assert measured.memory_bytes[0] == measured.memory_bytes[1]
    assert measured.shared_tensors[0] == measured.shared_tensors[1]


@pytest.mark.slow
def test_a_larger_arm_costs_more(small: Recipe):
    larger = small.override("model.num_hidden_layers=8")
    measured = measure(larger, small, pairs=5)
    assert measured.time.median > 1.2
    assert measured.memory_bytes[0] > 1.4 * measured.memory_bytes[1]
    assert measured.cache_bytes_per_token[0] == 2 * measured.cache_bytes_per_token[1]


@pytest.mark.quick("depth_attention")
@pytest.mark.parametrize("mechanism", ["depth_attention", "uniform_depth", "denseformer", "hyper_connections"])
def test_shared_parameters_start_equal(small: Recipe, mechanism: str):
    shared, equal = measure(Arm("arm", mechanism).recipe(small), small, pairs=1).shared_tensors
    assert shared == equal == len(build_training(small).weights())


def test_saved_bytes_follow_the_batch(small: Recipe):
    one, two = (saved_bytes(build_training(small.override(f"train.micro_batch={n}"))) for n in (4, 8))
    assert one < two < 2.05 * one


@pytest.mark.parametrize("case", ["vanilla", "loop+depth_attention-grid", "ponder2", "latent_cot@gemma"])
def test_cache_growth_is_what_is_declared(case: str):
    """Tokens that halt keep less than the declared most. What is declared of every mechanism is tested with models."""
    model = build(config_of(case))
    grown, declared = cache_growth(model), cache_bytes_per_token(model.config, bytes_per_scalar=4)
    assert 0 < grown <= declared
    assert grown == declared or model.model.recurrence.halts


def test_each_step_computes_by_its_own_kernels(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of stand-ins is one for the process: what was built last must not time both."""
    now: list[tuple[str, ...]] = []
    for place in ("fathom.training.build.use", "fathom.experiments.timing.use"):
        monkeypatch.setattr(place, lambda names, device=None: now.append(tuple(names)))
    monkeypatch.setattr("fathom.training.build.require", lambda names, device: None)  # as where liger-kernel is
    seen = []
    plain = Training.step

    def step(self: Training, number: int, batches: object = None) -> object:
        if batches is not None:  # a timed one
            seen.append((tuple(self.recipe.train.kernels), now[-1]))
        return plain(self, number, batches)

    monkeypatch.setattr(Training, "step", step)
    measure(small.override("train.kernels=[rms_norm]"), small, 2)
    assert len(seen) == 12 and all(own == used for own, used in seen) and len(set(seen)) == 2


def test_a_loop_that_grows_is_measured_over_its_whole_run(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first steps make one iteration, as the control does."""
    loop = "model.recurrence=loop", "model.recurrence_options.trips=3"
    few = small.override("train.tokens_per_step=64", "train.micro_batch=1", "model.num_hidden_layers=1")
    growing = few.override(*loop, "model.recurrence_options.growth=linear")
    trips = []
    plain = Training.step

    def step(self: Training, number: int, batches: object = None) -> object:
        made = plain(self, number, batches)
        if batches is not None and self.recipe is growing:  # a timed one
            trips.append(self.model.model.recurrence.drawn_trips)
        return made

    monkeypatch.setattr(Training, "step", step)
    found = measure(growing, few, 3)
    assert trips[2:] == [2, 2, 3, 3, 3, 3], "after two that warm up, each step is timed twice"
    fixed = build_training(few.override(*loop))
    assert found.memory_bytes[0] == pytest.approx(step_memory(fixed), rel=0.01)
    assert found.cache_bytes_per_token[0] == cache_growth(fixed.model) == 3 * found.cache_bytes_per_token[1]


def test_a_dry_run_times_steps_of_the_whole_run(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours are those of the mean step where iterations differ, else of the median step."""
    growing = small.override("model.recurrence=loop", "model.recurrence_options={trips: 5, growth: linear}")
    timed: list[int] = []

    def seconds(self: Clock, work: partial[object]) -> float:
        timed.append(work.args[0])
        return [9.0, 2.0, 5.0, 5.0, 5.0, 2.0][len(timed) - 1]

    monkeypatch.setattr(Clock, "seconds", seconds)
    assert _step_seconds(growing) == pytest.approx(3.8)
    assert timed == [10, 1, 3, 6, 8, 10], "of twelve"
    timed.clear()
    assert _step_seconds(small) == 5.0


def test_frozen_weights_need_no_gradient(small: Recipe) -> None:
    training = build_training(small.override("optim.only=[model.norm]"))
    held = sum(p.numel() for p in training.model.parameters()) * 4
    beyond = step_memory(training) - saved_bytes(training) - held
    assert beyond == pytest.approx(3 * 32 * 4, abs=8), "a gradient and two moments of one norm, and a count of steps"
