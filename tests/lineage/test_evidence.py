"""p-values are what they say: exact tails, Holm, calibration on unrelated models, the verdict rule."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from fathom.lineage import evidence, nulls, verdict
from fathom.lineage.comparison import Options, compare, measure
from fathom.lineage.evidence import Test
from fathom.lineage.inherited import Inherited
from fathom.lineage.verdict import Findings
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import build, save, tiny_config


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


@pytest.fixture(scope="module", params=[5, pytest.param(8, marks=pytest.mark.slow)])
def negatives(models, request):
    """All pairs of so many unrelated models: 10 or 28."""
    opened = [open_weights(models("qwen3", seed=20 + seed, num_hidden_layers=2)) for seed in range(request.param)]
    return [measure(a, b, Options(extras=False)) for a, b in combinations(opened, 2)]


@pytest.mark.slow
def test_t1_is_a_rencontres_number_on_unrelated_models(negatives):
    """Fixed points against the exact law, and the p-value not anti-conservative (Kolmogorov–Smirnov, one-sided)."""
    columns = [pair.aligned.fixed.columns for pair in negatives]
    counts = [int(np.sum(found == np.arange(len(found)))) for found in columns]
    assert all(pair.aligned.fixed.fixed <= count for pair, count in zip(negatives, counts, strict=True))
    draw = np.random.default_rng(0)
    # discrete p-values are spread over their step so that uniformity can be tested exactly
    spread = [stats.poisson.sf(k, 1) + draw.random() * stats.poisson.pmf(k, 1) for k in counts]
    assert stats.kstest(spread, "uniform").pvalue > 0.01
    reported = [evidence.fixed_point_bound(k) for k in counts]
    assert stats.kstest(reported, "uniform", alternative="greater").pvalue > 0.01


def test_t2_stays_under_its_assumed_rate(negatives):
    counts = [pair.head_agreement for pair in negatives]
    assert np.mean(counts) < evidence.POISSON_RATE and max(counts) < 15
    p = [evidence.poisson_tail(n, evidence.POISSON_RATE) for n in counts]
    assert stats.kstest(p, "uniform", alternative="greater").pvalue > 0.01


def test_t4_on_unrelated_models(negatives):
    found = [pair.neurons[frame] for pair in negatives for frame in ("order", "tokens", "axes")]
    assert max(count.paired for counts in found for count in counts) <= 5
    p = [evidence.test_neurons("order", counts, []).p for counts in found]
    assert stats.kstest(p, "uniform", alternative="greater").pvalue > 0.01


def findings(
    p_values, score=0.9, threshold=0.1, coverage=1.0, families=("embedding", "attention", "feed-forward"), **k
):
    void = k.pop("void", "")
    detail = {"channels": 128}
    tests = [Test(name, 100, "", p, kind, "", "embedding", detail, void=void) for name, p, kind in p_values]
    names = set(families)
    given = dict(inherited=Inherited(0.9, 0.2, 9), verbatim=True) | k
    blocks = given.pop("blocks", [f"{name}" for name in sorted(names)])
    return Findings(
        tests, score, threshold, coverage, names, {"embedding", "attention", "feed-forward"}, blocks, **given
    )


STRONG = [("T1", 1e-30, "exact"), ("T2", 1e-20, "model")]
WEAK = [("T1", 1e-3, "exact")]
NONE = [("T1", 0.6, "exact")]


@pytest.mark.parametrize(
    ("found", "label"),
    [
        (findings(STRONG), verdict.SHARED),
        (findings(STRONG, score=0.05), verdict.INITIALISATION),
        (findings(STRONG, score=0.05, coverage=0.0, families=("embedding", "feed-forward")), verdict.INITIALISATION),
        (findings(STRONG, threshold=None), verdict.INITIALISATION),  # no class: a score cannot be called high
        (findings(STRONG, coverage=0.25, blocks=["attention of layers 2, 3"]), verdict.PARTIAL),
        (findings(STRONG, coverage=0.0, families=("embedding",)), verdict.EMBEDDING),
        # embeddings agree, and T4 found nothing: hidden-state distillation or a public embedding would do the same
        (findings(STRONG, score=0.99, families=("embedding",)), verdict.EMBEDDING),
        # as alike as two runs of one recipe from one seed, and no later stage to be seen
        (findings(STRONG, one_seed=True), verdict.INITIALISATION),
        # what only a formula explains decides nothing, and neither does what was not measured
        (findings(STRONG, void="both begin from a formula"), verdict.INCONCLUSIVE),
        (findings(NONE, score=0.05, coverage=0.0, families=(), unmeasured="why"), verdict.INCONCLUSIVE),
        # what two trainings from one seed have left, in some layers more than in others
        (findings(STRONG, coverage=0.25, score=0.05, verbatim=False), verdict.INITIALISATION),
        (findings(STRONG, control_failed="a control scores as high"), verdict.INCONCLUSIVE),
        # where nothing speaks for a lineage, a control that scores as high spoils nothing
        (
            findings(NONE, score=0.05, coverage=0.0, families=(), control_failed="a control scores as high"),
            verdict.NONE,
        ),
        (findings(WEAK, score=0.05), verdict.INCONCLUSIVE),
        (findings(NONE, score=0.9), verdict.INCONCLUSIVE),
        (findings(NONE, score=0.05, low_overlap=True), verdict.INCONCLUSIVE),
        (findings(NONE, score=0.05, coverage=0.0, families=()), verdict.NONE),
        (findings(STRONG, inherited=Inherited(0.2, 0.2, 9)), verdict.INITIALISATION),  # a seed explains it
        (findings(STRONG, score=0.99, inherited=Inherited(-0.5, 0.12, 9)), verdict.INITIALISATION),  # however high
        (findings(STRONG, inherited=None), verdict.INITIALISATION),
    ],
)
def test_verdicts(found, label):
    said = verdict.decide(found)
    assert said.label == label and said.meaning and said.alternatives and said.sure
    assert "independent" not in (said.label + said.sentence).lower()
    assert len(said.not_claimed) == 4


def similar(model, seed):
    """What the same data teaches strangers: queries and keys along one direction, more or less."""
    common = torch.randn(64, generator=torch.Generator().manual_seed(77), dtype=torch.float64)
    own = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter += 0.15 * torch.outer(torch.randn(len(parameter), generator=own, dtype=torch.float64), common)
    return model


@pytest.mark.slow
def test_controls_that_were_never_trained_are_no_null_of_trained_strangers(tmp_path):
    """A score that only training makes is above anything random weights reach; it is no sign of a lineage."""
    for seed in (0, 1):
        save(similar(build(tiny_config("llama"), seed, trained=True), seed), tmp_path / f"trained-{seed}", 512)
    for seed in (2, 3):
        save(build(tiny_config("llama"), seed), tmp_path / f"random-{seed}", 512)
    pair = [open_weights(tmp_path / f"trained-{seed}") for seed in (0, 1)]
    controls = [tmp_path / f"random-{seed}" for seed in (2, 3)]
    found = compare(*pair, controls)
    naive = nulls.of_pairs([p for _, pairs in found.controls for p in pairs], "all of them")
    assert found.pair.scores[found.pair.best].score > evidence.score_threshold(naive.scores[found.pair.best])
    assert found.verdict.label == verdict.NONE and found.null is None
    assert sum("hardly trained" in note for note in found.skipped) == 2
