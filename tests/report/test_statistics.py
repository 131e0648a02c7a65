"""Intervals and corrections against numbers worked out elsewhere."""

import math
import random
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from fathom.report.statistics import (
    LEAST_DOCUMENTS,
    adjust,
    bootstrap_ratio,
    combined_difference,
    holm,
    mcnemar,
    paired_difference,
    paired_ratio,
    rank_correlation,
    weighted_difference,
    wilson,
)


def test_combined_differences_are_welchs():
    """Of two groups' means, with shares 1 and -1, Satterthwaite's interval is Welch's."""
    a, b = [3.1, 2.9, 3.4, 3.0, 3.3], [2.0, 2.6, 2.2]
    found = combined_difference([paired_difference(one, [0.0] * len(one)) for one in (a, b)], [1, -1])
    expected = stats.ttest_ind(a, b, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert (found.mean, found.pairs) == (pytest.approx(np.mean(a) - np.mean(b)), 8)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found.p == pytest.approx(expected.pvalue)
    alone = combined_difference([paired_difference(a, [*b, 0, 0]), paired_difference([1.0], [0.0])], [0.5, 0.5])
    assert alone.mean == pytest.approx((np.mean(a) - sum(b) / 5 + 1) / 2)
    assert (alone.pairs, alone.half_width, alone.p) == (6, None, None)
    same = combined_difference([paired_difference([1.0, 1.0], [1.0, 1.0])] * 2, [0.5, 0.5])
    assert (same.mean, same.half_width) == (0.0, 0.0)


def test_interval_is_students():
    a, b = [3.1, 2.9, 3.4, 3.0], [3.0, 3.0, 3.1, 2.8]
    found = paired_difference(a, b)
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(expected.pvalue)
    assert not found.excludes_zero


def test_one_pair_has_no_interval():
    found = paired_difference([1.0], [2.0])
    assert (found.mean, found.half_width, found.low, found.p, found.excludes_zero) == (-1.0, None, None, None, False)


def test_interval_covers_as_often_as_it_says():
    chance = random.Random(0)
    missed = sum(
        paired_difference([chance.gauss(0, 1) for _ in range(3)], [0.0] * 3).excludes_zero for _ in range(2000)
    )
    assert 70 < missed < 130


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_of_differences_between_means_counts_what_can_still_be_equal():
    """Three means have 0, 1 or 3 equal pairs; four have 0, 1, 2, 3 or 6 (Shaffer 1986)."""
    assert holm([0.01, 0.02, 0.03], means=3) == pytest.approx([0.03, 0.03, 0.03])
    assert holm([0.02, 0.001, 0.03], means=3) == pytest.approx([0.02, 0.003, 0.03])
    p = [0.001, 0.002, 0.003, 0.004, 0.005, 0.006]
    assert holm(p, means=4) == pytest.approx([0.006, 0.006, 0.009, 0.012, 0.012, 0.012])
    assert holm(p[:2], means=4) == pytest.approx(holm(p[:2])), "two tests can fail at most twice"
    assert holm([0.3], means=2) == [0.3]


def test_the_interval_of_a_ratio_holds_what_a_t_test_cannot_refuse():
    """Fieller: at its ends the t test of a - r b gives p = 0.05 exactly; inside more, outside less."""
    a, b = [0.9, 1.3, 0.8, 1.2], [2.1, 1.8, 2.2, 1.7]
    found = paired_ratio(a, b)
    assert found.value == pytest.approx(4.2 / 7.8)
    for r, p in ((found.low, 0.05), (found.high, 0.05), (found.value, 1.0)):
        assert stats.ttest_1samp(np.array(a) - r * np.array(b), 0).pvalue == pytest.approx(p)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("b", [[2.1, -1.8, 2.2, -1.7], [0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]])
def test_a_ratio_to_what_may_be_zero_has_no_bounds(b: list[float]):
    assert paired_ratio([0.9, 1.3, 0.8, 1.2], b) is None
    assert paired_ratio([1.0], [2.0]) is None, "one pair"


def test_rank_correlation_is_spearmans_and_ties_share_a_rank():
    chance = np.random.default_rng(0)
    losses = [chance.exponential(size=size) for size in chance.integers(1, 40, 60)]
    trips = [np.clip(np.round(row + chance.normal(size=len(row))), 1, 4).astype(int) for row in losses]
    found = rank_correlation(losses, trips)
    assert found.value == pytest.approx(stats.spearmanr(np.concatenate(losses), np.concatenate(trips)).statistic)
    assert found.low < found.value < found.high and found.clusters == 60
    assert rank_correlation(losses, trips) == found


def test_rank_correlation_widens_where_clusters_agree_among_themselves():
    """Rows copied whole say nothing new: drawing tokens instead of rows would make the interval too narrow."""
    chance = np.random.default_rng(1)
    rows = [(np.full(50, chance.normal()), np.full(50, chance.normal())) for _ in range(40)]
    together = rank_correlation(*zip(*rows, strict=True))
    alone = rank_correlation([a[:1] for a, _ in rows], [b[:1] for _, b in rows])
    assert together.high - together.low == pytest.approx(alone.high - alone.low, rel=0.05)


def test_rank_correlation_of_a_constant_is_none():
    assert rank_correlation([np.arange(5)], [np.ones(5)]) is None
    assert rank_correlation([np.arange(0)], [np.arange(0)]) is None


@pytest.mark.parametrize(
    ("lost", "won", "p"), [(0, 5, 0.0625), (0, 6, 0.03125), (5, 15, 0.0414), (10, 20, 0.0987), (100, 140, 0.0117)]
)
def test_mcnemar_is_the_exact_binomial_test(lost: int, won: int, p: float):
    assert mcnemar(lost, won) == pytest.approx(p, abs=5e-5)
    assert mcnemar(won, lost) == mcnemar(lost, won)
    assert mcnemar(0, 0) == mcnemar(7, 7) == 1
    assert 0 < mcnemar(900, 1300) < 1e-10


def test_a_bootstrap_covers_about_as_often_as_it_says():
    chance = np.random.default_rng(3)
    held = 0
    for _ in range(300):
        weights = chance.uniform(50, 500, 60)
        gaps = weights * (0.3 + chance.normal(0, 0.2, 60))
        found = bootstrap_ratio(gaps.tolist(), weights.tolist(), 200)
        assert found.value == pytest.approx(gaps.sum() / weights.sum())
        held += found.low < 0.3 < found.high
    assert 0.89 < held / 300 < 0.98
    assert bootstrap_ratio([1.0, 2.0], [1.0, 2.0]) == bootstrap_ratio([2.0, 4.0], [2.0, 4.0])


@pytest.mark.slow
def test_the_least_number_of_pairs_is_where_a_bootstrap_nearly_covers() -> None:
    """Skewed differences too; of two pairs every second interval misses."""
    chance = np.random.default_rng(5)
    held = {}
    for count in (2, LEAST_DOCUMENTS):
        draws = [chance.exponential(size=count).tolist() for _ in range(600)]
        found = [bootstrap_ratio(gaps, [1.0] * count, 200) for gaps in draws]
        held[count] = sum(one.low < 1 < one.high for one in found) / len(found)
    assert held[2] < 0.6 and held[LEAST_DOCUMENTS] > 0.86


def test_a_bootstrap_of_many_documents_stays_small() -> None:
    """All samples at once would be 1,000 numbers for each document, three times over."""
    chance = np.random.default_rng(4)
    gaps, weights = chance.normal(size=20_000), chance.uniform(1, 9, 20_000)
    tracemalloc.start()
    found = bootstrap_ratio(gaps.tolist(), weights.tolist(), 200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 8 * 20_000
    picked = np.random.default_rng(0).integers(20_000, size=(200, 20_000))
    ends = np.quantile(gaps[picked].sum(1) / weights[picked].sum(1), [0.025, 0.975])
    assert [found.low, found.high] == pytest.approx(ends.tolist(), rel=1e-9), "the samples of one large draw"


def test_wilson_of_published_scores():
    """The first is of Newcombe 1998, table I."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 5) == pytest.approx((0, 0.4345), abs=1e-4) and wilson(5, 5)[1] == 1
    published = [(85, 182, 0.3960, 0.5394), (75, 182, 0.3431, 0.4847)]
    published += [(515, 1395, 0.3442, 0.3948), (615, 1395, 0.4150, 0.4670)]
    for right, asked, low, high in published:
        assert wilson(right, asked) == pytest.approx((low, high), abs=5e-5)


def test_equal_differences_have_no_p() -> None:
    """Losses on a grid that differ alike with every seed show no noise; rounding is none either."""
    coarse = paired_difference([1.1, 2.2, 3.3], [1.0, 2.1, 3.2])
    assert coarse.half_width is None and coarse.p is None and not coarse.excludes_zero
    same = paired_difference([3.0, 3.1], [3.0, 3.1])
    assert (same.low, same.high, same.p, same.excludes_zero) == (0.0, 0.0, 1.0, False), "no difference at all is none"
    assert paired_difference([2.9, 3.0, 3.1001], [3.0, 3.1, 3.2]).p is not None


def test_a_difference_that_is_not_finite_leaves_the_others_alone():
    """A p that is no number has no rank among p values: it made all others 1."""
    broken, sure = weighted_difference([math.nan, 1.0, 2.0], [1, 1, 1]), weighted_difference([1.0, 1.1, 0.9], [1, 1, 1])
    adjust([broken, sure])
    assert (broken.low, broken.p, broken.p_holm) == (None, None, None)
    assert sure.p_holm == sure.p and sure.significant
