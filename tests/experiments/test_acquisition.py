"""How much sooner a puzzle is solved: censored runs bound it from one side, and intervals hold the truth."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from fathom.experiments.acquisition import Spent, below, dropped, puzzle_words, sooner
from fathom.experiments.ladder_results import PuzzleResult, PuzzleRow, PuzzleShares, Sooner
from fathom.report.statistics import holm, wilson


def at(flops: float) -> Spent:
    """A run of which it is known when it solved the puzzle."""
    return Spent(flops, flops)


def never(whole: float) -> Spent:
    return Spent(whole, math.inf)


def test_a_run_solves_it_between_two_evaluations() -> None:
    curve = [(1.0, 0.1), (2.0, 0.95), (3.0, 0.2), (4.0, 0.99)]
    assert Spent.read(curve, 4.0) == (1.0, 2.0) and Spent.read(curve[1:], 4.0) == (0.0, 2.0)
    assert Spent.read(curve[:1], 4.0) == Spent.read([], 4.0) == (4.0, math.inf)


def test_an_arm_that_solves_it_at_half_the_cost() -> None:
    found = sooner([at(8.0)] * 5, [at(4.0)] * 5)
    assert found is not None and (found.median, found.low, found.high) == ((2.0, 2.0), 2.0, 2.0)
    assert found.level == 1 - 2 / 32 and found.pairs == 5


def test_a_control_that_never_solves_it_gives_a_bound() -> None:
    found = sooner([never(10.0)] * 3, [at(4.0), at(5.0), at(2.0)])
    assert found is not None and found.median == (2.5, math.inf)
    assert (found.low, found.high, found.level) == (2.0, math.inf, 0.75)


def test_an_arm_that_never_solves_it() -> None:
    found = sooner([at(8.0), never(10.0)], [never(16.0)] * 2)
    assert found is not None and found.median == (0.0, math.inf), "one of two says nothing"
    assert sooner([at(8.0)] * 2, [never(16.0)] * 2) == Sooner((0.0, 0.5), 0.0, 0.5, 0.5, 2, 0.5)
    assert sooner([], []) is None


def test_what_lies_between_two_evaluations_is_not_told_apart() -> None:
    """Neither of runs that solve it in one interval of steps, however many, nor before the first evaluation."""
    dearer = sooner([Spent(100.0, 200.0)] * 9, [Spent(99.0, 198.0)] * 9)
    first = sooner([Spent(0.0, 200.0)] * 9, [Spent(0.0, 100.0)] * 9)
    assert dearer is not None and dearer.low < 1 < dearer.high and dearer.p == 1
    assert first == Sooner((0.0, math.inf), 0.0, math.inf, first.level, 9, 1.0) and str(first) == "unknown"
    next_one = sooner([Spent(200.0, 400.0)] * 6, [Spent(100.0, 200.0)] * 6)
    assert next_one is not None and (next_one.low, next_one.high, next_one.p) == (1.0, 4.0, 1 / 32)


@pytest.mark.parametrize(("pairs", "left"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (15, 3)])
def test_what_the_interval_leaves_out(pairs: int, left: int) -> None:
    assert dropped(pairs) == left
    assert pairs < 6 or 1 - 2 * below(left, pairs) >= 0.95 > 1 - 2 * below(left + 1, pairs)


def draws(pairs: int, seed: int, worth: float = 1.5, every: float = 0.0) -> tuple[list[Spent], list[Spent]]:
    """The control needs `worth` times the FLOPs in the median; luck is far from normal; some never get there; looked at
    once in so many FLOPs of the control."""
    chance, whole = random.Random(seed), 4.6

    def run(scale: float, step: float) -> Spent:
        needed = scale * math.exp(0.5 * (chance.random() < 0.3) * chance.choice([-1, 1]) + 0.1 * chance.gauss(0, 1))
        if needed > whole:
            return never(whole)
        return Spent(step * math.floor(needed / step), step * math.ceil(needed / step)) if step else at(needed)

    return [run(3.0 * worth, every) for _ in range(pairs)], [run(3.0, every * 0.9966) for _ in range(pairs)]


def as_found(runs: list[Spent]) -> list[Spent]:
    """The control: as if a run had solved it when it was seen to."""
    return [run if math.isinf(run.most) else at(run.most) for run in runs]


@pytest.mark.parametrize("every", [0.05, 0.3, 1.0])
def test_rare_evaluations_make_no_differences(every: float) -> None:
    """The truth is none, and the arm's steps are 0.34 % cheaper."""
    wrong = usual = 0
    for seed in range(400):
        control, arm = draws(9, seed, 1.0, every)
        found, seen = sooner(control, arm), sooner(as_found(control), as_found(arm))
        assert found is not None and seen is not None
        wrong += not found.low <= 1 <= found.high
        usual += not seen.low <= 1 <= seen.high
    miss = 1 - found.level
    assert wrong / 400 <= miss + 2 * math.sqrt(miss * (1 - miss) / 400)
    assert every < 1 or usual / 400 > miss + 4 * math.sqrt(miss * (1 - miss) / 400)


@pytest.mark.parametrize("pairs", [3, 5, 9])
def test_intervals_hold_the_truth_as_often_as_they_say(pairs: int) -> None:
    held = usual = 0
    for seed in range(400):
        control, arm = draws(pairs, seed)
        found = sooner(control, arm)
        assert found is not None
        held += found.low <= 1.5 <= found.high
        # The control: what is usually done, the runs that never solved it left out.
        both = [pair for pair in zip(control, arm, strict=True) if math.inf not in (pair[0].most, pair[1].most)]
        kept = sooner([mine for mine, _ in both], [theirs for _, theirs in both])
        usual += kept is not None and kept.low <= 1.5 <= kept.high
    level = found.level
    assert held / 400 >= level - 2 * math.sqrt(level * (1 - level) / 400)
    assert usual / 400 < level - 4 * math.sqrt(level * (1 - level) / 400)


def test_words() -> None:
    half = sooner([at(8.0)] * 5, [at(4.0), *[at(2.0)] * 4])
    bound = sooner([never(10.0)] * 5, [at(4.0)] * 5)
    nobody = sooner([never(10.0)] * 5, [never(10.0)] * 5)
    worse = sooner([at(8.0)] * 4, [never(10.0)] * 4)
    one = sooner([Spent(7.0, 8.0)], [at(4.0)])
    alike = sooner([Spent(8.0, 8.001)] * 5, [at(8.0)] * 5)
    found = [each for each in (half, bound, nobody, worse, one, alike) if each is not None]
    words = ["4.00 (2.00 to 4.00)", "> 2.50", "unknown", "< 0.80", "1.75 to 2.00", "1.00"]
    assert [str(each) for each in found] == words
    assert found[4].basis == "one pair of seeds"
    assert found[0].basis == "median of 5 pairs of seeds and an interval of ranks (94%)"
    assert [each.p for each in found[:4]] == [1 / 16, 1 / 16, 1.0, 1 / 8]


def shares(accuracy: list[float], ratio: Sooner | None) -> PuzzleShares:
    solved = sum(share >= 0.9 for share in accuracy)
    low, high = wilson(solved, len(accuracy))
    return PuzzleShares(accuracy, [], statistics.median(accuracy), solved, low, high, ratio)


def test_the_sentence_names_what_is_told_apart() -> None:
    """After Holm: six seeds that all agree are enough for one arm and not for one of four, five never."""
    for pairs, others, named in ((8, 1, True), (6, 0, True), (6, 3, False), (5, 0, False)):
        ratio = sooner([at(8.0)] * pairs, [at(4.0)] * pairs)
        level = sooner([at(8.0)] * pairs, [at(8.0)] * pairs)
        arms = {"vanilla": None, "loop": ratio, **dict.fromkeys([f"other{i}" for i in range(others)], level)}
        rows = [PuzzleRow(1, name, 1.0, [0], {"hops-2": shares([0.95] * pairs, found)}) for name, found in arms.items()]
        words = puzzle_words("vanilla", PuzzleResult(["hops-2"], 0.25, rows))
        assert words[0].endswith("by solved runs no arm differs significantly from vanilla")
        assert words[1:] == ["until it solves this level, vanilla needs 2.00 times the FLOPs of loop"] * named


def test_no_more_false_claims_than_said() -> None:
    """Of two arms that need what the control needs."""
    claimed = 0
    for seed in range(400):
        arms = [draws(6, seed * 3 + i, 1.0)[1] for i in range(3)]
        found = [sooner(arms[0], arm) for arm in arms[1:]]
        claimed += any(p < 0.05 for p in holm([each.p for each in found if each is not None]))
    assert claimed <= 20 + 2 * math.sqrt(19)
