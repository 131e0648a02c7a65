"""Pairs value channels of attention in two models by what they read from the residual stream and by what they write to
it.

A value channel reads by a row of W_V and writes by its column of W_O, added up over the query heads that share it.
Within a head every order of the channels computes the same, so training gives none a place of its own: models that
share an embedding, or learned from the same data, have no reason to pair them alike. Scores of queries and keys do rise
then, because the inputs agree. Attention is named as shared only if this test finds it.

`comparison.py` decides on which layers T5 runs, and compares all heads together only if T4 calls the models related.
`evidence.py` makes the p-value.
"""

from __future__ import annotations

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.neurons import Frame, Neurons, alive, unit
from fathom.lineage.weights import Weights


def has_values(weights: Weights, index: int) -> bool:
    """Whether a checkpoint has the value and output matrices of a layer's attention."""
    return weights.has("v", index) and weights.has("o", index)


STORED, HEADS, LAYER = range(3)
"""How the channels of a layer are taken: as they are stored, as the singular directions of each head, or as those of
all heads together. A change of basis within a head does not change the second; splitting or mixing heads, the third.
The third is all but given by what the layer computes, so a student that learns hidden states has it too, and it names
attention only between models that T4 calls related."""
WIDEST = 1536  # most channels of a layer whose singular directions are found together


def bases(*models: Weights) -> list[int]:
    """The bases in which value channels are compared: as stored, singular vectors of each head, and in small models
    singular vectors of a whole layer."""
    sizes = [min(g.width, (g.heads if g.latent else g.kv_heads) * g.head_dim) for g in (w.geometry for w in models)]
    return [STORED, HEADS, LAYER] if max(sizes) <= WIDEST else [STORED, HEADS]


def in_frame(weights: Weights, index: int, frame: Frame, basis: int = STORED) -> Neurons:
    """The value channels of one layer in a frame; channels without effect are removed.

    Args:
        weights: A model.
        index: The layer.
        frame: The coordinates.
        basis: One of those above.
    """
    g = weights.geometry
    layer = canonical.fold(weights.layer(index, canonical.VO_ROLES), g)
    read, write = layer["v"], np.ascontiguousarray(canonical.by_kv_head(layer["o"], g).T)  # [KV heads · D, d]
    if inside := frame.name == "blind":  # what is outside of this frame is empty, and can be read in any way
        read, write = frame.of(read), frame.of(write)
    if basis != STORED:
        heads = 1 if basis == LAYER else g.heads if g.latent else g.kv_heads
        read, write = (side.reshape(heads, -1, side.shape[1]) for side in (read, write))
        read, write = _singular(read, write)
    if not inside:
        read, write = frame.of(read), frame.of(write)
    kept = alive(np.linalg.norm(read, axis=1) * np.linalg.norm(write, axis=1))
    return unit(read[kept], write[kept], frame)


def _singular(read: Array, write: Array) -> tuple[Array, Array]:
    """The singular vectors of Σ o vᵀ of each head, as input and output rows [heads · D, d]; the output rows are scaled
    by the singular values."""
    (q, r), (p, t) = (np.linalg.qr(side.swapaxes(1, 2)) for side in (write, read))  # [heads, d, D], [heads, D, D]
    left, size, right = np.linalg.svd(r @ t.swapaxes(1, 2))
    written = (q @ left * size[:, None]).swapaxes(1, 2)
    seen = (p @ right.swapaxes(1, 2)).swapaxes(1, 2)
    width = read.shape[-1]
    return np.ascontiguousarray(seen.reshape(-1, width)), np.ascontiguousarray(written.reshape(-1, width))


def chance(weights: Weights) -> float:
    """The share of channels that unrelated models may pair by chance: the three strongest of each head, which training
    can make similar."""
    return 3 / max(weights.geometry.latent[2] if weights.geometry.latent else weights.geometry.head_dim, 2)
