"""Feed-forward neurons of two models, paired by their inputs and by their outputs.

A neuron reads by its gate (without a gate, by its up row) and writes by its column of W_down. Both are seen in a
*frame*, coordinates that the two models share:

    order    the residual channels in their order
    tokens   the responses to strings that both tokenizers have
    axes     the principal axes of each model's own embedding, which need no tokenizer
    blind    a rotation that was found from other layers, which needs neither embedding nor tokenizer

Two neurons are a pair if each is the other's nearest, both by inputs and by outputs; in the blind frame, by gate and
by up. Ties count on one side. Shared training data makes some such pairs between unrelated models, so the test's rate
is a share of the neurons, not one. Every frame survives neuron permutations and scales; all but the first survive
rotations.

`experts` chooses which experts of a mixture are compared; `evidence.py` decides how many pairs are significant.
`comparison.py` decides on which layers frames are tried (`_drawn`), and when the principal axes (`_by_axes`) and the
blind frame are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
EXPERTS, MANY = 8, 16384  # so many experts of a layer are read, or as many as have so many neurons together
CLOSE = 1e-5
DEAD = 1e-6  # neurons that cancel leave less than this share of the largest of them
FAR = 8.0  # what is added to a gate counts as at most so many times its size
TIED = 1 / 32  # chance may pair an item with at most this probability
REPEATED = 0.3  # median |cosine| of gates and up rows from which these are one witness
TOGETHER = 256  # groups of neurons whose sums are taken at once
KEY = 1e-3  # keys of duplicates differ by rounding only


@dataclass(frozen=True)
class Frame:
    """Coordinates in which models can be compared: a matrix [width, F] that maps one model's residual vectors to
    them."""

    name: str
    basis: Array
    centred: bool = False
    picked: Array | None = None  # the channels that the basis uses unchanged
    faint: Array | None = None  # [width, n]: the input in directions that no layer writes and the basis leaves out

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self.basis.shape[1] if self.picked is None else len(self.picked)

    def of(self, rows: Array) -> Array:
        """Residual vectors [n, width], converted to these coordinates [n, F]."""
        return rows @ self.basis if self.picked is None else rows[:, self.picked]


def order(width: int, seed: int) -> Frame:
    """The frame of the residual channels in their stored order; for very wide models a random sample of channels."""
    picked = np.sort(np.random.default_rng(seed).choice(width, min(width, FRAME), replace=False))
    return Frame("order", np.zeros((width, 0), np.float32), picked=picked)


def tokens(probes: Array) -> Frame:
    """The frame of responses to the embeddings of probe strings, [n, width]."""
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
    """The frame of an embedding's principal axes in descending order of variance; the sign of each axis is set by its
    skewness. The order of rows does not matter.

    Args:
        table: Returns the embedding in blocks of rows; called several times.
    """
    rows, total, squares = 0, np.zeros(1), np.zeros((1, 1))
    for block in table():
        unit = unit_rows(block).astype(np.float64)
        rows, total, squares = rows + len(unit), total + unit.sum(0), squares + unit.T @ unit
    mean = total / rows
    vectors = np.linalg.eigh(squares / rows - np.outer(mean, mean))[1][:, ::-1]
    vectors = np.ascontiguousarray(vectors, np.float32)
    skew = np.zeros(len(mean))
    for block in table():
        along = (unit_rows(block) - mean.astype(np.float32)) @ vectors
        skew += (along * along * along).sum(0, dtype=np.float64)
    return Frame("axes", vectors * np.where(skew < 0, np.float32(-1), np.float32(1)))


Frames = list[tuple[Frame, Frame]]
Side = tuple[Array, Array, bool]


@dataclass(frozen=True)
class Neurons:
    """The neurons of one layer in a frame, as unit rows [m, F]; duplicates are merged, and neurons without effect are
    removed."""

    read: Array
    write: Array
    up: Array | None = None  # of gated neurons

    def __len__(self) -> int:
        return len(self.read)

    def turned(self) -> Neurons:
        """The same neurons with the sign of all coordinates reversed."""
        return Neurons(-self.read, -self.write, None if self.up is None else -self.up)


def experts(weights: Weights, index: int, most: int | None = None) -> list[int]:
    """The indices of the experts of a layer that are read, evenly spaced by number unless experts are `ranked`.

    If they are `ranked`, half of them are those with the longest router rows, measured from their mean, which moves no
    choice. Neither the order of experts nor a rotation changes which these are, but training does.
    """
    count = weights.experts(index)
    most = min(count, most or max(EXPERTS, MANY // max(weights.neurons(index), 1)))
    rows = weights.router(index) if weights.ranked and most < count else None
    if rows is None:
        return [*dict.fromkeys(np.linspace(0, count - 1, most).astype(int).tolist())]
    rows = rows * (weights.tensor("ffn_norm", index) if weights.has("ffn_norm", index) else 1)
    places = np.argsort(-np.linalg.norm(rows - rows.mean(0), axis=1), kind="stable")
    first, rest = np.split(places, [most // 2])
    return np.concatenate([first, rest[np.linspace(0, len(rest) - 1, most - len(first)).astype(int)]]).tolist()


def in_frame(weights: Weights, index: int, frame: Frame) -> Neurons:
    """Read the neurons of one layer, of all its experts or of a sample of them, in a frame."""
    found = [_of_expert(weights, index, frame, expert) for expert in experts(weights, index)]
    read, up, write, offset = (
        found[0] if len(found) == 1 else (np.concatenate([part[i] for part in found]) for i in range(4))
    )
    del found
    return _merged(read, up, write, offset, weights.geometry.gated, frame)


def _of_expert(weights: Weights, index: int, frame: Frame, expert: int) -> tuple[Array, Array, Array, Array]:
    """One expert's neurons in a frame: gate rows (without gates, up rows), up rows, output rows, and constant inputs of
    the gates, such as biases."""
    norms = weights.layer(index, ("ffn_norm", "post_ffn_norm"))
    roles = ("gate", "up") if weights.geometry.gated else ("up",)
    rows = {role: np.empty((weights.neurons(index), frame.size), np.float32) for role in roles}
    offset = np.zeros(weights.neurons(index))
    biased = weights.experts(index) == 1 and weights.has(f"{roles[0]}_bias", index)
    for role in roles:
        for block in chunks(weights.neurons(index), CHUNK_ROWS):
            piece = {role: weights.tensor(role, index, block, expert), **norms}
            if role == roles[0] and biased:
                piece[f"{role}_bias"] = weights.tensor(f"{role}_bias", index, block)
            folded = canonical.fold(piece, weights.geometry)
            rows[role][block] = frame.of(folded[role])
            if role == roles[0]:
                offset[block] = folded.get(f"{role}_bias", 0)
                offset[block] -= 0 if frame.faint is None else np.linalg.norm(folded[role] @ frame.faint, axis=1)
    write = _written(weights, index, frame, expert, norms.get("post_ffn_norm"))
    return rows[roles[0]], rows["up"], write, offset


def _written(weights: Weights, index: int, frame: Frame, expert: int, gain: Array | None) -> Array:
    """The output direction of every neuron of one expert in a frame, [m, F]."""
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


def _merged(read: Array, up: Array, write: Array, offset: Array, gated: bool, frame: Frame) -> Neurons:
    """Merge neurons whose gate rows are equal up to sign (without gates: whose up rows are parallel) into one neuron.
    Split neurons join; cancelling ones vanish, and those that never fire.

    Neurons of one gate compute silu(g x) Σ d uᵀ x, whatever the single d and u are, so only the sum counts. Its largest
    singular pair stands for it. A gate -g counts as g, because silu(-z) = silu(z) - z: a copy may turn gates around and
    make up for the difference, a product of two linear maps, by neurons whose sum over each line is zero. What is added
    to a gate, a bias or a faint constant input, belongs to its line. From -FAR times its size on it keeps a neuron from
    ever firing, whose other rows then hold anything.
    """
    size = np.sqrt(np.einsum("ij,ij->i", read, read))
    shift = np.clip(offset * (math.sqrt(frame.size) if frame.centred else 1), -FAR * size, FAR * size)
    if (silent := (shift < 0) & (shift <= -FAR * size)).any():
        read, up, write, offset, shift = (part[~silent] for part in (read, up, write, offset, shift))
    whole = np.concatenate([read, shift[:, None].astype(read.dtype)], 1) if offset.any() else read
    group = duplicates(unit_rows(whole), np.linalg.norm(whole, axis=1) if gated else np.ones(len(read)))
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    first = order[starts]
    single = _effects(read, up, write, gated)
    if gated:
        _sum_products(up, write, np.split(order, starts[1:]) if len(order) else [])
    elif len(first) < len(order):
        write[first] = np.add.reduceat(write[order], starts)
    largest = np.maximum.reduceat(single[order], starts) if len(order) else single
    kept = np.sort(first[_effects(read, up, write, gated)[first] > DEAD * largest])
    if len(kept) < len(read):
        read, up, write = read[kept], up[kept], write[kept]
    return unit(read, write, frame, up if gated and frame.name == "blind" else None)


def _effects(read: Array, up: Array, write: Array, gated: bool) -> Array:
    """The size of each neuron's effect: the product of the norms of its rows."""
    out = np.ones(len(read))
    for rows in (read, up, write) if gated else (read, write):
        out *= np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return out


def _sum_products(up: Array, write: Array, groups: list[Array]) -> None:
    """Replace the first neuron of each group, in place, by the largest singular pair of Σ d uᵀ; its scale goes into the
    output row."""
    sizes = np.array([len(group) for group in groups])
    for size in np.unique(sizes[sizes > 1]):
        every = np.stack([group for group in groups if len(group) == size])
        for block in chunks(len(every), TOGETHER):
            some = every[block]
            d, u = write[some].astype(np.float64), up[some].astype(np.float64)  # [groups, size, F]
            inner = d @ d.swapaxes(1, 2)
            values, vectors = np.linalg.eigh(u @ u.swapaxes(1, 2))
            root = vectors * np.sqrt(np.maximum(values, 0))[:, None]  # u uᵀ = root rootᵀ
            squares, axes = np.linalg.eigh(root.swapaxes(1, 2) @ inner @ root)
            pick = (root @ axes[:, :, -1:]).swapaxes(1, 2)  # [groups, 1, size]
            write[some[:, 0]] = (pick @ d)[:, 0]
            up[some[:, 0]] = (pick @ inner @ u)[:, 0] / np.maximum(squares[:, -1:], canonical.TINY)


def alive(sizes: Array) -> Array:
    """Which neurons have an effect that is not negligible compared with the median effect."""
    out: Array = sizes > DEAD * float(np.median(sizes[sizes > 0])) if (sizes > 0).any() else sizes > 0
    return out


def unit(read: Array, write: Array, frame: Frame, up: Array | None = None) -> Neurons:
    """Neurons scaled to unit rows; in a frame of probes they are centred first, so that cosines are correlations over
    the probes."""
    if frame.centred:
        read, write = (rows - rows.mean(1, keepdims=True) for rows in (read, write))
    return Neurons(unit_rows(read), unit_rows(write), None if up is None else unit_rows(up))


def duplicates(read: Array, size: Array) -> Array:
    """A group number for each row: parallel rows of equal size are in the same group.

    Args:
        read: Unit rows, [m, F].
        size: Their sizes before, [m].
    """
    length = np.log(np.maximum(size, canonical.TINY))
    keys = np.random.default_rng(0).normal(size=(1, read.shape[1])).astype(read.dtype)
    seen = np.abs(read @ keys[0]) + length  # duplicates have equal keys
    place = np.argsort(seen, kind="stable")
    before, after = place[:-1], place[1:]
    near = np.flatnonzero((np.abs(seen[before] - seen[after]) <= KEY) & (np.abs(length[before] - length[after]) <= KEY))
    same = np.zeros(len(before), bool)
    for block in chunks(len(near), 1024):
        cosines = np.einsum("ij,ij->i", read[before[near[block]]], read[after[near[block]]])
        same[near[block]] = np.abs(cosines) > 1 - CLOSE
    out = np.empty(len(read), np.int64)
    out[place] = np.concatenate([[0], np.cumsum(~same)]) if len(read) else []
    return np.unique(out, return_inverse=True)[1]


def by_roles(a: Neurons, b: Neurons, gated: bool) -> list[Side]:
    """The rows by which neurons of two models are compared: gate and output, or in the blind frame gate and up. What is
    read has no sign.

    An up row that repeats the gate is no second witness.
    """
    if a.up is not None and b.up is not None and gated and not any(_repeats(side) for side in (a, b)):
        return [(a.read, b.read, False), (a.up, b.up, False)]
    return [(a.read, b.read, False), (a.write, b.write, not gated)]


def _repeats(found: Neurons) -> bool:
    """Whether a model's up rows are mostly parallel to its gate rows."""
    if found.up is None or not len(found):
        return found.up is None
    return float(np.median(np.abs(np.einsum("ij,ij->i", found.read, found.up)))) > REPEATED


def agreement(sides: Sequence[Side], seed: int = 0) -> tuple[int, int, float]:
    """The number of items that are mutual nearest neighbours on both sides, the number of items compared, and the
    similarity of the pairs.

    Within rounding several may be nearest: a copy may hold others with the same gate. With t₁ and t₂ of them on the two
    sides, chance pairs an item with probability t₁ t₂ / m at least, so items of which this exceeds TIED are not paired.
    The similarity is the median cosine of paired items, on the side where it is higher: 1 for unchanged weights.

    Args:
        sides: Two tables of either model, [m, F], and whether the sign of a row counts.
        seed: Seed of the sample of items.
    """
    if len(sides[0][0]) > len(sides[0][1]):
        sides = [(other, one, signed) for one, other, signed in sides]
    few = len(sides[0][0])
    if not few:
        return 0, 0, 0.0
    count = min(few, SAMPLE)
    sample = np.sort(np.random.default_rng(seed).choice(few, count, replace=False))
    large = len(sides[0][1])
    paired, ties = np.ones((count, large), bool), np.ones(count)
    for one, other, signed in sides:
        likeness = one[sample] @ other.T  # [sample, large]
        if not signed:
            np.abs(likeness, out=likeness)
        near = (likeness >= likeness.max(1, keepdims=True) - CLOSE) & (likeness >= likeness.max(0) - CLOSE)
        ties *= near.sum(1)
        paired &= near
    paired[ties > max(1, TIED * large)] = False
    found = np.flatnonzero(paired.any(1))
    if not len(found):
        return 0, count, 0.0
    partner = paired[found].argmax(1)
    alike = [np.einsum("ij,ij->i", one[sample[found]], other[partner]) for one, other, _ in sides]
    return len(found), count, max(float(np.median(np.abs(cosines))) for cosines in alike)
