"""The results of a ladder on a puzzle: accuracy, runs that solved it, and the ratio of FLOPs to the control. A run
solves a puzzle between two evaluations, or not at all, so only bounds of a ratio are known. Accuracy jumps, so means
and normal intervals mislead: the intervals use counts and ranks.

`tuning.py` finds the best learning rate on a puzzle, and has the bound below which losses count as equal (`LEARNED`).
`data/puzzles.py` makes the puzzles and reads their options.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fathom.data.puzzles import is_puzzle, open_puzzle
from fathom.experiments.ladder_results import PuzzleResult, PuzzleRow, PuzzleShares, Sooner
from fathom.experiments.scheduler import Task
from fathom.experiments.stages import State
from fathom.report.statistics import holm, wilson
from fathom.training import read_metrics
from fathom.training.results import held_out

SOLVED = 0.9
"""Accuracy at which a run has solved a puzzle."""
SURE = 0.95


class Spent(NamedTuple):
    """FLOPs until a run solved a puzzle: more than `least`, at most `most`."""

    least: float
    most: float

    @classmethod
    def read(cls, curve: Sequence[tuple[float, float]], whole: float) -> Spent:
        """The bounds on the FLOPs to solve a puzzle, from the (FLOPs, accuracy) pairs of a run's evaluations. A run
        that never solved the puzzle needs more than `whole`, all the FLOPs that it had."""
        before = 0.0
        for at, share in curve:
            if share >= SOLVED:
                return cls(before, at)
            before = at
        return cls(whole, math.inf)


def sooner(control: Sequence[Spent], arm: Sequence[Spent]) -> Sooner | None:
    """The control's FLOPs to solve a puzzle divided by an arm's, over pairs of runs of one seed; None without any
    pair."""
    if not control:
        return None
    pairs = [
        (mine.least / theirs.most, mine.most / theirs.least if theirs.least else math.inf)
        for mine, theirs in zip(control, arm, strict=True)
    ]
    lows, highs = (sorted(ends) for ends in zip(*pairs, strict=True))
    left = dropped(len(pairs))
    level = 1 - 2 * below(left, len(pairs))
    # A run needs more than its least, so a ratio lies strictly between its ends.
    alike = max(sum(low >= 1 < high for low, high in pairs), sum(low < 1 >= high for low, high in pairs))
    p = min(1.0, 2 * below(len(pairs) - alike, len(pairs)))
    median = statistics.median(lows), statistics.median(highs)
    return Sooner(median, lows[left], highs[-1 - left], level, len(pairs), p)


def dropped(pairs: int) -> int:
    """How many of the lowest, and as many of the highest, ratios a 95 % interval of the median may leave out."""
    return max((left for left in range((pairs + 1) // 2) if 1 - 2 * below(left, pairs) >= SURE), default=0)


def below(left: int, pairs: int) -> float:
    """Chance that no more than `left` of the pairs lie below their true median: a tail of the sign test."""
    return sum(math.comb(pairs, k) for k in range(left + 1)) / 2**pairs


def puzzle_result(state: State) -> PuzzleResult | None:
    """A puzzle's results on a ladder: accuracy by difficulty, the number of runs that solved it, and the FLOPs to solve
    it relative to the control's."""
    directory = state.ladder.recipe.data.directory
    if not is_puzzle(directory):
        return None
    data = open_puzzle(directory, "val")
    rows: list[PuzzleRow] = []
    for size in state.ladder.sizes:
        control: dict[str, dict[int, Spent]] = {}
        for arm in state.ladder.every_arm:
            over = [run for run in state.runs(size, arm) if run.done or run.failure is not None]
            flops, domains = state.flops[arm, size], dict[str, PuzzleShares]()
            steps = state.plans[size].recipes[arm.name].train.steps
            for name in data.domains:
                shares = [_accuracy(run, name) for run in over]
                curves = [_curve(run, name, steps, flops, share) for run, share in zip(over, shares, strict=True)]
                spent = {
                    run.seed: Spent.read(curve if run.done else [], flops)  # a diverged run has not solved it
                    for run, curve in zip(over, curves, strict=True)
                }
                beside = control.setdefault(name, spent)
                domains[name] = _shares(shares, curves, spent, None if beside is spent else beside)
            seeds = [run.seed for run in over]
            rows.append(PuzzleRow(size.index, arm.name, flops, seeds, domains))
    return PuzzleResult(list(data.domains), data.puzzle.traits.chance, rows)


def _shares(
    shares: Sequence[float],
    curves: Sequence[Sequence[tuple[float, float]]],
    spent: Mapping[int, Spent],
    control: Mapping[int, Spent] | None,
) -> PuzzleShares:
    solved = sum(share >= SOLVED for share in shares)
    low, high = wilson(solved, len(shares)) if shares else (0.0, 1.0)
    both = [seed for seed in spent if control is not None and seed in control]
    found = sooner([control[seed] for seed in both], [spent[seed] for seed in both]) if control is not None else None
    return PuzzleShares(
        accuracy=list(shares),
        curves=[list(curve) for curve in curves],
        median=statistics.median(shares) if shares else None,
        solved=solved,
        low=low,
        high=high,
        sooner=found,
    )


def _accuracy(run: Task, domain: str) -> float:
    """A run's final accuracy; 0 for a diverged run."""
    return (held_out(run.run_dir).domains[domain].accuracy or 0.0) if run.done else 0.0


def _curve(run: Task, domain: str, steps: int, flops: float, last: float) -> list[tuple[float, float]]:
    """(Training FLOPs, accuracy) at each evaluation of a domain; a finished run ends with (`flops`, `last`)."""
    key = f"val/{domain}/accuracy"
    lines = [line for line in read_metrics(run.run_dir) if key in line and line["step"] < steps]
    return [(flops * line["step"] / steps, line[key]) for line in lines] + [(flops, last)] * run.done


def puzzle_words(control: str, puzzle: PuzzleResult) -> list[str]:
    """Sentences on a puzzle's hardest difficulty at the largest size: runs that solved it, FLOPs to solve it, and
    significant differences."""
    hardest = puzzle.domains[-1]
    last = max(row.index for row in puzzle.rows)
    rows = {row.arm: row.domains[hardest] for row in puzzle.rows if row.index == last and row.seeds}
    own = rows.pop(control, None)
    if own is None:
        return []

    def words(name: str, row: PuzzleShares) -> str:
        return f"{name} solved {row.solved} of {len(row.accuracy)} (median accuracy {row.median:.2f})"

    parts = [words(name, row) for name, row in ((control, own), *rows.items())]
    apart = [name for name, row in rows.items() if row.low > own.high or row.high < own.low]
    told = f"only {', '.join(apart)} differ" if apart else "no arm differs"
    found = [f"on {hardest}, {', '.join(parts)}; by solved runs {told} significantly from {control}"]
    ratios = {name: row.sooner for name, row in rows.items() if row.sooner is not None}
    corrected = zip(ratios.items(), holm([ratio.p for ratio in ratios.values()]), strict=True)
    sure = [f"{ratio} times the FLOPs of {name}" for (name, ratio), p in corrected if p < 1 - SURE]
    return found + ([f"until it solves this level, {control} needs {', '.join(sure)}"] if sure else [])
