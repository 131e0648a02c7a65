"""Estimates the share of each parent model in a merged model, with a confidence interval.

A merge is a weighted mean C = Σ wᵢ Pᵢ, Σ wᵢ = 1, in the coordinates that its parents share. Per layer only inner
products of the models are kept, so the same pass serves every choice of child and parents:

    w = argmin ‖(C − P₁) − Σ_{i≥2} wᵢ (Pᵢ − P₁)‖²

The interval comes from leaving out one layer at a time (jackknife), so differences between layers, by training,
rounding or another recipe, widen it. The residual is the part that the parents do not explain, as a share of ‖C − P₁‖².

`tree.py` looks for merges among many models (`_merges`), and keeps them out of its tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fathom.checkpoints.tensors import Array
from fathom.errors import ModelError
from fathom.lineage.awm import chunks
from fathom.lineage.canonical import MATRICES
from fathom.lineage.weights import Told, Weights

FEWEST_LAYERS = 3
SAME_PLACE = 0.1  # cosine with a parent below which the child's numbers are not in the parents' order
APART = 1e-12  # parents that differ by less than this, relative to their size, are equal
CONFIDENCE = 0.95
TOGETHER = 8  # models whose matrices are multiplied with those of as many others at once
COLUMNS = 1 << 20  # numbers of each that are float64 at once
UNEXPLAINED = 0.1  # the residual above which no shares are reported
IF_COMPLETE = (
    "Shares hold if no parent is missing. A model that is itself a mean can stand in for a missing parent: then the "
    "fit is as exact, and the shares are other ones."
)


@dataclass(frozen=True)
class Share:
    """The weight of one parent in a merge."""

    parent: str
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Shares:
    """The estimated weights of all parents in a merge, and the part of the child that no parent explains."""

    shares: tuple[Share, ...]
    residual: float  # of ‖child − nearest parent‖²; 0 for an exact mean
    layers: int

    @property
    def is_merge(self) -> bool:
        """Whether the child is a weighted mean of at least two of the parents, and of no other model."""
        return self.residual <= UNEXPLAINED and sum(one.low > 0.02 for one in self.shares) > 1


def in_words(child: str, found: Shares) -> list[str]:
    """Lines of text on the parents' shares in a child; without numbers if the child is not a mean of these parents
    alone."""
    if found.is_merge:
        lines = [f"{one.share:7.1%}  ({one.low:.1%} to {one.high:.1%})  {one.parent}" for one in found.shares]
        lines.append(f"unexplained: {found.residual:.1%} of the distance to the nearest parent")
        return [*lines, f"{child} is a weighted mean of these models.", IF_COMPLETE]
    most = max(found.shares, key=lambda one: one.share)
    if found.residual > UNEXPLAINED:
        why = (
            f"they leave {found.residual:.1%} of its distance to the nearest of them unexplained. A parent may be "
            "missing, or it was trained after the merge. The JSON report holds the best fit, which is right "
            "only in the second case."
        )
    elif most.share > 1.02:
        why = f"it lies on the line through them, beyond {most.parent}."
    else:
        why = f"{most.parent} alone explains it."
    return [f"{child} is no weighted mean of these models{' alone' * (found.residual > UNEXPLAINED)}: {why}"]


def products(models: Sequence[Weights], progress: Told = lambda _: None) -> Array:
    """The inner products of all pairs of models, [layers, models, models]; each matrix is weighted by its size.

    Args:
        models: Models of one shape.
        progress: Called before each layer.
    """
    first = models[0].geometry
    for other in models[1:]:
        if shape_of(other) != shape_of(models[0]):
            raise ModelError(f"{other.name} and {models[0].name} differ in shape; a mean needs models of one shape")
    out = np.zeros((first.layers, len(models), len(models)))
    blocks = list(chunks(len(models), TOGETHER))
    for layer in range(first.layers):
        progress(f"{layer + 1} of {first.layers} layers")
        for role in (r for r in MATRICES if all(w.has(r, layer) for w in models)):
            for at, block in enumerate(blocks):
                rows = _rows(models[block], role, layer)
                out[layer, block, block] += _products(rows, rows)
                for rest in blocks[at + 1 :]:
                    found = _products(rows, _rows(models[rest], role, layer))
                    out[layer, block, rest] += found
                    out[layer, rest, block] += found.T
    return out


def _rows(models: Sequence[Weights], role: str, layer: int) -> Array:
    return np.stack([w.tensor(role, layer).reshape(-1) for w in models])


def _products(one: Array, other: Array) -> Array:
    """The inner products of every row of one array with every row of the other, in float64: fine-tunes of one base
    differ by less than the rounding of a sum in float32."""
    out = np.zeros((len(one), len(other)))
    for some in chunks(one.shape[1], COLUMNS):
        out += one[:, some].astype(np.float64) @ other[:, some].astype(np.float64).T
    return out


def shape_of(weights: Weights) -> tuple[object, ...]:
    """The properties that two models must share for their weights to be averaged."""
    g = weights.geometry
    widths = tuple(weights.neurons(i) if weights.has("up", i) else 0 for i in range(g.layers))  # a pruned one's differ
    return g.layers, g.width, g.heads, g.kv_heads, g.head_dim, widths, g.gated, g.latent


def shares(child: Weights, parents: Sequence[Weights], progress: Told = lambda _: None) -> Shares:
    """The share of each parent in a child, with 95 % intervals.

    Args:
        child: The model that may be a merge.
        parents: At least two, of the same shape.
        progress: Called before each layer.
    """
    if len(parents) < 2:
        raise ModelError("a merge has at least two parents")
    gram = products([child, *parents], progress)
    total = gram.sum(0)
    sizes = np.sqrt(np.maximum(np.diag(total), 1e-300))
    if (total[0, 1:] / sizes[0] / sizes[1:]).max() < SAME_PLACE:
        raise ModelError(
            f"{child.name}: its weights match no parent's position by position (cosines below {SAME_PLACE}); "
            "a disguised or unrelated model is not a weighted mean of the parents"
        )
    return solved(gram, [w.name for w in parents])


def solved(gram: Array, names: Sequence[str]) -> Shares:
    """Solve for the parents' shares, given inner products [layers, 1 + parents, 1 + parents] with the child first."""
    if len(gram) < FEWEST_LAYERS:
        raise ModelError(f"{len(gram)} layers are too few for a confidence interval; {FEWEST_LAYERS} are needed")
    nearest = 1 + int(np.argmin([_apart(gram.sum(0), 0, i) for i in range(1, gram.shape[1])]))
    others = [i for i in range(1, gram.shape[1]) if i != nearest]
    # differences from the nearest parent, for precision: [layers, others, others] and [layers, others]
    left = np.array([[[_inner(layer, (i, nearest), (j, nearest)) for j in others] for i in others] for layer in gram])
    right = np.array([[_inner(layer, (i, nearest), (0, nearest)) for i in others] for layer in gram])
    scale = float(np.trace(gram.sum(0)))
    if np.linalg.eigvalsh(left.sum(0)).min() <= APART * scale:
        raise ModelError("two parents are the same, or one is a mean of others: their shares cannot be separated")
    whole = np.linalg.solve(left.sum(0), right.sum(0))
    without = np.array(
        [np.linalg.solve(left.sum(0) - a, right.sum(0) - b) for a, b in zip(left, right, strict=True)]
    )  # [layers, others]
    weights = np.insert(whole, nearest - 1, 1 - whole.sum())
    spread = np.insert(without, nearest - 1, 1 - without.sum(1), axis=1)
    count = len(gram)
    error = np.sqrt((count - 1) / count * np.square(spread - spread.mean(0)).sum(0))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    moved = sum(_inner(layer, (0, nearest), (0, nearest)) for layer in gram)
    left_over = moved - 2 * float(whole @ right.sum(0)) + float(whole @ left.sum(0) @ whole)
    made = tuple(
        Share(name, float(w), float(w - r), float(w + r)) for name, w, r in zip(names, weights, reach, strict=True)
    )
    return Shares(made, max(0.0, left_over / max(moved, 1e-300)), count)


def _inner(layer: Array, one: tuple[int, int], other: tuple[int, int]) -> float:
    """⟨a − b, c − d⟩."""
    (a, b), (c, d) = one, other
    return float(layer[a, c] - layer[a, d] - layer[b, c] + layer[b, d])


def _apart(total: Array, i: int, j: int) -> float:
    return _inner(total, (i, j), (i, j))
