"""The evidence for shared lineage: matching tests with p-values, and what each test assumes.

H0: the two sets of weights descend from independent random initialisations, whatever the data. T1 and T2 also assume
that neither model learned the other's hidden states and that the embeddings were not shared.

    T1  fixed points    a channel matching against the identity: P(F ≥ k) ≤ Lᵏ/k!, exact
    T2  two witnesses   channels matched by the embedding and by the output head agree: Poisson
    T3  aligned score   rank among the scores of unrelated pairs: p ≥ 1/(N+1)
    T4  neurons         neurons paired alike by two parts of their weights: in four frames
    T5  values          value channels of attention paired alike by what they read and by what they write: Poisson
    T6  plane words     neighbouring rotary planes differ alike in what attention does through them: a sign test

T1, T2, T4 and T5 match weights, and decide. T3 compares scores. T6 is a witness: alone it leaves a pair inconclusive,
because a student that learns hidden states copies functions too.

`awm.py` decides which channels count: no ties, and in T1 only pairs at least twice as alike as the next best.
`aligning.py` decides when T1 and T2 have numbers: enough shared strings, and for T2 output heads that are not tied to
the embeddings (`_head_matching`). `pairs.py` tests them from a cosine of 0.95 on. `neurons.py` pairs T4's neurons, and
T5's channels, which `value_channels.py` reads. `planes.py` computes T6's words. `comparison.py` draws the layers of T4
and T5, refuses controls that a matching test, or T6 alone, finds related to a model (`_relation`), and marks tests as
void if both models start the weights from a formula. `verdict.py` applies Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.awm import Matching, gathered, unit_rows
from fathom.lineage.weights import Weights

ALPHA = 1e-6
WEAK, WITNESS = 1e-2, 1e-3  # p-values from which matching tests, and T6, leave a pair inconclusive
POISSON_RATE = 3.0
UNIVERSAL = 20  # shared training data may pair one in this many neurons
PROBES = 1024
SPREAD_FLOOR = 0.02
FEWEST = 8  # neurons or channels below which a matching is not evidence
EMBEDDING, HEAD = range(2)  # seeds: each matching breaks its ties with another one
ALIKE = 0.3  # two matrices of one model with a higher rms cosine are not independent witnesses
PLANE_SPREAD = 1.25  # variance of agreements of neighbouring planes, in those of a binomial distribution
ORDERED = 1e-3  # p-value of a rank correlation between index and energy below which channels count as ordered
STRATUM = 8  # number of channels of similar energy that count as exchangeable


@dataclass
class Test:
    """One test of H0. `kind` says where p comes from: exact, control, empirical or model (an assumed rate)."""

    __test__ = False  # not a pytest class

    name: str
    statistic: float
    null: str
    p: float
    kind: str
    assumptions: str
    family: str  # embedding | attention | feed-forward
    detail: dict[str, object] = field(default_factory=dict)
    corrected: float = 1.0
    void: str = ""  # why the test does not count here

    @property
    def matches(self) -> bool:
        """Whether the test matches individual weights (T1, T2, T4, T5), so that it may decide the verdict."""
        return not self.name.startswith(("T3", "T6"))


def fixed_point_bound(count: int, trials: int = 1) -> float:
    """The bound P(F ≥ k) ≤ Lᵏ/k! for F fixed points in L independent uniform matchings (factorial moments are at most
    Lᵏ)."""
    return min(1.0, math.exp(count * math.log(trials) - math.lgamma(count + 1)))


def poisson_tail(count: int, rate: float, trials: int = 1) -> float:
    """The Poisson p-value P(Poisson(rate) ≥ count), Bonferroni-corrected for `trials` tests."""
    return min(1.0, trials * float(stats.poisson.sf(count - 1, rate)))


def empirical(score: float, null: Sequence[float]) -> float:
    """The empirical p-value (1 + #{null ≥ score}) / (N + 1); never below 1/(N+1)."""
    return (1 + sum(value >= score for value in null)) / (len(null) + 1)


def false_positive_bound(negatives: int, confidence: float = 0.95) -> float:
    """The 95 % upper bound on the false-positive rate after no false positive in n independent negatives: 1 −
    0.05^{1/n}."""
    return 1.0 if negatives < 1 else 1 - (1 - confidence) ** (1 / negatives)


def detectable_drift(threshold: float) -> float:
    """The relative drift ε of the weights at which the score 1/(1+ε²) equals the threshold: larger drifts are not
    detected."""
    return math.inf if threshold <= 0 else math.sqrt(max(1 / threshold - 1, 0.0))


def score_threshold(null: Sequence[float]) -> float | None:
    """The score that counts as high: max(null) + 5 standard deviations of unrelated pairs' scores, with a minimum
    deviation if there are few. None below two scores."""
    if len(null) < 2:
        return None
    spread = float(np.std(null, ddof=1))
    return max(null) + 5 * (spread if len(null) >= 10 else max(spread, SPREAD_FLOOR))


def is_ordered(energy: Array) -> bool:
    """Whether a model's channels are sorted by energy, as they are after a rotation to principal axes."""
    if len(energy) < FEWEST or not np.ptp(energy) > 0:
        return False
    return float(stats.spearmanr(np.arange(len(energy)), energy).pvalue) < ORDERED


def test_order(found: Matching, ordered: bool) -> Test:
    """T1 on residual channels. If both models are ordered by energy, only channels of similar energy are exchangeable.

    Args:
        found: Channels matched by the embedding.
        ordered: Whether energy explains the channel order of both models.
    """
    count, trials = found.fixed, max(1, math.ceil(found.size / STRATUM)) if ordered else 1
    return Test(
        "T1 fixed points (embedding)",
        count,
        "at most 1/k!" if trials == 1 else f"at most Lᵏ/k!, L = {trials} strata of like energy",
        fixed_point_bound(count, trials),
        "exact",
        "channels exchangeable in the training of either model"
        if trials == 1
        else "channels of like energy exchangeable: both models are ordered by energy",
        "embedding",
        {"channels": found.size, "judged": found.judged, "strata": trials},
    )


def test_witnesses(count: int, channels: int, rate: float, calibrated: bool) -> Test:
    """T2: the number of channels on which the matchings by embedding and by output head agree."""
    return Test(
        "T2 embedding and output head",
        count,
        f"Poisson({rate:.3g})",
        poisson_tail(count, rate),
        "control" if calibrated else "model",
        "embedding and output head give unrelated matchings in unrelated models",
        "embedding",
        {"channels": channels},
    )


FRAMES = {
    "order": "channels as they stand",
    "tokens": "answers to shared strings",
    "axes": "principal axes, no tokenizer",
    "blind": "a rotation found from other layers, no tokenizer",
}
BASES = 3  # ways in which value channels are taken
STRANGERS = 9 / 160  # largest share in the blind frame, of 360 held-out layers of 120 pairs of strangers
MARGIN = 5  # the blind frame decides from so many times the largest share of strangers


@dataclass(frozen=True)
class NeuronCount:
    """How many neurons of a layer of A and a layer of B are paired in the same way by two parts of their weights, and
    how many were compared."""

    layers: tuple[int, int]
    paired: int
    of: int
    alike: float = 0.0  # median cosine of the inputs of the paired neurons
    among: int = 1  # pairs of layers of which this is the best

    def p(self, share: float, trials: int) -> float:
        """The probability of at least this many pairs by chance, if shared training data pairs a fraction `share` of
        the neurons."""
        return poisson_tail(self.paired, max(POISSON_RATE, share * self.of), trials * self.among)


def share_of_strangers(frame: str, controls: Sequence[float]) -> float:
    """The largest share of a layer's neurons that may be paired between unrelated models.

    Args:
        frame: One of FRAMES.
        controls: The largest share of each control pair.
    """
    if frame == "blind":
        return max(controls) if controls else STRANGERS
    return max(1 / UNIVERSAL, 2 * max(controls, default=0.0))


def neuron_p(frame: str, count: NeuronCount, controls: Sequence[float], trials: int) -> float:
    """The p-value of one count. The blind frame was fitted, so below its margin a count is weak evidence at most."""
    share = share_of_strangers(frame, controls)
    p = count.p(share, trials)
    enough = frame != "blind" or count.paired >= MARGIN * max(POISSON_RATE, share * count.of)
    return p if enough else max(p, WEAK / 10)


def test_neurons(frame: str, counts: Sequence[NeuronCount], controls: Sequence[float]) -> Test:
    """The result of T4 (neurons): the p-value of the best layer, Bonferroni-corrected for the number of layers.

    Args:
        frame: One of FRAMES.
        counts: Counts per pair of layers.
        controls: Shares of neurons that are paired in unrelated models.
    """
    share = share_of_strangers(frame, controls)
    trials = len(counts) * (12 if frame == "blind" else 1)  # three fits, two readings, either sign of the rotation
    best = min(counts, key=lambda count: neuron_p(frame, count, controls, trials))
    rate = max(POISSON_RATE, share * best.of)
    what, where = f"shared data pairs at most {share:.0%} of the neurons of unrelated models", FRAMES[frame]
    if frame == "blind":
        whose = "the controls" if controls else "recorded strangers of width 64"
        what = f"{whose} pair at most {share:.1%} of the neurons; decides from {MARGIN * rate:.0f} on"
    return Test(
        f"T4 neurons ({frame})",
        best.paired,
        f"Poisson({rate:.3g}), Bonferroni over {len(counts) * best.among} layers",
        neuron_p(frame, best, controls, trials),
        "control" if controls else "model",
        f"{what} ({where})",
        "feed-forward",
        {"neurons": best.of, "per_layer": [[*count.layers, count.paired, count.of] for count in counts]},
    )


def test_values(frame: str, counts: Sequence[NeuronCount], chance: float, controls: Sequence[float]) -> Test:
    """The result of T5 (value channels): the p-value of the best layer, Bonferroni-corrected for the number of layers.

    Args:
        frame: One of FRAMES.
        counts: Counts of value channels per pair of layers.
        chance: Share of channels that strangers may pair alike.
        controls: Shares of channels that are paired in unrelated models.
    """
    share = max(1 / UNIVERSAL, chance, 2 * max(controls, default=0.0))
    trials = BASES * len(counts)
    best = min(counts, key=lambda count: count.p(share, trials))
    return Test(
        f"T5 values ({frame})",
        best.paired,
        f"Poisson({max(POISSON_RATE, share * best.of):.3g}), Bonferroni over {len(counts)} layers",
        best.p(share, trials),
        "control" if controls else "model",
        f"strangers pair at most {share:.0%} of the value channels of a layer alike ({FRAMES[frame]})",
        "attention",
        {"values": best.of, "per_layer": [[*count.layers, count.paired, count.of] for count in counts]},
    )


def test_planes(count: int, of: int) -> Test:
    """The result of T6, a sign test: for how many pairs of neighbouring rotary planes the planes differ in the same
    direction in both models."""
    spread = math.sqrt(PLANE_SPREAD * of / 4)
    return Test(
        "T6 plane words",
        count,
        f"normal, mean {of / 2:g}, standard deviation {spread:.3g}",
        float(stats.norm.sf((count - 0.5 - of / 2) / spread)),
        "model",
        "in unrelated models neighbouring rotary planes may be exchanged",
        "attention",
        {"planes": of},
    )


test_order.__test__ = test_witnesses.__test__ = test_planes.__test__ = False  # type: ignore[attr-defined]
test_neurons.__test__ = test_values.__test__ = False  # type: ignore[attr-defined]


def middle(rows_a: Array, rows_b: Array, count: int) -> tuple[Array, Array]:
    """The embedding rows of `count` consecutive shared strings from the middle of the vocabulary: neither very frequent
    nor unused."""
    start = max((len(rows_a) - count) // 2, 0)
    return rows_a[start : start + count], rows_b[start : start + count]


def head_likeness(weights: Weights, rows: Array) -> float:
    """How similar a model's output head is to its embedding: the root mean square, over channels, of the cosine of both
    columns at some rows."""
    tables = [unit_rows(gathered(weights, rows, table)) for table in (canonical.embedding, canonical.head)]
    sizes = [np.maximum(np.linalg.norm(table, axis=0), canonical.TINY) for table in tables]
    cosines = np.einsum("nd,nd->d", *tables) / (sizes[0] * sizes[1])
    return float(np.sqrt(np.mean(np.square(cosines))))


def probability(value: float) -> str:
    """A p-value as text."""
    if value >= 0.001:
        return f"{value:.3f}"
    return "under 1e-300" if value <= 1e-300 else f"{value:.1e}"
