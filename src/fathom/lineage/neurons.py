"""Feed-forward neurons of two models, paired by their inputs and by their outputs.

A neuron reads by its gate (or, without a gate, by its up row) and writes by its column of W_down. Both are seen in a
*frame*, coordinates that the two models share:

    order    the residual channels in their order
    tokens   the responses to strings that both tokenizers have
    axes     the principal axes of each model's own embedding, which need no tokenizer

Two neurons are a pair if each is the other's nearest, both by inputs and by outputs. Shared training data makes some
such pairs between unrelated models, so the test's rate is a tenth of the neurons, not one. Every frame survives neuron
permutations and scales; tokens and axes also survive rotations of the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.awm import CHUNK_ROWS, chunks, gathered, unit_rows
from fathom.lineage.evidence import PROBES, middle
from fathom.lineage.weights import Weights

FRAME = 1024  # coordinates of a frame
SAMPLE = 512  # maximum neurons of a layer for which a partner is searched
FEWEST_STRINGS = 64
EXPERTS = 8  # maximum experts of a layer
CLOSE = 1e-5
DEAD = 1e-6
KEY = 1e-3  # keys of duplicates differ by rounding only


@dataclass(frozen=True)
class Frame:
    """Coordinates of one model: a matrix [width, F] that brings its residual vectors into the shared ones."""

    name: str
    basis: Array
    centred: bool = False
    picked: Array | None = None  # the channels that the basis uses unchanged

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self.basis.shape[1] if self.picked is None else len(self.picked)

    def of(self, rows: Array) -> Array:
        """Residual vectors [n, width] in these coordinates [n, F]."""
        return rows @ self.basis if self.picked is None else rows[:, self.picked]


def order(width: int, seed: int) -> Frame:
    """The channels themselves; for very wide models a seeded sample."""
    picked = np.sort(np.random.default_rng(seed).choice(width, min(width, FRAME), replace=False))
    return Frame("order", np.zeros((width, 0), np.float32), picked=picked)


def tokens(probes: Array) -> Frame:
    """Responses to probe embeddings [n, width]."""
    return Frame("tokens", unit_rows(probes).T * math.sqrt(probes.shape[1]), centred=True)


def frames(a: Weights, b: Weights, rows: tuple[Array, Array], seed: int, probes: int = PROBES) -> Frames:
    """The frames in which neurons of both models can be compared.

    Args:
        a: One model.
        b: The other.
        rows: Embedding rows of the same strings in both.
        seed: Seed of the sample of channels.
        probes: How many strings to take.
    """
    out: Frames = []
    if a.geometry.width == b.geometry.width:
        out.append((order(a.geometry.width, seed),) * 2)
    if len(rows[0]) >= FEWEST_STRINGS:
        left, right = middle(*rows, probes)
        out.append((tokens(gathered(a, left, canonical.embedding)), tokens(gathered(b, right, canonical.embedding))))
    return out


def axes(table: Callable[[], Iterator[Array]]) -> Frame:
    """Principal axes of an embedding in descending order; each points to its heavier tail. The order of rows does not
    matter.

    Args:
        table: Returns the embedding in blocks of rows; called several times.
    """
    rows, total, squares = 0, np.zeros(1), np.zeros((1, 1))
    for block in table():
        unit = unit_rows(block).astype(np.float64)
        rows, total, squares = rows + len(unit), total + unit.sum(0), squares + unit.T @ unit
    mean = total / rows
    vectors = np.linalg.eigh(squares / rows - np.outer(mean, mean))[1][:, ::-1]
    skew = np.sum([(((unit_rows(block) - mean) @ vectors) ** 3).sum(0) for block in table()], axis=0)
    vectors = vectors * np.where(skew < 0, -1.0, 1.0)
    return Frame("axes", np.ascontiguousarray(vectors, np.float32))


Frames = list[tuple[Frame, Frame]]


@dataclass(frozen=True)
class Neurons:
    """Neurons of one layer in a frame: unit rows [m, F]; duplicates are merged, neurons without effect removed."""

    read: Array
    write: Array

    def __len__(self) -> int:
        return len(self.read)


def in_frame(weights: Weights, index: int, frame: Frame) -> Neurons:
    """The neurons of one layer, of all experts (at most eight); matrices are streamed."""
    count = weights.experts(index)
    found = [
        _of_expert(weights, index, frame, expert)
        for expert in np.unique(np.linspace(0, count - 1, min(count, EXPERTS)).astype(int)).tolist()
    ]
    read, up, write = found[0] if len(found) == 1 else (np.concatenate([part[i] for part in found]) for i in range(3))
    del found
    return _merged(read, up, write, weights.geometry.gated, frame.centred)


def _of_expert(weights: Weights, index: int, frame: Frame, expert: int) -> tuple[Array, Array, Array]:
    norms = weights.layer(index, ("ffn_norm", "post_ffn_norm"))
    rows = {}
    for role in ("gate", "up") if weights.geometry.gated else ("up",):
        rows[role] = np.empty((weights.neurons(index), frame.size), np.float32)
        for block in chunks(weights.neurons(index), CHUNK_ROWS):
            piece = {role: weights.tensor(role, index, block, expert), **norms}
            rows[role][block] = frame.of(canonical.fold(piece, weights.geometry)[role])
    write = _written(weights, index, frame, expert, norms.get("post_ffn_norm"))
    return rows.get("gate", rows["up"]), rows["up"], write


def _written(weights: Weights, index: int, frame: Frame, expert: int, gain: Array | None) -> Array:
    """The output direction of every neuron, [m, F]."""
    centred = weights.geometry.norm == "layer"  # writers lose their mean over channels
    if frame.picked is not None and not centred:
        down = weights.tensor("down", index, frame.picked, expert)
        return np.ascontiguousarray((down if gain is None else down * gain[frame.picked, None]).T, np.float32)
    write = np.zeros((weights.neurons(index), frame.size), np.float32)
    sums = np.zeros(len(write), np.float32)
    for block in chunks(weights.geometry.width, CHUNK_ROWS):
        down = weights.tensor("down", index, block, expert)
        down = down if gain is None else down * gain[block, None]
        sums += down.sum(0)
        if frame.picked is not None:
            inside = (frame.picked >= block.start) & (frame.picked < block.stop)
            write[:, inside] = down[frame.picked[inside] - block.start].T
        else:
            write += down.T @ frame.basis[block]
    if centred:
        share = frame.basis.mean(0) if frame.picked is None else np.full(frame.size, 1 / weights.geometry.width)
        write -= np.outer(sums, share).astype(write.dtype)
    return write


def _merged(read: Array, up: Array, write: Array, gated: bool, centred: bool) -> Neurons:
    """One neuron for each group with equal inputs, whose outputs add up. Split neurons join, cancelling ones vanish."""
    if gated:  # up·c, down/c for any c: scale and sign move to the output
        size = np.sqrt(np.einsum("ij,ij->i", up, up))[:, None]
        largest = np.take_along_axis(up, np.abs(up).argmax(1)[:, None], 1)
        scale = np.where(largest < 0, -size, size)
        up /= np.where(size <= canonical.TINY, 1, scale)
        write *= scale
    group = duplicates(unit_rows(read), unit_rows(up) if gated else unit_rows(read))
    del up
    write = _summed(write, group)
    first = np.unique(group, return_index=True)[1]
    read = read[first]
    sizes = np.linalg.norm(write, axis=1) * np.linalg.norm(read, axis=1)
    alive = sizes > DEAD * float(np.median(sizes[sizes > 0])) if (sizes > 0).any() else sizes > 0
    read, write = read[alive], write[alive]
    if centred:  # so that cosines are correlations over the probes
        read -= read.mean(1, keepdims=True)
        write -= write.mean(1, keepdims=True)
    return Neurons(unit_rows(read), unit_rows(write))


def _summed(rows: Array, group: Array) -> Array:
    if not len(rows):
        return rows
    place = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[place], prepend=-1))
    out: Array = np.add.reduceat(rows[place], starts)
    return out


def duplicates(read: Array, up: Array) -> Array:
    """Group numbers: neurons that read alike, gate and up, are in one group."""
    draw = np.random.default_rng(0)
    keys = draw.normal(size=(2, read.shape[1])).astype(read.dtype)
    seen = read @ keys[0] + up @ keys[1]  # duplicates have equal keys
    place = np.argsort(seen, kind="stable")
    before, after = place[:-1], place[1:]
    alike = np.abs(seen[before] - seen[after]) <= KEY
    near = np.flatnonzero(alike)
    same = np.zeros(len(before), bool)
    for block in chunks(len(near), 1024):
        one, other = before[near[block]], after[near[block]]
        close = np.einsum("ij,ij->i", read[one], read[other]) > 1 - CLOSE
        same[near[block]] = close & (np.einsum("ij,ij->i", up[one], up[other]) > 1 - CLOSE)
    out = np.empty(len(read), np.int64)
    out[place] = np.concatenate([[0], np.cumsum(~same)]) if len(read) else []
    return np.unique(out, return_inverse=True)[1]


def agreement(a: Neurons, b: Neurons, gated: bool, seed: int = 0) -> tuple[int, int, float]:
    """The number of neurons that are each other's nearest by inputs and by outputs, of how many, and their similarity.

    The similarity is the median cosine of the inputs, or outputs, of paired neurons: 1 for unchanged weights.
    """
    small, large = (a, b) if len(a) < len(b) else (b, a)
    if not len(small):
        return 0, 0, 0.0
    count = min(len(small), SAMPLE)
    sample = np.sort(np.random.default_rng(seed).choice(len(small), count, replace=False))
    found = []
    for one, other, signed in ((small.read, large.read, True), (small.write, large.write, not gated)):
        likeness = one[sample] @ other.T  # [sample, large]
        if not signed:
            np.abs(likeness, out=likeness)
        nearest, back = likeness.argmax(1), likeness.argmax(0)
        found.append(np.where(back[nearest] == np.arange(count), nearest, -1))
    paired = np.flatnonzero((found[0] == found[1]) & (found[0] >= 0))
    if not len(paired):
        return 0, count, 0.0
    sides = ((small.read, large.read), (small.write, large.write))
    alike = [np.einsum("ij,ij->i", one[sample[paired]], other[found[0][paired]]) for one, other in sides]
    return len(paired), count, max(float(np.median(np.abs(cosines))) for cosines in alike)
