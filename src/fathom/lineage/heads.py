"""Finds attention heads without effect on the output: zero heads, and duplicates that cancel each other. Their W_Q and
W_K can hold anything.

A head reads by W_qᵀ W_k and writes by W_o W_v. The outputs of heads that attend alike add up. If the sum is zero, the
model computes the same without these heads. Both products are compared through a few random directions.

`awm.py` leaves these heads out of the repaired scores (`read_qk`), if `comparison.py` finds that they lower the scores
(`_living`).
"""

from __future__ import annotations

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.weights import Weights

DIRECTIONS = 16
CLOSE = 1e-3  # heads attend alike if the products differ by less, relative to their size
DEAD = 1e-4  # relative to the median head's effect


def living(weights: Weights, index: int) -> Array | None:
    """Which query heads of a layer affect its output, [heads]; None if this is unknown."""
    g = weights.geometry
    if g.latent or not (weights.has("v", index) and weights.has("o", index)):
        return None
    layer = weights.layer(index, (*canonical.QK_ROLES, *canonical.VO_ROLES[:2], "post_attn_norm"))
    layer = canonical.balance_qk(canonical.fold(layer, g), g)
    draw = np.random.default_rng(0)
    left, right = draw.normal(size=(2, g.width, DIRECTIONS)).astype(layer["q"].dtype)
    values = layer["v"].shape[0] // g.kv_heads
    keys = (layer["k"] @ right).reshape(g.kv_heads, 1, g.head_dim, DIRECTIONS)
    queries = (layer["q"] @ left).reshape(g.kv_heads, g.group, g.head_dim, DIRECTIONS)
    read = np.einsum("kgdi,kodj->kgij", queries, keys).reshape(g.heads, -1)
    seen = (layer["v"] @ left).reshape(g.kv_heads, values, DIRECTIONS)
    told = (right.T @ layer["o"]).reshape(DIRECTIONS, g.kv_heads, g.group, values)
    written = np.einsum("ikgv,kvj->kgij", told, seen).reshape(g.heads, -1)
    duplicates = _duplicates(read)
    effect = np.linalg.norm(duplicates @ written, axis=1)
    alive = effect > 0
    if alive.any():
        alive = effect > DEAD * float(np.median(effect[alive]))
    return alive if alive.any() else None


def _duplicates(read: Array) -> Array:
    """A 0/1 matrix [heads, heads] of which heads have the same attention scores; each head matches itself."""
    read = read.astype(np.float64)  # differences of squares lose precision in float32
    squares = np.einsum("ij,ij->i", read, read)
    apart = squares[:, None] + squares - 2 * (read @ read.T)
    near: Array = apart <= CLOSE**2 * np.maximum(squares[:, None], squares)
    np.fill_diagonal(near, True)
    return near.astype(read.dtype)
