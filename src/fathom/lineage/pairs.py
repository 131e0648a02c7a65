"""One pair of models and everything measured on it.

`awm.py` matches layers for each score (`matched`). `comparison.py` decides which layers are measured, and leaves out
scores of HuRef that overflow (`_other_scores`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fathom.lineage import awm, evidence, signs, value_channels
from fathom.lineage.aligning import CLOSE, Aligned
from fathom.lineage.evidence import NeuronCount, Test
from fathom.lineage.identity import Identical
from fathom.lineage.weights import Weights
from fathom.report.statistics import holm

NAMES = {"order": "order", "lap": "awm_canonical", "procrustes": "procrustes", "axes": "axes", "blind": "blind"}
"""Score by alignment."""
SCORE_LABELS = {
    "awm": "AWM as published",
    "order": "AWM repaired, channels in order",
    "awm_canonical": "AWM repaired",
    "procrustes": "AWM repaired, rotated (Procrustes)",
    "axes": "AWM repaired, by principal axes",
    "blind": "AWM repaired, by the layers alone",
    "ics": "HuRef ICS as published, shared anchors",
    "ics_rarest": "HuRef ICS as published, each model's rarest tokens",
    "ics_canonical": "HuRef ICS repaired, last two layers",
    "ics_all_layers": "HuRef ICS repaired, all layers",
    "pcs_2d": "parameter cosine of matrices",
}


@dataclass(frozen=True)
class Pair:
    """Everything measured on one pair. A is the wider model; `swapped` says whether A was given second."""

    a: Weights
    b: Weights
    swapped: bool
    aligned: Aligned
    layers: tuple[list[int], list[int]]  # layers of A and of B that were scored
    scores: dict[str, awm.Scores]
    neurons: dict[str, list[NeuronCount]]  # by frame
    values: dict[str, list[NeuronCount]] = field(default_factory=dict)  # value channels, by frame
    planes: tuple[int, int] | None = None  # pairs of neighbouring rotary planes that differ alike, of how many
    identical: Identical | None = None
    unmeasured: str = ""  # why no test without a tokenizer was run
    other: dict[str, float] = field(default_factory=dict)  # HuRef's scores, parameter cosine
    skipped: tuple[str, ...] = ()
    bytes_read: dict[str, int] = field(default_factory=dict)  # by model name
    seconds: float = 0.0

    @property
    def given(self) -> tuple[Weights, Weights]:
        """Both models in the order in which they were given."""
        return (self.b, self.a) if self.swapped else (self.a, self.b)

    @property
    def best(self) -> str | None:
        """The highest repaired score."""
        names = [name for name in NAMES.values() if name in self.scores]
        return max(names, key=lambda name: self.scores[name].score, default=None)

    def value(self, name: str) -> float | None:
        """A score by name."""
        return self.scores[name].score if name in self.scores else self.other.get(name)

    @property
    def matched(self) -> list[tuple[int, int]]:
        """Pairs of matching layers of A and B, from the best score on canonical weights; by relative depth if no score
        is high enough."""
        return matched_layers(self.scores, self.layers, (self.a, self.b))

    @property
    def head_agreement(self) -> int | None:
        """The number of channels that the embeddings and the output heads match to the same partner; None if one
        matching is missing."""
        head, found = self.aligned.head, self.aligned.fixed
        return None if head is None or found is None else head.agreement(found)

    @property
    def gaps(self) -> dict[str, float]:
        """Differences between kinds of scores of this pair that may be signs of tampering."""
        return signs.gaps({name: found.score for name, found in self.scores.items()}, self.aligned.alike)

    def own_tests(
        self,
        rate: float = evidence.POISSON_RATE,
        calibrated: bool = False,
        shares: dict[str, list[float]] | None = None,
    ) -> list[Test]:
        """The tests of this pair that need no null distribution: T1, T2 and T4 to T6.

        Args:
            rate: The rate of T2.
            calibrated: Whether the rate comes from controls.
            shares: By frame: shares of neurons, or with `values` before the frame of value channels, that unrelated
                models pair alike.
        """
        known = shares or {}
        tests = []
        found = self.aligned.fixed
        if found is not None and found.size >= evidence.FEWEST and self.aligned.close >= CLOSE:
            tests.append(evidence.test_order(found, self.aligned.ordered))
            if self.head_agreement is not None:
                tests.append(evidence.test_witnesses(self.head_agreement, found.size, rate, calibrated))
        for frame, counts in self.neurons.items():
            usable = [count for count in counts if count.of >= evidence.FEWEST]
            if usable:
                tests.append(evidence.test_neurons(frame, usable, known.get(frame, [])))
        chance = max(value_channels.chance(self.a), value_channels.chance(self.b))
        for frame, counts in self.values.items():
            usable = [count for count in counts if count.of >= evidence.FEWEST]
            if usable:
                tests.append(evidence.test_values(frame, usable, chance, known.get(f"values {frame}", [])))
        return tests if self.planes is None else [*tests, evidence.test_planes(*self.planes)]

    @property
    def p(self) -> float:
        """The smallest Holm-corrected p-value of the matching tests that need no null distribution."""
        tests = self.own_tests()
        return min((p for test, p in zip(tests, holm([t.p for t in tests]), strict=True) if test.matches), default=1.0)

    def convicts(self) -> bool:
        """Whether the tests without controls would call the pair related."""
        return self.p <= evidence.ALPHA


def matched_layers(
    scores: dict[str, awm.Scores], layers: tuple[Sequence[int], Sequence[int]], models: tuple[Weights, Weights]
) -> list[tuple[int, int]]:
    """Pairs of matching layers of A and B, from the best score on canonical weights; by relative depth if no score is
    high enough. In hybrids, the layers between two matched ones are counted from both."""
    depths = models[0].geometry.layers, models[1].geometry.layers
    names = [name for name in NAMES.values() if name in scores and scores[name].pairs]
    if names:
        best = max(names, key=lambda name: scores[name].score)
        if scores[best].score >= signs.CLEAR:
            return _with_neighbours([(layers[0][i], layers[1][j]) for i, j in scores[best].pairs], models)
    return [(round(j * (depths[0] - 1) / max(depths[1] - 1, 1)), j) for j in range(depths[1])]


def _with_neighbours(pairs: list[tuple[int, int]], models: tuple[Weights, Weights]) -> list[tuple[int, int]]:
    """The given pairs of layers with attention, and pairs of layers without it that are equally far from a given pair
    in both models."""
    depths = [w.geometry.layers for w in models]
    if [len(w.keyed) for w in models] == depths:
        return pairs
    found, taken = {*pairs}, {j for _, j in pairs}
    anchors = [(-1, -1), *sorted(pairs), (depths[0], depths[1])]
    for (i, j), (further, last) in pairwise(anchors):
        for at in (at for at in range(j + 1, last) if at not in taken):
            both = (i + at - j, further - last + at)  # layers may be missing before it, or after it
            found |= {(other, at) for other in both if i < other < further}
    return sorted(found)
