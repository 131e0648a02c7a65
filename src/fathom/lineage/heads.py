"""Attention heads without effect: zero ones, and twins that cancel. They can fill W_Q and W_K with anything.

A head reads by W_qᵀ W_k and writes by W_o W_v. Heads that attend alike add up what they write; where the sum is zero,
the model computes the same without them. Both products are compared through a few random directions.
"""

from __future__ import annotations

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.weights import Weights

DIRECTIONS = 16
TWIN = 1e-3  # heads attend alike where the products differ by less, relative to their size
DEAD = 1e-4  # of the median head's effect


def living(weights: Weights, index: int) -> Array | None:
    """Which query heads of a layer have an effect, [heads]; None where that cannot be said."""
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
    twins = _twins(read)
    effect = np.linalg.norm(twins @ written, axis=1)
    alive = effect > 0
    if alive.any():
        alive = effect > DEAD * float(np.median(effect[alive]))
    return alive if alive.any() else None


def _twins(read: Array) -> Array:
    """Which heads attend alike, [heads, heads], each with itself."""
    read = read.astype(np.float64)  # differences of squares lose what float32 has
    squares = np.einsum("ij,ij->i", read, read)
    apart = squares[:, None] + squares - 2 * (read @ read.T)
    near: Array = apart <= TWIN**2 * np.maximum(squares[:, None], squares)
    np.fill_diagonal(near, True)
    return near.astype(read.dtype)
