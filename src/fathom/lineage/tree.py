"""The family tree of many models: which are related, which are neighbours, with the support of every edge.

Every pair is measured once. Two models belong to one family if the pair's matching tests are significant after
Bonferroni over all pairs. Models of other families are the pair's controls. Within a family, the tree has the smallest
total drift: a score s = 1 / (1 + ε²) is a drift of ε times the weights. Another shape counts as a drift of half the
weights, so that a copy is attached to its original and not to the original's deeper sibling. The support of an edge is
how often it is in the tree when layers are resampled. It is not a confidence. A tree has no root. The direction of an
edge is reported if the weights show it.

A merge is a node with two parents and no edge of the tree: it lies between its parents and would draw all edges to
itself. It is undecided if other parents fit as well. An edge is undecided if its support is low, or if a merge is
nearer to one of its ends, which may come from the merge or before it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from fathom.checkpoints.tensors import Array
from fathom.errors import ModelError
from fathom.lineage import evidence, shares
from fathom.lineage.comparison import Options, judge, measure
from fathom.lineage.direction import Direction, direction
from fathom.lineage.pairs import Pair
from fathom.lineage.shares import Shares
from fathom.lineage.weights import Told, Weights, holding, open_weights

Place = tuple[int, int]

SCHEMA = 1
DRAWS = 200
LEAST_SCORE = 1e-3
RESHAPED = 0.5  # the drift that counts for a change of shape
DECIDED = 0.95  # the support below which an edge is undecided
EXACT = 0.02  # maximum unexplained part of a merge that is reported
MOST_MERGES = 12  # maximum models of one shape among which parents of merges are searched
MISSING = (
    "A parent may be missing from the set: neighbours are then siblings, or a grandparent and its grandchild, although "
    "the tree joins them."
)


@dataclass(frozen=True)
class Edge:
    """Two neighbouring models of a tree."""

    a: str
    b: str
    verdict: str
    p: float  # p-value of the matching tests, corrected for the number of tests and of pairs
    score: float
    drift: float
    support: float  # share of resampled trees with this edge; not a confidence
    direction: Direction
    undecided: str = ""  # why, if it is


@dataclass(frozen=True)
class Merge:
    """A model that is a mean of two others, which are its parents."""

    child: str
    found: Shares
    undecided: str = ""  # why, if it is

    @property
    def parents(self) -> set[str]:
        """The names of the parents."""
        return {one.parent for one in self.found.shares}


@dataclass(frozen=True)
class Family:
    """Related models: the tree of those that are no merges, and the merges."""

    models: tuple[str, ...]
    edges: tuple[Edge, ...]
    merges: tuple[Merge, ...] = ()


@dataclass(frozen=True)
class Tree:
    """All families, the largest first; a model without relatives is a family of its own."""

    families: tuple[Family, ...]
    pairs: int


def tree(where: Sequence[str | Path], seed: int = 0, progress: Told = lambda _: None) -> Tree:
    """Measure all pairs and build the trees.

    Args:
        where: At least two models.
        seed: Seed of every sample.
        progress: Called before each step.
    """
    models = [open_weights(place) for place in dict.fromkeys(map(str, where))]
    if len(models) < 2:
        raise ModelError("a tree needs at least two models")
    pairs: dict[Place, Pair] = {}
    places = list(combinations(range(len(models)), 2))
    for number, (i, j) in enumerate(places):
        one, other = models[i], models[j]

        def told(what: str, n: int = number, a: Weights = one, b: Weights = other) -> None:
            progress(f"pair {n + 1} of {len(places)}, {a.name} and {b.name}: {what}")

        with holding(one, other):
            pairs[i, j] = measure(one, other, Options(seed=seed, extras=False), told)
    sure = {place: p for place, pair in pairs.items() if (p := pair.p * len(places)) <= evidence.ALPHA}
    groups = grouped(len(models), list(sure))
    merges = _merges(models, progress)
    made = [_family(models, (group, groups), pairs, sure, merges, seed, progress) for group in groups]
    made.sort(key=lambda family: -len(family.models))
    return Tree(tuple(made), len(places))


def grouped(count: int, edges: Sequence[Place]) -> list[list[int]]:
    """Connected components, in the order of their first members."""
    parts = DisjointSet(range(count))
    for edge in edges:
        parts.merge(*edge)
    return sorted(map(sorted, parts.subsets()))


def _family(
    models: Sequence[Weights],
    groups: tuple[Sequence[int], Sequence[Sequence[int]]],
    pairs: Mapping[Place, Pair],
    sure: Mapping[Place, float],
    merges: Sequence[Merge],
    seed: int,
    progress: Told,
) -> Family:
    """The tree of one group of models; the others are strangers."""
    group, every = groups
    names = tuple(models[i].name for i in group)
    merged = tuple(merge for merge in merges if merge.child in names)
    apart = {i for i in group if models[i].name in {merge.child for merge in merged}}
    curves = {place: _curve(pairs[place]) for place in sure if place[0] in group}
    extra = {place: RESHAPED * _reshaped(models[place[0]], models[place[1]]) for place in curves}
    drifts = {place: _drift(float(np.mean(curve))) + extra[place] for place, curve in curves.items()}
    rest = {place: curve for place, curve in curves.items() if not apart & {*place}}
    chosen = spanning(group, {place: drifts[place] for place in rest})
    support = supports(group, rest, extra, chosen, seed) if chosen else {}
    strangers = [i for other in every if other is not group for i in other][: evidence.FEWEST]
    edges = []
    for place in chosen:
        a, b = models[place[0]], models[place[1]]
        progress(f"direction of {a.name} and {b.name}")
        controls = [(models[k].name, [pairs[min(i, k), max(i, k)] for i in place]) for k in strangers]
        with holding(a, b):
            said = judge(pairs[place], controls).verdict.label
            way = direction(a, b)
        score, p = float(np.mean(curves[place])), min(1.0, sure[place])
        near = [
            merge.child
            for merge in merged
            for end in place
            if models[end].name not in merge.parents and _between(models, merge, end, drifts) < drifts[place]
        ]
        doubt = f"the merge {near[0]} is nearer" if near else "little support" * (support[place] < DECIDED)
        edges.append(Edge(a.name, b.name, said, p, score, _drift(score), support[place], way, doubt))
    return Family(names, tuple(edges), merged)


def _between(models: Sequence[Weights], merge: Merge, end: int, drifts: Mapping[Place, float]) -> float:
    """The drift between a merge and another model; infinite if none was measured."""
    child = next(i for i, model in enumerate(models) if model.name == merge.child)
    return drifts.get((min(child, end), max(child, end)), math.inf)


def _reshaped(a: Weights, b: Weights) -> bool:
    return shares.shape_of(a) != shares.shape_of(b) or _experts(a) != _experts(b)


def _experts(weights: Weights) -> int:
    last = weights.geometry.layers - 1
    return weights.experts(last) if weights.has("down", last) else 0


def _curve(pair: Pair) -> Array:
    """Scores of the layers by the best alignment; layers without a partner count 0."""
    if pair.best is None:
        return np.zeros(1)
    found = pair.scores[pair.best].per_layer
    return np.array([*found, *[0.0] * (min(pair.scores[pair.best].map.shape) - len(found))] or [0.0])


def _drift(score: float) -> float:
    return math.sqrt(1 / min(max(score, LEAST_SCORE), 1.0) - 1)


def spanning(group: Sequence[int], drifts: Mapping[Place, float]) -> list[Place]:
    """The edges of the tree with the smallest total drift, nearest first (Kruskal)."""
    parts = DisjointSet(group)
    return [place for place in sorted(drifts, key=lambda p: (drifts[p], p)) if parts.merge(*place)]


def supports(
    group: Sequence[int],
    curves: Mapping[Place, Array],
    extra: Mapping[Place, float],
    chosen: Sequence[Place],
    seed: int,
) -> dict[Place, float]:
    """How often each edge is in the tree when layers are resampled, at the same relative depths for all pairs."""
    draw, found = np.random.default_rng(seed), dict.fromkeys(chosen, 0)
    depth = max(map(len, curves.values()))
    for _ in range(DRAWS):
        places = draw.random(depth)
        again = {p: _drift(float(np.mean(c[(places * len(c)).astype(int)]))) + extra[p] for p, c in curves.items()}
        kept = set(spanning(group, again))
        for place in chosen:
            found[place] += place in kept
    return {place: count / DRAWS for place, count in found.items()}


def _merges(models: Sequence[Weights], progress: Told) -> list[Merge]:
    """Models that are means of two others of the same shape."""
    out = []
    for shape in dict.fromkeys(map(shares.shape_of, models)):
        alike = [w for w in models if shares.shape_of(w) == shape and _experts(w) <= 1][:MOST_MERGES]
        if len(alike) < 3 or alike[0].geometry.layers < shares.FEWEST_LAYERS:
            continue
        gram = shares.products(alike, lambda at: progress(f"merges: {at}"))
        names = [w.name for w in alike]
        for child in range(len(alike)):
            pairs = combinations([i for i in range(len(alike)) if i != child], 2)
            found = [one for pair in pairs if (one := _mean(gram, child, pair, names)) is not None]
            if found:
                doubt = f"{len(found) - 1} other pairs of parents fit as well" if len(found) > 1 else ""
                out.append(Merge(names[child], min(found, key=lambda one: one.residual), doubt))
    return out


def _mean(gram: Array, child: int, parents: Place, names: Sequence[str]) -> Shares | None:
    place = [child, *parents]
    try:
        found = shares.solved(gram[:, place][:, :, place], [names[i] for i in parents])
    except ModelError:
        return None
    return found if found.is_merge and found.residual <= EXACT else None


def drawn(found: Tree, width: int = 80) -> str:
    """The trees as text, at most `width` columns."""
    lines: list[str] = []
    for number, family in enumerate(found.families):
        if len(family.models) == 1:
            lines.append(_cut(f"{family.models[0]}: no relative among these models", width))
            continue
        lines.append(f"family {number + 1}, {len(family.models)} models")
        for root in roots(family):
            lines += [_cut(line, width) for line in _branches(family, root)]
        for merge in family.merges:
            lines.append(
                _cut(f"{merge.child}: two parents, of which it is a mean, to {merge.found.residual:.1%}", width)
            )
            parts = [f"├─ {s.share:.1%} ({s.low:.1%} to {s.high:.1%}) of {s.parent}" for s in merge.found.shares]
            lines += [_cut(part, width) for part in parts]
            lines += [f"   undecided: {merge.undecided}"] if merge.undecided else []
        lines.append("")
    if any(family.merges for family in found.families):
        lines += [*textwrap.wrap(shares.IF_COMPLETE, width), ""]
    lines += [
        "The top of a tree is drawn, not claimed: direction is said where the weights",
        "tell it. Drift is in units of the weights' own size. Support is how often an",
        "edge stays when layers are drawn anew: it is not a confidence, because an edge",
        "that is wrong in every layer stays too. Below 95 % an edge is undecided.",
        *textwrap.wrap(MISSING, width),
    ]
    return "\n".join(lines)


def as_json(found: Tree) -> dict[str, object]:
    """The trees as plain data."""
    families = [asdict(family) for family in found.families]
    note = {"merges_note": shares.IF_COMPLETE} if any(family.merges for family in found.families) else {}
    return {"fathom_lineage_tree": SCHEMA, "pairs": found.pairs, "families": families, "note": MISSING, **note}


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def roots(family: Family) -> list[str]:
    """Where to start drawing, once for each connected part: a source without a source, with the most neighbours."""
    made = {edge.direction.made for edge in family.edges}
    source = {edge.direction.source for edge in family.edges}
    neighbours = {m: sum(m in (e.a, e.b) for e in family.edges) for m in family.models}
    merged = {merge.child for merge in family.merges}
    parts = DisjointSet([model for model in family.models if model not in merged])
    for edge in family.edges:
        parts.merge(edge.a, edge.b)
    return [max(part, key=lambda m: (m not in made, m in source, neighbours[m], m)) for part in parts.subsets()]


def _branches(family: Family, model: str, before: str = "", above: str | None = None) -> list[str]:
    lines = [model] if above is None else []
    below = [e for e in family.edges if model in (e.a, e.b) and above not in (e.a, e.b)]
    for edge in below:
        other = edge.b if edge.a == model else edge.a
        last = edge is below[-1]
        lines.append(f"{before}{'└' if last else '├'}─ {other}")
        inside = before + ("   " if last else "│  ")
        lines.append(f"{inside}{edge.verdict}; drift {edge.drift:.2f}, support {edge.support:.0%}")
        lines += [f"{inside}undecided: {edge.undecided}"] if edge.undecided else []
        lines.append(f"{inside}direction: {edge.direction if edge.direction.made else 'cannot be told'}")
        lines += _branches(family, other, inside, model)
    return lines
