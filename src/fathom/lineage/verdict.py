"""The verdict of a comparison: a label, its meaning, other possible explanations, and the reasons. When in doubt, it
claims less.

Identical weights are reported as such. "Shared lineage" needs a significant matching test of the layers' own weights, a
score that no control reaches, and a share of the training that neither a shared initialisation nor a shared order of
data explains. Without the last the verdict is "shared initialisation or lineage", however high the score. If only the
embeddings match, the verdict is "embedding agrees", which accuses nobody: hidden-state distillation does the same.

`inherited.py` sets how large the share of the training must be (`bar`). `evidence.py` makes the p-values, and decides
which score counts as high (`score_threshold`). `comparison.py` chooses the controls that are used (`_relation`), checks
that none scores as high as the pair (`_failed`), decides whether one seed and one order of data would explain as much
(`_one_seed`), and marks tests of deterministic starts as void. `identity.py` counts the identical tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fathom.lineage.evidence import ALPHA, WEAK, WITNESS, Test, detectable_drift, probability
from fathom.lineage.identity import Identical
from fathom.lineage.inherited import Inherited
from fathom.report.statistics import holm

COVERAGE = 0.7

SHARED, INITIALISATION = "shared lineage", "shared initialisation or lineage"
PARTIAL, EMBEDDING, INCONCLUSIVE, NONE = "partial", "embedding agrees", "inconclusive", "no evidence found"
EXIT_CODES = {NONE: 0, SHARED: 10, PARTIAL: 11, INCONCLUSIVE: 12, INITIALISATION: 13, EMBEDDING: 14}

NOT_CLAIMED = (
    "direction: A from B, B from A and a common parent look alike; that needs dates, configs or optimiser traces",
    "intent, or a breach of any licence",
    "distillation or shared training data: no test looks for them",
    "behaviour: nothing was run",
)
MEANINGS = {
    SHARED: "One of these models was made from the other, or both were made from a third.",
    INITIALISATION: "One was made from the other, or both started from the same random numbers; the weights alone do "
    "not say which.",
    PARTIAL: "Some weights of one model are in the other; the other parts that were measured show no relation.",
    EMBEDDING: "The two models use the same channels in the same places, but no weights of any layer match. This shows "
    "neither a shared initialisation nor a lineage of the models.",
    INCONCLUSIVE: "The weights neither show that the models are related nor let the question be closed.",
    NONE: "This does not prove that the models are independent: heavy retraining or a disguise that is not known here "
    "would look the same.",
}
SAME_FILE = "The two are one model under two names: a copy, or one computation that was repeated to the last bit."
SEED_AND_ORDER = (
    "one seed and one order of data: two runs of one recipe that differ in a setting, such as an ablation, can stay "
    "this alike"
)
START = "a public deterministic start: both may begin from the same formula (identity, Hadamard, sinusoids)"
ANCESTOR = "a common ancestor: both may come from one published model"
CONSENT = "consent: a licence may allow it, which weights do not show"
ALTERNATIVES = {
    SHARED: (ANCESTOR, SEED_AND_ORDER, CONSENT),
    INITIALISATION: (
        "a public seed: two teams that run one recipe from one seed begin with the same numbers",
        SEED_AND_ORDER,
        ANCESTOR,
        CONSENT,
    ),
    PARTIAL: (
        "a public component: an embedding or a layer that both took from the same source",
        "a public seed: parts that hardly trained still show where they began",
    ),
    EMBEDDING: (
        "a frozen or public embedding that both took from the same source",
        "hidden-state distillation: a student that learns the other's hidden states takes over its channels",
        START,
        "a lineage whose layers were replaced or trained for long",
    ),
    INCONCLUSIVE: ("chance, shared data or a shared tokenizer", "a lineage that long training has covered"),
    NONE: ("unrelated models", "a lineage that long training has covered, or a disguise that is not known here"),
}
COPIED = (
    "one computation, run twice: a program that is exact to the bit makes the same model from the same seed and data",
    ANCESTOR,
    CONSENT,
)
GIVE_CONTROLS = (
    "no control or null file of this class: no score can be called high, and the verdict cannot be shared lineage; "
    "give a control (--control MODEL, an unrelated model of the same kind; two if A and B differ in depth) or a null "
    "file (--null FILE)"
)


@dataclass
class Findings:
    """The inputs of the verdict rule."""

    tests: list[Test]
    best_score: float
    threshold: float | None  # p-value of the score; None without a null
    coverage: float  # share of the layers with their own evidence
    families: set[str]  # attention, feed-forward, embedding: those with their own evidence
    families_tested: set[str]
    blocks: list[str]
    inherited: Inherited | None = None
    verbatim: bool = False  # some part is unchanged, which two trainings from one seed would not leave
    control_failed: str = ""  # why the controls cannot be trusted
    refused: tuple[str, ...] = ()  # controls that are themselves related, and to what
    identical: Identical | None = None
    trained: bool = False  # whether the models show any training
    measured: str = ""  # how many layers have evidence, of those that were measured
    one_seed: bool = False  # so alike, and without a later stage, that one seed and one order would explain it
    unmeasured: str = ""  # why no test without a tokenizer was run
    low_overlap: bool = False
    by_number: bool = False
    """Whether rows were paired by number, because there was no tokenizer."""


@dataclass
class Verdict:
    """The verdict of a comparison: a label, sentences for a reader, and the reasons."""

    label: str
    sentence: str  # the finding
    meaning: str
    sure: str  # the grounds, and the certainty
    reasons: list[str]
    threshold: float | None
    minimum_detectable_drift: float | None
    alternatives: tuple[str, ...] = ()
    not_claimed: tuple[str, ...] = field(default=NOT_CLAIMED)

    @property
    def exit_code(self) -> int:
        """The exit code: 0 no evidence, 10 shared lineage, 11 partial, 12 inconclusive, 13 shared initialisation or
        lineage."""
        return EXIT_CODES[self.label]


def decide(found: Findings) -> Verdict:
    """The verdict rule. It never says "independent"."""
    for test, value in zip(found.tests, holm([test.p for test in found.tests]), strict=True):
        test.corrected = value
    matching = [test for test in found.tests if test.matches]
    p = min((test.corrected for test in matching if not test.void), default=1.0)
    void = any(test.corrected <= ALPHA for test in matching if test.void)
    label, reasons = _label(found, p, void)
    reasons += _witness(found) if label == INCONCLUSIVE else []
    same = found.identical is not None and found.identical.whole
    return Verdict(
        label,
        _sentence(label, found),
        SAME_FILE if same else MEANINGS[label],
        _sure(label, found),
        reasons,
        found.threshold,
        detectable_drift(found.threshold) if found.threshold is not None else None,
        COPIED if same else _alternatives(label, found, void),
    )


def _alternatives(label: str, found: Findings, void: bool) -> tuple[str, ...]:
    """Other explanations than shared lineage that the evidence does not exclude."""
    known = found.inherited is not None and found.inherited.margin >= 0
    if label == INITIALISATION and known:  # a seed alone does not explain the training that both have
        return ALTERNATIVES[label][1:]
    return (START, *ALTERNATIVES[label]) if void and label == INCONCLUSIVE else ALTERNATIVES[label]


def _label(found: Findings, p: float, void: bool) -> tuple[str, list[str]]:
    above = found.threshold is not None and found.best_score >= found.threshold
    reasons = [f"smallest corrected p of the matching tests: {probability(p)} (decides at {ALPHA:g})"]
    if found.identical is not None and found.identical.matrices:
        reasons.insert(0, f"identical: {found.identical}")
        if found.identical.whole:
            return SHARED if found.trained else INITIALISATION, reasons
    reasons += found.refused
    if found.threshold is None:
        reasons.append(GIVE_CONTROLS)
    else:
        verb = "reaches" if above else "stays below"
        reasons.append(f"best aligned score {found.best_score:.3f} {verb} max(null) + 5 sd = {found.threshold:.3f}")
    reasons.append(f"layers with evidence: {found.measured or format(found.coverage, '.0%')}")
    if found.control_failed and (p < WEAK or above or void):  # without evidence, a failed control does not matter
        return INCONCLUSIVE, [*reasons, found.control_failed]
    if p <= ALPHA:
        return _related(found, above, reasons)
    doubts = _doubts(found, void)
    if p < WEAK or above or doubts or _witness(found):
        return INCONCLUSIVE, [*reasons, *doubts]
    return NONE, reasons


def _witness(found: Findings) -> list[str]:
    """A remark if T6 is significant, for verdicts that no matching test decides: attention acts alike in both
    models."""
    told = any(test.name.startswith("T6") and test.p <= WITNESS for test in found.tests)
    what = "evidence of a shared function, but of no shared weights: hidden-state distillation is not excluded"
    return [f"the rotary planes of attention act alike (T6): {what}"] if told else []


def _doubts(found: Findings, void: bool) -> list[str]:
    """Reasons why finding no evidence does not show that the models are unrelated."""
    doubts = {
        "both models begin from a deterministic start, which makes strangers alike: its tests do not count": void,
        "too few shared strings to align by the embedding": found.low_overlap,
        "rows were paired by their numbers, for want of a tokenizer: other ids would hide anything": found.by_number,
        f"no test without a tokenizer was run: {found.unmeasured}": bool(found.unmeasured),
    }
    return [words for words, holds in doubts.items() if holds]


def _related(found: Findings, above: bool, reasons: list[str]) -> tuple[str, list[str]]:
    """The label and the reasons if a matching test is significant."""
    if found.families <= {"embedding"}:
        return EMBEDDING, [*reasons, "no matching test of a layer's own weights is significant"]
    missing = found.families_tested - found.families
    # some layers match and others do not, or one kind of weights alone: a part was taken, or long training from one
    # seed has left no more; only what is taken as it is tells the two apart
    if found.verbatim and found.blocks and (0 < found.coverage < COVERAGE or (len(found.families) == 1 and missing)):
        return PARTIAL, [*reasons, "evidence in: " + ", ".join(found.blocks)]
    reasons.append(_kept(found.inherited))
    kept = found.inherited is not None and found.inherited.margin >= 0
    if kept and found.one_seed:
        reasons.append("nothing shows a later stage of training: one seed and one order of data explain as much")
    elif kept and above and found.coverage >= COVERAGE:
        return SHARED, reasons
    return INITIALISATION, reasons


def _kept(inherited: Inherited | None) -> str:
    """A sentence on how much of what training added both models share."""
    if inherited is None or math.isinf(inherited.bar):
        return (
            "too little training is to be seen in these weights, or their channels are not aligned, to tell a lineage "
            "from a shared initialisation"
        )
    verb = "reaches" if inherited.margin >= 0 else "stays below"
    return (
        f"share of what training added that both have: {inherited.share:.2f}, which {verb} {inherited.bar:.2f}, the "
        "most that a shared initialisation is taken to explain"
    )


def _sentence(label: str, found: Findings) -> str:
    if found.identical is not None and found.identical.whole:
        return f"The weights are identical, {found.identical}."
    return {
        SHARED: "These weights share a lineage.",
        INITIALISATION: "These weights share an initialisation or a lineage.",
        PARTIAL: "Parts of these weights share an initialisation or a lineage: " + ", ".join(found.blocks) + ".",
        EMBEDDING: "The embeddings agree, and no other weights were found to.",
        INCONCLUSIVE: "The evidence is inconclusive.",
        NONE: "No evidence of weight reuse was found.",
    }[label]


def _fact(tests: Sequence[Test]) -> str:
    """A sentence on the significant finding that is easiest to explain: paired channels if there are any, else
    neurons."""
    sure = [test for test in tests if test.matches and test.corrected <= ALPHA and not test.void]
    channels = [test for test in sure if "channels" in test.detail]
    if channels:
        best = max(channels, key=lambda test: test.statistic)
        count, total = int(best.statistic), best.detail["channels"]
        if best.name.startswith("T1"):
            judged = best.detail.get("judged", total)
            inside = "all" if judged == count else f"{count:,} of them"
            found = f"{judged:,} could be judged, {inside} in the same place in both models"
        else:
            found = f"{count:,} are paired identically by two different parts of the network"
        return (
            f"Of {total:,} channels (the numbers that each layer hands on), {found}; in unrelated models about 1 "
            "would be."
        )
    best = max(sure, key=lambda test: test.statistic)
    what = "neurons" if "neurons" in best.detail else "values"
    return (
        f"Of {best.detail[what]:,} {what} of one layer, {best.statistic:,.0f} are paired identically by two separate "
        "parts of their weights; in unrelated models hardly any are."
    )


def _sure(label: str, found: Findings) -> str:
    """A sentence on how certain the verdict is, and what this certainty rests on."""
    if found.identical is not None and found.identical.whole:
        return "Every number was compared; no statistics are needed."
    if label == NONE:
        return "No test came near its limit. The method section says which changes these tests would not have seen."
    if label == INCONCLUSIVE:
        return "Not sure enough to say anything: see the reasons below."
    best = min((test for test in found.tests if test.matches and not test.void), key=lambda test: test.corrected)
    p = "of less than one in a million" if best.corrected > 0 else "too small to write as a number"
    kind = "an exact bound" if best.kind == "exact" else "an assumption that was checked on unrelated models"
    what = (
        "A student that learns hidden states, or a shared embedding, would do the same"
        if label == EMBEDDING
        else ("It is not the probability that anybody did anything wrong")
    )
    return (
        f"{_fact(found.tests)} If the models had begun with unrelated random numbers and learned nothing from each "
        f"other, a coincidence like this would have a probability {p}. That rests on {kind}. {what}."
    )
