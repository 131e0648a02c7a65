"""The canonical form: remove every degree of freedom that leaves a model's function unchanged, before a comparison.

A layer is a dict of arrays by role. Each step returns a new one:

    fold         gains go into the readers that follow them (γ = 1 afterwards)
    balance_qk   one scale per rotary plane; one matrix per head where there is no rotary; q/k-norm gains

The order matters. On pre-norm models both steps keep the logits. Steps act on the roles that are present, so a caller
that needs only q and k reads only q and k. The other gauges need no step: values and outputs are compared by their
product, neurons by rows of unit length, and the scale of a matrix drops out of every score.

`inherited.py` forms the products that no gauge affects, such as W_qᵀ W_k. `neurons.py` merges neurons of one gate, and
drops those without effect; `heads.py` finds heads without effect. Each score divides by the norm of what it compares
(`Kernel.cosine` in `awm.py`, `measured` in `inherited.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage.weights import Geometry, Layer, Weights

READERS = {"attn_norm": ("q", "k", "v"), "ffn_norm": ("gate", "up")}
WRITERS = {"o": "post_attn_norm", "down": "post_ffn_norm"}
QK_ROLES = ("q", "k", "attn_norm", "q_norm", "k_norm")
VO_ROLES = ("v", "o", "attn_norm", "post_attn_norm")
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
TINY = 1e-35  # in float32 too: a divisor that replaces zero must not itself round to zero


def fold(layer: Layer, geometry: Geometry) -> Layer:
    """Fold norms into weights: W_in ← W_in diag(γ); with LayerNorm also b ← b + W_in β, and reading and writing
    matrices are centred over channels."""
    out = dict(layer)
    for norm, roles in READERS.items():
        for role in (role for role in roles if role in out):
            if norm in out:
                _fold_reader(out, role, out[norm], out.get(f"{norm}_bias"))
            if geometry.norm == "layer":
                out[role] = out[role] - out[role].mean(1, keepdims=True)
    for role, norm in WRITERS.items():
        if role not in out:
            continue
        if norm in out:  # the gain follows the writer: exact only as the *effective* writer
            out[role] = out[role] * out[norm][:, None]
        if geometry.norm == "layer":
            for name in (n for n in (role, f"{role}_bias") if n in out):
                out[name] = out[name] - out[name].mean(0, keepdims=True)
    return {
        name: value for name, value in out.items() if name.removesuffix("_bias") not in {*READERS, *WRITERS.values()}
    }


def _fold_reader(out: Layer, role: str, gain: Array, shift: Array | None) -> None:
    if shift is not None:
        moved = out[role] @ shift
        out[f"{role}_bias"] = out[f"{role}_bias"] + moved if f"{role}_bias" in out else moved
    out[role] = out[role] * gain


@dataclass(frozen=True)
class Block:
    """Row indices of queries and keys that meet in one dot product: `query` is [heads sharing the keys, m], `key` is
    [m]."""

    query: Array
    key: Array
    rotary: bool


def blocks(geometry: Geometry) -> Iterator[Block]:
    """The dot products of attention, divided into blocks with the same freedom to rescale or rotate q against k."""
    g = geometry
    if g.latent is not None:
        plain, rotary, _, _ = g.latent
        query: Array = np.arange(g.heads * g.head_dim).reshape(g.heads, g.head_dim)
        for head in range(g.heads):
            yield Block(query[head : head + 1, :plain], np.arange(plain) + head * plain, False)
        yield Block(query[:, plain:], np.arange(rotary) + g.heads * plain, True)
        return
    query = np.arange(g.heads * g.head_dim).reshape(g.kv_heads, g.group, g.head_dim)
    key = np.arange(g.kv_heads * g.head_dim).reshape(g.kv_heads, g.head_dim)
    for head in range(g.kv_heads):
        if g.rotary_dim:
            yield Block(query[head, :, : g.rotary_dim], key[head, : g.rotary_dim], True)
        if g.rotary_dim < g.head_dim:
            yield Block(query[head, :, g.rotary_dim :], key[head, g.rotary_dim :], False)


def product_qk(q: Array, k: Array, geometry: Geometry) -> Array:
    """The product of responses of query rows [n, heads·D] and key rows [n, KV heads·D], [n, n]."""
    out = np.zeros((len(q), len(q)), q.dtype)
    for block in blocks(geometry):  # query heads that share a key add up before the product
        out += q[:, block.query].sum(1) @ k[:, block.key].T
    return out


def by_kv_head(o: Array, geometry: Geometry) -> Array:
    """The responses of W_o's columns [n, heads·D], summed over the query heads that share a value head."""
    kv_heads = geometry.heads if geometry.latent else geometry.kv_heads
    out: Array = o.reshape(len(o), kv_heads, geometry.heads // kv_heads, -1).sum(2)
    return out.reshape(len(o), -1)


def planes(m: int, rotary: str) -> Array:
    """The two coordinates of each rotary plane, [m/2, 2]: (i, i + m/2), or (2i, 2i + 1) where interleaved."""
    index = np.arange(m)
    return index.reshape(-1, 2) if rotary == "interleaved" else index.reshape(2, -1).T


def balance_qk(layer: Layer, geometry: Geometry) -> Layer:
    """Fix the scale of every query against its keys."""
    if geometry.late_norm:
        return _one_scale_a_head(layer, geometry)
    if geometry.qk_norm:
        return _balance_normed(layer, geometry) if "q_norm" in layer else dict(layer)
    out = {name: value.copy() if name in {"q", "k", "q_bias", "k_bias"} else value for name, value in layer.items()}
    for block in blocks(geometry):
        if block.rotary:
            _balance_planes(out, block, geometry.rotary)
        else:
            _balance_general(out, block)
    return out


def _balance_planes(out: Layer, block: Block, rotary: str) -> None:
    """Balance q and k in each rotary plane: q ← q/a and k ← k a with a = √(rms over heads ‖q‖ / ‖k‖)."""
    m = len(block.key)
    plane = planes(m, rotary)
    q = np.stack([_row_squares(out["q"], rows) for rows in block.query])[:, plane].sum(-1).mean(0)  # [planes]
    k = _row_squares(out["k"], block.key)[plane].sum(-1)
    dead = (q <= TINY) | (k <= TINY)
    scale = np.empty(m, out["q"].dtype)
    scale[plane] = np.where(dead, 1, np.where(dead, 1, q) / np.where(dead, 1, k))[:, None] ** 0.25
    for suffix in ("", "_bias"):
        tall = (slice(None), None) if suffix == "" else slice(None)
        if "q" + suffix in out:
            out["q" + suffix][block.query] /= scale[tall]
        if "k" + suffix in out:
            out["k" + suffix][block.key] *= scale[tall]


def _row_squares(matrix: Array, rows: Array) -> Array:
    part = matrix[rows]
    return np.einsum("ij,ij->i", part, part)


def _balance_general(out: Layer, block: Block) -> None:
    """Balance the unrotated part of q and k, which is free up to GL(m): make Σ_h q_h q_hᵀ/g and k kᵀ equal, so only a
    rotation stays free."""
    q, k = out["q"][block.query].astype(np.float64), out["k"][block.key].astype(np.float64)
    a = balancing(np.einsum("hid,hjd->ij", q, q) / len(q), k @ k.T)
    a_inverse = np.linalg.inv(a)
    out["q"][block.query] = a_inverse @ out["q"][block.query]  # [heads, m, d]
    out["k"][block.key] = a @ out["k"][block.key]
    if "q_bias" in out:
        out["q_bias"][block.query] = out["q_bias"][block.query] @ a_inverse
    if "k_bias" in out:
        out["k_bias"][block.key] = a @ out["k_bias"][block.key]


def balancing(p: Array, k: Array) -> Array:
    """Symmetric A with A⁻¹ P A⁻¹ = A K A: the square root of the geometric mean of P and K⁻¹."""
    root, inverse_root = _root(k)
    middle, _ = _root(root @ p @ root)
    return _root(inverse_root @ middle @ inverse_root)[0]


def _root(matrix: Array) -> tuple[Array, Array]:
    """Square root of a positive matrix and its inverse; directions that carry nothing are floored."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    values = np.sqrt(np.maximum(values, max(float(values.max()), TINY) * 1e-12))
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T


def _balance_normed(layer: Layer, geometry: Geometry) -> Layer:
    """Balance a layer with q/k-norm: heads lose their scale, and the norm gains are balanced between q and k and folded
    into the rows.

    Balanced per rotary plane; a coordinate that is not rotated by itself.
    """
    g, out = geometry, dict(layer)
    gain_q, gain_k = out.pop("q_norm"), out.pop("k_norm")
    shared = gain_q.size == g.head_dim
    heads_q = gain_q.reshape(1 if shared else g.heads, g.head_dim)
    heads_k = gain_k.reshape(1 if shared else g.kv_heads, g.head_dim)
    partner = np.arange(g.head_dim)  # the other coordinate of the plane; of one that is not rotated, itself
    plane = planes(g.rotary_dim, g.rotary)
    partner[plane] = plane[:, ::-1]
    # γ² for each coordinate, [KV heads or 1, D]; groups of query heads share one value
    square_q = np.square(heads_q).reshape(len(heads_k), -1, g.head_dim).mean(1)
    square_k = np.square(heads_k)
    norm_q, norm_k = square_q + square_q[:, partner], square_k + square_k[:, partner]
    b = (np.maximum(norm_q, TINY) / np.maximum(norm_k, TINY)) ** 0.25
    b_q = b if shared else np.repeat(b, g.group, 0)
    for role, gain, heads in (("q", heads_q / b_q, g.heads), ("k", heads_k * b, g.kv_heads)):
        rows = out[role].reshape(heads, g.head_dim, -1)
        axes = (1, 2) if shared else (0, 1, 2)
        norm = np.sqrt(np.square(rows).sum(axes, keepdims=True))
        out[role] = (rows / np.maximum(norm, TINY) * gain[:, :, None]).reshape(out[role].shape)
    return out


def _one_scale_a_head(layer: Layer, geometry: Geometry) -> Layer:
    """Remove the scale of each head of q and k, for models that norm heads after the rotation."""
    out = dict(layer)
    for role, heads in (("q", geometry.heads), ("k", geometry.kv_heads)):
        rows = out[role].reshape(heads, -1)
        size = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), TINY)
        out[role] = (rows / size).reshape(out[role].shape)
    return out


def embedding(weights: Weights, rows: Array | slice | None = None) -> Array:
    """Embedding rows in canonical form, as they enter the residual stream: centred if the model uses LayerNorm, and not
    multiplied by a norm's gain."""
    table = weights.tensor("embed", rows=rows)
    return table - table.mean(1, keepdims=True) if weights.geometry.norm == "layer" else table


def head(weights: Weights, rows: Array | slice | None = None) -> Array:
    """Output head rows with the final gain folded in; a tied head is E diag(γ)."""
    table = weights.tensor("embed" if weights.geometry.tied else "head", rows=rows)
    table = table * weights.tensor("final_norm") if weights.has("final_norm") else table
    return table - table.mean(1, keepdims=True) if weights.geometry.norm == "layer" else table
