"""Where models of one shape lie in the space of their weights: distances and angles.

Trainings move weights in directions that are all but orthogonal, so squared distances add up along the edges of a
family tree: ‖x − z‖² = ‖x − y‖² + ‖y − z‖² for y between x and z. They tell neighbours apart better than scores of
attention do. They need numbers in one order; a permuted or rotated copy is in another one.

Two models that were trained from x go alike at first, because gradients agree, so at x the angle between them is less
than a right one. If x is not their common ancestor but a third descendant of it, all three are equally far apart: an
angle of 60 degrees at x.

`tree.py` joins models by these distances, and claims the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import shares
from fathom.lineage.weights import Told, Weights

FORK = (0.1, 0.45)  # cosines at a model between two others that were trained from it


@dataclass(frozen=True)
class Space:
    """Models of one shape: their indices in the list of all models, and their inner products, [layers, n, n]."""

    models: tuple[int, ...]
    gram: Array

    def __contains__(self, model: object) -> bool:
        return model in self.models

    def together(self, i: int, j: int) -> bool:
        """Whether the weights of two models are stored in the same order (not permuted or rotated)."""
        return i in self and j in self and self._inner((i,), (j,)) >= shares.SAME_PLACE * self._size(i, j)

    def apart(self, i: int, j: int) -> Array:
        """The squared distance of two models in each layer, in units of the mean squared size of their layers."""
        a, b = self.models.index(i), self.models.index(j)
        squares = self.gram[:, a, a] + self.gram[:, b, b] - 2 * self.gram[:, a, b]
        out: Array = np.maximum(squares, 0) * len(squares) / max(self._size(i, j), 1e-300)
        return out

    def cosine(self, at: int, one: int, other: int) -> float:
        """The cosine of the angle at one model between two others."""
        sides = (one, at), (other, at)
        sizes = np.prod([max(self._inner(side, side), 1e-300) for side in sides])
        return float(self._inner(*sides) / np.sqrt(sizes))

    def _size(self, i: int, j: int) -> float:
        return float(np.sqrt(self._inner((i,), (i,)) * self._inner((j,), (j,))))

    def _inner(self, one: Sequence[int], other: Sequence[int]) -> float:
        """The inner product ⟨a, b⟩ of two models, or ⟨a − a', b − b'⟩ of two differences (a, a') and (b, b')."""
        total, signs = self.gram.sum(0), (1, -1)
        places = [[self.models.index(model) for model in side] for side in (one, other)]
        return float(sum(s * t * total[a, b] for a, s in zip(places[0], signs) for b, t in zip(places[1], signs)))  # noqa: B905


def spaces(models: Sequence[Weights], alike: Callable[[Weights], object], progress: Told) -> list[Space]:
    """One `Space` for each group of models with equal values of `alike`, such as the same shape."""
    out = []
    for kind in dict.fromkeys(map(alike, models)):
        some = [i for i, w in enumerate(models) if alike(w) == kind]
        if len(some) > 1:
            out.append(Space(tuple(some), shares.products([models[i] for i in some], progress)))
    return out


def fork(space: Space, at: int, neighbours: Sequence[int]) -> bool:
    """Whether all neighbours of a model in the tree were trained from it, assuming that no model is missing from the
    tree."""
    pairs = [(a, b) for n, a in enumerate(neighbours) for b in neighbours[n + 1 :]]
    return bool(pairs) and all(FORK[0] <= space.cosine(at, *pair) <= FORK[1] for pair in pairs)
