"""Deterministic starts: finds weights that were initialised from a formula instead of random numbers.

Two strangers that begin from the identity, a Hadamard matrix or sinusoids are alike without any relation, and the tests
assume random starts. A formula shows inside one model, and a rotation of the residual stream does not hide it:

    feed-forward  a neuron's gate and up rows (up and output rows, without a gate) begin equal
    attention     the rows of keys and values begin equal
    embedding     rows follow a law of their number, so their spectrum over row numbers has lines

A matrix also resembles its formula: z = |⟨W, P⟩| √(m n) / (‖W‖ ‖P‖), for P the identity or Sylvester's Hadamard matrix,
is about 1 by chance. A rotation hides that.

`comparison.py` marks the tests of weights as void if both models start them from a formula (`_without_formulas`). If
the verdict is then "inconclusive", `verdict.py` names "a public deterministic start" as an explanation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.awm import chosen_layers, unit_rows
from fathom.lineage.weights import Weights

ROLES = {"feed-forward": ("gate", "up", "down"), "attention": ("q", "k", "v", "o")}
ROWS = 4096
LAYERS, CORNER = 4, 512
ALIKE, MANY = 0.9, 1 / 6  # so many corresponding rows with so high a |cosine|; training alone brings few above 0.8
TOGETHER = 0.3  # median |cosine| of key and value rows, which training does not bring together
RESEMBLING = 10.0  # median z of the matrices of a family
LINES, AROUND = 6.0, 12  # a line has so many times the median power of its neighbours, which are so many on each side


def found(weights: Weights) -> frozenset[str]:
    """The families of weights (embedding, attention, feed-forward) that a model initialises from a formula."""
    if "starts" not in weights.memo:
        chosen = chosen_layers(weights.geometry.layers, LAYERS)
        likeness = {
            "feed-forward": [_likeness(*_neuron_rows(weights, i)) for i in chosen if weights.has("down", i)],
            "attention": [_together(*_head_rows(weights, i)) for i in chosen if _has_head_rows(weights, i)],
        }
        kinds = {family for family, some in likeness.items() if some and float(np.median(some)) >= MANY}
        kinds |= {family for family, roles in ROLES.items() if _resemblance(weights, chosen, roles) >= RESEMBLING}
        weights.memo["starts"] = frozenset(kinds | ({"embedding"} if lines(weights) >= LINES else set()))
    out: frozenset[str] = weights.memo["starts"]
    return out


def _neuron_rows(weights: Weights, index: int) -> tuple[Array, Array]:
    roles = ("gate", "up") if weights.geometry.gated else ("up", "down")
    some = slice(0, ROWS) if weights.geometry.gated else None
    matrices = {role: weights.tensor(role, index, some) for role in roles}
    layer = canonical.fold(weights.layer(index, ("ffn_norm", "post_ffn_norm")) | matrices, weights.geometry)
    one, other = (layer[role] for role in roles)
    return one, other if weights.geometry.gated else other.T


def _has_head_rows(weights: Weights, index: int) -> bool:
    rows = not weights.geometry.latent and all(weights.has(role, index) for role in "kv")
    return rows and weights.tensor("k", index).shape == weights.tensor("v", index).shape


def _head_rows(weights: Weights, index: int) -> tuple[Array, Array]:
    return weights.tensor("k", index), weights.tensor("v", index)


def _together(one: Array, other: Array) -> float:
    """1 if corresponding rows are more parallel than training would make them, else 0."""
    return float(np.median(np.abs(np.einsum("ij,ij->i", unit_rows(one), unit_rows(other)))) >= TOGETHER)


def _resemblance(weights: Weights, layers: Sequence[int], roles: Sequence[str]) -> float:
    """The median z, over some layers' stored matrices, of their similarity to the formula that they resemble most."""
    known = [(role, i) for i in layers for role in roles if weights.has(role, i)]
    found = [weights.tensor(*place, slice(0, CORNER))[:, :CORNER] for place in known]
    tables = [np.abs([_z(matrix, make(*matrix.shape)) for matrix in found]) for make in (np.eye, _hadamard)]
    return float(max(np.median(z) for z in tables)) if found else 0.0


def _z(matrix: Array, formula: Array) -> float:
    size = float(np.linalg.norm(matrix)) * float(np.linalg.norm(formula))
    return float(np.vdot(matrix, formula)) * matrix.size**0.5 / max(size, canonical.TINY)


def _hadamard(rows: int, columns: int) -> Array:
    """A Hadamard matrix: entry (i, j) is (−1)ⁿ, where n is the number of bits set in both i and j."""
    shared = np.arange(rows)[:, None] & np.arange(columns)
    for step in (8, 4, 2, 1):  # parity of the bits
        shared ^= shared >> step
    return (1 - 2 * (shared & 1)).astype(np.float32)


def _likeness(one: Array, other: Array) -> float:
    """The share of corresponding rows that are parallel; zero rows do not count."""
    cosines = np.abs(np.einsum("ij,ij->i", unit_rows(one), unit_rows(other)))
    return float(np.mean(cosines[cosines > 0] > ALIKE)) if (cosines > 0).any() else 0.0


def lines(weights: Weights) -> float:
    """The embedding's spectrum over row numbers: the power of its sharpest peak relative to neighbouring
    frequencies."""
    rows = min(weights.geometry.vocab, ROWS)
    if rows < 8 * AROUND:
        return 0.0
    table = unit_rows(canonical.embedding(weights, slice(0, rows)))
    table -= table.mean(0)
    power = (np.abs(np.fft.rfft(table * np.hanning(rows)[:, None], axis=0)) ** 2).sum(1)[AROUND:]
    around = np.lib.stride_tricks.sliding_window_view(power, 2 * AROUND + 1)  # [frequencies, 2 · AROUND + 1]
    return float((around[:, AROUND] / np.maximum(np.median(around, 1), canonical.TINY)).max())
