"""Value channels of attention in two models, paired by what they read and by what they write.

A value channel reads by a row of W_V and writes by its column of W_O, added up over the query heads that share it.
Within a head every order of the channels computes the same, so training gives none a place of its own: models that
share an embedding, or learned from the same data, have no reason to pair them alike. Scores of queries and keys do rise
then, because the inputs agree. Attention is named as shared only if this test finds it.
"""

from __future__ import annotations

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.neurons import Frame, Neurons, alive, unit
from fathom.lineage.weights import Weights


def has_values(weights: Weights, index: int) -> bool:
    """Whether a layer stores values and outputs."""
    return weights.has("v", index) and weights.has("o", index)


def in_frame(weights: Weights, index: int, frame: Frame, turned: bool = False) -> Neurons:
    """The value channels of one layer; those without effect are removed.

    Args:
        weights: A model.
        index: The layer.
        frame: The coordinates.
        turned: Whether each head is brought to its singular directions, which any change of its basis leaves alone.
    """
    g = weights.geometry
    layer = canonical.fold(weights.layer(index, canonical.VO_ROLES), g)
    read, write = layer["v"], np.ascontiguousarray(canonical.by_kv_head(layer["o"], g).T)  # [KV heads · D, d]
    if turned:
        heads = g.heads if g.latent else g.kv_heads
        read, write = _singular(read.reshape(heads, -1, g.width), write.reshape(heads, -1, g.width))
    read, write = frame.of(read), frame.of(write)
    kept = alive(np.linalg.norm(read, axis=1) * np.linalg.norm(write, axis=1))
    return unit(read[kept], write[kept], frame)


def _singular(read: Array, write: Array) -> tuple[Array, Array]:
    """The singular vectors of Σ o vᵀ of each head, [heads, D, d] to [heads · D, d]; sizes are in the outputs."""
    (q, r), (p, t) = (np.linalg.qr(side.swapaxes(1, 2)) for side in (write, read))  # [heads, d, D], [heads, D, D]
    left, size, right = np.linalg.svd(r @ t.swapaxes(1, 2))
    written = (q @ left * size[:, None]).swapaxes(1, 2)
    seen = (p @ right.swapaxes(1, 2)).swapaxes(1, 2)
    width = read.shape[-1]
    return np.ascontiguousarray(seen.reshape(-1, width)), np.ascontiguousarray(written.reshape(-1, width))


def chance(weights: Weights) -> float:
    """The share of channels that strangers may pair alike: the strongest three of each head may be learned alike."""
    return 3 / max(weights.geometry.latent[2] if weights.geometry.latent else weights.geometry.head_dim, 2)
