"""p-values are what they say: exact tails, Holm, calibration on unrelated models, the verdict rule."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fathom.lineage import evidence
from fathom.lineage.comparison import Options, measure
from fathom.lineage.evidence import Findings, Test


def simulated_fixed_points(n, draws, seed):
    draw = np.random.default_rng(seed)
    return np.array([(draw.permutation(n) == np.arange(n)).sum() for _ in range(draws)])


def test_factorial_bound_is_never_below_the_truth():
    counts = simulated_fixed_points(64, 20_000, 0)
    for k in range(7):
        truth = np.mean(counts >= k)
        assert evidence.fixed_point_bound(k) >= truth - 3 * np.sqrt(truth / 20_000)
    assert evidence.fixed_point_bound(10) == pytest.approx(2.8e-7, rel=0.02)
    assert evidence.fixed_point_bound(0) == 1.0 and evidence.fixed_point_bound(4096) == 0.0


def test_summed_bound_over_layers():
    counts = simulated_fixed_points(40, 20_000, 1).reshape(-1, 4).sum(1)
    for k in (8, 10, 12):
        assert evidence.fixed_point_bound(k, 4) >= np.mean(counts >= k)


def test_poisson_numbers_of_the_card():
    assert evidence.poisson_tail(15, 3.0) < 1e-6 < evidence.poisson_tail(13, 3.0)
    assert evidence.poisson_tail(17, 3.0, 32) < 1e-6


def test_empirical_p_is_never_below_its_resolution():
    assert evidence.empirical(0.9, [0.1] * 19) == pytest.approx(1 / 20)
    assert evidence.empirical(0.0, [0.1] * 19) == 1.0


def test_bounds_and_drift():
    for n, want in ((10, 0.26), (45, 0.064), (90, 0.033), (300, 0.010)):
        assert evidence.false_positive_bound(n) == pytest.approx(want, rel=0.03)
    assert evidence.false_positive_bound(0) == 1.0
    assert evidence.detectable_drift(0.05) == pytest.approx(4.36, abs=0.01)


@pytest.fixture(scope="module")
def negatives(models):
    """28 pairs of eight unrelated models."""
    from fathom.lineage.weights import open_weights

    opened = [open_weights(models("qwen3", seed=seed, num_hidden_layers=2)) for seed in range(20, 28)]
    options = Options(extras=False)
    return [measure(a, b, options) for i, a in enumerate(opened) for b in opened[i + 1 :]]


def test_t1_is_a_rencontres_number_on_unrelated_models(negatives):
    """Fixed points against the exact law, and the p-value not anti-conservative (Kolmogorov–Smirnov, one-sided)."""
    counts = [pair.fixed.fixed for pair in negatives]
    draw = np.random.default_rng(0)
    # discrete p-values are spread over their step so that uniformity can be tested exactly
    spread = [stats.poisson.sf(k, 1) + draw.random() * stats.poisson.pmf(k, 1) for k in counts]
    assert stats.kstest(spread, "uniform").pvalue > 0.01
    reported = [evidence.fixed_point_bound(k) for k in counts]
    assert stats.kstest(reported, "uniform", alternative="greater").pvalue > 0.01


def test_t2_stays_under_its_assumed_rate(negatives):
    counts = [n for pair in negatives for _, n in pair.witnesses] + [p.head.agreement(p.fixed) for p in negatives]
    assert np.mean(counts) < evidence.POISSON_RATE and max(counts) < 15
    p = [evidence.poisson_tail(n, evidence.POISSON_RATE) for n in counts]
    assert stats.kstest(p, "uniform", alternative="greater").pvalue > 0.01


def test_t4_on_unrelated_models(negatives):
    z = [value for pair in negatives for value in pair.z_values]
    assert abs(np.mean(z)) < 1 and 0.5 < np.std(z) < 2 and max(z) < 5


def test_the_calibration_check_can_fail(models, opened, tmp_path):
    """A lineage, slipped among the negatives, is seen by the same tests."""
    from fathom.lineage.attacks import attack
    from fathom.lineage.weights import open_weights

    attack(opened("qwen3"), ("permute",), tmp_path / "copy")
    pair = measure(opened("qwen3"), open_weights(tmp_path / "copy"), Options(extras=False))
    assert min(evidence.poisson_tail(n, evidence.POISSON_RATE) for _, n in pair.witnesses) < 1e-30


def test_token_halves_are_not_two_witnesses():
    """The card's trap: halves of one vocabulary share semantics, so unrelated models agree; a mock of that effect."""
    draw = np.random.default_rng(2)
    meaning = draw.normal(size=(64, 400))  # what the data puts into channels of both models, in different bases
    first, second = (draw.permutation(64) for _ in range(2))
    a, b = (meaning[order] + draw.normal(size=(64, 400)) for order in (first, second))

    def matching(part):
        return evidence.match(evidence.unit_rows(a[:, part]) @ evidence.unit_rows(b[:, part]).T).columns

    agreement = int((matching(slice(0, 200)) == matching(slice(200, 400))).sum())
    assert agreement > 15  # a Poisson(3) test would call these unrelated models kin


def findings(
    p_values, score=0.9, null=(0.01, 0.02), coverage=1.0, families=("embedding", "attention", "feed-forward"), **k
):
    tests = [Test(name, 100, "", p, kind, "", "embedding", {"channels": 128}) for name, p, kind in p_values]
    names = set(families)
    given = dict(control_failed=False, low_overlap=False, tampering=[]) | k
    blocks = given.pop("blocks", [f"{name}" for name in sorted(names)])
    return Findings(
        tests, score, list(null), coverage, names, {"embedding", "attention", "feed-forward"}, blocks, **given
    )


STRONG = [("T1", 1e-30, "exact"), ("T2", 1e-20, "model")]
WEAK = [("T1", 1e-3, "exact")]
NONE = [("T1", 0.6, "exact")]


@pytest.mark.parametrize(
    ("found", "label"),
    [
        (findings(STRONG), evidence.SHARED),
        (findings(STRONG, score=0.05), evidence.INITIALISATION),
        (findings(STRONG, score=0.05, coverage=0.0, families=("embedding", "feed-forward")), evidence.INITIALISATION),
        (findings(STRONG, null=()), evidence.INITIALISATION),  # no class: a score cannot be called high
        (findings(STRONG, coverage=0.25, blocks=["attention of layers 2, 3"]), evidence.PARTIAL),
        (findings(STRONG, coverage=0.0, families=("embedding",)), evidence.PARTIAL),
        (findings(STRONG, control_failed=True), evidence.INCONCLUSIVE),
        # where nothing speaks for a lineage, a control that scores as high spoils nothing
        (findings(NONE, score=0.05, coverage=0.0, families=(), control_failed=True), evidence.NONE),
        (findings(WEAK, score=0.05), evidence.INCONCLUSIVE),
        (findings(NONE, score=0.9), evidence.INCONCLUSIVE),
        (findings(NONE, score=0.05, low_overlap=True), evidence.INCONCLUSIVE),
        (findings(NONE, score=0.05, coverage=0.0, families=()), evidence.NONE),
        (findings([("T4", 1e-40, "nominal")], score=0.05), evidence.NONE),  # a nominal p decides nothing
    ],
)
def test_verdicts(found, label):
    verdict = evidence.decide(found)
    assert verdict.label == label
    assert "independent" not in (verdict.label + verdict.sentence).lower()
    assert len(verdict.not_claimed) == 4


def test_no_label_says_independent():
    assert not any("independent" in label for label in evidence.EXIT_CODES)
