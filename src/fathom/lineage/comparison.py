"""Compare two models: align, score, test, and weigh the result against controls.

`measure` looks at one pair; `compare` measures the pair and every control with either model, then decides.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy import stats

from fathom.checkpoints.origin import Refused, parse_json
from fathom.checkpoints.tensors import Array
from fathom.lineage import awm, canonical, evidence, huref, vocabulary
from fathom.lineage.evidence import Findings, Test, Verdict
from fathom.lineage.weights import Weights, open_weights
from fathom.report.files import write_json
from fathom.report.statistics import holm

Told = Callable[[str], None]

SMALL_BYTES = 2 << 30  # for smaller models fast mode leaves nothing out
FAST_LAYERS, FAST_FFN_LAYERS, EXACT_FFN_LAYERS = 16, 2, 8
HEAD_ROWS = 8192
ANCHORS = 1024
ALIGNMENTS = ("order", "lap", "procrustes")
NAMES = {"order": "order", "lap": "awm_canonical", "procrustes": "procrustes"}
SCORE_LABELS = {
    "awm": "AWM as published",
    "order": "AWM repaired, channels in order",
    "awm_canonical": "AWM repaired",
    "procrustes": "AWM repaired, rotated (Procrustes)",
    "ics": "HuRef ICS as published",
    "ics_canonical": "HuRef ICS repaired, last two layers",
    "ics_all_layers": "HuRef ICS repaired, all layers",
    "pcs_2d": "parameter cosine of matrices",
}
CLEAR, ROTATED, ALIKE = 0.2, 0.3, 0.9


@dataclass(frozen=True)
class Options:
    """How much to look at.

    Attributes:
        mode: fast samples 1,024 channels and, of large models, some layers; exact takes all.
        layers: Score this many evenly spaced layers (equal depths only); None leaves it to the mode.
        align: Any of order, lap, procrustes.
        reorder: Match layers freely instead of in order.
        seed: Of every sample.
        extras: HuRef's scores, parameter cosine and portraits; None means where they are cheap, or in exact mode.
    """

    mode: str = "fast"
    layers: int | None = None
    align: tuple[str, ...] = ALIGNMENTS
    reorder: bool = False
    seed: int = 0
    extras: bool | None = None

    def __post_init__(self) -> None:
        if self.mode not in {"fast", "exact"}:
            raise Refused(f"mode {self.mode!r}: wanted fast or exact")
        if unknown := set(self.align) - set(ALIGNMENTS):
            raise Refused(f"align {min(unknown)!r}: wanted some of {', '.join(ALIGNMENTS)}")
        if self.layers is not None and self.layers < 1:
            raise Refused(f"--layers {self.layers}: wanted 1 or more")
        if self.seed < 0:
            raise Refused(f"--seed {self.seed}: wanted 0 or more")


@dataclass
class Pair:
    """Everything measured on one pair; A is the wider model, `swapped` says whether it was given second."""

    a: Weights
    b: Weights
    swapped: bool
    shared: int = 0
    pairing: str = "strings"  # what rows were paired by: strings | row numbers | nothing
    layers: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    scores: dict[str, awm.Scores] = field(default_factory=dict)
    other: dict[str, float] = field(default_factory=dict)
    fixed: awm.Matching | None = None  # by the embedding
    alike: float = 1.0  # share of channels that AWM as published matches the same way
    head: awm.Matching | None = None
    witnesses: list[tuple[tuple[int, int], int]] = field(default_factory=list)  # layer pair -> agreements
    neurons: list[tuple[tuple[int, int], int, float]] = field(default_factory=list)  # layer pair -> fixed, z
    skipped: list[str] = field(default_factory=list)
    bytes_read: dict[str, int] = field(default_factory=dict)  # by model name
    seconds: float = 0.0

    @property
    def best(self) -> str | None:
        """The repaired score that is highest."""
        names = [name for name in NAMES.values() if name in self.scores]
        return max(names, key=lambda name: self.scores[name].score, default=None)

    def value(self, name: str) -> float | None:
        """A score by name."""
        return self.scores[name].score if name in self.scores else self.other.get(name)

    @property
    def z_values(self) -> list[float]:
        """Gate/up agreement per layer pair."""
        return [z for _, _, z in self.neurons if np.isfinite(z)]


def paired_rows(a: Weights, b: Weights) -> tuple[Array, Array, str]:
    """Embedding rows of the same strings in both models, and how they were paired."""
    words_a, words_b = a.vocabulary(), b.vocabulary()
    if words_a is not None and words_b is not None:
        return *vocabulary.shared_rows(words_a, words_b, a.geometry.vocab, b.geometry.vocab), "strings"
    if a.geometry.vocab == b.geometry.vocab:
        rows = np.arange(min(a.geometry.vocab, vocabulary.SHARED_LIMIT))
        return rows, rows, "row numbers"
    return np.zeros(0, np.int64), np.zeros(0, np.int64), "nothing"


def measure(first: Weights, second: Weights, options: Options, progress: Told = lambda _: None) -> Pair:
    """Align and score one pair; every number of the report that does not need a control."""
    started = time.monotonic()
    before = {w.name: w.origin.bytes_read for w in (first, second)}
    swapped = second.geometry.width > first.geometry.width
    pair = Pair(*((second, first) if swapped else (first, second)), swapped)
    rows_a, rows_b, pair.pairing = paired_rows(pair.a, pair.b)
    pair.shared = len(rows_a)
    alignments = _alignments(pair, rows_a, rows_b, options, progress)
    pair.layers = _layers(pair, options)
    if alignments:
        pair.scores = awm.score_layers(
            (pair.a, pair.b),
            pair.layers,
            _methods(alignments, options),
            options.seed,
            options.reorder,
            lambda at: progress(f"queries and keys: {at}"),
        )
    if len(rows_a) >= 64:
        _witness_neurons(pair, rows_a, rows_b, options, progress)
    if has_extras(pair, options) and len(rows_a) >= 64:
        _other_scores(pair, rows_a, rows_b, progress)
    pair.skipped += [note for w in (pair.a, pair.b) for note in _unseen(w)]
    pair.skipped += [
        f"{w.name}: {tensor}: {count} value{'s' if count > 1 else ''} not finite or beyond 1e15, taken as 0"
        for w in (pair.a, pair.b)
        for tensor, count in w.unusable.items()
    ]
    pair.bytes_read = {w.name: w.origin.bytes_read - before[w.name] for w in (first, second)}
    pair.seconds = time.monotonic() - started
    return pair


def _unseen(weights: Weights) -> Iterator[str]:
    """Parts of a model's feed-forward weights that no test reads, in words."""
    names = [view.tensor for (role, _), view in weights.views.items() if role == "down"]
    if not names:
        yield f"{weights.name}: no feed-forward weights of a known name: T1 of neurons, T2 along them, T4 missing"
    elif any(".experts." in name for name in names):
        yield f"{weights.name}: of the experts of a layer only the first is compared; nothing is said of the others"


def _small(pair: Pair) -> bool:
    return pair.a.file_bytes + pair.b.file_bytes <= SMALL_BYTES


def has_extras(pair: Pair, options: Options) -> bool:
    """Whether to compute HuRef's scores and portraits: if they are cheap, in exact mode, or if asked for."""
    return options.extras if options.extras is not None else options.mode == "exact" or _small(pair)


def _alignments(pair: Pair, rows_a: Array, rows_b: Array, options: Options, progress: Told) -> dict[str, awm.Alignment]:
    """The alignments that can be trusted here; the reasons for the others go into `skipped`."""
    out: dict[str, awm.Alignment] = {}
    d_a, d_b = pair.a.geometry.width, pair.b.geometry.width
    if d_a == d_b:
        out["order"] = awm.identity(d_a)
    if len(rows_a) < 2 * d_b:
        pair.skipped.append(
            f"alignment by the embedding: {len(rows_a)} shared strings, {2 * d_b} would be needed for width {d_b}"
        )
        return {k: v for k, v in out.items() if k in options.align}
    progress("embeddings")
    cross = awm.cross_products(pair.a, pair.b, rows_a, rows_b, published=True)
    if cross.rows < 2 * d_b:
        pair.skipped.append(
            f"alignment by the embedding: {cross.rows} of {len(rows_a):,} shared rows are neither zero nor copies of "
            f"others, {2 * d_b} would be needed for width {d_b}"
        )
        return {k: v for k, v in out.items() if k in options.align}
    progress("channel matching")
    out["lap"], pair.fixed = awm.lap(cross.cosines(), evidence.EMBEDDING)
    assert cross.published is not None
    out["published"], published = awm.lap(cross.published.cosines(), evidence.EMBEDDING)
    pair.alike = float(np.mean(published.columns == pair.fixed.columns))
    if pair.fixed.size < d_b:
        pair.skipped.append(
            f"T1 and T2 leave out {d_b - pair.fixed.size} of {d_b:,} channels, which are zero or copies of others"
        )
    if options.mode == "exact" or _small(pair):
        progress("rotation")
        out["procrustes"] = awm.procrustes(cross)
    elif "procrustes" in options.align:
        pair.skipped.append("Procrustes alignment: slow at this width in fast mode; use exact mode")
    del cross
    pair.head = _head_matching(pair, rows_a, rows_b, progress)
    if "lap" not in options.align:
        del out["published"]
    return {k: v for k, v in out.items() if k in (*options.align, "published")}


def _head_matching(pair: Pair, rows_a: Array, rows_b: Array, progress: Told) -> awm.Matching | None:
    """The second witness: channels matched by the output heads, if both models have one of their own."""
    if any(w.geometry.tied for w in (pair.a, pair.b)):
        if pair.a.has("head") or pair.b.has("head"):
            pair.skipped.append("T2 embedding and output head: a head tied to its embedding is no second witness")
        return None
    kept_a, kept_b = evidence.middle(rows_a, rows_b, HEAD_ROWS)
    rows = [w.store.tensors[w.views["head", None].tensor].shape[0] for w in (pair.a, pair.b)]
    usable = (kept_a < rows[0]) & (kept_b < rows[1])
    if usable.sum() < 2 * pair.b.geometry.width:
        return None
    progress("output heads")
    for w, kept in ((pair.a, kept_a[usable]), (pair.b, kept_b[usable])):
        likeness = evidence.head_likeness(w, evidence.middle(kept, kept, evidence.PROBES)[0])
        if likeness >= evidence.TWINS:
            pair.skipped.append(
                f"T2 embedding and output head: the head of {w.name} is all but its embedding (cosine {likeness:.2f}), "
                "so it is no second witness"
            )
            return None
    cross = awm.cross_products(pair.a, pair.b, kept_a[usable], kept_b[usable], canonical.head)
    return awm.match(cross.cosines(), evidence.HEAD)


def _methods(alignments: dict[str, awm.Alignment], options: Options) -> list[awm.MatchMethod]:
    methods = []
    for kind, how in alignments.items():
        if kind == "published":
            continue
        full = options.mode == "exact" and kind == "lap"
        methods.append(awm.MatchMethod(NAMES[kind], how, channels=None if full else awm.FAST_CHANNELS))
    if "published" in alignments:
        methods.append(awm.MatchMethod("awm", alignments["published"], published=True))
    return methods


def _layers(pair: Pair, options: Options) -> tuple[list[int], list[int]]:
    depths = pair.a.geometry.layers, pair.b.geometry.layers
    limit = options.layers
    if limit is None and options.mode == "fast" and not _small(pair):
        limit = FAST_LAYERS
    if depths[0] != depths[1]:  # a sample of layers could miss their partners
        limit = None
    return awm.chosen_layers(depths[0], limit), awm.chosen_layers(depths[1], limit)


def layer_pairs(pair: Pair) -> list[tuple[int, int]]:
    """Matched layers, by the map of the best repaired score; by relative depth without one."""
    if pair.best is not None and pair.scores[pair.best].pairs:
        return [(pair.layers[0][i], pair.layers[1][j]) for i, j in pair.scores[pair.best].pairs]
    depth_a, depth_b = pair.a.geometry.layers, pair.b.geometry.layers
    return [(round(j * (depth_a - 1) / max(depth_b - 1, 1)), j) for j in range(depth_b)]


def _witness_neurons(pair: Pair, rows_a: Array, rows_b: Array, options: Options, progress: Told) -> None:
    """T2 along the feed-forward path and T4, on evenly spaced layer pairs; the map is given, not chosen here."""
    pairs = [p for p in layer_pairs(pair) if pair.a.has("down", p[0]) and pair.b.has("down", p[1])]
    limit = None if _small(pair) else EXACT_FFN_LAYERS if options.mode == "exact" else FAST_FFN_LAYERS
    kept = evidence.middle(rows_a, rows_b, evidence.PROBES)
    seen = [evidence.probes(w, rows) for w, rows in zip((pair.a, pair.b), kept, strict=True)]
    gated = pair.a.geometry.gated and pair.b.geometry.gated
    for at in awm.chosen_layers(len(pairs), limit) if pairs else []:
        i, j = pairs[at]
        progress(f"neurons of layers {i + 1} and {j + 1}")
        answers = evidence.neuron_responses(pair.a, i, seen[0]), evidence.neuron_responses(pair.b, j, seen[1])
        found = evidence.match_neurons(*answers, options.seed)
        likeness = max(answer.likeness for answer in answers)
        if likeness >= evidence.TWINS:
            pair.skipped.append(
                f"T4 gate/up agreement, layers {i + 1} and {j + 1}: gate and up of one model answer alike "
                f"(correlation {likeness:.2f}), so up is no second witness"
            )
        if found.tied:
            left = f"{found.tied} of {found.tied + len(found.sample):,} neurons of layers {i + 1} and {j + 1}"
            pair.skipped.append(f"T1, T2 and T4 leave out {left}, which are zero or copies of others")
        if len(found.sample) < evidence.FEWEST:
            continue
        usable = gated and likeness < evidence.TWINS
        pair.neurons.append(((i, j), found.fixed, found.z if usable else float("nan")))
        if pair.fixed is not None:
            neurons = found.neurons()
            sides = [
                evidence.writers(w, layer, picked, answer.up_norms)
                for w, layer, picked, answer in zip((pair.a, pair.b), (i, j), neurons, answers, strict=True)
            ]
            second = evidence.writer_matching(sides[0], sides[1], found.up_sign)
            pair.witnesses.append(((i, j), second.agreement(pair.fixed)))


def shared_anchors(pair: Pair, rows_a: Array, rows_b: Array) -> tuple[Array, Array]:
    """Rows of the anchor strings that both models have."""
    words_a, words_b = pair.a.vocabulary(), pair.b.vocabulary()
    if pair.pairing == "strings" and words_a is not None and words_b is not None:
        both = {
            text: row
            for text, row in words_a.items()
            if words_b.get(text, pair.b.geometry.vocab) < pair.b.geometry.vocab
        }
        texts = vocabulary.anchors(both, pair.a.geometry.vocab, ANCHORS)
        return np.array([words_a[text] for text in texts]), np.array([words_b[text] for text in texts])
    return rows_a[:ANCHORS], rows_b[:ANCHORS]


def _other_scores(pair: Pair, rows_a: Array, rows_b: Array, progress: Told) -> None:
    progress("invariant terms")
    at_a, at_b = shared_anchors(pair, rows_a, rows_b)
    with np.errstate(over="ignore", invalid="ignore"):  # three matrices are multiplied: their scale is not bounded
        found = {
            "ics": huref.ics(pair.a, pair.b, at_a, at_b, published=True),
            "ics_canonical": huref.ics(pair.a, pair.b, at_a, at_b),
        }
        if _small(pair):
            found["ics_all_layers"] = huref.ics_all_layers(pair.a, pair.b, at_a, at_b)
            value, count = huref.pcs(huref.matched_matrices(pair.a, pair.b))
            found |= {"pcs_2d": value} if count else {}
    for name, value in found.items():
        if np.isfinite(value):
            pair.other[name] = value
        else:
            pair.skipped.append(f"{SCORE_LABELS[name]}: the numbers are too large to multiply")


@dataclass
class Null:
    """Scores of pairs known to be unrelated: from a calibration file, or from the controls of this comparison."""

    origin: str
    scores: dict[str, list[float]]
    witnesses: list[int]
    z: list[list[float]]
    per_layer: dict[str, list[list[float]]]
    pairs: int
    models: int
    file: dict[str, object] | None = None  # path, sha256 and the part that was used

    def rate(self) -> float:
        """Poisson rate for T2: max(3, upper 95 % limit of the controls' mean)."""
        if not self.witnesses:
            return evidence.POISSON_RATE
        total, count = sum(self.witnesses), len(self.witnesses)
        return max(evidence.POISSON_RATE, float(stats.chi2.ppf(0.95, 2 * (total + 1))) / (2 * count))


def null_of(pairs: Sequence[Pair], origin: str, models: int) -> Null:
    """A null from measured unrelated pairs."""
    scores: dict[str, list[float]] = {}
    per_layer: dict[str, list[list[float]]] = {}
    for pair in pairs:
        for name in SCORE_LABELS:
            if (value := pair.value(name)) is not None:
                scores.setdefault(name, []).append(value)
        for name, found in pair.scores.items():
            per_layer.setdefault(name, []).append(found.per_layer)
    counts = [count for pair in pairs for _, count in pair.witnesses]
    counts += [pair.head.agreement(pair.fixed) for pair in pairs if pair.head is not None and pair.fixed is not None]
    z = [pair.z_values for pair in pairs if pair.z_values]
    return Null(origin, scores, counts, z, per_layer, len(pairs), models)


def structure_class(a: Weights, b: Weights) -> str:
    """Pairs are only comparable to unrelated pairs of the same kind: widths and whether depths agree."""
    widths = sorted((a.geometry.width, b.geometry.width), reverse=True)
    depth = "equal depth" if a.geometry.layers == b.geometry.layers else "unequal depth"
    return f"width {widths[0]}/{widths[1]}, {depth}"


NULL_VERSION = 1


def read_null(path: Path, kind: str) -> Null:
    """The part of a calibration file that matches a structure class."""
    if not path.is_file():
        raise Refused(f"{path}: no such null file")
    raw = path.read_bytes()
    body = parse_json(raw, str(path))
    classes = body.get("classes")
    if body.get("fathom_null") != NULL_VERSION or not isinstance(classes, dict):
        raise Refused(f"{path}: not a null file of version {NULL_VERSION} (fathom lineage calibrate writes one)")
    if kind not in classes:
        raise Refused(f"{path}: no null for {kind}; it has {'; '.join(classes)}")
    if not _is_null(classes[kind]):
        raise Refused(f"{path}: class {kind} is malformed")
    scores = classes[kind]["scores"]
    if high := [name for name in NAMES.values() if (evidence.score_threshold(scores.get(name, [])) or 0) >= 1]:
        raise Refused(
            f"{path}: class {kind}: a score of {high[0]} would have to pass 1 to be high: a pair in it is related"
        )
    file = {"path": str(path), "sha256": hashlib.sha256(raw).hexdigest(), "class": classes[kind]}
    return Null(f"{path.name} ({kind})", **copy.deepcopy(classes[kind]), file=file)


def _is_null(body: object) -> bool:
    """Whether a class of a null file has the fields of one, each of its type."""

    def numbers(value: object, depth: int = 1) -> bool:
        if depth:
            return isinstance(value, list) and all(numbers(item, depth - 1) for item in value)
        return type(value) in (int, float) and bool(np.isfinite(value))  # type: ignore[call-overload]

    def named(value: object, depth: int) -> bool:
        return isinstance(value, dict) and all(numbers(item, depth) for item in value.values())

    def count(value: object) -> bool:
        return type(value) is int and value >= 0

    if not isinstance(body, dict) or set(body) != {"scores", "witnesses", "z", "per_layer", "pairs", "models"}:
        return False
    counts = isinstance(body["witnesses"], list) and all(
        map(count, [*body["witnesses"], body["pairs"], body["models"]])
    )
    return counts and named(body["scores"], 1) and named(body["per_layer"], 2) and numbers(body["z"], 2)


def write_null(path: Path, groups: dict[str, list[Pair]]) -> dict[str, object]:
    """Write measured unrelated pairs, by structure class."""
    classes = {}
    for pair in (pair for pairs in groups.values() for pair in pairs):
        if _convicts(pair):
            raise Refused(f"{pair.a.name} and {pair.b.name} share weights: a null is made of unrelated models")
    for kind, pairs in groups.items():
        null = null_of(pairs, "", len({w.name for pair in pairs for w in (pair.a, pair.b)}))
        classes[kind] = {key: value for key, value in vars(null).items() if key not in {"origin", "file"}}
    body = {"fathom_null": NULL_VERSION, "classes": classes}
    write_json(path, body)
    return body


@dataclass(frozen=True)
class Given:
    """Further inputs of a comparison, which the report records.

    Attributes:
        null: A calibration file.
        adapter_base: Base model of adapters that name none.
        max_bytes: Limit on what is read from either model.
    """

    null: Path | None = None
    adapter_base: str | None = None
    max_bytes: int | None = None


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
    blocks: list[str]
    given: Given = Given()


def compare(
    a: Weights,
    b: Weights,
    controls: Sequence[str | Path | Weights] = (),
    null_file: Path | None = None,
    options: Options | None = None,
    progress: Told = lambda _: None,
) -> Comparison:
    """Measure A against B and both against every control, then decide.

    Args:
        a: One model.
        b: The other; which is which implies no direction.
        controls: Unrelated models of the same kind, opened and measured one after the other.
        null_file: A calibration file, instead of or besides controls.
        options: How much to look at.
        progress: Called with a few words before each step.
    """
    options = options or Options()
    if null_file is not None:
        read_null(null_file, structure_class(a, b))  # refused before the work if it does not fit
    pair = measure(a, b, options, progress)
    measured: list[tuple[str, list[Pair]]] = []
    for where in controls:
        other = where if isinstance(where, Weights) else open_weights(where)
        name = other.name
        measured.append(
            (name, [measure(w, other, options, lambda at, n=name: progress(f"control {n}: {at}")) for w in (a, b)])  # type: ignore[misc]
        )
    return judge(pair, measured, null_file, options)


def judge(
    pair: Pair, measured: list[tuple[str, list[Pair]]], null_file: Path | None = None, options: Options | None = None
) -> Comparison:
    """Decide about a measured pair.

    Args:
        pair: What `measure` returned.
        measured: Each control by name, measured against either model of the pair.
        null_file: A calibration file, instead of or besides controls.
        options: What the measurements were made with.
    """
    null = _null(pair, measured, null_file)
    tests = run_tests(pair, null)
    threshold = _thresholds(pair, null)
    tampering = _tampering(pair, threshold)
    found, covered, blocks = _findings(pair, tests, null, measured, tampering, threshold)
    sizes = covered, len(pair.layers[0]), len(pair.layers[1])
    verdict = evidence.decide(found)
    return Comparison(pair, measured, null, tests, verdict, tampering, sizes, options or Options(), blocks)


def _null(pair: Pair, measured: list[tuple[str, list[Pair]]], null_file: Path | None) -> Null | None:
    kind = structure_class(pair.a, pair.b)
    alike = [p for _, pairs in measured for p in pairs if structure_class(p.a, p.b) == kind]
    if unlike := sum(len(pairs) for _, pairs in measured) - len(alike):
        pair.skipped.append(f"{unlike} control pair(s) are not of the class {kind}: shown, but not part of the null")
    names = {w.name for p in alike for w in (p.a, p.b)}
    from_controls = null_of(alike, f"control pairs of {kind}", len(names)) if alike else None
    if null_file is None:
        return from_controls
    null = read_null(null_file, kind)
    if from_controls is not None:
        for name, values in from_controls.scores.items():
            null.scores.setdefault(name, []).extend(values)
        null.witnesses += from_controls.witnesses
        null.z += from_controls.z
        null.origin += f" and {from_controls.origin}"
        null.pairs += from_controls.pairs
    return null


def run_tests(pair: Pair, null: Null | None) -> list[Test]:
    """T1–T4, as far as the pair allows."""
    tests: list[Test] = []
    rate = null.rate() if null else evidence.POISSON_RATE
    calibrated = bool(null and null.witnesses)
    if pair.fixed is not None and pair.fixed.size >= evidence.FEWEST:
        width = pair.fixed.size
        tests.append(evidence.test_order(pair.fixed))
        if pair.head is not None:
            count = pair.head.agreement(pair.fixed)
            tests.append(evidence.test_witnesses(count, width, rate, calibrated, "embedding"))
        if pair.witnesses:
            count, trials = max(n for _, n in pair.witnesses), len(pair.witnesses)
            test = evidence.test_witnesses(count, width, rate, calibrated, "feed-forward", trials)
            test.detail["per_layer"] = [[i, j, n] for (i, j), n in pair.witnesses]
            tests.append(test)
    if pair.neurons:
        count = sum(fixed for _, fixed, _ in pair.neurons)
        p = evidence.fixed_point_bound(count, len(pair.neurons))
        bound = "at most Lᵏ/k! over L layers"
        why = "neurons exchangeable in the training of either model"
        tests.append(Test("T1 fixed points (neurons)", count, bound, p, "exact", why, "feed-forward"))
    for name in NAMES.values():
        if name in pair.scores and null and null.scores.get(name):
            values, score = null.scores[name], pair.scores[name].score
            p = evidence.empirical(score, values)
            why = "the null pairs are of the same structure class"
            tests.append(Test(f"T3 {name}", score, f"{len(values)} unrelated scores", p, "empirical", why, "attention"))
    if pair.z_values:
        tests.append(evidence.test_gate_up(pair.z_values, null.z if null else []))
    return tests


def _thresholds(pair: Pair, null: Null | None) -> dict[str, float]:
    out = {}
    for name in NAMES.values():
        value = evidence.score_threshold(null.scores.get(name, [])) if null and name in pair.scores else None
        if value is not None:
            out[name] = value
    return out


def _tampering(pair: Pair, thresholds: dict[str, float]) -> list[str]:
    """Signs of function-preserving changes to the weights; only where a score is high to begin with."""
    score = {name: pair.scores[name].score for name in pair.scores}
    clear = {name: max(CLEAR, thresholds.get(name, CLEAR)) for name in score}
    lap, rotated, order = (score.get(name) for name in ("awm_canonical", "procrustes", "order"))
    out = []
    if lap is not None and rotated is not None and rotated - lap > ROTATED:
        out.append("rotation tampering suspected: only a rotation of the residual stream aligns the models")
    if lap is not None and lap > clear["awm_canonical"] and lap - score.get("awm", lap) > 0.02:
        out.append(
            "re-gauging suspected: the score rises once gains and head scales are brought to canonical form"
            if pair.alike >= ALIKE
            else "embedding rows out of proportion: channels match only after every row is brought to the same length"
        )
    if lap is not None and order is not None and lap - order > ROTATED:
        out.append("permutation suspected: channels match only after reordering")
    if order is not None and lap is not None and rotated is not None and order - max(lap, rotated) > ROTATED:
        out.append("embedding replaced: attention matches in order, the embedding does not")
    best = pair.scores[pair.best] if pair.best else None
    shifted = best is not None and any(i != j for i, j in best.pairs) and len(set(best.map.shape)) == 1
    if best is not None and shifted and best.score > clear[best.method]:
        out.append("layers shifted or reordered")
    return out


def _findings(
    pair: Pair,
    tests: list[Test],
    null: Null | None,
    measured: list[tuple[str, list[Pair]]],
    tampering: list[str],
    thresholds: dict[str, float],
) -> tuple[Findings, int, list[str]]:
    """Summarise measurements to the inputs of the verdict rule."""
    name = pair.best
    best = pair.scores[name].score if name else 0.0
    # the best of several alignments meets the highest bar of any: what a shared seed leaves in order is above the bar
    # of that order, and is no lineage
    strictest = max(thresholds, key=thresholds.__getitem__, default=None)
    null_scores = null.scores[strictest] if null and strictest else []
    bar = thresholds[strictest] if strictest else CLEAR
    layers = min(len(side) for side in pair.layers)
    good = (
        [p for p, s in zip(pair.scores[name].pairs, pair.scores[name].per_layer, strict=True) if s >= bar]
        if name
        else []
    )
    coverage = len(good) / layers if layers else 0.0
    families, blocks = set(), []
    tested = {"attention"} if name else set()
    if good:
        families.add("attention")
        shown = ", ".join(str(pair.layers[1][j] + 1) for _, j in good)
        blocks.append("attention of every layer" if len(good) == layers else f"attention of layers {shown}")
    for test in (t for t in tests if t.decides and t.family != "attention"):
        tested.add(test.family)
        if test.p <= evidence.ALPHA and test.family not in families:
            families.add(test.family)
            blocks.append(test.family)
    failed = any(_convicts(p) for _, pairs in measured for p in pairs)
    if measured and name and best >= CLEAR:
        failed |= any((p.value(name) or 0.0) >= best for _, pairs in measured for p in pairs)
    low, by_number = pair.pairing == "nothing" or pair.fixed is None, pair.pairing == "row numbers"
    return (
        Findings(tests, best, null_scores, coverage, families, tested, blocks, failed, low, tampering, by_number),
        len(good),
        blocks,
    )


def _convicts(control: Pair) -> bool:
    """Whether the tests that need no controls would call a control pair related."""
    own = [test.p for test in run_tests(control, None) if test.kind in {"exact", "model"}]
    return bool(own) and min(holm(own)) <= evidence.ALPHA
