"""HuRef's invariant terms, similarities computed from them, and the 512-number sketch of a model.

    M_a = X W_qᵀ W_k Xᵀ      M_b = X W_vᵀ W_oᵀ Xᵀ      M_f = X W_uᵀ W_dᵀ Xᵀ

X holds the embeddings of a few thousand anchor strings, so the terms live in token space: every rotation of the
residual stream and every gauge of a head or a neuron drops out. HuRef's own M_f puts W_g ⊙ W_u in place of W_u, which
does not survive a sign flip of the stream; both are here, the published one to show the difference.

`comparison.py` decides which scores are computed (`Options.has_extras`, `_other_scores`), and pairs each model's own
rarest tokens, as HuRef does (`_own_anchors`). `publishing/portrait.py` draws the sketch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.awm import CHUNK_ROWS, bounded, chunks, gathered
from fathom.lineage.vocabulary import string_hash
from fathom.lineage.weights import Weights
from fathom.report.mixing import mixed

SKETCH = 512


def product_ffn(x: Array, weights: Weights, index: int, published: bool = False) -> Array:
    """The feed-forward term X W_uᵀ W_dᵀ Xᵀ, read in blocks of rows; `published` takes raw weights and W_g ⊙ W_u in
    place of W_u.

    Under LayerNorm X is centred, so the writer's mean cancels.
    """
    norms = {} if published else weights.layer(index, ("ffn_norm", "post_ffn_norm"))
    gated = published and weights.has("gate", index)
    read = []  # X W_uᵀ, [N, neurons] in blocks
    for rows in chunks(weights.neurons(index), CHUNK_ROWS):
        block = weights.tensor("up", index, rows)
        if gated:
            block = block * weights.tensor("gate", index, rows)
        read.append(x @ (block if published else canonical.fold({"up": block, **norms}, weights.geometry)["up"]).T)
    written = np.zeros((len(x), weights.neurons(index)), x.dtype)  # X W_d
    for rows in chunks(weights.geometry.width, CHUNK_ROWS):
        block = weights.tensor("down", index, rows)
        written += x[:, rows] @ (block * norms["post_ffn_norm"][rows, None] if "post_ffn_norm" in norms else block)
    return np.concatenate(read, axis=1) @ written.T


def terms(weights: Weights, x: Array, index: int, published: bool = False) -> Iterator[Array]:
    """HuRef's three invariant terms of one layer (QK, VO, feed-forward) at anchor embeddings X, from canonical weights
    unless `published`."""
    g = weights.geometry
    layer = weights.layer(index, canonical.QK_ROLES)
    layer = layer if published else canonical.balance_qk(canonical.fold(layer, g), g)
    yield canonical.product_qk(x @ layer["q"].T, x @ layer["k"].T, g)
    layer = weights.layer(index, canonical.VO_ROLES)
    layer = layer if published else canonical.fold(layer, g)
    yield (x @ layer["v"].T) @ canonical.by_kv_head(x @ layer["o"], g).T
    if weights.has("down", index):
        yield product_ffn(x, weights, index, published)


def anchor_embeddings(weights: Weights, rows: Array, published: bool = False) -> Array:
    """Embedding rows of the anchors, in the anchors' order."""
    table = (lambda w, r: w.tensor("embed", rows=r)) if published else canonical.embedding
    return gathered(weights, np.asarray(rows, np.int64), table)


def double_centred(term: Array) -> Array:
    """A term with the mean of each row and column removed, scaled to Frobenius norm 1."""
    term = bounded(term)
    term = term - term.mean(0, keepdims=True)
    term = term - term.mean(1, keepdims=True)
    return term / max(float(np.linalg.norm(term)), canonical.TINY)


def _cosine(pairs: Iterable[tuple[Array, Array]]) -> float:
    dot = norm_a = norm_b = 0.0
    for a, b in pairs:
        dot += float(np.vdot(a, b))
        norm_a += float(np.vdot(a, a))
        norm_b += float(np.vdot(b, b))
    return dot / math.sqrt(max(norm_a * norm_b, canonical.TINY))


@dataclass(frozen=True)
class Spanned:
    """The anchor embeddings X in factors: X = Q R, and the vector of ones = Q r.

    A term is Q T Qᵀ for T from R in place of X, so no term of N² numbers is needed: T has at most width + 1 rows.
    """

    q: Array  # [N, k], k = min(N, width + 1)
    r: Array  # [k, width]
    ones: Array  # [k]

    @classmethod
    def of(cls, x: Array) -> Spanned:
        """Of anchor embeddings [N, width]."""
        q, r = np.linalg.qr(np.concatenate([x, np.ones_like(x[:, :1])], axis=1))
        return cls(q, np.ascontiguousarray(r[:, :-1]), r[:, -1])

    def standardised(self, term: Array) -> Array:
        """HuRef's normalisation of a term to mean 0 and standard deviation 1, for a term [k, k]; it is also scaled to
        norm 1."""
        mean = (self.ones @ term @ self.ones) / (self.ones @ self.ones) ** 2
        term = term - mean * np.outer(self.ones, self.ones)
        return term / max(float(np.linalg.norm(term)), canonical.TINY)


def ics(a: Weights, b: Weights, rows_a: Array, rows_b: Array, published: bool = False) -> float:
    """The cosine of two models' invariant terms over the last two layers; `published` takes raw weights and HuRef's
    gated term."""
    one, other = (Spanned.of(anchor_embeddings(w, rows, published)) for w, rows in ((a, rows_a), (b, rows_b)))
    turn = one.q.T @ other.q
    few = 2 if min(len(a.keyed), len(b.keyed)) > 1 else 1
    dot, sizes = 0.0, np.zeros(2)
    for i, j in zip(a.keyed[-few:], b.keyed[-few:], strict=True):
        pairs = zip(terms(a, one.r, i, published), terms(b, other.r, j, published), strict=False)
        for left, right in ((one.standardised(x), other.standardised(y)) for x, y in pairs):
            dot += float(np.vdot(turn.T @ left @ turn, right))
            sizes += [float(np.vdot(term, term)) for term in (left, right)]
    return dot / math.sqrt(max(float(sizes.prod()), canonical.TINY))


def summed_terms(weights: Weights, x: Array) -> list[Array]:
    """Each of the three invariant terms, double-centred and summed over all layers, so models of different depth can be
    compared."""
    total: list[Array] = []
    for index in weights.keyed:
        for place, term in enumerate(terms(weights, x, index)):
            if place == len(total):
                total.append(np.zeros_like(term))
            total[place] += double_centred(term)
    return [term / max(float(np.linalg.norm(term)), canonical.TINY) for term in total]


def ics_all_layers(a: Weights, b: Weights, rows_a: Array, rows_b: Array) -> float:
    """The cosine of two models' invariant terms, each summed over all layers."""
    sums_a = summed_terms(a, anchor_embeddings(a, rows_a))
    sums_b = summed_terms(b, anchor_embeddings(b, rows_b))
    return _cosine(zip(sums_a, sums_b, strict=False))


def last_terms(weights: Weights, x: Array) -> list[Array]:
    """The invariant terms of the last two layers with attention, double-centred."""
    return [double_centred(t) for index in weights.keyed[-2:] for t in terms(weights, x, index)]


def sketch(matrices: Sequence[Array], strings: Sequence[bytes]) -> Array:
    """A random projection z [512] of the terms: the hash of strings i and j gives entry (i, j) a sign and a bucket.

    With unit-norm terms z is close to N(0, I), and cosines of sketches estimate cosines of terms to about 1/√512.
    """
    z = np.zeros(SKETCH)
    for number, matrix in enumerate(matrices):
        left, right = (
            np.array([string_hash(text, b"sketch:%d:%s" % (number, side)) for text in strings], np.uint64)
            for side in (b"left", b"right")
        )
        for row in range(0, len(strings), 256):  # in blocks, so that the hashes never fill an N×N array
            code = mixed(left[row : row + 256, None] + right)
            sign = (code >> np.uint64(63)).astype(np.int8) * 2 - 1
            bucket = (code & np.uint64(SKETCH - 1)).astype(np.int64)
            weighted = (matrix[row : row + 256] * sign).astype(np.float64)
            z += np.bincount(bucket.reshape(-1), weighted.reshape(-1), SKETCH)
    return z * math.sqrt(SKETCH / max(len(matrices), 1))


def quantised(z: Array) -> Array:
    """A sketch z in its published form, int8: round(32 z)."""
    return np.clip(np.rint(32 * z), -127, 127).astype(np.int8)


def sketch_cosine(a: Array, b: Array) -> Array:
    """Cosine of two sketches, or of each row of a table [n, 512] and a sketch."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    sizes = np.einsum("...i,...i->...", a, a) * (b @ b)
    out: Array = a @ b / np.sqrt(np.maximum(sizes, canonical.TINY))
    return out


def pcs(a: Weights, b: Weights) -> float | None:
    """The cosine of two models' parameters, over matrices with the same role, layer and shape; None if there are
    none."""
    pairs = _matched_matrices(a, b)
    first = next(pairs, None)
    return None if first is None else _cosine(chain([first], pairs))


def _matched_matrices(a: Weights, b: Weights) -> Iterator[tuple[Array, Array]]:
    for role, layer in a.views:
        if (role, layer) in b.views and len(a.store.tensors[a.views[role, layer].tensor].shape) >= 2:
            one, other = a.tensor(role, layer), b.tensor(role, layer)
            if one.shape == other.shape and one.ndim == 2:
                yield one, other
