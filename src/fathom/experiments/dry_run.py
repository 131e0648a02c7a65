"""The cost of a comparison or a ladder, and a ladder's expected precision: `--dry-run`.

`arms.py` decides the steps of each arm under `--equal`. `simulation.py` predicts a ladder's intervals. The dry run of a
paper's table is in `paper.py`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from functools import partial

import torch

from fathom.evaluation.clock import Clock
from fathom.experiments.arms import training_flops
from fathom.experiments.compare_results import ArmBudget, ComparisonBudget
from fathom.experiments.ladder_results import BudgetRow, LadderBudget, Resolution, Width
from fathom.experiments.plan import Plan
from fathom.experiments.rungs import Ladder, Size
from fathom.experiments.simulation import Truth, resolution
from fathom.experiments.timing import spread_steps
from fathom.models.cost import count_parameters
from fathom.recipe import Recipe
from fathom.report.tables import PlainTable
from fathom.training import build_training
from fathom.training.trained_flops import step_flops_range

TIMED = 5
"""Timed steps of the control at each rung, spread over the run, after a step that warms up."""
TOYS = Truth(sigma=(0.02, 0.006), shared=0.02, own=0.006)
"""Noise of small runs on few tokens; `Truth()` has the noise of longer ones."""


def budget(ladder: Ladder) -> LadderBudget:
    """Runs, FLOPs and hours by size on this machine, and the expected width of intervals."""
    rows = [_row(ladder, size) for size in ladder.all_sizes]
    return LadderBudget(
        rungs=rows,
        runs=sum(row.runs for row in rows),
        flops=math.fsum(row.flops for row in rows),
        hours=math.fsum(row.hours for row in rows),
        device=_device(),
        resolution=_resolution(ladder),
    )


def _row(ladder: Ladder, size: Size) -> BudgetRow:
    rules, at = ladder.rules, size.index - 1
    main = size.budget == 0
    points = rules.tune_points[at] if main and at < len(rules.tune_points) else 0
    seed_controls = min(rules.seed_control[at], rules.seeds[at]) if main and at < len(rules.seed_control) else 0
    last = main and rules.check and len(ladder.sizes) >= 3 and size == ladder.sizes[-1]
    runs = {arm: ladder.seeds[at] + (2 if last and arm in ladder.arms else 0) for arm in ladder.every_arm}
    for arm in ladder.arms if points else ():
        runs[arm] += points * rules.tune_seeds[at]
    runs[ladder.control] += seed_controls
    flops = math.fsum(count * ladder.flops(arm, size) for arm, count in runs.items())
    seconds = _step_seconds(ladder.run(ladder.control, size, ladder.recipe.optim.lr, ladder.first_seed()))
    per_flop = seconds * size.steps / ladder.flops(ladder.control, size)
    return BudgetRow(
        rung=size.name,
        parameters=size.parameters,
        tokens=size.tokens,
        steps=size.steps,
        runs=sum(runs.values()),
        flops=flops,
        step_seconds=seconds,
        hours=flops * per_flop / 3600,
    )


def comparison_budget(plan: Plan) -> ComparisonBudget:
    """Runs, FLOPs and hours by arm on this machine."""
    control = plan.run_recipe(plan.control.name, plan.seeds[0])
    seconds = _step_seconds(control)
    per_flop = seconds * control.train.steps / training_flops(control)
    arms = [_arm(name, recipe, len(plan.seeds), per_flop) for name, recipe in plan.recipes.items()]
    return ComparisonBudget(
        arms=arms,
        runs=sum(one.runs for one in arms),
        flops=math.fsum(one.flops for one in arms),
        step_seconds=seconds,
        hours=math.fsum(one.hours for one in arms),
        device=_device(),
    )


def _arm(name: str, recipe: Recipe, runs: int, seconds_per_flop: float) -> ArmBudget:
    steps, flops = recipe.train.steps, runs * training_flops(recipe)
    return ArmBudget(
        arm=name,
        parameters=count_parameters(recipe.config()),
        tokens=steps * recipe.train.tokens_per_step,
        steps=steps,
        runs=runs,
        flops=flops,
        hours=flops * seconds_per_flop / 3600,
    )


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, one process"


def _step_seconds(recipe: Recipe) -> float:
    """Seconds per step: the median of a few steps, or their mean if steps differ in their iterations."""
    training = build_training(recipe)
    clock = Clock(training.ranks.device)
    timed = spread_steps(recipe.train.steps, TIMED)
    _, *times = [clock.seconds(partial(training.step, step)) for step in (timed[-1], *timed)]
    least, _, most = step_flops_range(recipe)
    return statistics.median(times) if least == most else statistics.fmean(times)


def _resolution(ladder: Ladder) -> Resolution | None:
    """Expected half-widths of a ladder's intervals, from simulated ladders with as many model sizes and seeds; None if
    the ladder cannot estimate a multiplier."""
    if len(ladder.sizes) < 2 or max(ladder.seeds) < 2:
        return None
    flops = [ladder.flops(ladder.control, size) for size in ladder.sizes]
    decades = math.log10(flops[-1] / flops[0])
    if decades <= 0:
        return None

    def width(noise: Truth) -> Width:
        truth = dataclasses.replace(noise, decades=decades, seeds=ladder.seeds, start=flops[0])
        return Width(*resolution(truth))

    return Resolution(decades, width(Truth()), width(TOYS))


def comparison_rows(found: ComparisonBudget) -> PlainTable:
    """The cost of every arm."""
    columns = ["arm", "parameters", "tokens", "steps", "runs", "FLOPs", "hours"]
    rows = [
        [
            one.arm,
            *(f"{count:,}" for count in (one.parameters, one.tokens, one.steps, one.runs)),
            f"{one.flops:.3g}",
            f"{one.hours:.3g}",
        ]
        for one in found.arms
    ]
    words = "without evaluations and the timing rounds"
    return (
        f"A step of the control takes {found.step_seconds:.3f} s; arms at its speed for each FLOP, {words}",
        columns,
        rows,
    )


def budget_rows(found: LadderBudget) -> PlainTable:
    """The cost of every rung."""
    columns = ["rung", "parameters", "tokens", "steps", "runs", "FLOPs", "s/step", "hours"]
    rows = [
        [
            row.rung,
            *(f"{count:,}" for count in (row.parameters, row.tokens, row.steps, row.runs)),
            f"{row.flops:.3g}",
            f"{row.step_seconds:.3f}",
            f"{row.hours:.3g}",
        ]
        for row in found.rungs
    ]
    words = "checks as if every arm differed significantly; without points that tuning may add"
    return f"Arms at the control's speed for each FLOP, {words}", columns, rows
