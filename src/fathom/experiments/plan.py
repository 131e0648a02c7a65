"""A comparison as data: the plan, its tasks, and which of them are done.

`differences.plan_changed` decides whether a report is exploratory, as after a change of seeds or contrasts that follows
results. `arms.py` decides each arm's steps and what it may override. More arms or seeds are allowed, since `check_runs`
compares only the recipes of runs. The plans of a paper's table are made in `paper.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from fathom.checkpoints.file_names import ARMS, MEASURED, PLAN, RECIPE
from fathom.checkpoints.places import require_folder
from fathom.data.puzzles import open_data
from fathom.errors import SettingsError
from fathom.experiments.arms import Arm, Equal, arm_recipes, parse_arms
from fathom.experiments.compare_results import Measured, Measurement
from fathom.experiments.contrasts import Contrast, parse_contrasts
from fathom.experiments.scheduler import Task, one_thread
from fathom.experiments.task_claims import Claim
from fathom.experiments.timing import measure
from fathom.recipe import Recipe, differences, load_recipe, parse_recipe
from fathom.report.files import read_json, write_json
from fathom.report.results import read_result, restored
from fathom.training.build import batch_plan, check_device, check_model
from fathom.training.parallel import device_of

NOT_TIMED = (
    *("track", "data.directory", "data.mixture", "data.phases"),
    *(f"train.{key}" for key in ("checkpoint_every", "keep_last", "async_save", "export", "log_every")),
)
"""Keys that a measurement does not depend on."""


@dataclass(frozen=True)
class PlanValues:
    """`plan.json`."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    equal: Equal
    pairs: int
    recipe: dict[str, object]
    contrasts: tuple[Contrast, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that defines a comparison."""

    recipe: Recipe
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    equal: Equal = "tokens"
    pairs: int = 12
    """Timing rounds per arm, in the order A B B A; 0 for none."""
    contrasts: tuple[Contrast, ...] = ()
    """Sums of several arms' losses with signs, tested in one family with the differences."""

    @property
    def control(self) -> Arm:
        """The first arm, with which the others are compared."""
        return self.arms[0]

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """Each arm's recipe, with `train.steps` scaled to the equal budget."""
        return arm_recipes(self.recipe, self.arms, self.equal)

    def run_recipe(self, arm: str, seed: int) -> Recipe:
        """The recipe of one run."""
        return self.recipes[arm].override(f"train.seed={seed}", "track.display=none")

    def run(self, out: Path, arm: str, seed: int, alone: bool = False) -> Task:
        """One training run.

        Args:
            out: The comparison's directory.
            arm: The arm's name.
            seed: Its seed.
            alone: Whether it counts without the control's run of its seed.
        """
        run, control = (out / ARMS / name / f"seed-{seed}" for name in (arm, self.control.name))
        return Task(out, run, arm, seed, partial(self.run_recipe, arm, seed), None if alone else control)

    def runs(self, out: Path, alone: bool = False) -> list[Task]:
        """All training runs, in the order in which a single worker takes them: seed by seed, so that a partial report
        is paired."""
        return [self.run(out, arm.name, seed, alone) for seed in self.seeds for arm in self.arms]

    def tasks(self, out: Path, alone: bool = False) -> list[Task]:
        """All runs, then all measurements."""
        seed, arms = self.seeds[0], self.arms[1:] if self.pairs else ()
        timed = [
            Measuring(out, out / MEASURED, arm.name, seed, partial(self.run_recipe, arm.name, seed), plan=self)
            for arm in arms
        ]
        return [*self.runs(out, alone), *timed]

    def written(self) -> PlanValues:
        """The content of `plan.json`."""
        return PlanValues(self.arms, self.seeds, self.equal, self.pairs, self.recipe.to_dict(), self.contrasts)

    @classmethod
    def read(cls, out: Path) -> Plan:
        """The plan of an existing comparison."""
        path = plan_file(out, PLAN, "comparison")
        try:
            found = restored(PlanValues, read_json(path))
        except ValueError as error:
            raise SettingsError(f"{path} is damaged: {' '.join(str(error).split())}") from None
        if not found.arms or not found.seeds:
            raise SettingsError(f"{path} is damaged: it has no arms or no seeds")
        try:
            recipe = parse_recipe(found.recipe)
            plan = cls(recipe, found.arms, found.seeds, found.equal, found.pairs, found.contrasts)
            _ = plan.recipes
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from error
        return plan


def plan_file(out: Path, name: str, what: str) -> Path:
    """The path of a directory's plan, which must exist.

    Args:
        out: The directory.
        name: The file's name.
        what: For the error: a comparison or a ladder.
    """
    if not (out / name).exists():
        raise SettingsError(f"{out}: contains no {what} ({name} is missing)")
    return out / name


@dataclass(frozen=True)
class Measuring(Task):
    """A task that measures an arm and the control and writes `measured/ARM.json`; both have the seed of the first
    run."""

    plan: Plan = field(kw_only=True)

    timed: ClassVar = True

    @property
    def name(self) -> str:
        """The name of its claim."""
        return f"{self.arm}-measured"

    @property
    def failure(self) -> None:
        """Always None: only training runs record a failure."""
        return None

    @property
    def done(self) -> bool:
        """Whether the measurement exists and still holds for this plan; see `read_measured`."""
        return read_measured(self.plan, self.out, self.arm) is not None

    def run(self, claim: Claim | None, **facts: str) -> bool:
        """Measure and write the result; under torchrun only the first rank measures."""
        if claim is None:
            return True
        control = self.plan.run_recipe(self.plan.control.name, self.seed)
        with one_thread():
            measured = measure(self.recipe, control, self.plan.pairs)
        claim.require()
        write_json(self.run_dir / f"{self.arm}.json", Measurement((self.recipe.to_dict(), control.to_dict()), measured))
        return True


def make_plan(
    recipe: Recipe,
    arms: str,
    seeds: int = 3,
    equal: Equal = "tokens",
    pairs: int = 12,
    out: Path | None = None,
    contrasts: str = "",
) -> Plan:
    """Make a comparison's plan, and check it together with its data and the directory `out` that it would resume."""
    if seeds < 1:
        raise SettingsError(f"seeds={seeds}: allowed: 1 or more")
    if pairs < 0:
        raise SettingsError(f"pairs={pairs}: allowed: 0 or more")
    first = recipe.train.seed
    found = tuple(parse_arms(arms))
    sums = parse_contrasts(contrasts, [arm.name for arm in found])
    plan = Plan(recipe, found, tuple(range(first, first + seeds)), equal, pairs, sums)
    check(plan, out)
    return plan


def check(plan: Plan, out: Path | None = None, begins: bool = True) -> None:
    """Open the data as every arm will read it, check device and model if no run exists, and compare existing runs with
    the plan.

    Args:
        plan: What will run.
        out: The output directory; None if there is none yet.
        begins: Whether the caller knows that no run has begun.
    """
    if out is not None:
        require_folder(out, "a comparison")
    begins = begins and (out is None or not (out / PLAN).exists())
    for name, recipe in plan.recipes.items():
        data = open_data(recipe.data.directory, verify=False, collections=recipe.data.collections)
        open_data(recipe.data.directory, "val", False, recipe.data.collections)
        data.require_vocabulary(recipe.config().vocab_size)
        batch_plan(recipe, data)
        rows = recipe.rows_per_step
        if rows % min(recipe.train.micro_batch, rows):
            raise SettingsError(
                f"arm {name}: train.micro_batch={recipe.train.micro_batch}: allowed: a divisor of {rows}"
            )
        if begins:
            device_of(recipe.train.device)
            check_model(recipe, data)
    if out is not None:
        check_runs(plan, out)


def check_runs(plan: Plan, out: Path) -> None:
    """Raise an error if the directory holds runs of other recipes than the plan's."""
    for task in plan.runs(out):
        path = task.run_dir / RECIPE
        if path.exists():
            differing = differences(load_recipe(path), task.recipe)
            if differing:
                raise SettingsError(
                    f"{task.run_dir} contains a run of another recipe; different: {', '.join(differing)}"
                )


def check_machine(plan: Plan) -> None:
    """Reject recipes that cannot train on this machine's device."""
    for recipe in plan.recipes.values():
        check_device(recipe, device_of(recipe.train.device).type)


def read_measured(plan: Plan, out: Path, arm: str) -> Measured | None:
    """The measurement of an arm; None unless it was made for this plan's recipes, with at least as many timing
    rounds."""
    path = out / MEASURED / f"{arm}.json"
    if not path.exists():
        return None
    found = read_result(Measurement, path, "delete it and run the same command to measure again")
    expected = [plan.run_recipe(name, plan.seeds[0]) for name in (arm, plan.control.name)]
    pairs = zip(found.recipes, expected, strict=True)
    same = all(not differences(parse_recipe(recipe), wanted, ignore=NOT_TIMED) for recipe, wanted in pairs)
    return found.measured if same and found.measured.time.pairs >= plan.pairs else None
