"""Plane words: numbers that describe what attention does in each rotary plane, independent of tokenizer, rotation and
order of heads.

Rotary planes have a name that no edit can change, their frequency. For plane i of layer l, with C a map of a reference
layer (`blind`) and S the mean outer product of the embedding's unit rows,

    word = Σ_h tr(C O_h V_h S K†_{h,i} Q_{h,i})    K†Q: real part k₁q₁ + k₂q₂, imaginary part k₂q₁ - k₁q₂

Every product joins a reader to a writer, so a word survives rotations of the stream, changes of basis in heads, silent
and split heads, neurons that cancel and channels that stay empty. The words of a plane are scaled, made a unit vector,
and freed of what is quadratic in i. For neighbouring planes 2k and 2k + 1 of two models

    D_k = (a_2k - a_2k+1) · (b_2k - b_2k+1)

If two trainings have nothing to do with each other, swapping two neighbours in one of them changes nothing systematic,
so each D_k is positive with probability one half. The count of positive ones is taken as normal with 1.25 times the
binomial's variance, because the planes of a layer are not quite independent. This is an assumption about neighbours,
and it is measured (`benchmarks/lineage/planes.py`). A student that learns hidden states copies functions, and passes.

`canonical.py` balances queries and keys within a plane. `evidence.py` makes T6's p-value. `verdict.py` calls a pair
inconclusive if T6 alone finds it related. `comparison.py` refuses a control that T6 alone finds related (`_relation`),
and reports planes that agree too seldom (`_opposed`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import awm, blind, canonical
from fathom.lineage.awm import unit_rows
from fathom.lineage.weights import Weights

LAYERS, REFERENCES = 12, 4  # most layers, and layers whose maps they are measured by
WIDE, WIDE_LAYERS, WIDE_REFERENCES = 1024, 4, 2  # the same above so many channels, because products cost width³
ROWS = 16384  # embedding rows, drawn, that S is taken from
FEWEST = 8  # pairs of neighbouring planes


def comparable(a: Weights, b: Weights) -> bool:
    """Whether the rotary planes of two models can be compared: rotary attention of the same size, in the same number of
    layers."""
    one, other = a.geometry, b.geometry
    alike = one.rotary_dim == other.rotary_dim and one.layers == other.layers
    usable = blind.usable(a), blind.usable(b)
    known = one.latent is None and other.latent is None and usable[0] == usable[1] and len(usable[0]) > 1
    return alike and known and len(usable[0]) * (one.rotary_dim // 4) >= FEWEST


def drawn(a: Weights, b: Weights, nonce: int) -> tuple[list[int], list[int]]:
    """The layers whose words are computed, and the reference layers whose maps enter these words; both are drawn by the
    nonce."""
    wide = max(a.geometry.width, b.geometry.width) > WIDE
    every, draw = blind.usable(a), np.random.default_rng([nonce, 6])
    sizes = (WIDE_LAYERS, WIDE_REFERENCES) if wide else (LAYERS, REFERENCES)
    first, second = (sorted(draw.permutation(every)[:size].tolist()) for size in sizes)
    return first, second


def words(weights: Weights, layers: Sequence[int], references: Sequence[int]) -> Array:
    """The words (rotation-invariant numbers) of every rotary plane, [layers, planes, words]."""
    key = f"planes {list(layers)} {list(references)}"
    if key not in weights.memo:
        maps = [blind.layer_map(weights, kind, i) for i in references for kind in (blind.ATTENTION, blind.FEED_FORWARD)]
        second = _second_moment(weights)
        weights.memo[key] = np.stack([_of_layer(weights, i, maps, second) for i in layers])
    out: Array = weights.memo[key]
    return out


def _second_moment(weights: Weights) -> Array:
    """The matrix S: the mean outer product of unit embedding rows, [d, d]."""
    rows = np.arange(weights.geometry.vocab)
    if len(rows) > ROWS:
        rows = np.sort(np.random.default_rng(0).choice(rows, ROWS, replace=False))
    table = unit_rows(canonical.embedding(weights, rows))
    out: Array = table.T @ table / len(table)
    return out


def _of_layer(weights: Weights, index: int, maps: Sequence[Array], second: Array) -> Array:
    g = weights.geometry
    layer = canonical.fold(weights.layer(index, (*canonical.QK_ROLES, *canonical.VO_ROLES[:2], "post_attn_norm")), g)
    layer = {role: awm.bounded(value) for role, value in canonical.balance_qk(layer, g).items()}
    seen = (layer["v"] @ second).reshape(g.kv_heads, -1, g.width)  # V S
    keys = layer["k"].reshape(g.kv_heads, g.head_dim, g.width)
    inner = np.repeat(seen @ keys.swapaxes(1, 2), g.group, 0)  # V S Kᵀ, [H, D_v, D]
    outputs = layer["o"].reshape(g.width, g.heads, -1).transpose(1, 0, 2)  # [H, d, D_v]
    first, other = canonical.planes(g.rotary_dim, g.rotary).T
    out = []
    for one in maps:
        queries = (layer["q"] @ one).reshape(g.heads, g.head_dim, g.width)
        found = np.einsum("hij,hjk->ik", queries @ outputs, inner)  # Σ_h Q C O V S Kᵀ, [D, D]
        out += [found[first, first] + found[other, other], found[first, other] - found[other, first]]
    return np.stack(out, -1)  # [planes, words]


def agreements(a: Array, b: Array) -> tuple[int, int]:
    """For how many pairs of neighbouring planes the difference of words points the same way in both models, and the
    number of pairs."""
    one, other = (_steps(found) for found in (a, b))
    together = np.einsum("lkc,lkc->lk", one, other)
    return int((together > 0).sum()), together.size


def _steps(found: Array) -> Array:
    """The differences of words between planes 2k and 2k + 1, [layers, planes / 2, words]."""
    found = found / np.maximum(np.abs(found).mean((0, 1)), canonical.TINY)
    found = found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), canonical.TINY)
    planes = found.shape[1]
    curve = np.linalg.qr(np.vander(np.linspace(-1, 1, planes), 3))[0].astype(found.dtype)  # 1, i, i²
    found = found - np.einsum("ij,kj,lkc->lic", curve, curve, found)
    even = found[:, : planes - planes % 2].reshape(len(found), -1, 2, found.shape[-1])
    out: Array = even[:, :, 0] - even[:, :, 1]
    return out
