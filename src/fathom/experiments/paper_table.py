"""Make a paper's table: run its comparisons, score its tasks, and set the results beside the published numbers. The
output directory holds:

    out/SIZE/           the comparison of a size
    out/scores/TASK/    scores of its runs on a task
    out/table.json      the table without times, so that a run that was killed and resumed writes the same bytes

Two arms whose every training step has the same loss are one model: then an arm's mechanism is off, and the table fails.

`paper.py` reads the published numbers from the table's YAML file and computes the dry run. `evaluation/scoring.py`
scores the tasks. `cli/paper.py` sets the exit code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from fathom.checkpoints.file_names import ARMS
from fathom.checkpoints.places import require_folder
from fathom.errors import FathomError
from fathom.evaluation.scoring import EvaluationSettings, evaluate
from fathom.experiments.compare import carry_out
from fathom.experiments.compare_results import ArmResult, ComparisonReport
from fathom.experiments.paper import PaperPlan, PaperTable
from fathom.experiments.plan import Plan, check
from fathom.experiments.scheduler import is_first
from fathom.experiments.workers import ALONE, Team
from fathom.report.files import write_json
from fathom.report.tables import PlainTable

TABLE = "table.json"


@dataclass(frozen=True)
class TableRow:
    """One arm of one size."""

    size: str
    row: str
    parameters: int
    tokens: int
    seeds: int
    loss: float | None
    """Held-out loss, averaged over seeds; None if every run failed."""
    perplexity: float | None
    difference: float | None
    """Mean paired difference of the loss from the control's; None for the control."""
    trips: float | None
    """Mean trips of a token, for a model whose tokens may halt."""
    tasks: dict[str, float]
    """Accuracy by task."""
    published: dict[str, float | None]
    """The published value of each column."""


@dataclass(frozen=True)
class TableReport:
    """`table.json`."""

    paper: str
    table: str
    says: str
    tier: str
    rows: list[TableRow]
    missing: dict[str, str]
    """Tasks that were not scored, and why."""
    same: list[str]
    """Pairs of arms that are one model."""


def make_table(
    table: PaperTable,
    tier: str,
    plans: Mapping[str, Plan],
    out: Path,
    team: Team = ALONE,
    task_data: Path | None = None,
    quiet: bool = False,
) -> TableReport:
    """Run the unfinished comparisons and scores of a table, then write the table.

    Args:
        table: The paper's table.
        tier: The tier that `plans` belong to.
        plans: The comparison of every size.
        out: The directory.
        team: Who trains.
        task_data: A folder with the tasks' documents; without it no task is scored.
        quiet: Print no line for a finished run.
    """
    require_folder(out, "a paper's table")
    for size, plan in plans.items():
        check(plan, out / size)
    rows: list[TableRow] = []
    missing: dict[str, str] = {}
    same: list[str] = []
    for size, plan in plans.items():
        report = carry_out(plan, out / size, team, quiet)
        tasks = _task_scores(table, out, size, report, task_data, missing) if is_first() else {}
        rows += [_row(table, size, arm, tasks.get(arm.name, {})) for arm in report.arms]
        same += [f"{size}: {a} and {b}" for a, b in same_models(report)]
    made = TableReport(table.paper, table.table, table.says, tier, rows, missing, same)
    if is_first():
        write_json(out / TABLE, made)
    return made


def same_models(report: ComparisonReport) -> Iterator[tuple[str, str]]:
    """Pairs of arms whose losses are bitwise equal at every step of every seed that both have."""
    for a, b in combinations(report.arms, 2):
        pairs = [(x, y) for x in a.runs for y in b.runs if x.seed == y.seed]
        if pairs and all(x.loss == y.loss and x.training_loss.loss == y.training_loss.loss for x, y in pairs):
            yield a.name, b.name


def _row(table: PaperTable, size: str, arm: ArmResult, tasks: dict[str, float]) -> TableRow:
    other = table.compared_with(size)
    numbers = table.rows[arm.name].published.get(other, [None] * len(table.columns))
    columns = table.columns if other == size else [f"{column} at {other}" for column in table.columns]
    made = math.isfinite(arm.loss)
    return TableRow(
        size=size,
        row=arm.name,
        parameters=arm.parameters,
        tokens=arm.tokens,
        seeds=len(arm.runs),
        loss=arm.loss if made else None,
        perplexity=arm.perplexity if made else None,
        difference=None if arm.difference is None else arm.difference.mean,
        trips=None if arm.trips is None else arm.trips.mean,
        tasks=tasks,
        published=dict(zip(columns, numbers, strict=True)),
    )


def _task_scores(
    table: PaperTable,
    out: Path,
    size: str,
    report: ComparisonReport,
    task_data: Path | None,
    missing: dict[str, str],
) -> dict[str, dict[str, float]]:
    """Accuracy by arm and task, of the model of the first seed; the reasons for tasks without a score go to
    `missing`."""
    found: dict[str, dict[str, float]] = {}
    seed = report.seeds[0]
    models = [f"{arm.name}={out / size / ARMS / arm.name / f'seed-{seed}'}" for arm in report.arms if arm.runs]
    for task in table.tasks:
        if task_data is None:
            missing[task] = "give --task-data, a folder with the tasks' documents"
            continue
        try:
            settings = EvaluationSettings(tasks=task, task_data=task_data, out=out / "scores" / size / task)
            scored = evaluate(models, settings)
        except FathomError as error:
            missing[task] = " ".join(str(error).split())
            continue
        failed = [words for one in scored.checkpoints.values() for words in one.failed.values()]
        if failed:
            missing[task] = failed[0]
        for row in scored.rows:
            if row.metric == "acc":
                for name, score in row.scores.items():
                    found.setdefault(name, {})[task] = score
    return found


def table_rows(made: TableReport) -> PlainTable:
    """The table for a terminal."""
    columns = list(dict.fromkeys(column for row in made.rows for column in row.published))
    tasks = sorted({task for row in made.rows for task in row.tasks})
    several = len({row.size for row in made.rows}) > 1
    halts = any(row.trips is not None for row in made.rows)
    head = [*(["size"] if several else []), "row", "parameters", "tokens", "loss", "perplexity", "Δ loss"]
    head += [*(["trips"] if halts else []), *tasks, *(f"paper: {column}" for column in columns)]
    rows = [
        [
            *([row.size] if several else []),
            *(row.row, f"{row.parameters:,}", f"{row.tokens:,}", _number(row.loss), _number(row.perplexity, 2)),
            _number(row.difference, sign="+"),
            *([_number(row.trips, 2)] if halts else []),
            *(_number(row.tasks.get(task), 3) for task in tasks),
            *(_number(row.published.get(column)) for column in columns),
        ]
        for row in made.rows
    ]
    return f"{made.paper}, {made.table}; tier {made.tier}", head, rows


def verdict(made: TableReport) -> str:
    """The verdict on the table."""
    lines = [made.says] if made.says else []
    lines += [f"Not scored: {task}: {words}" for task, words in made.missing.items()]
    if made.tier == "tiny":
        lines.append("The models are far smaller than the paper's: the table proves the commands, not the ordering.")
    lines += [f"The same model twice, so a mechanism is off: {pair}" for pair in made.same]
    return "\n".join(lines)


def plan_rows(plan: PaperPlan) -> PlainTable:
    """The cost of every arm, for a terminal."""
    head = ["size", "arm", "parameters", "tokens", "steps", "runs", "FLOPs", "FLOPs a token at inference", "days"]
    rows = [
        [
            *(one.size, one.arm, f"{one.parameters:,}", f"{one.tokens:,}", f"{one.steps:,}", str(one.runs)),
            *(f"{one.flops:.3g}", f"{one.inference_flops:.3g}", f"{one.days:.3g}"),
        ]
        for one in plan.arms
    ]
    share = f"{100 * plan.utilisation:.0f} % of its peak"
    return f"{plan.paper}, {plan.table}; tier {plan.tier}; days on one {plan.device} at {share}", head, rows


def _number(value: float | None, digits: int = 4, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.{digits}f}".rstrip("0").rstrip(".")
