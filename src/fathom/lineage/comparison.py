"""Compare two models: align, score, test, and compare the result with controls.

`measure` measures one pair; `compare` measures the pair and every control with either model, then decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.errors import ModelError
from fathom.lineage import (
    aligning,
    awm,
    canonical,
    evidence,
    heads,
    huref,
    inherited,
    neurons,
    nulls,
    signs,
    verdict,
    vocabulary,
)
from fathom.lineage.aligning import Aligned
from fathom.lineage.evidence import NeuronCount, Test
from fathom.lineage.inherited import Inherited
from fathom.lineage.nulls import Null, structure_class
from fathom.lineage.pairs import NAMES, SCORE_LABELS, Pair, matched_layers
from fathom.lineage.verdict import Findings, Verdict
from fathom.lineage.weights import SMALL_BYTES, Told, Weights, holding, open_weights
from fathom.report.statistics import holm

FAST_LAYERS, FAST_FFN_LAYERS, EXACT_FFN_LAYERS = 12, 2, 8
ANCHORS, FAST_ANCHORS = 1024, 256  # number of anchor strings for the terms of two layers, and of all layers
PLAIN = 0.9  # a copy without padded weights scores more


@dataclass(frozen=True)
class Options:
    """How much of the models to read.

    Attributes:
        mode: `fast` samples 768 channels and, for large models, some layers; `exact` takes all.
        seed: Seed of every sample.
        extras: HuRef's scores, parameter cosine and portraits; None computes them if they are cheap, or in exact mode.
    """

    mode: str = "fast"
    seed: int = 0
    extras: bool | None = None

    def __post_init__(self) -> None:
        if self.mode not in {"fast", "exact"}:
            raise ModelError(f"mode {self.mode!r}: wanted fast or exact")
        if self.seed < 0:
            raise ModelError(f"seed={self.seed}: wanted 0 or more")

    def all_of(self, a: Weights, b: Weights) -> bool:
        """Whether nothing is skipped: in exact mode, or for small models."""
        return self.mode == "exact" or _small(a, b)

    def has_extras(self, a: Weights, b: Weights) -> bool:
        """Whether to compute HuRef's scores and portraits: if they are cheap, in exact mode, or if requested."""
        return self.extras if self.extras is not None else self.all_of(a, b)


def _small(a: Weights, b: Weights) -> bool:
    return a.file_bytes + b.file_bytes <= SMALL_BYTES


def measure(first: Weights, second: Weights, options: Options, progress: Told = lambda _: None) -> Pair:
    """Align and score one pair: every number of the report that needs no control."""
    started = time.monotonic()
    before = {w.name: w.origin.bytes_read for w in (first, second)}
    swapped = second.geometry.width > first.geometry.width
    a, b = (second, first) if swapped else (first, second)
    aligned = aligning.align(a, b, options.all_of(a, b), progress)
    layers = _layers(a, b, options)
    scores = awm.score_layers((a, b), layers, _methods(aligned, options), options.seed, progress)
    pairs = matched_layers(scores, layers, (a.geometry.layers, b.geometry.layers))
    probes = evidence.PROBES if options.all_of(a, b) else evidence.PROBES // 2
    frames = neurons.frames(a, b, aligned.rows, options.seed, probes)
    counts = _neurons(a, b, frames, pairs, options, progress)
    axes: dict[str, awm.Alignment] = {}
    if options.all_of(a, b) and not _sure(counts, aligned):
        by_axes, axes = _by_axes(a, b, pairs, options, progress)
        counts = counts | by_axes
        methods = [awm.MatchMethod(NAMES[kind], how) for kind, how in axes.items()]
        scores = scores | awm.score_layers((a, b), layers, methods, options.seed, progress)
    other: dict[str, float] = {}
    skipped = [*aligned.skipped]
    if _sure(counts, aligned) and max((scores[n].score for n in NAMES.values() if n in scores), default=1.0) < PLAIN:
        rescored = _living(a, b, layers, aligned, scores, options, progress)
        scores = scores | rescored
        skipped += ["attention heads without effect are left out of the repaired scores"] if rescored else []
    if options.has_extras(a, b) and aligned.shared >= 64:
        other, overflown = _other_scores(a, b, aligned, progress)
        skipped += overflown
    skipped += [note for w in (a, b) for note in _unseen(w)]
    skipped += [
        f"{w.name}: {tensor}: {count} value{'s' if count > 1 else ''} not finite or beyond 1e15, taken as 0"
        for w in (a, b)
        for tensor, count in w.unusable.items()
    ]
    read = {w.name: w.origin.bytes_read - before[w.name] for w in (first, second)}
    aligned = replace(aligned, ways=aligned.ways | axes)
    return Pair(a, b, swapped, aligned, layers, scores, counts, other, tuple(skipped), read, time.monotonic() - started)


def _unseen(weights: Weights) -> Iterator[str]:
    """Parts of a model's feed-forward weights that no test reads, in words."""
    layers = [layer for role, layer in weights.views if role == "down" and layer is not None]
    if not layers:
        yield f"{weights.name}: no feed-forward weights of a known name, so T4 is missing"
    elif (most := max(weights.experts(layer) for layer in layers)) > neurons.EXPERTS:
        yield f"{weights.name}: {neurons.EXPERTS} of {most} experts of a layer are compared, evenly spaced"


def _layers(a: Weights, b: Weights, options: Options) -> tuple[list[int], list[int]]:
    depths = a.geometry.layers, b.geometry.layers
    alike = depths[0] == depths[1]  # else a sample of layers could miss their partners
    limit = FAST_LAYERS if alike and not options.all_of(a, b) else None
    return awm.chosen_layers(depths[0], limit), awm.chosen_layers(depths[1], limit)


def _methods(aligned: Aligned, options: Options) -> list[awm.MatchMethod]:
    methods = []
    for kind, how in aligned.ways.items():
        if kind == "published":
            methods.append(awm.MatchMethod("awm", how, published=True))
            continue
        full = options.mode == "exact" and kind == "lap"
        methods.append(awm.MatchMethod(NAMES[kind], how, channels=None if full else awm.FAST_CHANNELS))
    return methods


def _living(
    a: Weights,
    b: Weights,
    layers: tuple[list[int], list[int]],
    aligned: Aligned,
    scores: dict[str, awm.Scores],
    options: Options,
    progress: Told,
) -> dict[str, awm.Scores]:
    """The repaired scores without heads that have no effect, if higher, because such heads can hold anything."""
    places = [(w, layer) for w, some in zip((a, b), layers, strict=True) for layer in some]
    if not any(alive is not None and not alive.all() for alive in (heads.living(*place) for place in places)):
        return {}
    methods = [method for method in _methods(aligned, options) if not method.published]
    found = awm.score_layers((a, b), layers, methods, options.seed, progress, living=True)
    best = max(s.score for s in found.values()) - max(scores[name].score for name in found)
    return found if best > signs.NARROW else {}


def _neurons(
    a: Weights, b: Weights, frames: neurons.Frames, pairs: list[tuple[int, int]], options: Options, progress: Told
) -> dict[str, list[NeuronCount]]:
    """T4 on evenly spaced pairs of layers, in each frame; the map of layers is given, not chosen here."""
    usable = [p for p in pairs if a.has("down", p[0]) and b.has("down", p[1])]
    limit = None if _small(a, b) else EXACT_FFN_LAYERS if options.mode == "exact" else FAST_FFN_LAYERS
    gated = a.geometry.gated and b.geometry.gated
    out: dict[str, list[NeuronCount]] = {}
    chosen = awm.chosen_layers(len(usable), limit) if usable else []
    for i, j in (usable[at] for at in chosen):
        progress(f"neurons of layers {i + 1} and {j + 1}")
        for left, right in frames:
            seen = neurons.in_frame(a, i, left), neurons.in_frame(b, j, right)
            found = NeuronCount((i, j), *neurons.agreement(*seen, gated, options.seed))
            out.setdefault(left.name, []).append(found)
            if found.p(1 / evidence.UNIVERSAL, len(chosen)) <= evidence.ALPHA / 10:
                break  # another frame could add nothing
    return out


def _sure(counts: dict[str, list[NeuronCount]], aligned: Aligned) -> bool:
    """Whether the measurements so far are decisive."""
    tests = [evidence.test_neurons(frame, found, []).p for frame, found in counts.items()]
    if aligned.fixed is not None and aligned.close >= aligning.CLOSE:
        tests.append(evidence.test_order(aligned.fixed, aligned.ordered).p)
    return min(tests, default=1.0) <= evidence.ALPHA / 10


def _by_axes(
    a: Weights, b: Weights, pairs: list[tuple[int, int]], options: Options, progress: Told
) -> tuple[dict[str, list[NeuronCount]], dict[str, awm.Alignment]]:
    """The frame that needs no tokenizer, if the others found nothing, since a tokenizer may name the wrong strings."""
    if a.geometry.width != b.geometry.width or a.geometry.vocab != b.geometry.vocab:
        return {}, {}
    progress("principal axes")
    left, right = (neurons.axes(lambda w=w: _table(w)) for w in (a, b))  # type: ignore[misc]
    counts = _neurons(a, b, [(left, right)], pairs, options, progress)
    if not counts or evidence.test_neurons("axes", counts["axes"], []).p > evidence.ALPHA:
        return counts, {}
    return counts, {"axes": awm.Alignment(rotation=left.basis @ right.basis.T)}


def _table(weights: Weights) -> Iterator[Array]:
    for rows in awm.chunks(weights.geometry.vocab, awm.CHUNK_ROWS):
        yield canonical.embedding(weights, rows)


def shared_anchors(a: Weights, b: Weights, aligned: Aligned) -> tuple[Array, Array]:
    """Rows of the anchor strings that both models have."""
    words_a, words_b = a.vocabulary(), b.vocabulary()
    if aligned.pairing == "strings" and words_a is not None and words_b is not None:
        both = {t: row for t, row in words_a.items() if words_b.get(t, b.geometry.vocab) < b.geometry.vocab}
        texts = vocabulary.anchors(both, a.geometry.vocab, ANCHORS)
        return np.array([words_a[text] for text in texts]), np.array([words_b[text] for text in texts])
    return aligned.rows[0][:ANCHORS], aligned.rows[1][:ANCHORS]


def _other_scores(a: Weights, b: Weights, aligned: Aligned, progress: Told) -> tuple[dict[str, float], list[str]]:
    progress("invariant terms")
    at_a, at_b = shared_anchors(a, b, aligned)
    with np.errstate(over="ignore", invalid="ignore"):  # a product of three matrices has no bounded scale
        found = {
            "ics": huref.ics(a, b, at_a, at_b, published=True),
            "ics_canonical": huref.ics(a, b, at_a, at_b),
        }
        if _small(a, b):
            found["ics_all_layers"] = huref.ics_all_layers(a, b, at_a[:FAST_ANCHORS], at_b[:FAST_ANCHORS])
            value = huref.pcs(a, b)
            found |= {} if value is None else {"pcs_2d": value}
    good = {name: value for name, value in found.items() if np.isfinite(value)}
    return good, [f"{SCORE_LABELS[name]}: the numbers are too large to multiply" for name in found if name not in good]


@dataclass(frozen=True)
class Given:
    """Further inputs of a comparison, which the report records.

    Attributes:
        null: A calibration file.
        adapter_base: Base model of adapters that do not name theirs.
    """

    null: Path | None = None
    adapter_base: str | None = None


@dataclass
class Comparison:
    """A pair, the scores of unrelated models, the tests and the verdict."""

    pair: Pair
    controls: list[tuple[str, list[Pair]]]
    null: Null | None
    tests: list[Test]
    verdict: Verdict
    tampering: list[str]
    coverage: tuple[int, int, int]  # layers with evidence, layers of A, layers of B (as scored)
    options: Options
    inherited: Inherited | None = None
    skipped: tuple[str, ...] = ()
    given: Given = Given()


def compare(
    a: Weights,
    b: Weights,
    controls: Sequence[str | Path | Weights] = (),
    null_file: Path | None = None,
    options: Options | None = None,
    progress: Told = lambda _: None,
) -> Comparison:
    """Compare A with B and both with every control, then decide.

    Args:
        a: One model.
        b: The other model; the order implies no direction.
        controls: Unrelated models of the same kind, measured one after the other; each counts once.
        null_file: A calibration file, instead of or in addition to controls.
        options: How much of the models to read.
        progress: Called with a few words before each step.
    """
    options = options or Options()
    if null_file is not None:
        nulls.read(null_file, structure_class(a, b))  # refused before the work if it does not fit
    measured: dict[str, tuple[str, list[Pair]]] = {}
    with holding(a, b):
        pair = measure(a, b, options, progress)
        for where in controls:
            other = where if isinstance(where, Weights) else open_weights(where)
            if (digest := nulls.digest(other)) in measured:
                continue

            def told(at: str, name: str = other.name) -> None:
                progress(f"control {name}: {at}")

            with holding(a, b, other):
                measured[digest] = other.name, [measure(w, other, options, told) for w in (a, b)]
        return judge(pair, list(measured.values()), null_file, options)


def judge(
    pair: Pair, measured: list[tuple[str, list[Pair]]], null_file: Path | None = None, options: Options | None = None
) -> Comparison:
    """Decide about a measured pair.

    Args:
        pair: The result of `measure`.
        measured: Each control by name, measured against either model of the pair.
        null_file: A calibration file, instead of or in addition to controls.
        options: The options of the measurements.
    """
    null, notes = _null(pair, measured, null_file)
    tests = run_tests(pair, null)
    bar = _threshold(pair, null)
    sure = bool(tests) and min(holm([t.p for t in tests if not t.name.startswith("T3")] or [1.0])) <= evidence.ALPHA
    best = pair.scores[pair.best].score if pair.best else 0.0
    tampering = signs.suspected(pair.gaps, null.gaps if null else {}, best, bar) if sure else []
    tampering += _shifted(pair, bar) if sure else []
    covered, families, blocks = _evidence(pair, tests, bar)
    layers = min(len(side) for side in pair.layers)
    shared = _inherited(pair, options or Options()) if sure else None
    found = Findings(
        tests,
        best,
        bar,
        covered / layers if layers else 0.0,
        families,
        {test.family for test in tests} | ({"attention"} if pair.best else set()),
        blocks,
        shared,
        _verbatim(pair, tests),
        _control_failed(pair, measured),
        pair.aligned.pairing == "nothing" or pair.aligned.fixed is None,
        pair.aligned.pairing == "row numbers",
    )
    sizes = covered, len(pair.layers[0]), len(pair.layers[1])
    return Comparison(
        pair,
        measured,
        null,
        tests,
        verdict.decide(found),
        tampering,
        sizes,
        options or Options(),
        shared,
        (*pair.skipped, *notes),
    )


def _null(pair: Pair, measured: list[tuple[str, list[Pair]]], null_file: Path | None) -> tuple[Null | None, list[str]]:
    kind = structure_class(pair.a, pair.b)
    alike = [p for _, pairs in measured for p in pairs if structure_class(p.a, p.b) == kind]
    unlike = sum(len(pairs) for _, pairs in measured) - len(alike)
    notes = [f"{unlike} control pair(s) are not of the class {kind}: shown, but not part of the null"] if unlike else []
    untrained = _untrained(pair, measured)
    alike = [p for p in alike if p.a.name not in untrained and p.b.name not in untrained]
    notes += [f"{name} is hardly trained: shown, but not part of the null of trained models" for name in untrained]
    from_controls = nulls.of_pairs(alike, f"control pairs of {kind}") if alike else None
    if null_file is None:
        return from_controls, notes
    null = nulls.read(null_file, kind)
    return (null if from_controls is None else nulls.joined(null, from_controls)), notes


def _untrained(pair: Pair, measured: list[tuple[str, list[Pair]]]) -> list[str]:
    """Controls with less than a tenth of the pair's training, which are no fair comparison for trained models."""
    if not measured:
        return []
    least = min(inherited.training(w) for w in (pair.a, pair.b)) / 10
    own = {pair.a.name, pair.b.name}
    others = {w.name: w for _, pairs in measured for p in pairs for w in (p.a, p.b) if w.name not in own}
    return [name for name, weights in others.items() if inherited.training(weights) < least]


def run_tests(pair: Pair, null: Null | None) -> list[Test]:
    """T1–T4, as far as the pair allows."""
    rate = null.rate() if null else evidence.POISSON_RATE
    tests = pair.own_tests(rate, bool(null and null.witnesses), null.neurons if null else None)
    for name in NAMES.values():
        if name in pair.scores and null and null.scores.get(name):
            values, score = null.scores[name], pair.scores[name].score
            p = evidence.empirical(score, values)
            why = "the null pairs are of the same structure class"
            tests.append(Test(f"T3 {name}", score, f"{len(values)} unrelated scores", p, "empirical", why, "attention"))
    return tests


def _threshold(pair: Pair, null: Null | None) -> float | None:
    """The highest threshold of any score, which the best of several scores must exceed."""
    known = [null.scores.get(name, []) for name in NAMES.values() if name in pair.scores] if null else []
    return max((bar for some in known if (bar := evidence.score_threshold(some)) is not None), default=None)


def _shifted(pair: Pair, bar: float | None) -> list[str]:
    best = pair.scores[pair.best] if pair.best else None
    if best is None or best.score <= max(signs.CLEAR, bar or 0) or len(set(best.map.shape)) != 1:
        return []
    return [signs.WORDS["shifted"]] if any(i != j for i, j in best.pairs) else []


def _evidence(pair: Pair, tests: list[Test], bar: float | None) -> tuple[int, set[str], list[str]]:
    """Layers with their own evidence, the kinds of weights with evidence, and both in words."""
    height = max(bar or 0.0, signs.CLEAR) + signs.BEYOND  # a single layer is noisier than the mean of all
    scored = pair.scores[pair.best] if pair.best else None
    by_score = {
        pair.layers[1][j]
        for (_, j), score in (zip(scored.pairs, scored.per_layer, strict=True) if scored else ())
        if score >= height
    }
    by_neurons = {count.layers[1] for count in _significant(pair)}
    families = {test.family for test in tests if test.p <= evidence.ALPHA and test.family != "attention"}
    families |= {"attention"} if by_score else set()
    blocks = [family for family in ("embedding",) if family in families]
    for family, layers in (("attention", by_score), ("feed-forward", by_neurons)):
        if family in families and layers:
            whole = len(layers) == pair.b.geometry.layers
            blocks.append(f"{family} of " + ("every layer" if whole else f"layers {_listed(layers)}"))
    covered = (by_score | by_neurons) & set(pair.layers[1])
    return min(len(covered), min(map(len, pair.layers))), families, blocks


def _significant(pair: Pair) -> list[NeuronCount]:
    """Pairs of layers whose neurons are paired beyond chance."""
    counts = [count for some in pair.neurons.values() for count in some]
    return [count for count in counts if count.p(1 / evidence.UNIVERSAL, len(counts)) <= evidence.ALPHA]


def _verbatim(pair: Pair, tests: list[Test]) -> bool:
    """Whether some part is unchanged, which two trainings from one seed would not leave."""
    embedding = any(test.family == "embedding" and test.p <= evidence.ALPHA for test in tests)  # as in T1 and T2
    return embedding or any(count.alike >= aligning.CLOSE for count in _significant(pair))


def _listed(layers: set[int]) -> str:
    return ", ".join(str(layer + 1) for layer in sorted(layers))


def _control_failed(pair: Pair, measured: list[tuple[str, list[Pair]]]) -> bool:
    every = [p for _, pairs in measured for p in pairs]
    failed = any(p.convicts() for p in every)
    name, best = pair.best, pair.scores[pair.best].score if pair.best else 0.0
    if name and best >= signs.CLEAR:
        failed |= any((p.value(name) or 0.0) >= best for p in every)
    return failed


def _inherited(pair: Pair, options: Options) -> Inherited | None:
    """The training that both models share, by the best alignment."""
    if pair.best is None:
        return None
    how = next(pair.aligned.ways[kind] for kind, name in NAMES.items() if name == pair.best)
    most = None if options.all_of(pair.a, pair.b) else FAST_FFN_LAYERS
    return inherited.measured(pair.a, pair.b, pair.matched, how, options.seed, most)
