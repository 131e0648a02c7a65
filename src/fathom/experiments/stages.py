"""Determines the next runs of a ladder from its directory alone, so that all machines agree. The stages are:

tune every arm at several learning rates, at the first sizes
rungs all sizes but a sealed last one, each a comparison; the seed controls
seal    the last rung predicted, its hash kept
last    the last rung
check   half and twice the learning rate at the largest size

`ladder.py` runs the stages, `rungs.py` makes their recipes, `tuning.py` finds the best learning rate, and
`multipliers.py` compares the prediction with the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from fathom.checkpoints.file_names import PLAN, RESULT
from fathom.data.puzzles import is_puzzle
from fathom.errors import SettingsError
from fathom.experiments.arms import Arm
from fathom.experiments.ladder_results import Forecast, Prediction, Tuned
from fathom.experiments.plan import Plan, PlanValues, check_runs
from fathom.experiments.rungs import (
    CHECK,
    MATCHED,
    RUNGS,
    SEED_CONTROL,
    SEED_CONTROL_SEED,
    TUNE,
    TUNING_SEED,
    Ladder,
    Size,
    rounded,
    sha256_of,
)
from fathom.experiments.scaling import DECADE, ESTIMATOR, Posterior, Rung, fitted
from fathom.experiments.scheduler import Task
from fathom.experiments.tuning import LEARNED, bowl, first_places, next_place, pooled_sigma
from fathom.recipe import Recipe
from fathom.report.files import asdict, digest, read_json, write_json
from fathom.report.results import read_result, restored
from fathom.report.statistics import holm

STAGES = ("tune", "rungs", "seal", "last", "check")
PREDICTION = "prediction.json"
SURE = 0.05


@dataclass(frozen=True)
class State:
    """The state of a ladder, read from its directory."""

    ladder: Ladder
    out: Path

    # Tuning

    def tuning(self) -> tuple[list[Task], list[dict[str, Tuned]]]:
        """The tuning runs so far, and the tuning result of each finished rung by arm. The last runs may be
        unfinished."""
        runs, found = list[Task](), list[dict[str, Tuned]]()
        for index in range(len(self.ladder.rules.tune_points)):
            cells, bowls = self._search(index, found)
            # Whole seeds first, the control before the others.
            runs += [run for seed in zip(*cells, strict=True) for run in seed]
            if bowls is None:
                break
            found.append(bowls)
        return runs, found

    def _search(
        self, index: int, found: Sequence[dict[str, Tuned]]
    ) -> tuple[list[list[Task]], dict[str, Tuned] | None]:
        """The tuning runs of a rung, one list for each arm and learning rate; and, when all have ended, each arm's
        tuning result."""
        first = self.ladder.rules.tune_points[index]
        centres, domains = self._centres(index, found), self.ladder.rules.tune_domains
        places = {arm.name: first_places(first) for arm in self.ladder.arms}
        while True:
            cells = {
                (arm.name, place): self._tuning_runs(index, arm, place, centres[arm.name])
                for arm in self.ladder.arms
                for place in places[arm.name]
            }
            if not all(run.settled for cell in cells.values() for run in cell):
                return list(cells.values()), None
            points: dict[str, dict[int, list[float]]] = {name: {} for name in places}
            for (name, place), cell in cells.items():
                points[name][place] = [max(run.loss(domains), LEARNED) for run in cell]
            wanted = {name: at for name, rows in points.items() if (at := next_place(rows, first)) is not None}
            if not wanted:
                break
            for name, at in wanted.items():
                places[name].append(at)
        # The noise of a run is that of all arms together.
        sigma = pooled_sigma([*points.values(), *(tuned.losses for rows in found[:1] for tuned in rows.values())])
        return list(cells.values()), {
            name: Tuned(**vars(bowl(rows, first, sigma)), centre=centres[name], losses=dict(sorted(rows.items())))
            for name, rows in points.items()
        }

    def _centres(self, index: int, found: Sequence[dict[str, Tuned]]) -> dict[str, float]:
        """The centre of each arm's learning rates at a rung: the recipe's at the first rung, then the previous optimum,
        scaled by the rule."""
        if index == 0:
            return {arm.name: self.ladder.recipe.optim.lr for arm in self.ladder.arms}
        before, sizes = found[index - 1], self.ladder.sizes
        grown = self.ladder.rule(sizes[index]) / self.ladder.rule(sizes[index - 1])
        control = before[self.ladder.control.name]
        return {name: rounded((tuned.rate if tuned.known else control.rate) * grown) for name, tuned in before.items()}

    def _tuning_runs(self, index: int, arm: Arm, place: int, centre: float) -> list[Task]:
        """The tuning runs of an arm at one learning rate (`place` doublings from the centre), one for each seed."""
        size, first = self.ladder.sizes[index], self.ladder.first_seed() + TUNING_SEED
        where = self.out / TUNE / size.name / arm.name / f"lr{place:+d}"
        make = partial(self.ladder.run, arm, size, rounded(centre * 2.0**place))
        seeds = range(first, first + self.ladder.rules.tune_seeds[index])
        return [Task(self.out, where / f"seed-{n - first}", arm.name, n, partial(make, n)) for n in seeds]

    def used(self, run: Task) -> bool:
        """Whether this is a tuning run whose optimum later runs already use."""
        stage, size, *_ = run.run_dir.relative_to(self.out).parts  # tune/1/ARM/lr+1/seed-0
        return stage == TUNE and any((self.out / later).exists() for later in (RUNGS, f"{TUNE}/{int(size) + 1}"))

    @cached_property
    def finished_tuning(self) -> list[dict[str, Tuned]] | None:
        """The tuning results of every tuned rung, by arm; None while tuning is not finished."""
        runs, found = self.tuning()
        return found if all(run.settled for run in runs) else None

    @property
    def tuned(self) -> list[dict[str, Tuned]]:
        """The tuning results of every tuned rung, by arm; raises an error if tuning is not finished."""
        if self.finished_tuning is None:
            raise SettingsError(f"{self.out}: tuning is not finished")
        return self.finished_tuning

    def ratio(self, arm: Arm) -> float:
        """The ratio of an arm's learning rate to the control's, pooled over the tuned sizes; 1 if the arm's optimum is
        unknown."""
        control = self.ladder.control.name
        if arm.name == control or arm.name.startswith(MATCHED):
            return 1.0
        own = [i for i, rows in enumerate(self.tuned) if rows[arm.name].known]
        both = [self.tuned[i] for i in own if self.tuned[i][control].known]
        logs = [math.log(rows[arm.name].rate / rows[control].rate) for rows in both]
        if not logs:
            logs = [math.log(self._carried(arm, i) / self.tuned[-1][control].rate) for i in own]
        if logs:
            return math.exp(math.fsum(logs) / len(logs))
        last = self.tuned[-1] if self.tuned else None
        if last is None or math.isfinite(_loss_at(last[arm.name], last[control].rate)):
            return 1.0
        return last[arm.name].rate / last[control].rate  # it diverges at the control's learning rate

    def _carried(self, arm: Arm, index: int) -> float:
        """An arm's optimal learning rate at a tuned rung, transferred to the last tuned rung by the scaling rule."""
        here, last = self.ladder.sizes[index], self.ladder.sizes[len(self.tuned) - 1]
        return self.tuned[index][arm.name].rate * self.ladder.rule(last) / self.ladder.rule(here)

    def rate(self, arm: Arm, size: Size) -> float:
        """An arm's learning rate at a rung: the control's optimum, scaled by the rule, times the arm's ratio."""
        ladder = self.ladder
        if not self.tuned:
            return rounded(ladder.recipe.optim.lr * ladder.rule(size))
        reference = ladder.sizes[len(self.tuned) - 1]
        control = self.tuned[-1][ladder.control.name].rate
        return rounded(self.ratio(arm) * control * ladder.rule(size) / ladder.rule(reference))

    # Rungs

    @cached_property
    def plans(self) -> dict[Size, Plan]:
        """The plan of each rung's comparison; tuning must be finished."""
        ladder = self.ladder
        return {
            size: ladder.plan(size, {arm.name: self.rate(arm, size) for arm in ladder.every_arm})
            for size in ladder.all_sizes
        }

    @cached_property
    def flops(self) -> dict[tuple[Arm, Size], float]:
        """Training FLOPs of a run of each arm at each rung."""
        return {
            (arm, size): self.ladder.flops(arm, size) for arm in self.ladder.every_arm for size in self.ladder.all_sizes
        }

    def rung_dir(self, size: Size) -> Path:
        """The directory of a rung."""
        return self.out / RUNGS / size.name

    def rung_tasks(self, size: Size) -> list[Task]:
        """The training runs and measurements of a rung."""
        return self.plans[size].tasks(self.rung_dir(size), alone=is_puzzle(self.ladder.recipe.data.directory))

    def runs(self, size: Size, arm: Arm) -> list[Task]:
        """The runs of an arm at a rung."""
        plan = self.plans[size]
        return [plan.run(self.rung_dir(size), arm.name, seed) for seed in plan.seeds]

    def seed_controls(self) -> list[Task]:
        """The runs of the seed control: the control with the same batches and other initial values."""
        found, first = [], self.ladder.first_seed()
        for size, count in zip(self.ladder.sizes, self.ladder.rules.seed_control, strict=False):
            seeds = self.ladder.rules.seeds[size.index - 1]
            for seed in range(first, first + min(count, seeds)):
                where = self.out / SEED_CONTROL / size.name / f"seed-{seed}"
                recipe = partial(self._seed_control, size, seed)
                found.append(Task(self.out, where, self.ladder.control.name, seed, recipe))
        return found

    def _seed_control(self, size: Size, seed: int) -> Recipe:
        control = self.ladder.control
        rate = self.rate(control, size)
        order = self.ladder.run(control, size, rate, seed).data_seed
        return self.ladder.run(control, size, rate, seed + SEED_CONTROL_SEED).override(f"data.seed={order}")

    def main_sizes(self) -> list[Size]:
        """The sizes that run before the prediction is sealed."""
        last = self.ladder.sizes[-1]
        return [size for size in self.ladder.all_sizes if not (self.ladder.rules.sealed and size == last)]

    def losses(self, size: Size, arm: Arm) -> dict[int, float]:
        """Final losses of finished runs, by seed."""
        return finite_losses(self.runs(size, arm))

    def rungs(self, arm: Arm, sizes: Sequence[Size]) -> dict[Size, Rung]:
        """Losses of an arm and the control at each rung, for seeds that both finished; rungs without a shared seed are
        left out."""
        found = ((size, self.paired(size, self.losses(size, arm), self.flops[arm, size])) for size in sizes)
        return {size: rung for size, rung in found if rung is not None}

    def paired(self, size: Size, own: dict[int, float], flops: float) -> Rung | None:
        """The losses of some runs, given by seed, paired with the control's losses; None if they share no seed."""
        control = self.losses(size, self.ladder.control)
        seeds = sorted(set(control) & set(own))
        if not seeds:
            return None
        x_control, x_own = math.log(self.flops[self.ladder.control, size]), math.log(flops)
        return Rung(x_control, tuple(control[s] for s in seeds), x_own, tuple(own[s] for s in seeds))

    def fit(self, arm: Arm, sizes: Sequence[Size]) -> Posterior | None:
        """The posterior of an arm's losses and the control's; None if it cannot be computed."""
        return fitted(tuple(self.rungs(arm, sizes).values()))

    # The seal

    def prediction(self) -> Prediction:
        """The prediction that is sealed before the largest size is trained."""
        last, before = self.ladder.sizes[-1], self.ladder.sizes[:-1]
        rows: list[Forecast] = []
        for arm in self.ladder.every_arm[1:]:
            found = self.fit(arm, before)
            if found is None:
                rows.append(Forecast(arm.name))
                continue
            x_control, x_arm = (math.log(self.flops[one, last]) for one in (self.ladder.control, arm))
            rows.append(Forecast(arm.name, *found.predict(x_control, x_arm, self.ladder.seeds[last.index - 1])))
        seeds = list(self.ladder.seeds[:-1])
        return Prediction(self.ladder.sha256, ESTIMATOR, last.index, rows, self.digests(before), seeds)

    def digests(self, sizes: Sequence[Size]) -> dict[str, str]:
        """SHA-256 of each result file on which a prediction is based."""
        runs = [run for size in sizes for run in self.plans[size].runs(self.rung_dir(size))]
        paths = [run.run_dir / RESULT for run in runs]
        return {str(path.relative_to(self.out)): digest(path).sha256 for path in paths if path.exists()}

    def seal(self) -> None:
        """Write the prediction, unless it exists already."""
        path = self.out / PREDICTION
        if not path.exists():
            body = asdict(self.prediction())
            del body["sha256"]
            write_json(path, {**body, "sha256": sha256_of(body)})

    def sealed(self) -> Prediction | None:
        """The sealed prediction; None before the seal. A file that was edited is rejected."""
        path = self.out / PREDICTION
        if not path.exists():
            return None
        try:
            values = read_json(path)
            named = values.pop("sha256")
        except (ValueError, KeyError):
            raise SettingsError(f"{path} is damaged: it differs from the sealed prediction") from None
        if sha256_of(values) != named:
            raise SettingsError(f"{path}: wrong sha256: it differs from the sealed prediction")
        found = restored(Prediction, {**values, "sha256": named})
        if found.ladder != self.ladder.sha256:
            raise SettingsError(f"{path}: the prediction belongs to the ladder of another plan")
        return found

    # The check at the top

    def judged(self) -> dict[Arm, float]:
        """The Holm-adjusted p-values of M = 1 at the last rung, for the arms that have a posterior."""
        fits = {arm: self.fit(arm, self.ladder.sizes) for arm in self.ladder.every_arm[1:]}
        top = self.ladder.sizes[-1]
        found = {arm: fit.sides(math.log(self.flops[arm, top])) for arm, fit in fits.items() if fit is not None}
        return dict(zip(found, holm(list(found.values())), strict=True))

    def checks(self) -> list[Task]:
        """Runs at half and twice the learning rate at the last rung, for the control and for each arm that differs
        significantly from it."""
        sure = [arm for arm, p in self.judged().items() if p < SURE and not arm.name.startswith(MATCHED)]
        if not self.ladder.rules.check or len(self.ladder.sizes) < 3 or not sure:
            return []
        return [self._check(arm, place) for arm in (self.ladder.control, *sure) for place in (-1, 1)]

    def _check(self, arm: Arm, place: int) -> Task:
        size, seed = self.ladder.sizes[-1], self.ladder.first_seed()
        rate = rounded(self.rate(arm, size) * 2.0**place)
        where = self.out / CHECK / arm.name / f"lr{place:+d}" / f"seed-{seed}"
        return Task(self.out, where, arm.name, seed, partial(self.ladder.run, arm, size, rate, seed))

    # What comes next

    def work(self, stage: str) -> list[Task]:
        """The tasks of a stage, including finished ones; earlier stages must be settled."""
        last = self.ladder.sizes[-1]
        sealed = self.ladder.rules.sealed
        if stage == "tune":
            return self.tuning()[0]
        if stage == "rungs":
            rungs = [task for size in self.main_sizes() for task in self.rung_tasks(size)]
            return [*rungs, *self.seed_controls()]
        if stage == "last":
            return self.rung_tasks(last) if sealed else []
        return self.checks() if stage == "check" else []

    def stages(self, until: str = STAGES[-1]) -> Iterator[tuple[str, list[Task]]]:
        """The stages up to `until`, each with its tasks; ends with the first stage that has work left."""
        for stage in STAGES[: STAGES.index(until) + 1]:
            found = self.work(stage)
            yield stage, found
            if not all(task.settled for task in found):
                return

    def begin(self, stage: str) -> None:
        """Seal the prediction if the stage is `seal` or later, and write the plans of the stage's rungs."""
        if self.ladder.rules.sealed and STAGES.index(stage) >= STAGES.index("seal"):
            self.seal()
            self.sealed()  # refuses one that was changed
        sizes = {"rungs": self.main_sizes(), "last": self.ladder.sizes[-1:]}.get(stage, [])
        for size in sizes:
            path, planned = self.rung_dir(size) / PLAN, self.plans[size]
            remedy = "delete it to write it again"
            if not path.exists() or read_result(PlanValues, path, remedy) != planned.written():
                check_runs(planned, path.parent)  # seeds may be added, and learning rates change until a run exists
                write_json(path, planned.written())


def finite_losses(runs: Iterable[Task]) -> dict[int, float]:
    """The final losses, by seed, of those runs that have a finite one."""
    return {run.seed: loss for run in runs if math.isfinite(loss := run.loss())}


def _loss_at(tuned: Tuned, rate: float) -> float:
    """An arm's mean tuning loss at the tried learning rate that is nearest to `rate`."""
    wanted = math.log2(rate / tuned.centre)
    place = min(tuned.losses, key=lambda place: (abs(place - wanted), place))
    return math.fsum(tuned.losses[place]) / len(tuned.losses[place])


def beyond(x: float) -> list[tuple[str, float]]:
    """Points at which an extrapolation is shown: half a decade and a decade above x."""
    return [("half a decade above", x + DECADE / 2), ("a decade above", x + DECADE)]
