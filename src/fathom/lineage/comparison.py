"""Compare two models: align, score, test, and compare the result with controls.

`measure` measures one pair; `compare` measures the pair and every control with either model, then decides.

`verdict.py` decides the label and its exit code, `evidence.py` the p-values and which score is high. `aligning.py`
makes the alignments by the embedding, and `awm.py` the scores of AWM. `pairs.py` decides which layers match, and with
`aligning.py` when T1 and T2 are run. `neurons.py` decides how many neurons and experts are compared. `nulls.py` has the
structure class that a control must share to be part of the null distribution.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.errors import ModelError
from fathom.lineage import (
    aligning,
    awm,
    blind,
    canonical,
    direction,
    evidence,
    heads,
    huref,
    identity,
    inherited,
    neurons,
    nulls,
    planes,
    signs,
    starts,
    value_channels,
    verdict,
    vocabulary,
)
from fathom.lineage.aligning import Aligned
from fathom.lineage.evidence import NeuronCount, Test
from fathom.lineage.inherited import Inherited
from fathom.lineage.nulls import Null, structure_class
from fathom.lineage.pairs import NAMES, SCORE_LABELS, Pair, matched_layers
from fathom.lineage.shares import shape_of
from fathom.lineage.verdict import Findings, Verdict
from fathom.lineage.weights import SMALL_BYTES, Told, Weights, holding, open_weights

FAST_LAYERS, FAST_FFN_LAYERS, EXACT_FFN_LAYERS = 12, 2, 8
CONTROL_FFN_LAYERS = 4  # of controls, in fast mode
ANCHORS, FAST_ANCHORS = 1024, 256  # number of anchor strings for the terms of two layers, and of all layers
OWN_ANCHORS = 4096  # tokens that HuRef takes of each model
BLIND_NEEDS = "no test without a tokenizer: it needs two layers with known values, outputs and feed-forward weights"
ONE_SEED = 0.9  # share of the training and aligned score from which one seed and one order of data may explain both
LOW_RANK, CORNER = 1e-3, 512
ALIGNED = 0.02  # best score below which channels are not aligned
PLAIN = 0.9  # a copy without padded weights scores more


@dataclass(frozen=True)
class Options:
    """Options of a comparison: how much of the two models to read, and the seeds of random choices.

    Attributes:
        mode: `fast` samples 768 channels and, for large models, some layers; `exact` takes all, but tests T4 and T5
            look at eight layers of large models.
        seed: Seed of the samples of channels and of the sketches.
        nonce: Draws the layers and neurons that matching tests look at; drawn afresh by default, so that nobody can
            prepare a model for them. The report prints it, and the same nonce repeats the comparison.
        extras: HuRef's scores, parameter cosine and portraits; None computes them if they are cheap, or in exact mode.
        most: Layers that T4 and T5 look at, at most; None for no other limit than that of the mode.
    """

    mode: str = "fast"
    seed: int = 0
    nonce: int | None = None
    extras: bool | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in {"fast", "exact"}:
            raise ModelError(f"mode {self.mode!r}: wanted fast or exact")
        if self.seed < 0:
            raise ModelError(f"seed={self.seed}: wanted 0 or more")
        if self.nonce is not None and self.nonce < 0:
            raise ModelError(f"nonce={self.nonce}: wanted 0 or more")

    @property
    def drawn(self) -> int:
        """The seed of random choices: the nonce, or `seed` if no nonce was drawn."""
        return self.seed if self.nonce is None else self.nonce

    def of_controls(self) -> Options:
        """The options for comparing controls: in fast mode fewer layers are measured, and HuRef's scores are left
        out."""
        return self if self.mode == "exact" else replace(self, extras=False, most=CONTROL_FFN_LAYERS)

    def all_of(self, a: Weights, b: Weights) -> bool:
        """Whether all layers and scores are measured, as in exact mode and for small models."""
        return self.mode == "exact" or _small(a, b)

    def has_extras(self, a: Weights, b: Weights) -> bool:
        """Whether to compute HuRef's scores and the portraits: in exact mode, for small models, or on request."""
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
    same = identity.identical(a, b, options.all_of(a, b), progress)
    scores = awm.score_layers((a, b), layers, _methods(aligned, options), options.seed, progress)
    pairs = matched_layers(scores, layers, (a, b))
    probes = evidence.PROBES if options.all_of(a, b) else evidence.PROBES // 2
    frames = neurons.frames(a, b, aligned.rows, options.seed, probes)
    counts = _neurons(a, b, frames, pairs, options, progress)
    turned: dict[str, awm.Alignment] = {}
    unmeasured = ""
    if not _sure(counts):
        more, turned, unmeasured = _without_tokenizer(a, b, pairs, options, progress)
        counts = counts | more.counts
        frames, pairs = (more.frames, more.pairs) if turned else (frames, pairs)
        methods = [awm.MatchMethod(NAMES[kind], how) for kind, how in turned.items()]
        scores = scores | awm.score_layers((a, b), layers, methods, options.seed, progress)
    other: dict[str, float] = {}
    skipped = [*aligned.skipped, *([unmeasured] if unmeasured else [])]
    skipped += [] if same.known else ["identical tensors of remote models: not looked for in fast mode"]
    if (_sure(counts) or _sure_channels(aligned)) and max(
        (scores[n].score for n in NAMES.values() if n in scores), default=1.0
    ) < PLAIN:
        rescored = _living(a, b, layers, aligned, scores, options, progress)
        scores = scores | rescored
        skipped += ["attention heads without effect are left out of the repaired scores"] if rescored else []
    if options.has_extras(a, b) and aligned.shared >= 64:
        other, overflown = _other_scores(a, b, aligned, options, progress)
        skipped += overflown
    skipped += [note for w in (a, b) for note in _unseen(w)]
    skipped += [
        f"{w.name}: {tensor}: {count} value{'s' if count > 1 else ''} not finite or beyond 1e15, taken as 0"
        for w in (a, b)
        for tensor, count in w.unusable.items()
    ]
    read = {w.name: w.origin.bytes_read - before[w.name] for w in (first, second)}
    aligned = replace(aligned, ways=aligned.ways | turned)
    return Pair(
        *(a, b, swapped, aligned, layers, scores, counts),
        values=_values((a, b), frames, pairs, _sure(counts) and not _formulas(a, b), options, progress),
        planes=_planes(a, b, options, progress),
        identical=same,
        unmeasured=unmeasured,
        other=other,
        skipped=tuple(skipped),
        bytes_read=read,
        seconds=time.monotonic() - started,
    )


def _unseen(weights: Weights) -> Iterator[str]:
    """Sentences on the parts of a model's feed-forward weights that no test reads."""
    layers = [layer for role, layer in weights.views if role == "down" and layer is not None]
    if not layers:
        yield f"{weights.name}: no feed-forward weights of a known name, so T4 is missing"
        return
    layer = max(layers, key=weights.experts)
    if (seen := len(neurons.experts(weights, layer))) < (most := weights.experts(layer)):
        which = "by number, and by the length of their router rows"
        yield f"{weights.name}: {seen} of {most} experts of a layer are compared, {which}"


def _layers(a: Weights, b: Weights, options: Options) -> tuple[list[int], list[int]]:
    alike = a.geometry.layers == b.geometry.layers  # else a sample of layers could miss their partners
    limit = FAST_LAYERS if alike and not (options.all_of(a, b) and options.most is None) else None
    ours, theirs = ([w.keyed[at] for at in awm.chosen_layers(len(w.keyed), limit)] for w in (a, b))
    return ours, theirs


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
    """The scores on canonical weights without heads that have no effect, if higher than with all heads, because such
    heads can hold any values."""
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
    """Run T4 (neurons) on the given pairs of layers, in each frame."""
    usable = [p for p in pairs if a.has("down", p[0]) and b.has("down", p[1])]
    gated = a.geometry.gated and b.geometry.gated
    out: dict[str, list[NeuronCount]] = {}
    chosen = _drawn(usable, a, b, options)
    for i, j in chosen:
        progress(f"neurons of layers {i} and {j}")
        for left, right in frames:
            seen = neurons.in_frame(a, i, left), neurons.in_frame(b, j, right)
            found = NeuronCount((i, j), *neurons.agreement(neurons.by_roles(*seen, gated), options.drawn))
            out.setdefault(left.name, []).append(found)
            if evidence.neuron_p(left.name, found, [], len(chosen)) <= evidence.ALPHA / 10:
                break  # another frame could add nothing
    return out


def _drawn(pairs: list[tuple[int, int]], a: Weights, b: Weights, options: Options) -> list[tuple[int, int]]:
    """The pairs of layers that T4 and T5 compare: all pairs of small models, else one pair from each stretch of layers,
    drawn by the nonce."""
    limit = len(pairs) if _small(a, b) else EXACT_FFN_LAYERS if options.mode == "exact" else FAST_FFN_LAYERS
    limit = limit if options.most is None else min(limit, options.most)
    if limit >= len(pairs):
        return pairs
    draw, ends = np.random.default_rng(options.drawn), np.linspace(0, len(pairs), limit + 1).round().astype(int)
    return [pairs[draw.integers(*stretch)] for stretch in pairwise(ends)]


def _values(
    models: tuple[Weights, Weights],
    frames: neurons.Frames,
    pairs: list[tuple[int, int]],
    related: bool,
    options: Options,
    progress: Told,
) -> dict[str, list[NeuronCount]]:
    """Run T5 (value channels) on the same pairs of layers as T4. If T4 calls the models related, all heads together are
    compared too."""
    a, b = models
    usable = [p for p in pairs if value_channels.has_values(a, p[0]) and value_channels.has_values(b, p[1])]
    out: dict[str, list[NeuronCount]] = {}
    for i, j in _drawn(usable, a, b, options):
        progress(f"values of layers {i} and {j}")
        for left, right in frames:
            tries = []
            for basis in value_channels.bases(a, b) if related else value_channels.bases(a, b)[:2]:
                one, other = value_channels.in_frame(a, i, left, basis), value_channels.in_frame(b, j, right, basis)
                sides = [(one.read, other.read, False), (one.write, other.write, False)]
                tries.append(NeuronCount((i, j), *neurons.agreement(sides, options.drawn)))
            out.setdefault(left.name, []).append(max(tries, key=lambda count: count.paired))
    return out


def _planes(a: Weights, b: Weights, options: Options, progress: Told) -> tuple[int, int] | None:
    """Run T6 (rotary planes), which needs neither a tokenizer nor an alignment."""
    if not planes.comparable(a, b):
        return None
    progress("rotary planes")
    layers = planes.drawn(a, b, options.drawn)
    return planes.agreements(*(planes.words(w, *layers) for w in (a, b)))


def _sure(counts: dict[str, list[NeuronCount]]) -> bool:
    """Whether the neuron counts (T4) so far are already significant enough to decide."""
    tests = [evidence.test_neurons(frame, found, []).p for frame, found in counts.items()]
    return min(tests, default=1.0) <= evidence.ALPHA / 10


def _sure_channels(aligned: Aligned) -> bool:
    """Whether T1 is decisive."""
    if aligned.fixed is None or aligned.close < aligning.CLOSE:
        return False
    return evidence.test_order(aligned.fixed, aligned.ordered).p <= evidence.ALPHA / 10


@dataclass(frozen=True)
class Blind:
    """Measurements without a tokenizer: neuron counts in each frame, and the frame and pairs of layers in which related
    neurons were found."""

    counts: dict[str, list[NeuronCount]]
    frames: neurons.Frames = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)


def _without_tokenizer(
    a: Weights, b: Weights, pairs: list[tuple[int, int]], options: Options, progress: Told
) -> tuple[Blind, dict[str, awm.Alignment], str]:
    """Compare neurons in the frames that need no tokenizer, since a tokenizer may name the wrong strings; also the
    reason if no such frame could be measured."""
    counts, frame = _by_axes(a, b, pairs, options, progress)
    if frame is not None:
        return Blind(counts, [frame], pairs), {"axes": _turn(frame)}, ""
    maps = blind.map_pairs(a, b, progress)
    fit, held = blind.split(maps, options.drawn)
    if not fit or not held:
        return Blind(counts), {}, BLIND_NEEDS
    groups = blind.windows(maps, held, a, b)
    fits = blind.fits(maps, fit, options.drawn)[: None if options.most is None else 1]  # of controls, the first
    try:
        return _blind(a, b, counts, list(product(_choices(a, b), fits)), groups, options, progress)
    finally:
        a.ranked = b.ranked = False


def _blind(
    a: Weights,
    b: Weights,
    counts: dict[str, list[NeuronCount]],
    fits: list[tuple[bool, blind.Maps]],
    groups: list[blind.Pairs],
    options: Options,
    progress: Told,
) -> tuple[Blind, dict[str, awm.Alignment], str]:
    """Compare neurons in the blind frame of each fit in turn, until one fit gives a significant result; each fit
    chooses experts and maps."""
    seen = []
    for ranked, some in fits:
        a.ranked = b.ranked = ranked
        progress("layers without a tokenizer")
        one, other = blind.frame(a, b, some)
        tries = _held_out(a, b, (one, other), groups, options)
        found = max(tries, key=_paired)
        seen.append(found)
        if evidence.test_neurons("blind", found, []).p <= evidence.ALPHA:
            frame = (one if found is tries[0] else replace(one, basis=-one.basis)), other
            matched = [count.layers for count in found]
            return Blind(counts | {"blind": found}, [frame], matched), {"blind": _turn(frame)}, ""
    return Blind(counts | {"blind": max(seen, key=_paired)}), {}, ""


def _choices(a: Weights, b: Weights) -> list[bool]:
    """Whether experts are ranked by router rows, one entry for each try: by number first, and also by rank if not all
    experts are read."""
    most = max((w.experts(i) for w in (a, b) for i in range(w.geometry.layers) if w.has("down", i)), default=1)
    return [False] if most <= blind.EXPERTS else [False, True]


def _paired(counts: list[NeuronCount]) -> int:
    return sum(count.paired for count in counts)


def _turn(frame: tuple[neurons.Frame, neurons.Frame]) -> awm.Alignment:
    return awm.Alignment(rotation=frame[0].basis @ frame[1].basis.T)


def _held_out(
    a: Weights, b: Weights, frame: tuple[neurons.Frame, neurons.Frame], groups: list[blind.Pairs], options: Options
) -> tuple[list[NeuronCount], list[NeuronCount]]:
    """Counts of neurons paired in the blind frame, for the best pair of layers in each group; one list for each sign of
    the rotation.

    What they read in directions that no layer writes may keep them from firing, or be nothing at all: both are tried.
    """
    gated = a.geometry.gated and b.geometry.gated
    frames = [frame]
    if any(side.faint is not None for side in frame):
        frames.append((replace(frame[0], faint=None), replace(frame[1], faint=None)))
    out: tuple[list[NeuronCount], list[NeuronCount]] = [], []
    for group in groups:
        tries: tuple[list[NeuronCount], list[NeuronCount]] = [], []
        for (i, j), (left, right) in product(group, frames):
            one, other = neurons.in_frame(a, i, left), neurons.in_frame(b, j, right)
            for some, side in zip(tries, (one, one.turned()), strict=True):
                found = neurons.agreement(neurons.by_roles(side, other, gated), options.drawn)
                some.append(NeuronCount((i, j), *found))
        for best, some in zip(out, tries, strict=True):
            best.append(replace(max(some, key=lambda count: count.paired), among=len(group) * (1 + a.ranked)))
    return out


def _by_axes(
    a: Weights, b: Weights, pairs: list[tuple[int, int]], options: Options, progress: Told
) -> tuple[dict[str, list[NeuronCount]], tuple[neurons.Frame, neurons.Frame] | None]:
    """Compare neurons in the principal axes of the embeddings; both models need the same embedding rows, in any order,
    and layers in the same order."""
    alike = all(getattr(a.geometry, size) == getattr(b.geometry, size) for size in ("width", "vocab", "layers"))
    if not alike or not options.all_of(a, b):
        return {}, None
    progress("principal axes")
    left, right = _axes(a), _axes(b)
    counts = _neurons(a, b, [(left, right)], pairs, options, progress)
    if not counts or evidence.test_neurons("axes", counts["axes"], []).p > evidence.ALPHA:
        return counts, None
    return counts, (left, right)


def _axes(weights: Weights) -> neurons.Frame:
    if "axes" not in weights.memo:
        weights.memo["axes"] = neurons.axes(lambda: _table(weights))
    out: neurons.Frame = weights.memo["axes"]
    return out


def _table(weights: Weights) -> Iterator[Array]:
    for rows in awm.chunks(weights.geometry.vocab, awm.CHUNK_ROWS):
        yield canonical.embedding(weights, rows)


def shared_anchors(a: Weights, b: Weights, aligned: Aligned) -> tuple[Array, Array]:
    """The embedding rows, in both models, of the anchor strings that occur in both vocabularies; the first paired rows
    if rows were not paired by strings."""
    words_a, words_b = a.vocabulary(), b.vocabulary()
    if aligned.pairing == "strings" and words_a is not None and words_b is not None:
        both = {t: row for t, row in words_a.items() if words_b.get(t, b.geometry.vocab) < b.geometry.vocab}
        texts = vocabulary.anchors(both, a.geometry.vocab, ANCHORS)
        return np.array([words_a[text] for text in texts]), np.array([words_b[text] for text in texts])
    return aligned.rows[0][:ANCHORS], aligned.rows[1][:ANCHORS]


def _own_anchors(a: Weights, b: Weights) -> tuple[Array, Array] | None:
    """The anchors as HuRef chooses them: each model's rarest tokens, paired by rank, so two different tokenizers pair
    different strings."""
    words = ((one.vocabulary() or {}, one.geometry.vocab) for one in (a, b))
    first, second = (vocabulary.rarest(found, rows, OWN_ANCHORS) for found, rows in words)
    count = min(len(first), len(second))
    return (np.array(first[-count:]), np.array(second[-count:])) if count else None


def _other_scores(
    a: Weights, b: Weights, aligned: Aligned, options: Options, progress: Told
) -> tuple[dict[str, float], list[str]]:
    progress("invariant terms")
    at_a, at_b = shared_anchors(a, b, aligned)
    with np.errstate(over="ignore", invalid="ignore"):  # a product of three matrices has no bounded scale
        found = {
            "ics": huref.ics(a, b, at_a, at_b, published=True),
            "ics_canonical": huref.ics(a, b, at_a, at_b),
        }
        if options.all_of(a, b):
            if (own := _own_anchors(a, b)) is not None:
                found["ics_rarest"] = huref.ics(a, b, *own, published=True)
            found["ics_all_layers"] = huref.ics_all_layers(a, b, at_a[:FAST_ANCHORS], at_b[:FAST_ANCHORS])
            value = huref.pcs(a, b)
            found |= {} if value is None else {"pcs_2d": value}
    good = {name: value for name, value in found.items() if np.isfinite(value)}
    return good, [f"{SCORE_LABELS[name]}: the numbers are too large to multiply" for name in found if name not in good]


@dataclass(frozen=True)
class Given:
    """The inputs of a comparison other than the models and options; the report records them.

    Attributes:
        null: A calibration file.
        adapter_base: Base model of adapters that do not name theirs.
    """

    null: Path | None = None
    adapter_base: str | None = None


@dataclass
class Comparison:
    """The result of a comparison: the pair of models, the scores of unrelated models, the tests and the verdict."""

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
    if options.nonce is None:
        options = replace(options, nonce=secrets.randbelow(1 << 32))
    if null_file is not None:
        nulls.read(null_file, structure_class(a, b))  # refused before the work if it does not fit
    others = [where if isinstance(where, Weights) else open_weights(where) for where in controls]  # refused at once
    measured: dict[str, tuple[str, list[Pair]]] = {}
    with holding(a, b):
        own = {nulls.digest(w): w.name for w in (a, b)} if others else {}
        digests = [nulls.digest(other) for other in others]
        for other, digest in zip(others, digests, strict=True):
            if digest in own:
                raise ModelError(f"control {other.name} is {own[digest]}, which is compared: give an unrelated model")
        pair = measure(a, b, options, progress)
        for other, digest in zip(others, digests, strict=True):
            if digest in measured:
                continue

            def told(at: str, name: str = other.name) -> None:
                progress(f"control {name}: {at}")

            with holding(a, b, other):
                measured[digest] = other.name, [measure(w, other, options.of_controls(), told) for w in (a, b)]
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
    options = options or Options()
    related = {name: why for name, pairs in measured if (why := _relation(name, pairs))}
    usable = [(name, pairs) for name, pairs in measured if name not in related]
    null, notes = _null(pair, usable, null_file)
    tests = run_tests(pair, null)
    bar = _threshold(pair, null)
    sure = any(test.p <= evidence.ALPHA for test in tests if test.matches)
    if sure:
        tests = _without_formulas(pair, tests)
    best = pair.scores[pair.best].score if pair.best else 0.0
    tampering = signs.suspected(pair.gaps, null.gaps if null else {}, best, bar) if sure else []
    tampering += [*_shifted(pair, bar), *_opposed(pair)] if sure else []
    seen = _evidence(pair, tests)
    shared = _inherited(pair, options) if sure else None
    same = pair.identical is not None and pair.identical.whole
    found = Findings(
        tests,
        best,
        bar,
        seen.coverage,
        seen.families,
        {test.family for test in tests if test.matches},
        seen.blocks,
        shared,
        _verbatim(pair, tests),
        _failed(pair, usable),
        tuple(f"{why}: shown, but refused as a control" for why in related.values()),
        pair.identical,
        same and inherited.training(pair.a) >= inherited.VISIBLE,
        seen.in_words,
        sure and _one_seed(pair, shared),
        pair.unmeasured,
        pair.aligned.pairing == "nothing" or pair.aligned.fixed is None,
        pair.aligned.pairing == "row numbers",
    )
    ours, theirs = (max(len(some), len(seen.measured)) for some in pair.layers)
    sizes = len(seen.layers), min(ours, pair.a.geometry.layers), min(theirs, pair.b.geometry.layers)
    return Comparison(
        pair,
        measured,
        null,
        tests,
        verdict.decide(found),
        tampering,
        sizes,
        options,
        shared,
        (*pair.skipped, *notes),
    )


def _relation(name: str, pairs: list[Pair]) -> str:
    """Why a control cannot be used: its own tests call it related to one of the compared models; empty if they do
    not."""
    for p in pairs:
        tests = [test for test in p.own_tests() if test.matches == p.convicts()]  # else by the witness alone
        test = min(tests, key=lambda test: test.p, default=None)
        if test is not None and test.p <= evidence.ALPHA:
            other = p.a.name if p.b.name == name else p.b.name
            return f"control {name} is itself related to {other} ({test.name}, p {evidence.probability(test.p)})"
    return ""


def _failed(pair: Pair, usable: list[tuple[str, list[Pair]]]) -> str:
    """Why the controls show that the tests cannot be trusted for this pair; empty if they do not show it."""
    name, best = pair.best, pair.scores[pair.best].score if pair.best else 0.0
    for control, pairs in usable:
        if name and best >= signs.CLEAR and any((p.value(name) or 0.0) >= best for p in pairs):
            return f"control {control} scores as high as the pair: the tests cannot be trusted here"
    return ""


def _without_formulas(pair: Pair, tests: list[Test]) -> list[Test]:
    """The tests; those that compare weights which both models initialise from a formula are marked as void."""
    both = _formulas(pair.a, pair.b)
    why = "both models begin from a deterministic start"
    return [replace(test, void=why) if test.family in both and _counts(test) else test for test in tests]


def _formulas(a: Weights, b: Weights) -> frozenset[str]:
    """The families of weights (such as attention) that both models initialise from a formula instead of random
    numbers."""
    return starts.found(a) & starts.found(b)


def _one_seed(pair: Pair, shared: Inherited | None) -> bool:
    """Whether two independent runs with one seed and one order of data could be this similar, with no sign of later
    training of one from the other.

    A disguise is no stage of training: whoever rotates one of two such runs makes it no child of the other. Alignments
    without a tokenizer are too inexact to measure the likeness, so they never rule the two runs out.
    """
    if shared is None or pair.best is None:
        return False
    untold = pair.best in {"axes", "blind"}
    alike = untold or min(shared.share, pair.scores[pair.best].score) >= ONE_SEED
    return alike and not _later_stage(pair)


def _later_stage(pair: Pair) -> bool:
    """Whether one model shows signs of being made from the finished other one: unchanged matrices, rounding, or a
    low-rank difference."""
    kept = pair.identical is not None and pair.identical.inner > 0
    return kept or direction.direction(pair.a, pair.b).made is not None or _of_low_rank(pair)


def _of_low_rank(pair: Pair) -> bool:
    """Whether the two models' matrices of a layer differ by a low-rank matrix, as after LoRA."""
    if shape_of(pair.a) != shape_of(pair.b):
        return False
    for i, j in (pair.matched[0], pair.matched[-1]):
        for role in (r for r in ("q", "v", "up") if pair.a.has(r, i) and pair.b.has(r, j)):
            one, other = pair.a.tensor(role, i), pair.b.tensor(role, j)
            if one.shape != other.shape:  # of layers with other numbers
                continue
            size = np.linalg.svd((one - other)[:CORNER, :CORNER], compute_uv=False)
            if size[0] > 0 and size[len(size) // 2] < LOW_RANK * size[0]:
                return True
    return False


def _null(pair: Pair, measured: list[tuple[str, list[Pair]]], null_file: Path | None) -> tuple[Null | None, list[str]]:
    kind = structure_class(pair.a, pair.b)
    alike = [p for _, pairs in measured for p in pairs if structure_class(p.a, p.b) == kind]
    unlike = sum(len(pairs) for _, pairs in measured) - len(alike)
    notes = [f"{unlike} control pair(s) are not of the class {kind}: shown, but not part of the null"] if unlike else []
    untrained = _untrained(pair, measured)
    alike = [p for p in alike if p.a.name not in untrained and p.b.name not in untrained]
    notes += [f"{name} is hardly trained: shown, but not part of the null of trained models" for name in untrained]
    null = None if null_file is None else nulls.read(null_file, kind)
    added = nulls.of_pairs(alike, f"control pairs of {kind}", null)
    if not added.pairs:
        return null, notes
    return (added if null is None else nulls.joined(null, added)), notes


def _untrained(pair: Pair, measured: list[tuple[str, list[Pair]]]) -> list[str]:
    """The names of controls with less than a tenth of the compared models' training; they are no fair comparison for
    trained models."""
    if not measured:
        return []
    least = min(inherited.training(w) for w in (pair.a, pair.b)) / 10
    own = {pair.a.name, pair.b.name}
    others = {w.name: w for _, pairs in measured for p in pairs for w in (p.a, p.b) if w.name not in own}
    return [name for name, weights in others.items() if inherited.training(weights) < least]


def run_tests(pair: Pair, null: Null | None) -> list[Test]:
    """The results of tests T1 to T6, as far as they can be run on this pair of models."""
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
    """The highest threshold of any kind of score; the pair's best score must exceed it."""
    known = [null.scores.get(name, []) for name in NAMES.values() if name in pair.scores] if null else []
    return max((bar for some in known if (bar := evidence.score_threshold(some)) is not None), default=None)


def _shifted(pair: Pair, bar: float | None) -> list[str]:
    best = pair.scores[pair.best] if pair.best else None
    if best is None or best.score <= max(signs.CLEAR, bar or 0) or len(set(best.map.shape)) != 1:
        return []
    return [signs.WORDS["shifted"]] if any(i != j for i, j in best.pairs) else []


def _opposed(pair: Pair) -> list[str]:
    """A warning if the rotary planes agree far less often than by chance, as after training against T6."""
    if pair.planes is None or evidence.test_planes(pair.planes[1] - pair.planes[0], pair.planes[1]).p > evidence.ALPHA:
        return []
    return [signs.WORDS["opposed"]]


@dataclass(frozen=True)
class Evidence:
    """Where the matching tests found evidence: the layers of B with evidence, among the layers measured, and the kinds
    of weights."""

    layers: set[int]
    measured: set[int]
    of: int
    families: set[str]
    blocks: list[str]

    @property
    def coverage(self) -> float:
        """The fraction of the measured layers in which a matching test found evidence."""
        return len(self.layers) / len(self.measured) if self.measured else 0.0

    @property
    def in_words(self) -> str:
        """The coverage in words."""
        rest = "" if len(self.measured) == self.of else f" that were measured, of {self.of}; the others are unknown"
        return f"{len(self.layers)} of {len(self.measured)}{rest}"


def _evidence(pair: Pair, tests: list[Test]) -> Evidence:
    """The layers and the kinds of weights for which their own matching test found evidence."""
    families = {test.family for test in tests if _counts(test) and test.p <= evidence.ALPHA}
    tables = {"attention": pair.values, "feed-forward": pair.neurons}
    found = {family: _significant(pair, family) if family in families else [] for family in tables}
    counts = [count for table in tables.values() for some in table.values() for count in some]
    layers = {count.layers[1] for some in found.values() for count in some}
    measured = {count.layers[1] for count in counts}
    if "blind" in pair.neurons and "blind" in pair.aligned.ways:  # in no other frame could anything be seen
        measured = {count.layers[1] for count in pair.neurons["blind"]}
    elif _small(pair.a, pair.b) and measured:  # layers without a partner were looked at too
        measured |= set(pair.layers[1]) if len(pair.layers[1]) <= len(pair.layers[0]) else set()
    blocks = [family for family in ("embedding",) if family in families]
    for family, some in found.items():
        if own := {count.layers[1] for count in some}:
            every = pair.b.keyed if family == "attention" else range(pair.b.geometry.layers)
            whole = own >= {*every}
            what = "every layer" if len(every) == pair.b.geometry.layers else "every layer that has it"
            each = what if whole else f"layers {_listed(own)}"
            blocks.append(f"{family} of {each}" + ("" if whole or own < measured else ", all that were measured"))
    return Evidence(layers & measured, measured, pair.b.geometry.layers, families, blocks)


def _counts(test: Test) -> bool:
    return test.matches and not test.void


def _significant(pair: Pair, family: str = "feed-forward") -> list[NeuronCount]:
    """The pairs of layers whose neurons (or value channels) are paired significantly more often than by chance."""
    if family == "attention":
        every = [count for some in pair.values.values() for count in some]
        share = max(1 / evidence.UNIVERSAL, value_channels.chance(pair.a), value_channels.chance(pair.b))
        return [count for count in every if count.p(share, evidence.BASES * len(every)) <= evidence.ALPHA]
    total = sum(map(len, pair.neurons.values()))
    return [
        count
        for frame, some in pair.neurons.items()
        for count in some
        if evidence.neuron_p(frame, count, [], total) <= evidence.ALPHA
    ]


def _verbatim(pair: Pair, tests: list[Test]) -> bool:
    """Whether some weights are nearly unchanged between the models, which two trainings from one seed would not
    leave."""
    sure = {test.family for test in tests if _counts(test) and test.p <= evidence.ALPHA}
    if "embedding" in sure:  # as in T1 and T2
        return True
    return any(count.alike >= aligning.CLOSE for family in sure for count in _significant(pair, family))


def _listed(layers: set[int]) -> str:
    return ", ".join(map(str, sorted(layers)))


def _inherited(pair: Pair, options: Options) -> Inherited | None:
    """How much of their training both models share, measured by the best alignment; None if no alignment is good
    enough."""
    if pair.best is None or pair.scores[pair.best].score < ALIGNED:
        return None
    how = next(pair.aligned.ways[kind] for kind, name in NAMES.items() if name == pair.best)
    most = None if options.all_of(pair.a, pair.b) else FAST_FFN_LAYERS
    return inherited.measured(pair.a, pair.b, pair.matched, how, options.seed, most)
