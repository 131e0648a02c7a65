"""A comparison as data: the plan, its tasks, and which of them are done. Nothing here trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fathom.checkpoints.layout import ARMS, FAILED, MEASURED, PLAN, RECIPE, RESULT
from fathom.data.puzzles import open_data
from fathom.errors import SettingsError
from fathom.experiments.arms import Arm, Equal, arm_recipes, parse_arms
from fathom.experiments.compare_results import Failure, Measured, Measurement
from fathom.recipe import Recipe, differences, load_recipe, parse_recipe
from fathom.report.files import read_json
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


@dataclass(frozen=True)
class Plan:
    """Everything that defines a comparison."""

    recipe: Recipe
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    equal: Equal = "tokens"
    pairs: int = 12
    """Timing rounds per arm, in the order A B B A; 0 for none."""

    @property
    def control(self) -> Arm:
        """The first arm, with which the others are compared."""
        return self.arms[0]

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """Each arm's recipe, steps scaled to the equal budget."""
        return arm_recipes(self.recipe, self.arms, self.equal)

    def run_recipe(self, arm: str, seed: int) -> Recipe:
        """The recipe of one run."""
        return self.recipes[arm].override(f"train.seed={seed}", "track.display=none")

    def written(self) -> PlanValues:
        """What `plan.json` holds."""
        return PlanValues(self.arms, self.seeds, self.equal, self.pairs, self.recipe.to_dict())

    @classmethod
    def read(cls, out: Path) -> Plan:
        """The plan of an existing comparison."""
        path = plan_file(out, PLAN, "comparison")
        try:
            found = restored(PlanValues, read_json(path))
        except ValueError as error:
            raise SettingsError(f"{path} is damaged: {' '.join(str(error).split())}") from None
        if not found.arms or not found.seeds:
            raise SettingsError(f"{path} is damaged: it holds no arms and seeds")
        try:
            plan = cls(parse_recipe(found.recipe), found.arms, found.seeds, found.equal, found.pairs)
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
class RunTask:
    """One task for one process: a training run, or a measurement (without a seed)."""

    plan: Plan
    out: Path
    arm: str
    seed: int | None
    alone: bool = False
    """Whether the run counts even without the control's run of the same seed."""

    @property
    def name(self) -> str:
        """The name of its claim."""
        return f"{self.arm}-measured" if self.seed is None else f"{self.arm}-seed-{self.seed}"

    @property
    def timed(self) -> bool:
        """Whether it is a measurement."""
        return self.seed is None

    @property
    def device(self) -> str:
        """`train.device` of the comparison."""
        return self.plan.recipe.train.device

    @property
    def run_dir(self) -> Path:
        """The directory of a training run."""
        return self.out / ARMS / self.arm / f"seed-{self.seed}"

    @property
    def failure(self) -> Failure | None:
        """Why training failed; None if it did not."""
        return None if self.seed is None or self.done else read_failure(self.run_dir)

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do: it is done, it failed, or the control failed for that seed."""
        control = RunTask(self.plan, self.out, self.plan.control.name, self.seed)
        return self.done or self.failure is not None or (not self.alone and control.failure is not None)

    @property
    def done(self) -> bool:
        """Whether its result exists."""
        if self.seed is not None:
            return (self.run_dir / RESULT).exists()
        return read_measured(self.plan, self.out, self.arm) is not None


def read_failure(run_dir: Path) -> Failure | None:
    """Why a run cannot resume; None if it can."""
    path = run_dir / FAILED
    if not path.exists():
        return None
    return read_result(Failure, path, "delete it to resume the run")


def make_plan(
    recipe: Recipe, arms: str, seeds: int = 3, equal: Equal = "tokens", pairs: int = 12, out: Path | None = None
) -> Plan:
    """A plan, checked together with its data and the directory that it would resume."""
    if seeds < 1:
        raise SettingsError(f"seeds={seeds}: allowed: 1 or more")
    if pairs < 0:
        raise SettingsError(f"pairs={pairs}: allowed: 0 or more")
    first = recipe.train.seed
    plan = Plan(recipe, tuple(parse_arms(arms)), tuple(range(first, first + seeds)), equal, pairs)
    check(plan, out)
    return plan


def check(plan: Plan, out: Path | None = None, begins: bool = True) -> None:
    """Open the data as every arm will, check device and model if no run exists, and compare existing runs with the
    plan.

    Args:
        plan: What will run.
        out: The output directory; None if there is none yet.
        begins: Whether the caller knows that no run has begun.
    """
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
    for task in tasks(plan, out) if out is not None else ():
        path = task.run_dir / RECIPE
        if task.seed is not None and path.exists():
            differing = differences(load_recipe(path), plan.run_recipe(task.arm, task.seed))
            if differing:
                raise SettingsError(
                    f"{task.run_dir} contains a run of another recipe; different: {', '.join(differing)}"
                )


def check_machine(plan: Plan) -> None:
    """Reject recipes that cannot train on this machine's device."""
    for recipe in plan.recipes.values():
        check_device(recipe, device_of(recipe.train.device).type)


def tasks(plan: Plan, out: Path, alone: bool = False) -> list[RunTask]:
    """All tasks in the order of a single worker: seed by seed, so that a partial report is paired.

    Args:
        plan: The comparison.
        out: Its directory.
        alone: Whether runs count without the control's of their seed.
    """
    runs = [RunTask(plan, out, arm.name, seed, alone) for seed in plan.seeds for arm in plan.arms]
    timed = [RunTask(plan, out, arm.name, None) for arm in plan.arms[1:]] if plan.pairs else []
    return [*runs, *timed]


def read_measured(plan: Plan, out: Path, arm: str) -> Measured | None:
    """A measurement, if it was made for this plan's recipes."""
    path = out / MEASURED / f"{arm}.json"
    if not path.exists():
        return None
    found = read_result(Measurement, path, "delete it and run the same command to measure again")
    expected = [plan.run_recipe(name, plan.seeds[0]) for name in (arm, plan.control.name)]
    pairs = zip(found.recipes, expected, strict=True)
    same = all(not differences(parse_recipe(recipe), wanted, ignore=NOT_TIMED) for recipe, wanted in pairs)
    return found.measured if same and found.measured.time.pairs >= plan.pairs else None
