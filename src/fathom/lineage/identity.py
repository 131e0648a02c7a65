"""Identical tensors, which are reported before all other evidence because they need no statistics.

Tensors are compared by role and layer, value by value. File layouts, names, shards and dtypes do not matter as long as
every value is the same. Tensors of no known role are compared by name; buffers are left out. A few rows are read first,
so two models without an equal tensor cost little.

`layouts.py` has the names of buffers.

If all weights are identical, `verdict.py` needs no control. `comparison.py` decides whether remote tensors are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fathom.checkpoints.origin import LocalOrigin
from fathom.checkpoints.tensors import FLOATS, Array, is_scale
from fathom.lineage.awm import CHUNK_ROWS, chunks
from fathom.lineage.weights import Told, Weights

FIRST_ROWS = 8
NAMED = 1000  # tensors of an unknown role that are compared
Key = tuple[str, int | None]


@dataclass(frozen=True)
class Identical:
    """How many tensors of two models hold the same values."""

    tensors: int  # all that either model has
    equal: int
    matrices: int = 0  # of the equal ones, matrices whose values are not all alike
    inner: int = 0  # of those, matrices of layers
    known: bool = True  # False if the tensors were too costly to read

    @property
    def whole(self) -> bool:
        """Whether all tensors of the two models hold equal values."""
        return self.equal == self.tensors and self.matrices > 0

    def __str__(self) -> str:
        """In words."""
        return f"{self.equal:,} of {self.tensors:,} tensors"


def identical(a: Weights, b: Weights, thorough: bool, progress: Told = lambda _: None) -> Identical:
    """Count the tensors that hold the same values in both models.

    Args:
        a: One model.
        b: The other.
        thorough: Whether remote tensors may be read too.
        progress: Called before the first step.
    """
    if not thorough and not all(isinstance(origin, LocalOrigin) for w in (a, b) for origin in w.origins):
        return Identical(0, 0, known=False)
    progress("identical tensors")
    sides = [(_views(w), _others(w)) for w in (a, b)]
    equal: set[Key] = set()
    telling: dict[Key, bool] = {}
    for key in sides[0][0].keys() & sides[1][0].keys():
        same, telling[key] = _same(a, b, key)
        equal |= {key} if same else set()
    names = sides[0][1] & sides[1][1]
    alike = sum(_same_values(a.store.read(name), b.store.read(name)) for name in sorted(names)[:NAMED])
    total = len(sides[0][0].keys() | sides[1][0].keys()) + len(sides[0][1] | sides[1][1])
    return Identical(
        total, len(equal) + alike, sum(telling.values()), sum(n for k, n in telling.items() if k[1] is not None)
    )


def _views(weights: Weights) -> dict[Key, int]:
    """The number of experts for each (role, layer); a head tied to the embedding is left out."""
    return {
        (role, layer): weights.experts(layer) if layer is not None and role in {"gate", "up", "down"} else 1
        for role, layer in weights.views
        if not (role == "head" and weights.geometry.tied)
    }


def _others(weights: Weights) -> set[str]:
    """Floating-point tensors whose role is unknown; tensors of experts are left out, since they are compared by
    role."""
    known = (name for name in weights.extra_tensors if weights.store.tensors[name].dtype in FLOATS)
    return {name for name in known if ".experts." not in name and not is_scale(name)}


def _same(a: Weights, b: Weights, key: Key) -> tuple[bool, bool]:
    """Whether a role's tensor is equal in both models, and whether it is a matrix with at least two different
    values."""
    counts = [_views(w)[key] for w in (a, b)]
    if counts[0] != counts[1]:
        return False, False
    telling = False
    for expert in range(counts[0]):
        for one, other in _blocks(a, b, key, expert):
            if not _same_values(one, other):
                return False, False
            telling |= one.ndim == 2 and float(one.max()) > float(one.min())
    return True, telling


def _blocks(a: Weights, b: Weights, key: Key, expert: int) -> Iterator[tuple[Array, Array]]:
    """Yields corresponding blocks of both models' tensors, beginning with a small block of rows."""
    rows = [_rows(w, key) for w in (a, b)]
    if rows[0] != rows[1]:
        yield np.zeros(0), np.zeros(1)
        return
    for block in (slice(0, FIRST_ROWS), *chunks(rows[0], CHUNK_ROWS)):
        yield a.stored(*key, block, expert), b.stored(*key, block, expert)


def _rows(weights: Weights, key: Key) -> int:
    view = weights.views[key]
    if view.rows is not None:
        return sum(stop - start for start, stop in view.rows)
    shape = weights.store.tensors[view.tensor].shape
    shape = shape[1:] if view.item is not None else shape
    return shape[-1] if view.transposed else shape[0]


def _same_values(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=True))
