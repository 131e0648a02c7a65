"""The verdict: a label, its meaning, other possible explanations, and the reasons. When in doubt, it claims less.

"Shared lineage" needs three things: a significant matching test, a score that no control reaches, and a share of the
training that a shared initialisation does not explain. Without the last the verdict is "shared initialisation or
lineage", however high the score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fathom.lineage.evidence import ALPHA, WEAK, Test, detectable_drift, probability
from fathom.lineage.inherited import Inherited
from fathom.report.statistics import holm

COVERAGE = 0.7

SHARED, INITIALISATION = "shared lineage", "shared initialisation or lineage"
PARTIAL, INCONCLUSIVE, NONE = "partial", "inconclusive", "no evidence found"
EXIT_CODES = {NONE: 0, SHARED: 10, PARTIAL: 11, INCONCLUSIVE: 12, INITIALISATION: 13}

NOT_CLAIMED = (
    "direction: A from B, B from A and a common parent look alike; that needs dates, configs or optimiser traces",
    "intent, or a breach of any licence",
    "distillation or shared training data: neither moves weights, and neither is looked for",
    "behaviour: nothing was run",
)
MEANINGS = {
    SHARED: "One of these models was made from the other, or both were made from a third.",
    INITIALISATION: "One was made from the other, or both started from the same random numbers; the weights alone do "
    "not say which.",
    PARTIAL: "Some weights of one model are in the other; the rest show no relation.",
    INCONCLUSIVE: "The weights neither show that the models are related nor let the question be closed.",
    NONE: "This does not prove that the models are independent: heavy retraining or a disguise that is not known here "
    "would look the same.",
}
ALTERNATIVES = {
    SHARED: (
        "a common ancestor: both may come from one published model",
        "consent: a licence may allow it, which weights do not show",
    ),
    INITIALISATION: (
        "a public seed: two teams that run one recipe from one seed begin with the same numbers",
        "a common ancestor: both may come from one published model",
        "consent: a licence may allow it, which weights do not show",
    ),
    PARTIAL: (
        "a public component: an embedding or a layer that both took from the same source",
        "a public seed: parts that hardly trained still show where they began",
    ),
    INCONCLUSIVE: ("chance, shared data or a shared tokenizer", "a lineage that long training has covered"),
    NONE: ("unrelated models", "a lineage that long training has covered, or a disguise that is not known here"),
}


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
    control_failed: bool = False
    low_overlap: bool = False
    by_number: bool = False
    """Whether rows were paired by number, because there was no tokenizer."""


@dataclass
class Verdict:
    """The verdict: a label, sentences for a reader, and the reasons."""

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
        """0 no evidence, 10 shared lineage, 11 partial, 12 inconclusive, 13 shared initialisation or lineage."""
        return EXIT_CODES[self.label]


def decide(found: Findings) -> Verdict:
    """The verdict rule. It never says "independent"."""
    for test, value in zip(found.tests, holm([test.p for test in found.tests]), strict=True):
        test.corrected = value
    matching = [test for test in found.tests if not test.name.startswith("T3")]
    p = min((test.corrected for test in matching), default=1.0)
    label, reasons = _label(found, p)
    drift = detectable_drift(found.threshold) if found.threshold is not None else None
    return Verdict(
        label,
        _sentence(label, found),
        MEANINGS[label],
        _sure(label, found),
        reasons,
        found.threshold,
        drift,
        ALTERNATIVES[label],
    )


def _label(found: Findings, p: float) -> tuple[str, list[str]]:
    above = found.threshold is not None and found.best_score >= found.threshold
    reasons = [f"smallest corrected p of the matching tests: {probability(p)} (decides at {ALPHA:g})"]
    if found.threshold is None:
        reasons.append(
            "no control or null file of this class: a score cannot be called high (give a control or a null file)"
        )
    else:
        verb = "reaches" if above else "stays below"
        reasons.append(f"best aligned score {found.best_score:.3f} {verb} max(null) + 5 sd = {found.threshold:.3f}")
    reasons.append(f"layers with evidence: {found.coverage:.0%}")
    if found.control_failed and (p < WEAK or above):  # without evidence for a lineage, a failed control does not matter
        return INCONCLUSIVE, [*reasons, "a control scores as high as the pair: the tests cannot be trusted here"]
    if p <= ALPHA:
        return _related(found, above, reasons)
    if p < WEAK or above or found.low_overlap or found.by_number:
        if found.low_overlap:
            reasons.append("too few shared strings to align by the embedding")
        if found.by_number:
            reasons.append("rows were paired by their numbers, for want of a tokenizer: other ids would hide anything")
        return INCONCLUSIVE, reasons
    return NONE, reasons


def _related(found: Findings, above: bool, reasons: list[str]) -> tuple[str, list[str]]:
    """The label if a matching test is significant."""
    missing = found.families_tested - found.families
    # some layers match and others do not, or one kind of weights alone: a part was taken, or long training from one
    # seed has left no more; only what is taken as it is tells the two apart
    if found.verbatim and found.blocks and (0 < found.coverage < COVERAGE or (len(found.families) == 1 and missing)):
        return PARTIAL, [*reasons, "evidence in: " + ", ".join(found.blocks)]
    reasons.append(_kept(found.inherited))
    if above and found.coverage >= COVERAGE and found.inherited is not None and found.inherited.margin >= 0:
        return SHARED, reasons
    return INITIALISATION, reasons


def _kept(inherited: Inherited | None) -> str:
    """The shared part of the training, in words."""
    if inherited is None or math.isinf(inherited.bar):
        return "too little training is to be seen in these weights to tell a lineage from a shared initialisation"
    verb = "reaches" if inherited.margin >= 0 else "stays below"
    return (
        f"share of what training added that both have: {inherited.share:.2f}, which {verb} {inherited.bar:.2f}, the "
        "most that a shared initialisation is taken to explain"
    )


def _sentence(label: str, found: Findings) -> str:
    return {
        SHARED: "These weights share a lineage.",
        INITIALISATION: "These weights share an initialisation or a lineage.",
        PARTIAL: "Parts of these weights share an initialisation or a lineage: " + ", ".join(found.blocks) + ".",
        INCONCLUSIVE: "The evidence is inconclusive.",
        NONE: "No evidence of weight reuse was found.",
    }[label]


def _fact(tests: Sequence[Test]) -> str:
    """The simplest significant finding: paired channels if there are any, then neurons."""
    sure = [test for test in tests if test.corrected <= ALPHA]
    channels = [test for test in sure if "channels" in test.detail]
    if channels:
        best = max(channels, key=lambda test: test.statistic)
        how = "have the same place in both models"
        if best.name.startswith("T2"):
            how = "are paired identically by two different parts of the network"
        return (
            f"Of {best.detail['channels']:,} channels (the numbers that each layer hands on), {best.statistic:,.0f} "
            f"{how}; in unrelated models about 1 would be."
        )
    best = max(sure, key=lambda test: test.statistic)
    return (
        f"Of {best.detail['neurons']:,} neurons of one layer, {best.statistic:,.0f} are paired identically by what "
        "they read and by what they write; in unrelated models hardly any are."
    )


def _sure(label: str, found: Findings) -> str:
    """The certainty of the verdict, and its basis."""
    if label == NONE:
        return "No test came near its limit. The method section says which changes these tests would not have seen."
    if label == INCONCLUSIVE:
        return "Not sure enough to say anything: see the reasons below."
    best = min(found.tests, key=lambda test: test.corrected)
    p = "of less than one in a million" if best.corrected > 0 else "too small to write as a number"
    kind = "an exact bound" if best.kind == "exact" else "an assumption that was checked on unrelated models"
    return (
        f"{_fact(found.tests)} If the models had begun with unrelated random numbers, a coincidence like this would "
        f"have a probability {p}. That rests on {kind}. It is not the probability that anybody did anything wrong."
    )
