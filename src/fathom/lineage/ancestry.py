"""Traces each layer of model B to the layer of model A from which it comes: for pruned, repeated, reordered, looped and
merged stacks.

T4 compares every layer of B with every layer of A: it counts neurons that are paired alike by their inputs and by their
outputs. A layer has a source if the best count is significant after Bonferroni over all pairs of layers and frames. A
layer without a source is reported as "none", not as "new".

`neurons.py` pairs the neurons. For a comparison, `pairs.py` matches layers by their scores instead (`matched_layers`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fathom.errors import ModelError
from fathom.lineage import aligning, evidence, neurons
from fathom.lineage.evidence import NeuronCount
from fathom.lineage.weights import Told, Weights


@dataclass(frozen=True)
class Source:
    """The layer of A from which one layer of B comes, if any, with the evidence."""

    layer: int
    source: int | None  # the layer of A; None if no layer is significant
    paired: int
    of: int
    p: float  # after Bonferroni over all pairs of layers and frames
    alike: float  # median cosine of the paired neurons: 1 for unchanged weights
    second: int  # the next best layer's count, for comparison


def sources(a: Weights, b: Weights, seed: int = 0, progress: Told = lambda _: None) -> list[Source]:
    """The source in A of every layer of B.

    Args:
        a: The model that layers may come from.
        b: The model whose layers are traced.
        seed: Seed of every sample.
        progress: Called before each layer.
    """
    if seed < 0:
        raise ModelError(f"seed={seed}: wanted 0 or more")
    rows_a, rows_b, _ = aligning.paired_rows(a, b)
    frames = neurons.frames(a, b, (rows_a, rows_b), seed)
    layers = [[i for i in range(w.geometry.layers) if w.has("down", i)] for w in (a, b)]
    if not frames or not all(layers):
        raise ModelError(
            f"{a.name} and {b.name}: to compare layers, both need feed-forward weights, and the same width or shared "
            "token strings"
        )
    gated = a.geometry.gated and b.geometry.gated
    counts: dict[int, list[NeuronCount]] = {j: [] for j in layers[1]}
    for left, right in frames:
        progress(f"{left.name}: layers of {a.name}")
        known = {i: neurons.in_frame(a, i, left) for i in layers[0]}
        for j in layers[1]:
            progress(f"{left.name}: layer {j} of {b.name}")
            own = neurons.in_frame(b, j, right)
            counts[j] += [
                NeuronCount((i, j), *neurons.agreement(neurons.by_roles(known[i], own, gated), seed)) for i in layers[0]
            ]
    trials = len(frames) * len(layers[0]) * len(layers[1])
    return [_source(j, found, trials) for j, found in counts.items()]


def _source(layer: int, found: list[NeuronCount], trials: int) -> Source:
    best = max(found, key=lambda count: (count.paired, count.alike))
    p = best.p(1 / evidence.UNIVERSAL, trials) if best.of >= evidence.FEWEST else 1.0
    others = [count.paired for count in found if count.layers[0] != best.layers[0]]
    source = best.layers[0] if p <= evidence.ALPHA else None
    return Source(layer, source, best.paired, best.of, p, best.alike, max(others, default=0))
