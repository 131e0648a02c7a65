"""Determines which of two related models came first, if the weights show it; usually they do not.

Only operations that lose or repeat information have a direction:

    rounding     numbers of one lie on a grid, and are the other's numbers rounded to it
    sparsity     one has zeros where the other has numbers, and the same numbers elsewhere
    repetition   two layers of one come from the same layer of the other
    experts      the experts of one are copies of the other's feed-forward

Fine-tuning of any length has none: A from B, B from A and a common parent look the same.

`tree.py` finds the root of a family, by its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import ancestry
from fathom.lineage.awm import chosen_layers
from fathom.lineage.canonical import MATRICES
from fathom.lineage.shares import shape_of
from fathom.lineage.weights import Weights

SAMPLED_ROWS = 64
LAYERS = 4
NEARLY_ALL = 0.99
GROUPS = (32, 64, 128, 0)  # numbers that share a scale; 0 for a whole row
LEVELS = (7, 8, 127, 128)
SPARSE = 0.05
ALIKE = 0.5


@dataclass(frozen=True)
class Direction:
    """Which of two models was made from the other, and why; `made` is None if this is unknown."""

    made: str | None
    source: str | None
    reason: str

    def __str__(self) -> str:
        """In words."""
        return f"{self.made} from {self.source}: {self.reason}" if self.made else f"cannot be told: {self.reason}"


UNKNOWN = Direction(None, None, "nothing in the weights was lost or repeated; dates and configs may help")


def direction(a: Weights, b: Weights) -> Direction:
    """Which of two models that are known to be related was made from the other."""
    found = [
        Direction(made.name, source.name, reason)
        for made, source in ((a, b), (b, a))
        if (reason := _reason(made, source)) is not None
    ]
    if len(found) == 2:
        return Direction(None, None, f"each looks made from the other ({found[0].reason}; {found[1].reason})")
    return found[0] if found else UNKNOWN


def _reason(made: Weights, source: Weights) -> str | None:
    """Why `made` must be the later one of two related models; None if there is no reason."""
    if (reason := _upcycled(made, source)) is not None:
        return reason
    if shape_of(made) == shape_of(source):
        pairs = list(_sampled(made, source))
        if pairs:
            return _rounded(pairs) or _pruned(pairs)
        return None
    if made.geometry.layers > source.geometry.layers and made.geometry.width == source.geometry.width:
        return _repeated(made, source)
    return None


def _sampled(a: Weights, b: Weights) -> Iterator[tuple[Array, Array]]:
    """Yields the same rows of matrices that both models have, from some layers."""
    depth = min(a.geometry.layers, b.geometry.layers)
    for layer in chosen_layers(depth, LAYERS):
        for role in (r for r in MATRICES if a.has(r, layer) and b.has(r, layer)):
            one, other = (w.tensor(role, layer, slice(0, SAMPLED_ROWS)) for w in (a, b))
            if one.shape == other.shape:
                yield one, other


def _rounded(pairs: Sequence[tuple[Array, Array]]) -> str | None:
    """The reason if the first model's numbers are the second's, rounded to 16 bits or to a quantisation grid; else
    None."""
    for name, to in (("bfloat16", _bfloat16), ("float16", lambda x: x.astype(np.float16).astype(np.float32))):
        if all(np.array_equal(one, to(other)) for one, other in pairs) and any((x != y).any() for x, y in pairs):
            return f"its numbers are the other's, rounded to {name}"
    for group in GROUPS:
        found = [_on_grid(one, other, group) for one, other in pairs]
        if all(share is not None and share >= NEARLY_ALL for share in found):
            return "its numbers lie on a grid of few levels, and are the other's rounded to it"
    return None


def _bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def _on_grid(one: Array, other: Array, group: int) -> float | None:
    """The share of groups in which `one` lies on a quantisation grid and equals `other` rounded to it; None if `other`
    lies on a grid itself, or if a row cannot be divided into such groups."""
    width = group or one.shape[1]
    if one.shape[1] % width:
        return None
    own, far = (values.reshape(-1, width).astype(np.float64) for values in (one, other))
    return None if _steps(far).mean() > 0.5 else float(_steps(own, far).mean())


def _steps(values: Array, rounded: Array | None = None) -> Array:
    """Which groups have values on a quantisation grid; with `rounded`, also whether other numbers round to that
    grid."""
    largest, low = np.abs(values).max(1, keepdims=True), values.min(1, keepdims=True)
    span = values.max(1, keepdims=True) - low
    tries = [(largest / top, np.zeros_like(low)) for top in LEVELS] + [(span / top, low) for top in (15, 255)]
    out = np.zeros(len(values), bool)
    for step, start in tries:
        unit = (values - start) / np.maximum(step, 1e-30)
        good = (np.abs(unit - np.rint(unit)) < 0.02).all(1) & (largest[:, 0] > 0)
        if rounded is not None:
            near = np.abs(rounded - values) <= 0.6 * step
            good &= (near.mean(1) > 0.9) & (rounded != values).any(1)
        out |= good
    return out


def _pruned(pairs: Sequence[tuple[Array, Array]]) -> str | None:
    one, other = (np.concatenate([pair[side].reshape(-1) for pair in pairs]) for side in (0, 1))
    gone = (one == 0) & (other != 0)
    kept = one != 0
    if gone.mean() >= SPARSE and (other == 0).mean() < SPARSE / 10 and np.mean(one[kept] == other[kept]) >= NEARLY_ALL:
        return f"{gone.mean():.0%} of its numbers are zero, and the rest are the other's"
    return None


def _repeated(made: Weights, source: Weights) -> str | None:
    found = [one.source for one in ancestry.sources(source, made) if one.source is not None]
    twice = sorted({layer for layer in found if found.count(layer) > 1})
    if twice and len(found) >= NEARLY_ALL * made.geometry.layers:
        listed = ", ".join(map(str, twice))
        return f"layers {listed} of the other come twice or more"
    return None


def _upcycled(made: Weights, source: Weights) -> str | None:
    layer = next((i for i in range(made.geometry.layers) if made.has("down", i)), None)
    if layer is None or made.geometry.width != source.geometry.width or not source.has("down", layer):
        return None
    if made.experts(layer) < 2 or source.experts(layer) > 1:
        return None
    own = source.tensor("down", layer)
    experts = [made.tensor("down", layer, expert=e) for e in range(min(made.experts(layer), 4))]
    if all(e.shape == own.shape and _cosine(e, own) > ALIKE for e in experts):
        return "its experts are copies of the other's feed-forward"
    return None


def _cosine(a: Array, b: Array) -> float:
    return float(np.vdot(a, b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))
