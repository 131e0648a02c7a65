"""The family tree of many models: which are related, which are neighbours, where it begins, and what is undecided.

Every pair is measured once. Two models belong to one family if the pair's matching tests are significant after
Bonferroni over all pairs. Models of other families are the pair's controls. Within a family, the tree has the smallest
total drift, in units of the weights' own size. Models whose numbers are in one order are joined first, by the distance
of all their weights (`distances`); a disguised copy is in another order, and is joined by its scores, for a score
s = 1 / (1 + ε²) is a drift of ε. Another shape counts as a drift of half the weights, so that a copy is attached to its
original and not to the original's deeper sibling. The support of an edge is how often it is in the tree when layers are
resampled. It is not a confidence. The direction of an edge is reported if the weights show it, and the root if exactly
one model lies so between its neighbours as only their common parent does.

A merge is a node with two parents and no edge of the tree: it lies between its parents and would draw all edges to
itself. It is undecided if other parents fit as well. An edge is undecided if its support is low, or if one of its ends
may come from a merge that is nearer: the two parents' own parent does not, nor does a model from which the other end
lies in the same direction as from the merge.

`comparison.py` measures the pairs, `distances.py` has the cosines that a root needs, `shares.py` fits the merges, and
`direction.py` says which of two models came first.
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
from fathom.lineage import distances, evidence, shares
from fathom.lineage.comparison import Options, judge, measure
from fathom.lineage.direction import Direction, direction
from fathom.lineage.distances import Space
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
BEYOND = 0.2  # cosine at a merge from which it does not lie between two models
SAME = 0.02  # drift below which weights are all but the same, and either model may be the first
MISSING = (
    "A parent may be missing from the set: neighbours are then siblings, or a grandparent and its grandchild, although "
    "the tree joins them."
)
READING = (
    "The top of a tree is drawn, not claimed. A root is claimed where one model lies so between its neighbours as only "
    "their common parent does, if no model is missing. Drift is in units of the weights' own size. Support is how "
    "often an edge stays when layers are drawn anew: it is not a confidence, because an edge that is wrong in every "
    "layer stays too. Below 95 % an edge is undecided."
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
    """A model that is a weighted mean of two other models, which are its parents."""

    child: str
    found: Shares
    undecided: str = ""  # why, if it is

    @property
    def parents(self) -> set[str]:
        """The names of the parents."""
        return {one.parent for one in self.found.shares}


@dataclass(frozen=True)
class Family:
    """A family of related models: the tree of those that are not merges, and the merges."""

    models: tuple[str, ...]
    edges: tuple[Edge, ...]
    merges: tuple[Merge, ...] = ()
    root: tuple[str, ...] = ()  # the first model, if no model is missing; several if their weights are all but the same


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
    found = distances.spaces(models, lambda w: (shares.shape_of(w), _experts(w)), lambda at: progress(f"weights: {at}"))
    merges = [merge for space in found for merge in _merges(models, space)]
    known = _Known(models, pairs, sure, found, merges)
    made = [_family(known, group, groups, seed, progress) for group in groups]
    made.sort(key=lambda family: -len(family.models))
    return Tree(tuple(made), len(places))


def grouped(count: int, edges: Sequence[Place]) -> list[list[int]]:
    """Connected components, in the order of their first members."""
    parts = DisjointSet(range(count))
    for edge in edges:
        parts.merge(*edge)
    return sorted(map(sorted, parts.subsets()))


@dataclass(frozen=True)
class Step:
    """The distance of two models: squared distances by layer if their weights are in the same order, else scores by
    layer."""

    layers: Array
    near: bool  # in one order
    reshaped: float = 0.0  # what another shape adds

    def drift(self, at: Array | slice = slice(None)) -> float:
        """The drift between two models in units of the weights' size, over all layers or over those at some relative
        depths."""
        some = self.layers[at if isinstance(at, slice) else (at * len(self.layers)).astype(int)]
        return math.sqrt(float(some.mean())) if self.near else _drift(float(some.mean())) + self.reshaped


@dataclass(frozen=True)
class _Known:
    """All measurements of a group of models: pairs, the p-values of related pairs, distances, and merges."""

    models: Sequence[Weights]
    pairs: Mapping[Place, Pair]
    sure: Mapping[Place, float]
    spaces: Sequence[Space]
    merges: Sequence[Merge]

    def space(self, *members: int) -> Space | None:
        """The `Space` in which all these models have their weights in the same order; None if there is none."""
        return next((s for s in self.spaces if all(s.together(members[0], other) for other in members[1:])), None)

    def step(self, place: Place) -> Step:
        """How far two models are apart."""
        if (space := self.space(*place)) is not None:
            return Step(space.apart(*place), True)
        return Step(_curve(self.pairs[place]), False, RESHAPED * _reshaped(*(self.models[i] for i in place)))

    def number(self, name: str) -> int:
        """A model's number."""
        return next(i for i, model in enumerate(self.models) if model.name == name)


def _family(known: _Known, group: Sequence[int], groups: Sequence[Sequence[int]], seed: int, progress: Told) -> Family:
    """The tree of one group of related models; models of other groups serve as unrelated controls."""
    models, pairs = known.models, known.pairs
    names = tuple(models[i].name for i in group)
    merged = tuple(merge for merge in known.merges if merge.child in names)
    apart = {known.number(merge.child) for merge in merged}
    steps = {place: known.step(place) for place in known.sure if place[0] in group}
    rest = {place: step for place, step in steps.items() if not apart & {*place}}
    chosen = _spanning(group, rest)
    support = supports(group, rest, chosen, seed) if chosen else {}
    strangers = [i for other in groups if other is not group for i in other][: evidence.FEWEST]
    edges = []
    for place in chosen:
        a, b = models[place[0]], models[place[1]]
        progress(f"direction of {a.name} and {b.name}")
        controls = [(models[k].name, [pairs[min(i, k), max(i, k)] for i in place]) for k in strangers]
        with holding(a, b):
            said = judge(pairs[place], controls).verdict.label
            way = direction(a, b)
        nearer = [merge.child for merge in merged if _may_come_from(known, merge, place, chosen, steps)]
        doubt = f"the merge {nearer[0]} is nearer" if nearer else "little support" * (support[place] < DECIDED)
        score, p = float(np.mean(_curve(pairs[place]))), min(1.0, known.sure[place])
        edges.append(Edge(a.name, b.name, said, p, score, steps[place].drift(), support[place], way, doubt))
    return Family(names, tuple(edges), merged, _root(known, chosen, edges))


def _may_come_from(
    known: _Known, merge: Merge, place: Place, chosen: Sequence[Place], steps: Mapping[Place, Step]
) -> bool:
    """Whether one end of an edge may have been trained from a merge that is nearer to it than the edge's other end."""
    child, parents = known.number(merge.child), [known.number(name) for name in merge.parents]
    for end, other in (place, place[::-1]):
        between = steps.get((min(child, end), max(child, end)))
        if end in parents or between is None or between.drift() >= steps[place].drift():
            continue
        space = known.space(end, other, child, *parents)
        if space is None:
            return True
        if other in parents:  # unless it is the parents' own parent
            joined = all((min(end, one), max(end, one)) in chosen for one in parents)
            clear = joined and space.cosine(end, *parents) > -distances.FORK[0]
        else:
            clear = space.cosine(child, end, other) >= BEYOND
        if not clear:
            return True
    return False


def _root(known: _Known, chosen: Sequence[Place], edges: Sequence[Edge]) -> tuple[str, ...]:
    """The root of a tree, if the positions of its neighbours show it, along with models whose weights are almost the
    same."""
    ways: dict[int, list[int]] = {}  # neighbours that may have come before or after a model
    same: dict[int, list[int]] = {}
    unclear = set()
    for (i, j), edge in zip(chosen, edges, strict=True):
        if edge.direction.made:
            unclear.add(known.number(edge.direction.made))
        elif edge.drift < SAME:
            same.setdefault(i, []).append(j)
            same.setdefault(j, []).append(i)
        elif edge.undecided or known.space(i, j) is None:
            unclear |= {i, j}
        else:
            ways.setdefault(i, []).append(j)
            ways.setdefault(j, []).append(i)
    found = [at for at, others in ways.items() if at not in unclear and _forks(known, at, others)]
    if len(found) != 1:
        return ()
    for at, others in ((at, others) for at, others in ways.items() if at != found[0]):
        up = _towards(ways, at, found[0])
        space = known.space(at, *others)
        if up is not None and space and any(space.cosine(at, up, o) >= distances.FORK[0] for o in others if o != up):
            return ()
    firsts = [found[0]]
    for at in firsts:  # which grows
        firsts += [one for one in same.get(at, []) if one not in firsts]
    return tuple(known.models[i].name for i in firsts)


def _forks(known: _Known, at: int, others: Sequence[int]) -> bool:
    space = known.space(at, *others)
    return space is not None and distances.fork(space, at, others)


def _towards(ways: Mapping[int, Sequence[int]], at: int, goal: int) -> int | None:
    """The neighbour of a model through which a path leads to another model; None if there is no path."""
    seen, front = {goal}, [goal]
    while front:
        step = front.pop()
        for other in ways.get(step, ()):
            if other == at:
                return step
            if other not in seen:
                seen.add(other)
                front.append(other)
    return None


def _reshaped(a: Weights, b: Weights) -> bool:
    return shares.shape_of(a) != shares.shape_of(b) or _experts(a) != _experts(b)


def _experts(weights: Weights) -> int:
    last = weights.geometry.layers - 1
    return weights.experts(last) if weights.has("down", last) else 0


def _curve(pair: Pair) -> Array:
    """The scores of the layers by the best alignment; layers without a partner count as 0."""
    if pair.best is None:
        return np.zeros(1)
    found = pair.scores[pair.best].per_layer
    return np.array([*found, *[0.0] * (min(pair.scores[pair.best].map.shape) - len(found))] or [0.0])


def _drift(score: float) -> float:
    return math.sqrt(1 / min(max(score, LEAST_SCORE), 1.0) - 1)


def spanning(group: Sequence[int], *drifts: Mapping[Place, float]) -> list[Place]:
    """The edges of the tree with the smallest total drift (Kruskal); edges from the first table of drifts take
    precedence over those from the next."""
    parts = DisjointSet(group)
    return [p for some in drifts for p in sorted(some, key=lambda p: (some[p], p)) if parts.merge(*p)]


def _spanning(group: Sequence[int], steps: Mapping[Place, Step], at: Array | slice = slice(None)) -> list[Place]:
    """The tree of a group of models: those with weights in the same order are joined first, then joined to the
    others."""
    return spanning(group, *({p: s.drift(at) for p, s in steps.items() if s.near == near} for near in (True, False)))


def supports(
    group: Sequence[int], steps: Mapping[Place, Step], chosen: Sequence[Place], seed: int
) -> dict[Place, float]:
    """How often each edge of a tree is in the tree again when layers are resampled, at the same relative depths for all
    pairs."""
    draw, found = np.random.default_rng(seed), dict.fromkeys(chosen, 0)
    depth = max(len(step.layers) for step in steps.values())
    for _ in range(DRAWS):
        kept = set(_spanning(group, steps, draw.random(depth)))
        for place in chosen:
            found[place] += place in kept
    return {place: count / DRAWS for place, count in found.items()}


def _merges(models: Sequence[Weights], space: Space) -> list[Merge]:
    """The models of a space that are weighted means of two others."""
    names, out = [models[i].name for i in space.models], []
    few = len(names) < 3 or len(space.gram) < shares.FEWEST_LAYERS or _experts(models[space.models[0]]) > 1
    for child in range(0 if few else len(names)):
        pairs = combinations([i for i in range(len(names)) if i != child], 2)
        found = [one for pair in pairs if (one := _mean(space.gram, child, pair, names)) is not None]
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
    """The family trees as text, at most `width` columns wide."""
    lines: list[str] = []
    for number, family in enumerate(found.families):
        if len(family.models) == 1:
            lines.append(_cut(f"{family.models[0]}: no relative among these models", width))
            continue
        lines.append(f"family {number + 1}, {len(family.models)} models")
        lines += [_cut(f"root: {' or '.join(family.root)}", width)] if family.root else []
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
        *textwrap.wrap(READING, width),
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
    """The models at which to start drawing, one for each connected part: preferably the root, else a model that was
    made from no other, preferably one from which others were made; on a tie, the one with the most neighbours."""
    made = {edge.direction.made for edge in family.edges}
    source = {edge.direction.source for edge in family.edges}
    neighbours = {m: sum(m in (e.a, e.b) for e in family.edges) for m in family.models}
    merged = {merge.child for merge in family.merges}
    parts = DisjointSet([model for model in family.models if model not in merged])
    for edge in family.edges:
        parts.merge(edge.a, edge.b)

    def first(model: str) -> tuple[bool, bool, bool, int, str]:
        return model in family.root[:1], model not in made, model in source, neighbours[model], model

    return [max(part, key=first) for part in parts.subsets()]


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
