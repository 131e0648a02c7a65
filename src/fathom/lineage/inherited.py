"""Measures how much of one model's training the other one shares, beyond what a shared initialisation can explain.

Two runs from one public seed start with the same numbers, so every matching test finds them, however different their
data. Only what was *learned* proves a lineage. Per layer, three products act on the residual stream and are independent
of the gauge:

    W_qᵀ W_k      W_o W_v      W_down W_up

For random factors the largest singular value e is known. Directions of A's product with singular values s well above e
come from training, and an initialisation holds at most e of each. B's share of them is

    Σ (uᵀ P_B v − e) / Σ (s − e)

The share is 1 for a copy, and at most about 0 for independent trainings with any initialisation. Runs that hardly
trained have few such directions, and common gradients make those alike: the fewer there are, the larger the share has
to be.

`comparison.py` chooses the alignment (`_inherited`), and decides whether one seed and one order of data would explain
as much (`_one_seed`). `verdict.py` decides what follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical
from fathom.lineage.awm import Alignment, draw_channels, identity
from fathom.lineage.neurons import experts
from fathom.lineage.weights import Weights

CHANNELS = 384
ABOVE = 1.2  # directions count if they are this many times the largest random one
LAYERS, WIDE_LAYERS = 8, 4  # for models with more than 256 channels, because singular values cost n³
FEW, MANY = 0.06, 0.10  # directions per channel below which, and above which, the bar is constant
HIGH, LOW, FEWEST = 0.95, 0.30, 0.005
VISIBLE = 0.01  # directions per channel from which a model is trained; random weights stay below 0.007


@dataclass(frozen=True)
class Inherited:
    """The measured share of one model's trained directions that the other one contains."""

    share: float  # median over matrices
    directions: float  # per channel and matrix: the amount of visible training
    matrices: int

    @property
    def bar(self) -> float:
        """The share above which a common initialisation is ruled out."""
        if self.directions < FEWEST:
            return math.inf
        return float(np.interp(self.directions, (FEW, MANY), (HIGH, LOW)))

    @property
    def margin(self) -> float:
        """How far the measured share is above the share that a common initialisation could explain (`bar`)."""
        return self.share - self.bar


def measured(
    a: Weights,
    b: Weights,
    pairs: Sequence[tuple[int, int]],
    how: Alignment,
    seed: int = 0,
    most: int | None = None,
) -> Inherited | None:
    """Measure the share in both directions over at most eight matched layers (four for wide models), and return the
    result with the larger margin.

    None if no training is visible. `most` limits the layers further.
    """
    channels = draw_channels(b.geometry.width, CHANNELS, seed)
    found: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    limit = min(LAYERS if len(channels) <= CHANNELS // 2 else WIDE_LAYERS, most or LAYERS)
    chosen = pairs if len(pairs) <= limit else [pairs[i] for i in np.linspace(0, len(pairs) - 1, limit).astype(int)]
    for i, j in chosen:
        ours = dict(products(a, i, how, channels))
        theirs = dict(products(b, j, identity(b.geometry.width), channels))
        for kind in ours.keys() & theirs.keys():
            scale = _chance(a, kind, len(channels)), _chance(b, kind, len(channels))
            sides = [p / max(float(np.linalg.norm(p)), canonical.TINY) for p in (ours[kind], theirs[kind])]
            for way in (0, 1):
                found[way].append(_share(sides[way], sides[1 - way], scale[way]))
    made = [_summary(parts, len(channels)) for parts in found.values() if parts]
    return max((one for one in made if one is not None), key=lambda one: one.margin, default=None)


def training(weights: Weights, seed: int = 0) -> float:
    """A model's amount of training: the trained directions per channel and matrix in its first and last layers; 0 for
    random weights."""
    if "training" not in weights.memo:
        channels = draw_channels(weights.geometry.width, CHANNELS, seed)
        counts = [
            _share(product, product, _chance(weights, kind, len(channels)))[1] / len(channels)
            for index in {0, weights.geometry.layers - 1}
            for kind, product in products(weights, index, identity(weights.geometry.width), channels)
        ]
        weights.memo["training"] = sum(counts) / max(len(counts), 1)
    return float(weights.memo["training"])


def _share(own: Array, other: Array, chance: tuple[float, int]) -> tuple[float, float]:
    """The share of the trained directions of the product `own` that `other` contains, and the number of these
    directions."""
    u, s, v = np.linalg.svd(own)
    ratio, rank = chance
    edge = float(np.median(s[:rank])) * ratio
    trained = s > ABOVE * edge
    if not trained.any():
        return math.nan, 0.0
    held = np.einsum("ij,ij->j", u[:, trained], other @ v[trained].T)
    return float((held - edge).sum() / (s[trained] - edge).sum()), float(trained.sum())


def _summary(parts: list[tuple[float, float]], channels: int) -> Inherited | None:
    shares = [share for share, _ in parts if not math.isnan(share)]
    if not shares:
        return None
    return Inherited(float(np.median(shares)), sum(n for _, n in parts) / len(parts) / channels, len(parts))


def products(weights: Weights, index: int, how: Alignment, channels: Array) -> Iterator[tuple[str, Array]]:
    """The three products W_qᵀ W_k, W_o W_v and W_down W_up of a layer at some aligned channels, with norm gains folded
    in, [n, n]."""
    g = weights.geometry
    if weights.has("q", index):
        layer = canonical.fold(weights.layer(index, canonical.QK_ROLES), g)
        layer = canonical.balance_qk(layer, g)
        q, k = (how.apply(layer[role], channels) for role in "qk")  # [n, heads·D]
        yield "qk", canonical.product_qk(q, k, g)
    layer = canonical.fold(weights.layer(index, canonical.VO_ROLES), g)
    if "v" in layer and "o" in layer:
        v, o = how.apply(layer["v"], channels), how.apply(layer["o"].T, channels)
        yield "vo", canonical.by_kv_head(o, g) @ v.T
    if weights.has("down", index):
        yield "ffn", _feed_forward(weights, index, how, channels)


def _feed_forward(weights: Weights, index: int, how: Alignment, channels: Array) -> Array:
    """The product W_down W_up of a layer, summed over some of its experts."""
    norms = weights.layer(index, ("ffn_norm", "post_ffn_norm"))
    total = np.zeros((len(channels), len(channels)), np.float32)
    for expert in experts(weights, index, 8):
        both = {"up": weights.tensor("up", index, None, expert), "down": weights.tensor("down", index, None, expert)}
        both = canonical.fold({**both, **norms}, weights.geometry)
        total += how.apply(both["down"].T, channels) @ how.apply(both["up"], channels).T
    return total


def _chance(weights: Weights, kind: str, channels: int) -> tuple[float, int]:
    """The ratio of the largest to the median singular value for a product of random factors, and its number of non-zero
    singular values."""
    g = weights.geometry
    inner, group = (g.ffn, 1) if kind == "ffn" else (g.heads * g.head_dim, 1 if g.latent else g.group)
    return edge(channels, inner, group), min(channels, max(inner // group, 1))


@cache
def edge(channels: int, inner: int, group: int) -> float:
    """The ratio of the largest to the median singular value of a product of random factors, where `group` columns of
    one factor share one column of the other."""
    draw = np.random.default_rng(0)
    rank, ratios = max(inner // group, 1), []
    for _ in range(3):
        one, other = draw.normal(size=(channels, rank * group)), draw.normal(size=(channels, rank))
        one = one.reshape(channels, rank, group).sum(2)
        values = np.linalg.svd(one @ other.T, compute_uv=False)[:rank]
        ratios.append(float(values[0] / max(float(np.median(values)), canonical.TINY * values[0])))
    return float(np.mean(ratios))
