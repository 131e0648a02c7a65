"""How much sooner a puzzle is solved: censored runs bound it from one side, and intervals hold the truth."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from fathom.ladder.acquisition import Sooner, Spent, below, dropped, puzzle_words, sooner
from fathom.ladder.results import PuzzleRow, PuzzleShares
from fathom.report.statistics import holm, wilson


def test_an_arm_that_solves_it_at_half_the_cost() -> None:
    found = sooner([Spent(8.0, 10.0)] * 5, [Spent(4.0, 10.0)] * 5)
    assert found is not None and (found.median, found.low, found.high) == ((2.0, 2.0), 2.0, 2.0)
    assert found.level == 1 - 2 / 32 and found.pairs == 5


def test_a_control_that_never_solves_it_gives_a_bound() -> None:
    found = sooner([Spent(None, 10.0)] * 3, [Spent(4.0, 10.0), Spent(5.0, 10.0), Spent(2.0, 10.0)])
    assert found is not None and found.median == (2.5, math.inf)
    assert (found.low, found.high, found.level) == (2.0, math.inf, 0.75)


def test_an_arm_that_never_solves_it() -> None:
    found = sooner([Spent(8.0, 10.0), Spent(None, 10.0)], [Spent(None, 16.0)] * 2)
    assert found is not None and found.median == (0.0, math.inf), "one of two says nothing"
    assert sooner([Spent(8.0, 10.0)] * 2, [Spent(None, 16.0)] * 2) == ((0.0, 0.5), 0.0, 0.5, 0.5, 2, 0.5)
    assert sooner([], []) is None


@pytest.mark.parametrize(("pairs", "left"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (15, 3)])
def test_what_the_interval_leaves_out(pairs: int, left: int) -> None:
    assert dropped(pairs) == left
    assert pairs < 6 or 1 - 2 * below(left, pairs) >= 0.95 > 1 - 2 * below(left + 1, pairs)


def draws(pairs: int, seed: int, worth: float = 1.5) -> tuple[list[Spent], list[Spent]]:
    """The control needs `worth` times the FLOPs in the median; luck is far from normal; some never get there."""
    chance, whole = random.Random(seed), 4.6

    def run(scale: float) -> Spent:
        needed = scale * math.exp(0.5 * (chance.random() < 0.3) * chance.choice([-1, 1]) + 0.1 * chance.gauss(0, 1))
        return Spent(needed if needed <= whole else None, whole)

    return [run(3.0 * worth) for _ in range(pairs)], [run(3.0) for _ in range(pairs)]


@pytest.mark.parametrize("pairs", [3, 5, 9])
def test_intervals_hold_the_truth_as_often_as_they_say(pairs: int) -> None:
    held = usual = 0
    for seed in range(400):
        control, arm = draws(pairs, seed)
        found = sooner(control, arm)
        assert found is not None
        held += found.low <= 1.5 <= found.high
        # The control: what is usually done, the runs that never solved it left out.
        both = [pair for pair in zip(control, arm, strict=True) if None not in (pair[0].solved, pair[1].solved)]
        kept = sooner([mine for mine, _ in both], [theirs for _, theirs in both])
        usual += kept is not None and kept.low <= 1.5 <= kept.high
    level = found.level
    assert held / 400 >= level - 2 * math.sqrt(level * (1 - level) / 400)
    assert usual / 400 < level - 4 * math.sqrt(level * (1 - level) / 400)


def test_words() -> None:
    half = sooner([Spent(8.0, 10.0)] * 5, [Spent(4.0, 10.0), *[Spent(2.0, 10.0)] * 4])
    never = sooner([Spent(None, 10.0)] * 5, [Spent(4.0, 10.0)] * 5)
    nobody = sooner([Spent(None, 10.0)] * 5, [Spent(None, 10.0)] * 5)
    worse = sooner([Spent(8.0, 10.0)] * 4, [Spent(None, 10.0)] * 4)
    assert half is not None and never is not None and nobody is not None and worse is not None
    assert [each.words() for each in (half, never, nobody, worse)] == [
        "4.00 (2.00 to 4.00)",
        "> 2.50",
        "unknown",
        "< 0.80",
    ]
    assert [each.p for each in (half, never, nobody, worse)] == [1 / 16, 1 / 16, 1.0, 1 / 8]
    for each in (half, never, nobody, worse):
        assert Sooner.read(json.loads(json.dumps(each.row(), allow_nan=False))) == each


def shares(accuracy: list[float], ratio: Sooner | None) -> PuzzleShares:
    solved = sum(share >= 0.9 for share in accuracy)
    low, high = wilson(solved, len(accuracy))
    return {
        "accuracy": accuracy,
        "curves": [],
        "median": statistics.median(accuracy),
        "solved": solved,
        "low": low,
        "high": high,
        "flops_to_solve": [],
        "sooner": ratio.row() if ratio else None,
    }


def test_the_sentence_names_what_is_told_apart() -> None:
    """After Holm: six seeds that all agree are enough for one arm and not for one of four, five never."""
    for pairs, others, named in ((8, 1, True), (6, 0, True), (6, 3, False), (5, 0, False)):
        ratio = sooner([Spent(8.0, 10.0)] * pairs, [Spent(4.0, 10.0)] * pairs)
        level = sooner([Spent(8.0, 10.0)] * pairs, [Spent(8.0, 10.0)] * pairs)
        arms = {"vanilla": None, "loop": ratio, **dict.fromkeys([f"twin{i}" for i in range(others)], level)}
        rows: list[PuzzleRow] = [
            {"index": 1, "arm": name, "flops": 1.0, "seeds": [0], "domains": {"hops-2": shares([0.95] * pairs, found)}}
            for name, found in arms.items()
        ]
        words = puzzle_words("vanilla", {"domains": ["hops-2"], "chance": 0.25, "solved_at": 0.9, "rows": rows})
        assert words[0].endswith("by solved runs no arm can be told apart from vanilla")
        assert words[1:] == ["until it solves it vanilla needs 2.00 times the FLOPs of loop"] * named


def test_no_more_false_claims_than_said() -> None:
    """Of two arms that need what the control needs."""
    claimed = 0
    for seed in range(400):
        arms = [draws(6, seed * 3 + i, 1.0)[1] for i in range(3)]
        found = [sooner(arms[0], arm) for arm in arms[1:]]
        claimed += any(p < 0.05 for p in holm([each.p for each in found if each is not None]))
    assert claimed <= 20 + 2 * math.sqrt(19)
