"""The blind frame: the rotation between two residual streams from their layers alone, without embedding or tokenizer.

A layer computes two maps of the stream, [d, d]. An edit that keeps the function can only rotate them:

    VO = Σ_h O_h V_h                                attention on a text of one token
    FF = Σ_j d_j (a_j u_j + b_j (u_jᵀ g_j) g_j)ᵀ    the mean Jacobian of the feed-forward for x ~ N(0, 1),
                                                    a = E silu(s z), b = E silu''(s z), s = ‖g_j‖

Neurons that are split, cancelled or never fire drop out of the sums. From a few layers each model gets eigenvectors
of Σ (C Cᵀ + φ Cᵀ C + ½(C + Cᵀ)). Signs come from the products in those bases, and the rotation R between the bases is
then improved by R ← polar(Σ C_A R C_Bᵀ + C_Aᵀ R C_B). Neurons are paired only in layers that this fit never saw, by
gate and by up apart. R is known up to its sign, so both are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import awm, canonical, values
from fathom.lineage.neurons import EXPERTS, Frame
from fathom.lineage.weights import Told, Weights

FIT, HELD = 6, 3  # most layers for the fit, and for the test
WIDEST = 1024  # eigenvectors that are used
LEADING = 128  # eigenvectors that are aligned first
STEPS, WIDE_STEPS = 100, 30  # of the leading ones, which are cheap, and of all
SETTLED = 1e-4
GOLDEN = 0.618
NODES, WEIGHTS_OF_NODES = np.polynomial.hermite_e.hermegauss(64)
TURN = 1e-3  # two maps of layers that differ by less have the same invariants
Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Basis:
    """Eigenvectors of one model's layers, [d, K], and the maps of those layers in them, [n, K, K]."""

    vectors: Array
    maps: Array


def usable(weights: Weights) -> list[int]:
    """Layers with values, outputs and feed-forward weights."""
    return [i for i in range(weights.geometry.layers) if values.has_values(weights, i) and weights.has("down", i)]


def split(pairs: Pairs, nonce: int) -> tuple[Pairs, Pairs]:
    """Pairs of layers for the fit and for the test, drawn by the nonce; none is in both."""
    held = min(HELD, max(1, len(pairs) // 3))
    drawn = [pairs[at] for at in np.random.default_rng(nonce).permutation(len(pairs))[: held + FIT]]
    return sorted(drawn[held:]), sorted(drawn[:held])


def layer_pairs(a: Weights, b: Weights, progress: Told = lambda _: None) -> Pairs:
    """Which layers to compare: by number at equal depth, else by what no rotation changes, in order."""
    layers = usable(a), usable(b)
    if a.geometry.layers == b.geometry.layers:
        return [(i, i) for i in layers[0] if i in layers[1]]
    marks = [np.array([_invariants(w, i, progress) for i in some]) for w, some in zip((a, b), layers, strict=True)]
    if not all(len(some) for some in marks):
        return []
    spread = np.maximum(np.concatenate(marks).std(0), canonical.TINY)
    apart = np.square((marks[0][:, None] - marks[1]) / spread).mean(-1)  # [layers of A, layers of B]
    return [(layers[0][i], layers[1][j]) for i, j in awm.monotone(np.exp(-apart / TURN) + 1e-3 * np.exp(-apart))]


def _invariants(weights: Weights, index: int, progress: Told) -> Array:
    """Traces of the maps of a layer that no rotation changes."""
    progress(f"layers without a tokenizer: layer {index + 1} of {weights.name}")
    out = []
    for one in maps(weights, index):
        twice, square = one @ one, one.T @ one
        out += [np.trace(one), np.trace(twice), np.vdot(one.T, twice), np.vdot(square, square), np.vdot(twice, twice)]
    return np.array(out, np.float64)


def maps(weights: Weights, index: int) -> tuple[Array, Array]:
    """VO and FF of one layer, [d, d], each of unit size."""
    vo, ff = _attention(weights, index), _feed_forward(weights, index)
    return vo / max(float(np.linalg.norm(vo)), canonical.TINY), ff / max(float(np.linalg.norm(ff)), canonical.TINY)


def _attention(weights: Weights, index: int) -> Array:
    g = weights.geometry
    layer = canonical.fold(weights.layer(index, canonical.VO_ROLES), g)
    out: Array = canonical.by_kv_head(awm.bounded(layer["o"]), g) @ awm.bounded(layer["v"])
    return out.astype(np.float32)


def _feed_forward(weights: Weights, index: int) -> Array:
    """The mean Jacobian, summed over the first experts."""
    g = weights.geometry
    norms = weights.layer(index, ("ffn_norm", "post_ffn_norm"))
    total = np.zeros((g.width, g.width), np.float32)
    roles = ("gate", "up", "down") if g.gated else ("up", "down")
    for expert in range(min(weights.experts(index), EXPERTS)):
        layer = canonical.fold(norms | {r: weights.tensor(r, index, None, expert) for r in roles}, g)
        read = _mean_reader(layer["gate"], layer["up"]) if g.gated else awm.bounded(layer["up"])
        total += (awm.bounded(layer["down"]) @ read).astype(np.float32)
    return total


def _mean_reader(gate: Array, up: Array) -> Array:
    """a_j u_j + b_j (u_jᵀ g_j) g_j, [m, d]."""
    size = np.sqrt(np.einsum("ij,ij->i", gate, gate)).astype(np.float64)
    x = np.clip(size, 0, 1e3)[:, None] * NODES  # [m, nodes]
    s = 1 / (1 + np.exp(-np.clip(x, -500, 500)))
    chance = WEIGHTS_OF_NODES / WEIGHTS_OF_NODES.sum()
    mean = (x * s) @ chance
    bend = (s * (1 - s) * (2 + x * (1 - 2 * s))) @ chance
    along = bend * np.einsum("ij,ij->i", up, gate)
    return up * mean[:, None].astype(up.dtype) + gate * along[:, None].astype(up.dtype)


def basis(weights: Weights, layers: Sequence[int], most: int) -> Basis:
    """The eigenvectors of some layers, those of the largest |eigenvalue| first, and the layers' maps in them."""
    key = f"blind {list(layers)} {most}"
    if key not in weights.memo:
        found = [one for index in layers for one in maps(weights, index)]
        total = sum(c @ c.T + np.float32(GOLDEN) * (c.T @ c) + np.float32(0.5) * (c + c.T) for c in found)
        size, vectors = np.linalg.eigh(np.asarray(total, np.float64))
        vectors = vectors[:, np.argsort(-np.abs(size), kind="stable")[:most]].astype(np.float32)
        weights.memo[key] = Basis(vectors, np.stack([vectors.T @ c @ vectors for c in found]))
    out: Basis = weights.memo[key]
    return out


def rotation(a: Basis, b: Basis) -> Array:
    """R [K, K] with C_A R ≈ R C_B, up to its sign."""
    agreement = np.einsum("nij,nij->ij", a.maps, b.maps)
    first = np.linalg.eigh(agreement + agreement.T)[1][:, -1]
    found = np.diag(np.where(first < 0, -1.0, 1.0)).astype(np.float32)
    few = slice(0, LEADING)
    found[few, few] = _improved(found[few, few], a.maps[:, few, few], b.maps[:, few, few], STEPS)
    return found if len(found) <= LEADING else _improved(found, a.maps, b.maps, WIDE_STEPS)


def _improved(found: Array, a: Array, b: Array, steps: int) -> Array:
    """R ← polar(Σ C_A R C_Bᵀ + C_Aᵀ R C_B), until it settles. Models that drifted far need many steps."""
    for _ in range(steps):
        pull = sum(x @ found @ y.T + x.T @ found @ y for x, y in zip(a, b, strict=True))
        u, _, vt = np.linalg.svd(pull)
        step = float(np.linalg.norm(u @ vt - found)) / np.sqrt(len(found))
        found = u @ vt
        if step < SETTLED:
            break
    return found


def frames(a: Weights, b: Weights, fit: Pairs) -> list[tuple[Frame, Frame]]:
    """The shared frame from the layers of the fit, with either sign of the rotation."""
    most = min(a.geometry.width, b.geometry.width, WIDEST)
    sides = [basis(w, [pair[side] for pair in fit], most) for side, w in enumerate((a, b))]
    turned = sides[0].vectors @ rotation(*sides)
    own = Frame("blind", sides[1].vectors)
    return [(Frame("blind", turned), own), (Frame("blind", -turned), own)]
