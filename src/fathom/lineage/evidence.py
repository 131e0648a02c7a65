"""Evidence: matching tests with exact or control-calibrated p-values, and the verdict rule with its limits.

H0: the two sets of weights descend from independent random initialisations, whatever the data or the teacher.

    T1  fixed points      a channel matching against the identity: P(F ≥ k) ≤ 1/k!, exact
    T2  two witnesses     two matchings read from different kinds of weights agree: Poisson, rate checked on controls
    T3  aligned score     rank among the scores of unrelated pairs: p ≥ 1/(N+1)
    T4  gate and up       two matchings of feed-forward neurons agree: rotation-proof, needs a paired control
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.awm import CHUNK_ROWS, Matching, chunks, gathered, match, unit_rows
from fathom.lineage.weights import Weights
from fathom.report.statistics import holm

ALPHA = 1e-6
WEAK = 1e-2
POISSON_RATE = 3.0
COVERAGE = 0.7
PROBES = 1024
NEURONS = 2048
SPREAD_FLOOR = 0.02
FEWEST = 8  # neurons or channels below which a matching says nothing
EMBEDDING, HEAD, GATE, UP, WRITERS = range(5)  # seeds: each matching breaks its ties with its own
TWINS = 0.3  # two matrices of one model with a higher rms cosine are not independent witnesses

SHARED, INITIALISATION = "shared lineage", "shared initialisation or lineage"
PARTIAL, INCONCLUSIVE, NONE = "partial", "inconclusive", "no evidence found"
EXIT_CODES = {NONE: 0, SHARED: 10, PARTIAL: 11, INCONCLUSIVE: 12, INITIALISATION: 13}

NOT_CLAIMED = (
    "direction: A from B, B from A and a common parent look alike; that needs dates, configs or optimiser traces",
    "intent, or a breach of any licence",
    "distillation or shared training data: neither moves weights, and neither is looked for",
    "behaviour: nothing was run",
)


@dataclass
class Test:
    """One test of H0. `kind` says where p comes from: exact, control, empirical, model (assumed rate) or nominal."""

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

    @property
    def decides(self) -> bool:
        """Whether the verdict may rest on it: a nominal p-value is only shown."""
        return self.kind != "nominal"


def fixed_point_bound(count: int, trials: int = 1) -> float:
    """P(F ≥ k) ≤ Lᵏ/k! for F fixed points in L independent uniform matchings (factorial moments are at most Lᵏ)."""
    return min(1.0, math.exp(count * math.log(trials) - math.lgamma(count + 1)))


def poisson_tail(count: int, rate: float, trials: int = 1) -> float:
    """Bonferroni over `trials` of P(Poisson(rate) ≥ count)."""
    return min(1.0, trials * float(stats.poisson.sf(count - 1, rate)))


def empirical(score: float, null: Sequence[float]) -> float:
    """(1 + #{null ≥ score}) / (N + 1); never below 1/(N+1)."""
    return (1 + sum(value >= score for value in null)) / (len(null) + 1)


def false_positive_bound(negatives: int, confidence: float = 0.95) -> float:
    """Upper bound on the false-positive rate after 0 in n independent negatives: 1 − 0.05^{1/n}."""
    return 1.0 if negatives < 1 else 1 - (1 - confidence) ** (1 / negatives)


def detectable_drift(threshold: float) -> float:
    """ε at which 1/(1+ε²) equals the threshold: larger relative drifts of the weights are not detected."""
    return math.inf if threshold <= 0 else math.sqrt(max(1 / threshold - 1, 0.0))


def test_order(found: Matching) -> Test:
    """T1 on residual channels."""
    count = found.fixed
    return Test(
        "T1 fixed points (embedding)",
        count,
        "at most 1/k! (a uniform matching fixes about 1 channel)",
        fixed_point_bound(count),
        "exact",
        "channels exchangeable in the training of either model (i.i.d. initialisation, SGD/Adam/Muon)",
        "embedding",
        {"channels": found.size},
    )


def test_witnesses(count: int, channels: int, rate: float, calibrated: bool, family: str, trials: int = 1) -> Test:
    """T2: channels on which the embedding's matching and another one agree; the best of `trials` layers."""
    other = {"embedding": "output head", "feed-forward": "feed-forward path"}[family]
    return Test(
        f"T2 embedding and {other}",
        count,
        f"Poisson({rate:.3g})" + (f", Bonferroni over {trials} layers" if trials > 1 else ""),
        poisson_tail(count, rate, trials),
        "control" if calibrated else "model",
        f"embedding and {other} give unrelated matchings in unrelated models",
        family,
        {"channels": channels},
    )


test_order.__test__ = test_witnesses.__test__ = False  # type: ignore[attr-defined]


@dataclass
class Responses:
    """Responses of one layer's neurons to the shared strings: standardised rows, [neurons, probes]."""

    gate: Array | None
    up: Array
    up_norms: Array

    @property
    def likeness(self) -> float:
        """Rms correlation of gate and up responses over the neurons; 0 without a gate."""
        if self.gate is None:
            return 0.0
        return float(np.sqrt(np.mean(np.square(np.einsum("np,np->n", self.gate, self.up)))))


def neuron_responses(weights: Weights, index: int, probes: Array) -> Responses:
    """Responses of gate and up, gains folded, to RMS-normalised probe embeddings [n, d]; matrices are streamed."""
    scaled = unit_rows(probes) * math.sqrt(probes.shape[1])
    norms = weights.layer(index, ("ffn_norm",))
    out: dict[str, Array] = {}
    up_norms = np.zeros(0)
    for role in (role for role in ("gate", "up") if weights.has(role, index)):
        answers, sizes = [], []
        for rows in chunks(weights.neurons(index), CHUNK_ROWS):
            piece = canonical.fold({role: weights.tensor(role, index, rows), **norms}, weights.geometry)[role]
            answers.append(piece @ scaled.T)
            sizes.append(np.sqrt(np.einsum("ij,ij->i", piece, piece, dtype=np.float64)))
        together = np.concatenate(answers)
        answers.clear()
        together -= together.mean(1, keepdims=True)
        out[role] = unit_rows(together)  # so that products are Pearson correlations
        up_norms = np.concatenate(sizes)
    return Responses(out.get("gate"), out["up"], up_norms)


def writers(weights: Weights, index: int, neurons: Array, up_norms: Array) -> Array:
    """Columns of the canonical W_down for some neurons, [width, m], balanced against their up rows; streamed."""
    norms = weights.layer(index, ("post_ffn_norm",))
    out = np.empty((weights.geometry.width, len(neurons)), np.float32)
    for rows in chunks(weights.geometry.width, CHUNK_ROWS):
        out[rows] = weights.tensor("down", index, rows)[:, neurons]
    if "post_ffn_norm" in norms:
        out *= norms["post_ffn_norm"][:, None]
    if weights.geometry.norm == "layer":
        out -= out.mean(0, keepdims=True)
    if weights.geometry.gated:
        sizes = np.sqrt(np.einsum("ij,ij->j", out, out, dtype=np.float64))
        balance = np.sqrt(up_norms[neurons] / np.maximum(sizes, canonical.TINY))
        out *= balance.astype(out.dtype)
    return out


@dataclass
class NeuronMatch:
    """One layer pair: for some neurons of the narrower side, their partners on the other by gate and by up."""

    sample: Array  # neurons of the side with fewer that count: no tie decided their partners
    by_gate: Array
    by_up: Array
    up_sign: Array
    swapped: bool  # the sample is from A
    tied: int  # neurons that were left out

    def neurons(self) -> tuple[Array, Array]:
        """Matched neurons of A and of B, by gate."""
        return (self.sample, self.by_gate) if self.swapped else (self.by_gate, self.sample)

    @property
    def z(self) -> float:
        """√(m−1) times Spearman's ρ of the two matchings; not a number where too few neurons are left."""
        if len(self.sample) < FEWEST:
            return math.nan
        rho = stats.spearmanr(self.by_gate, self.by_up).statistic
        return 0.0 if not math.isfinite(rho) else float(rho) * math.sqrt(len(self.sample) - 1)

    @property
    def fixed(self) -> int:
        """Neurons whose partner has their own number."""
        return int(np.sum(self.by_gate == self.sample))


def match_neurons(a: Responses, b: Responses, seed: int) -> NeuronMatch:
    """Match neurons by gate (signed: its sign is not free) and by up (|Pearson|: its sign is)."""
    swapped = len(a.up) < len(b.up)
    small, large = (a, b) if swapped else (b, a)
    m = min(len(small.up), NEURONS)
    sample = np.sort(np.random.default_rng(seed).choice(len(small.up), m, replace=False))
    up = large.up @ small.up[sample].T  # [large, m]
    if small.gate is None or large.gate is None:  # ungated: one in-projection, whose sign is not free
        by_gate = by_up = match(np.maximum(up, 0), seed=GATE)
    else:
        by_up = match(up, seed=UP)
        by_gate = match(np.maximum(large.gate @ small.gate[sample].T, 0), seed=GATE)
    kept = np.flatnonzero(by_gate.counted & by_up.counted)
    sign = np.where(up[by_gate.columns[kept], kept] < 0, -1.0, 1.0)
    return NeuronMatch(sample[kept], by_gate.columns[kept], by_up.columns[kept], sign, swapped, m - len(kept))


def writer_matching(writers_a: Array, writers_b: Array, sign: Array) -> Matching:
    """Second witness: channels of A for those of B, by the writers of matched neurons, signs transferred."""
    return match(unit_rows(writers_a * sign.astype(writers_a.dtype)) @ unit_rows(writers_b).T, seed=WRITERS)


def middle(rows_a: Array, rows_b: Array, count: int) -> tuple[Array, Array]:
    """A run of shared strings from the middle of the vocabulary: neither the commonest nor never-used ones."""
    start = max((len(rows_a) - count) // 2, 0)
    return rows_a[start : start + count], rows_b[start : start + count]


def probes(weights: Weights, rows: Array) -> Array:
    """Canonical embeddings of the probe strings."""
    return gathered(weights, rows, canonical.embedding)


def head_likeness(weights: Weights, rows: Array) -> float:
    """How much a model's output head is its embedding: rms cosine of the channels' columns at some rows."""
    tables = [unit_rows(gathered(weights, rows, table)) for table in (canonical.embedding, canonical.head)]
    sizes = [np.maximum(np.linalg.norm(table, axis=0), canonical.TINY) for table in tables]
    cosines = np.einsum("nd,nd->d", *tables) / (sizes[0] * sizes[1])
    return float(np.sqrt(np.mean(np.square(cosines))))


def combined(z_values: Sequence[float]) -> float:
    """Stouffer: Σz/√L."""
    return float(np.sum(z_values)) / math.sqrt(max(len(z_values), 1))


def test_gate_up(z_values: Sequence[float], controls: Sequence[Sequence[float]]) -> Test:
    """T4. With controls at the same relative layers the smaller of z_adj and z_pair counts; without, p is nominal.

    z_adj = z − max(0, mean z of the controls);  z_pair = min over controls of (z − z_control)/√2.
    """
    z = combined(z_values)
    detail: dict[str, object] = {"z": z, "per_layer": [round(v, 3) for v in z_values]}
    used = z
    if controls:
        others = [combined(values) for values in controls]
        adjusted, paired = z - max(0.0, float(np.mean(others))), (z - max(others)) / math.sqrt(2)
        detail |= {"z_adj": adjusted, "z_pair": paired}
        used = min(adjusted, paired)
    return Test(
        "T4 gate/up agreement",
        used,
        "N(0,1) after subtracting the controls" if controls else "N(0,1), nominal: anti-conservative without a control",
        float(stats.norm.sf(used)),
        "control" if controls else "nominal",
        "unrelated models share no pairing of gate and up rows beyond what the controls share",
        "feed-forward",
        detail,
    )


test_gate_up.__test__ = False  # type: ignore[attr-defined]


@dataclass
class Verdict:
    """The verdict: a label, one sentence, and the reasons."""

    label: str
    sentence: str
    reasons: list[str]
    threshold: float | None
    drift: float | None
    not_claimed: tuple[str, ...] = NOT_CLAIMED

    @property
    def exit_code(self) -> int:
        """0 no evidence, 10 shared lineage, 11 partial, 12 inconclusive, 13 shared initialisation or lineage."""
        return EXIT_CODES[self.label]


def score_threshold(null: Sequence[float]) -> float | None:
    """max(null) + 5 sd of unrelated scores of the same class; the sd of a handful is floored. None below two."""
    if len(null) < 2:
        return None
    spread = float(np.std(null, ddof=1))
    return max(null) + 5 * (spread if len(null) >= 10 else max(spread, SPREAD_FLOOR))


@dataclass
class Findings:
    """The inputs of the verdict rule."""

    tests: list[Test]
    best_score: float
    null_scores: list[float]
    coverage: float
    families: set[str]  # attention, feed-forward, embedding: those with evidence of their own
    families_tested: set[str]
    blocks: list[str]
    control_failed: bool
    low_overlap: bool
    tampering: list[str]
    by_number: bool = False
    """Whether rows were paired by their numbers, because there was no tokenizer."""


def decide(found: Findings) -> Verdict:
    """The verdict rule. It never says "independent"."""
    deciding = [test for test in found.tests if test.decides]
    for test, value in zip(deciding, holm([test.p for test in deciding]), strict=True):
        test.corrected = value
    matching = [test for test in deciding if not test.name.startswith("T3")]
    best = min(matching, key=lambda test: test.corrected, default=None)
    p = best.corrected if best else 1.0
    threshold = score_threshold(found.null_scores)
    drift = detectable_drift(threshold) if threshold is not None else None
    above = threshold is not None and found.best_score >= threshold
    label, reasons = _label(found, p, above, threshold)
    return Verdict(label, _sentence(label, found), reasons, threshold, drift)


def _label(found: Findings, p: float, above: bool, threshold: float | None) -> tuple[str, list[str]]:
    missing = found.families_tested - found.families
    reasons = [f"smallest corrected p of the matching tests: {probability(p)} (decides at {ALPHA:g})"]
    if threshold is None:
        reasons.append(
            "no control or null file of this class: a score cannot be called high (give --control or --null)"
        )
    else:
        verb = "reaches" if above else "stays below"
        reasons.append(f"best aligned score {found.best_score:.3f} {verb} max(null) + 5 sd = {threshold:.3f}")
    reasons.append(f"layers matched with evidence: {found.coverage:.0%}")
    if found.control_failed and (p < WEAK or above):  # without evidence for a lineage, a failed control does not matter
        return INCONCLUSIVE, [*reasons, "a control scores as high as the pair: the tests cannot be trusted here"]
    if p <= ALPHA:
        # some layers match and others do not, or one kind of weights alone: a part was taken. No layer matching at all
        # while several kinds of weights pair up is what a shared initialisation leaves after long training.
        some_layers = 0 < found.coverage < COVERAGE
        if found.blocks and (some_layers or (len(found.families) == 1 and missing)):
            return PARTIAL, [*reasons, "evidence in: " + ", ".join(found.blocks)]
        return (SHARED if above and found.coverage >= COVERAGE else INITIALISATION), reasons
    if p < WEAK or above or found.low_overlap or found.by_number or found.tampering:
        if found.low_overlap:
            reasons.append("too few shared strings to align by the embedding")
        if found.by_number:
            reasons.append("rows were paired by their numbers, for want of a tokenizer: other ids would hide anything")
        return INCONCLUSIVE, reasons
    return NONE, reasons


def probability(value: float) -> str:
    """A p-value as text."""
    if value >= 0.001:
        return f"{value:.3f}"
    return "< 1e-300" if value <= 1e-300 else f"{value:.1e}"


def _sentence(label: str, found: Findings) -> str:
    opening = {
        SHARED: "These weights share a lineage.",
        INITIALISATION: "These weights share an initialisation or a lineage.",
        PARTIAL: "Parts of these weights share an initialisation or a lineage: " + ", ".join(found.blocks) + ".",
        INCONCLUSIVE: "The evidence is inconclusive.",
        NONE: "No evidence of weight reuse was found.",
    }[label]
    if label in {INCONCLUSIVE, NONE}:
        return opening
    return f"{opening} {_fact(found.tests)}"


def _fact(tests: Sequence[Test]) -> str:
    """The plainest significant finding: paired channels if there are any, otherwise the smallest p."""
    sure = [test for test in tests if test.decides and test.corrected <= ALPHA]
    counted = [test for test in sure if "channels" in test.detail]
    if not counted:
        best = min(sure, key=lambda test: test.corrected)
        return f"{best.name} gives {best.statistic:,.4g}, corrected p {probability(best.corrected)}."
    best = max(counted, key=lambda test: test.statistic)
    how = "as they stand in both" if best.name.startswith("T1") else "identically by two different parts of the network"
    fact = f"{best.statistic:,.0f} of {best.detail['channels']:,} channels are paired {how}; "
    return fact + "unrelated models give about 1."
