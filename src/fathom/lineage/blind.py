"""The blind frame: finds the rotation between two models' residual streams from their layers alone, without embedding
or tokenizer.

A layer computes two maps of the stream, [d, d]. An edit that keeps the function can only rotate them:

    VO = Σ_h O_h V_h                                attention on a text of one token
    FF = Σ_j d_j (a_j u_j + b_j (u_jᵀ g_j) g_j)ᵀ    the mean Jacobian of the feed-forward for x ~ N(0, 1),
                                                    a = E silu(s z), b = E silu''(s z), s = ‖g_j‖

Neurons that are split, cancelled or never fire drop out of the sums. Directions that no map writes are left out before
anything is computed: nothing is ever in them, so they can be read in any way. From a few of these maps each model gets
eigenvectors of Σ (C Cᵀ + φ Cᵀ C + ½(C + Cᵀ)). Signs come from the products in those bases, and the rotation R between
the bases is then improved by R ← polar(Σ C_A R C_Bᵀ + C_Aᵀ R C_B). Neurons are paired only in layers that this fit
never saw, by gate and by up apart. R is known up to its sign, so both are tried. If nothing is found, R is fitted to VO
alone, of all layers, and to FF alone: FF holds for Gaussian input, and a copy can have neurons that fire for no other.

`planes.py` compares rotary planes (T6). `evidence.py` judges the share of neurons that this frame pairs (T4): it
decides from five times the largest share in any control. Without controls, 9 of 160 neurons stand for that share.
`comparison.py` tries the fits in turn, and says why if none can be made; if no other test decides, the verdict is then
"inconclusive" (`_doubts` in `verdict.py`). `neurons.py` merges split neurons, and drops those that cannot fire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from fathom.checkpoints.tensors import Array
from fathom.lineage import awm, canonical, value_channels
from fathom.lineage.neurons import Frame, experts
from fathom.lineage.weights import Told, Weights

FIT, HELD = 12, 3  # most maps for the fit, and layers for the test
WIDEST = 1024  # eigenvectors that are used
LEADING = 128  # at most so many leading eigenvectors are aligned first; then twice as many, until all are
STEPS, FEWEST_STEPS = 100, 4  # of the leading ones; of more, fewer in proportion to what a step costs
SETTLED = 1e-4
GOLDEN = 0.618
NODES, WEIGHTS_OF_NODES = np.polynomial.hermite_e.hermegauss(64)
TURN = 1e-3  # two maps of layers that differ by less have the same invariants
EXPERTS = 8  # most experts of a map
DEAD = 1e-4  # a map that is so much smaller than the median one is none
EMPTY = 1e-5  # share of the mean energy below which a direction is never written: rounding to bfloat16 leaves 1e-6
Pairs = list[tuple[int, int]]
ATTENTION, FEED_FORWARD = range(2)
Maps = list[tuple[int, int, int]]
"""Maps of two models that correspond: the kind, the layer of A and that of B."""


@dataclass(frozen=True)
class Basis:
    """A basis [d, K] of eigenvectors computed from one model's layers, and the layers' maps expressed in this basis,
    [n, K, K]."""

    vectors: Array
    maps: Array
    faint: Array | None = None  # [d, d - K], the input in the directions that no map writes


def usable(weights: Weights, kind: int = ATTENTION) -> list[int]:
    """The layers whose map of the given kind (attention or feed-forward) can be computed. Attention's are used where
    feed-forward weights are known too."""
    fed = [i for i in range(weights.geometry.layers) if weights.has("down", i)]
    return fed if kind == FEED_FORWARD else [i for i in fed if value_channels.has_values(weights, i)]


def split(maps: Maps, nonce: int) -> tuple[Maps, Pairs]:
    """Divide the layers at random, by the nonce, into maps that fit the rotation and pairs of layers that test it; no
    layer is in both."""
    draw = np.random.default_rng(nonce)
    fed = [(i, j) for kind, i, j in maps if kind == FEED_FORWARD]
    some = min(HELD, max(1, len(fed) // 3))
    held = [fed[at] for at in draw.permutation(len(fed))[:some]]
    left, right = {i for i, _ in held}, {j for _, j in held}
    rest = [one for one in maps if one[1] not in left and one[2] not in right]
    return sorted(rest[at] for at in draw.permutation(len(rest))[:FIT]), sorted(held)


def fits(maps: Maps, fit: Maps, nonce: int) -> list[Maps]:
    """The sets of maps to which the rotation is fitted in turn: both kinds, then attention in all layers, then
    feed-forward.

    Attention's are linear, so neurons that never fire do not change them. Where every text begins with one token, heads
    that see nothing else can; then the third is left.
    """
    attention = [one for one in maps if one[0] == ATTENTION]
    drawn = np.random.default_rng(nonce).permutation(len(attention))[:FIT]
    found = [fit, sorted(attention[at] for at in drawn), [one for one in fit if one[0] == FEED_FORWARD]]
    return [some for some in found if some]


def windows(maps: Maps, held: Pairs, a: Weights, b: Weights) -> list[Pairs]:
    """The pairs of layers for the test, in groups in which at most one pair can be correct.

    Where the depths differ, feed-forward maps may mislead. Then a layer of the shallower model may correspond to any of
    the other's layers between the partners of its attention and of the next one's.
    """
    if a.geometry.layers == b.geometry.layers:
        return [[pair] for pair in held]
    short = int(b.geometry.layers < a.geometry.layers)
    deep = (b, a)[short]
    partners = {one[1 + short]: one[2 - short] for one in maps if one[0] == ATTENTION}
    out = []
    for pair in held:
        at, own = pair[short], pair[1 - short]
        first = max((j for i, j in partners.items() if i <= at), default=0)
        last = min((j for i, j in partners.items() if i > at), default=deep.geometry.layers)
        some = {own, *(j for j in usable(deep, FEED_FORWARD) if first <= j <= last)}
        out.append([(j, at) if short else (at, j) for j in sorted(some)])
    return out


def map_pairs(a: Weights, b: Weights, progress: Told = lambda _: None) -> Maps:
    """Which layers' maps to compare: layers with the same number at equal depth, else an order-preserving matching by
    rotation-invariant numbers.

    Attention and feed-forward are paired apart, because a layer can be cut between them.
    """
    kinds = (ATTENTION, FEED_FORWARD)
    if a.geometry.layers == b.geometry.layers:
        every = range(a.geometry.layers)
        return [(kind, i, i) for i in every for kind in kinds if i in usable(a, kind) and i in usable(b, kind)]
    out: Maps = []
    for kind in kinds:
        found = [_living(w, kind, usable(w, kind), progress) for w in (a, b)]
        if not all(found):
            continue
        marks = [np.array(list(one.values())) for one in found]
        spread = np.maximum(np.concatenate(marks).std(0), canonical.TINY)
        apart = np.square((marks[0][:, None] - marks[1]) / spread).mean(-1)  # [layers of A, layers of B]
        places = [list(one) for one in found]
        pairs = awm.monotone(np.exp(-apart / TURN) + 1e-3 * np.exp(-apart))
        out += [(kind, places[0][i], places[1][j]) for i, j in pairs]
    return out


def _living(weights: Weights, kind: int, layers: Sequence[int], progress: Told) -> dict[int, Array]:
    """For each layer, the numbers (tr Cᵏ)^(1/k) of its map C, which no rotation changes. Layers that write nothing are
    left out."""
    some = awm.chosen_layers(len(layers), FIT // 2)
    span = _written([layer_map(weights, FEED_FORWARD, layers[at]) for at in some])
    faint = None if span is None else _faint(weights, span)
    sizes, out = {}, {}
    for i in layers:
        progress(f"layers without a tokenizer: layer {i} of {weights.name}")
        found = layer_map(weights, kind, i, span, faint)
        one, sizes[i] = _unit(found), float(np.linalg.norm(found))
        twice = one @ one
        traces = np.trace(one), np.trace(twice), np.vdot(one.T, twice), np.vdot(twice.T, twice)
        out[i] = sizes[i] * np.array([np.sign(t) * np.abs(t) ** (1 / k) for k, t in enumerate(traces, 1)], np.float64)
    least = DEAD * float(np.median([size for size in sizes.values() if size > 0] or [0.0]))
    alive = {i: marks for i, marks in out.items() if sizes[i] > least}
    scale = float(np.median([np.abs(marks).mean() for marks in alive.values()] or [1.0]))
    return {i: marks / max(scale, canonical.TINY) for i, marks in alive.items()}


def _written(found: Sequence[Array]) -> Array | None:
    """The directions of the residual stream to which some maps write, [d, K]; None if they write to all directions."""
    energy, vectors = np.linalg.eigh(sum(c.astype(np.float64) @ c.T for c in map(_unit, found)))
    kept = energy > EMPTY * float(energy.mean()) if energy.max() > 0 else energy == 0
    return None if kept.all() else vectors[:, kept].astype(np.float32)


def _unit(found: Array) -> Array:
    return found / max(float(np.linalg.norm(found)), canonical.TINY)


def layer_map(weights: Weights, kind: int, index: int, span: Array | None = None, faint: Array | None = None) -> Array:
    """The attention map (VO) or feed-forward map (FF) of one layer: [d, d], or [K, K] within a subspace `span` [d,
    K]."""
    if kind == FEED_FORWARD:
        return _feed_forward(weights, index, span, faint)
    g = weights.geometry
    layer = canonical.fold(weights.layer(index, canonical.VO_ROLES), g)
    read, write = awm.bounded(layer["v"]), canonical.by_kv_head(awm.bounded(layer["o"]), g)
    if span is not None:
        read, write = read @ span, span.T @ write
    out: Array = write @ read
    return out.astype(np.float32)


def _feed_forward(weights: Weights, index: int, span: Array | None, faint: Array | None) -> Array:
    """The mean Jacobian of a feed-forward layer, summed over some of its experts."""
    g = weights.geometry
    roles = ("gate", "up", "down") if g.gated else ("up", "down")
    bias = f"{roles[0]}_bias"
    shared = weights.layer(index, ("ffn_norm", "post_ffn_norm"))
    if weights.experts(index) == 1 and weights.has(bias, index):
        shared[bias] = weights.tensor(bias, index)
    size = g.width if span is None else span.shape[1]
    total = np.zeros((size, size), np.float32)
    for expert in experts(weights, index, EXPERTS):
        layer = canonical.fold(shared | {r: weights.tensor(r, index, None, expert) for r in roles}, g)
        offset = layer.get(bias, 0) - (0 if faint is None else np.linalg.norm(layer[roles[0]] @ faint, axis=1))
        if span is not None:
            layer |= {r: layer[r] @ span for r in roles[:-1]} | {"down": span.T @ layer["down"]}
        read = _mean_reader(layer["gate"], layer["up"], offset) if g.gated else _mean_slope(layer["up"], offset)
        total += (awm.bounded(layer["down"]) @ read).astype(np.float32)
    return total


def _mean_reader(gate: Array, up: Array, offset: Array | int = 0) -> Array:
    """The rows a_j u_j + b_j (u_jᵀ g_j) g_j, [m, d], of gated neurons' mean Jacobian; `offset` is added to the
    gates."""
    size = np.sqrt(np.einsum("ij,ij->i", gate, gate)).astype(np.float64)
    x = np.clip(size, 0, 1e3)[:, None] * NODES + np.clip(np.reshape(offset, (-1, 1)), -1e3, 1e3)  # [m, nodes]
    s = 1 / (1 + np.exp(-np.clip(x, -500, 500)))
    chance = WEIGHTS_OF_NODES / WEIGHTS_OF_NODES.sum()
    mean = (x * s) @ chance
    bend = (s * (1 - s) * (2 + x * (1 - 2 * s))) @ chance
    along = bend * np.einsum("ij,ij->i", up, gate)
    return up * mean[:, None].astype(up.dtype) + gate * along[:, None].astype(up.dtype)


def _mean_slope(up: Array, offset: Array | int) -> Array:
    """The input rows of ungated neurons' mean Jacobian: half of each up row, or less if a bias keeps the neuron from
    firing."""
    size = np.sqrt(1 + np.einsum("ij,ij->i", up, up))
    return awm.bounded(up) * special.ndtr(offset / size)[:, None].astype(up.dtype)


def basis(weights: Weights, chosen: Sequence[tuple[int, int]]) -> Basis:
    """The eigenvectors computed from some maps (kind, layer), those with the largest |eigenvalue| first, and the maps
    expressed in them.

    The first of a model is kept: controls ask for it again, and for no other.
    """
    known: dict[tuple[object, ...], Basis] = weights.memo.setdefault("blind", {})
    key = (weights.ranked, *chosen)
    found = known.get(key) or _basis(weights, chosen)
    if not known:
        known[key] = found
    return found


def _basis(weights: Weights, chosen: Sequence[tuple[int, int]]) -> Basis:
    found = [layer_map(weights, *place) for place in chosen]
    span, outside = _written(found), None
    if span is not None:
        outside = _faint(weights, span)
        found = [layer_map(weights, *place, span, outside) for place in chosen]
    found = [_unit(one) for one in found]
    total = sum(c @ c.T + np.float32(GOLDEN) * (c.T @ c) + np.float32(0.5) * (c + c.T) for c in found)
    size, vectors = np.linalg.eigh(np.asarray(total, np.float64))
    vectors = vectors[:, np.argsort(-np.abs(size), kind="stable")[:WIDEST]].astype(np.float32)
    own = np.stack([vectors.T @ c @ vectors for c in found])
    return Basis(vectors if span is None else span @ vectors, own, outside)


def _faint(weights: Weights, span: Array) -> Array:
    """The directions outside a subspace, each times the largest component that any normed embedding row has along it,
    [d, d - K].

    Whoever reads as much there, however faint it is, need never fire. The most, because other rows of the vocabulary,
    which no text uses, could cancel a mean.
    """
    outside = np.linalg.qr(span.astype(np.float64), mode="complete")[0][:, span.shape[1] :]
    most = np.zeros(outside.shape[1])
    for rows in awm.chunks(weights.geometry.vocab, awm.CHUNK_ROWS):
        unit = awm.unit_rows(canonical.embedding(weights, rows)).astype(np.float64)
        most = np.maximum(most, np.abs(unit @ outside).max(0))
    return outside * (most * math.sqrt(len(span)))


def rotation(a: Basis, b: Basis) -> Array:
    """The rotation R [K, K] with C_A R ≈ R C_B for all maps C of models A and B, up to the sign of R."""
    agreement = np.einsum("nij,nij->ij", a.maps, b.maps)
    first = np.linalg.eigh(agreement + agreement.T)[1][:, -1]
    found = np.diag(np.where(first < 0, -1.0, 1.0)).astype(np.float32)
    sizes = [len(found)]
    while sizes[0] > LEADING:
        sizes.insert(0, sizes[0] // 2)
    for size in sizes:
        few = slice(0, size)
        steps = max(FEWEST_STEPS, min(STEPS, STEPS * LEADING**3 // size**3))
        found[few, few] = _improved(found[few, few], a.maps[:, few, few], b.maps[:, few, few], steps)
    return found


def _improved(found: Array, a: Array, b: Array, steps: int) -> Array:
    """Repeat R ← polar(Σ C_A R C_Bᵀ + C_Aᵀ R C_B) until R converges. Models that drifted far need many steps."""
    for _ in range(steps):
        pull = sum(x @ found @ y.T + x.T @ found @ y for x, y in zip(a, b, strict=True))
        u, _, vt = np.linalg.svd(pull)
        step = float(np.linalg.norm(u @ vt - found)) / np.sqrt(len(found))
        found = u @ vt
        if step < SETTLED:
            break
    return found


def frame(a: Weights, b: Weights, fit: Maps) -> tuple[Frame, Frame]:
    """The coordinates that both models share, from the maps of the fit, up to the sign of one model's side."""
    sides = [basis(w, [(one[0], one[1 + side]) for one in fit]) for side, w in enumerate((a, b))]
    most = min(len(side.vectors.T) for side in sides)
    sides = [replace(side, vectors=side.vectors[:, :most], maps=side.maps[:, :most, :most]) for side in sides]
    first, second = sides[0].vectors @ rotation(*sides), sides[1].vectors
    return Frame("blind", first, faint=sides[0].faint), Frame("blind", second, faint=sides[1].faint)
