"""AWM: align residual channels by the embedding, then compare W_Q and W_K by unbiased CKA over channels.

The score of a layer is

    score(layer) = ½ Σ_{W ∈ Q,K} CKA_u(Rᵀ W_Aᵀ, W_Bᵀ)

R is the identity (order), a signed permutation (LAP, as published) or the polar factor of the embeddings' cross
product (Procrustes). Samples are channels, features are head rows, so head counts may differ and any rotation of
the rows drops out. Published: raw weights. Repaired: canonical ones.

`aligning.py` decides which alignments are computed, and `comparison.py` those without a tokenizer, and which layers and
channels are scored. `signs.py` compares published with repaired scores. `evidence.py` decides which score is high
(`score_threshold`), and which drift of the weights a score means (`detectable_drift`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import blas, svd
from scipy.optimize import linear_sum_assignment

from fathom.checkpoints.tensors import Array
from fathom.lineage import canonical, heads
from fathom.lineage.weights import Weights

MAP_CHANNELS = 256
LARGEST = 1e4
FAST_CHANNELS = 768
CHUNK_ROWS = 2048
CLEAR = 2.0  # a pair is clear if it is this many times more similar than the next best
TIE = 1e-5  # two rows with similarities that differ by less than this share of the largest are equal


def triangle(features: Array) -> Array:
    """The lower triangle of X Xᵀ for X [n, p], which costs half as much as the full product. The upper
    triangle is zero."""
    syrk = blas.dsyrk if features.dtype == np.float64 else blas.ssyrk
    # BLAS sees Xᵀ (no copy) and fills one triangle of (Xᵀ)ᵀXᵀ
    out: Array = syrk(1.0, np.ascontiguousarray(features).T, trans=1).T
    return out


def mirrored(half: Array) -> Array:
    """The full symmetric matrix whose lower triangle is given."""
    full = half + half.T
    np.fill_diagonal(full, np.diagonal(half))
    return full


def centred(kernel: Array) -> Array:
    """U-centring, in place: zero diagonal, then rows and columns that sum to zero off the diagonal."""
    n = len(kernel)
    np.fill_diagonal(kernel, 0)
    means = kernel.sum(1, dtype=np.float64) / (n - 2)
    means -= means.sum() / (2 * (n - 1))
    means = means.astype(kernel.dtype)
    kernel -= means[:, None]
    kernel -= means
    np.fill_diagonal(kernel, 0)
    return kernel


def inner(a: Array, b: Array) -> float:
    """⟨A, B⟩ with the sum over rows in float64."""
    return float(np.einsum("ij,ij->i", a, b).sum(dtype=np.float64))


def cka(x: Array, y: Array, guard: float = 0.0) -> float:
    """Unbiased linear CKA of X [n, p] and Y [n, p']."""
    return Kernel.of(triangle(x)).cosine(Kernel.of(triangle(y)), guard)


@dataclass(frozen=True)
class Alignment:
    """How the channels of model A map to those of model B: either `columns` and `signs`, or a rotation [d_A, d_B]. B's
    channels keep their order."""

    columns: Array | None = None
    signs: Array | None = None
    rotation: Array | None = None

    def apply(self, matrix: Array, channels: Array) -> Array:
        """The columns of W_A [p, d_A] aligned with some of B's channels, transposed to features [n, p]."""
        if self.rotation is not None:
            return np.ascontiguousarray((matrix @ self.rotation[:, channels].astype(matrix.dtype)).T)
        assert self.columns is not None and self.signs is not None
        return np.ascontiguousarray((matrix[:, self.columns[channels]] * self.signs[channels].astype(matrix.dtype)).T)


def identity(width: int) -> Alignment:
    """No matching: the original order."""
    return Alignment(np.arange(width), np.ones(width))


@dataclass
class Cross:
    """Sums of row products over the shared vocabulary, collected in one pass over both models' embeddings."""

    product: Array  # E_Aᵀ E_B, [d_A, d_B]
    sum_a: Array
    sum_b: Array
    square_a: Array
    square_b: Array
    rows: int
    published: Cross | None = None  # the same sums of unscaled rows, if requested

    @classmethod
    def empty(cls, d_a: int, d_b: int, kind: np.dtype[np.floating]) -> Cross:
        """Sums of nothing."""
        return cls(np.zeros((d_a, d_b), kind), np.zeros(d_a), np.zeros(d_b), np.zeros(d_a), np.zeros(d_b), rows=0)

    def add(self, part_a: Array, part_b: Array) -> None:
        """Add some paired rows."""
        self.product += part_a.T @ part_b
        for part, sums, squares in ((part_a, self.sum_a, self.square_a), (part_b, self.sum_b, self.square_b)):
            sums += part.sum(0, dtype=np.float64)
            squares += np.einsum("ij,ij->j", part, part, dtype=np.float64)
        self.rows += len(part_a)

    def cosines(self) -> Array:
        """Cosines of A's channels with B's, not centred."""
        norms = np.sqrt(np.maximum(self.square_a, canonical.TINY))[:, None] * np.sqrt(
            np.maximum(self.square_b, canonical.TINY)
        )
        return self.product / norms.astype(self.product.dtype)


def cross_products(
    weights_a: Weights,
    weights_b: Weights,
    rows_a: Array,
    rows_b: Array,
    table: Callable[[Weights, Array], Array] = canonical.embedding,
    published: bool = False,
) -> Cross:
    """Sums over pairs of embedding rows, each scaled to unit length so that all have equal weight; zero and duplicate
    rows are excluded.

    Args:
        weights_a: One model.
        weights_b: The other.
        rows_a: Rows of A.
        rows_b: Rows of B for the same strings.
        table: Embedding or head.
        published: Also sum all unscaled rows, as AWM does.
    """
    d_a, d_b = weights_a.geometry.width, weights_b.geometry.width
    total: Cross | None = None
    seen: tuple[set[bytes], set[bytes]] = (set(), set())
    for start in range(0, len(rows_a), CHUNK_ROWS):
        part_a = gathered(weights_a, rows_a[start : start + CHUNK_ROWS], table)
        part_b = gathered(weights_b, rows_b[start : start + CHUNK_ROWS], table)
        kind = np.result_type(part_a, part_b)
        if total is None:
            total = Cross.empty(d_a, d_b, kind)
            total.published = Cross.empty(d_a, d_b, kind) if published else None
        if total.published is not None:
            total.published.add(part_a, part_b)
        alive = _telling(part_a, seen[0]) & _telling(part_b, seen[1])
        total.add(unit_rows(part_a[alive]), unit_rows(part_b[alive]))
    assert total is not None
    return total


def unit_rows(rows: Array) -> Array:
    """Rows scaled to unit length; zero rows stay zero, and large numbers do not overflow."""
    largest = np.maximum(rows.max(1, keepdims=True, initial=0), -rows.min(1, keepdims=True, initial=0))
    out: Array = rows / np.maximum(largest, canonical.TINY)
    out /= np.maximum(np.sqrt(np.einsum("ij,ij->i", out, out)), canonical.TINY)[:, None]
    return out


def _telling(rows: Array, seen: set[bytes]) -> Array:
    """Which rows are neither almost zero nor copies of earlier rows; their hashes are added to `seen`."""
    sizes = np.abs(rows).max(1)
    out = np.zeros(len(rows), bool)
    for at in np.flatnonzero(sizes > max(1e-6 * float(np.median(sizes)), canonical.TINY)):
        digest = hashlib.blake2b(rows[at].tobytes(), digest_size=16).digest()
        out[at] = digest not in seen
        seen.add(digest)
    return out


def gathered(weights: Weights, rows: Array, table: Callable[[Weights, Array], Array]) -> Array:
    """Rows of a table in the requested order; the file is read in ascending order of rows."""
    order = np.argsort(rows, kind="stable")
    read = table(weights, rows[order])
    out = np.empty_like(read)
    out[order] = read
    return out


@dataclass(frozen=True)
class Matching:
    """A one-to-one assignment, and which of its pairs count as evidence (ties do not)."""

    columns: Array  # the partner of each item of the narrower side
    counted: Array  # neither it nor its partner is zero or a copy of another
    clear: Array  # the pair is far more similar than either is to anything else

    @property
    def fixed(self) -> int:
        """The number of channels matched to the channel with the same index, not counting ties and unclear matches.

        A model can be permuted until an assignment maps an unrelated model's channels to the same indices. Such pairs
        are not clear.
        """
        return int(np.sum(self.counted & self.clear & (self.columns == np.arange(len(self.columns)))))

    @property
    def judged(self) -> int:
        """The number of items with a clear partner, whichever index the partner has."""
        return int(np.sum(self.counted & self.clear))

    @property
    def size(self) -> int:
        """Number of items that count."""
        return int(self.counted.sum())

    def agreement(self, other: Matching) -> int:
        """The number of items that count as evidence in both matchings and have the same partner in both."""
        return int(np.sum(self.counted & other.counted & (self.columns == other.columns)))


def match(similarity: Array, seed: int = 0) -> Matching:
    """Assignment that maximises |similarity| [rows, columns]: for each column its row (columns ≤ rows).

    Ties are broken at random. A solver that breaks them in input order would find a matching without any information.
    """
    draw = np.random.default_rng(seed)
    rows, columns = (draw.permutation(count) for count in similarity.shape)
    shuffled = similarity.T[np.ix_(columns, rows)]
    np.abs(shuffled, out=shuffled)
    picked, partners = linear_sum_assignment(shuffled, maximize=True)
    del shuffled
    out = np.empty(similarity.shape[1], np.int64)
    out[columns[picked]] = rows[partners]
    return Matching(out, ~(tied(similarity.T) | tied(similarity)[out]), _clear(similarity, out))


def _clear(similarity: Array, columns: Array) -> Array:
    """Whether the similarity of each assigned pair is far higher than any other in its row and its column."""
    sizes = np.abs(similarity)
    place = np.arange(len(columns))
    own = sizes[columns, place]
    sizes[columns, place] = 0
    return own >= CLEAR * np.maximum(sizes.max(0), sizes.max(1)[columns])


def tied(similarity: Array) -> Array:
    """Which rows an assignment cannot distinguish: almost zero, or equal to another row up to sign."""
    sizes = np.abs(similarity)
    highest = sizes.max(1)
    slack = TIE * float(highest.max())
    out: Array = highest <= slack
    weights: Array = np.random.default_rng(0).random((sizes.shape[1],))
    keys = sizes @ weights.astype(sizes.dtype)
    order = np.argsort(keys)
    near = np.flatnonzero(np.diff(keys[order]) <= slack * sizes.shape[1])
    for block in chunks(len(near), 256):
        one, other = order[near[block]], order[near[block] + 1]
        equal = np.abs(sizes[one] - sizes[other]).max(1) <= slack
        out[one[equal]] = out[other[equal]] = True
    return out


def lap(cosines: Array, seed: int = 0) -> tuple[Alignment, Matching]:
    """The published alignment: for each channel of B the channel of A with the largest |cosine|, one to one."""
    found = match(cosines, seed)
    picked = cosines[found.columns, np.arange(len(found.columns))]
    return Alignment(found.columns, np.where(picked < 0, -1.0, 1.0)), found


def procrustes(cross: Cross) -> Alignment:
    """R = U Vᵀ of the centred cross product: the rotation that brings A's embedding closest to B's."""
    product = cross.product - np.outer(cross.sum_a, cross.sum_b / max(cross.rows, 1)).astype(cross.product.dtype)
    u, _, vt = svd(product, full_matrices=False, overwrite_a=True, check_finite=False)
    return Alignment(rotation=u @ vt)


def draw_channels(width: int, count: int, seed: int) -> Array:
    """A seeded sample of channels, sorted; all channels if there are at most `count`."""
    if width <= count:
        return np.arange(width)
    return np.sort(np.random.default_rng(seed).choice(width, count, replace=False))


@dataclass(frozen=True)
class MatchMethod:
    """A scoring method: an alignment, applied either to canonical weights or, as in the published AWM, to raw
    weights."""

    name: str
    how: Alignment
    published: bool = False
    channels: int | None = FAST_CHANNELS

    @property
    def guard(self) -> float:
        """The limit below which a kernel is too small for the published code, which then returns a CKA of 0; 0 for
        canonical weights."""
        return 1e-8 if self.published else 0.0


@dataclass
class Scores:
    """The Q and K scores of each matched layer by one method, and the layer × layer similarities by which layers were
    matched."""

    map: Array  # [layers of A, layers of B], mean of Q and K
    pairs: list[tuple[int, int]]
    q: list[float] = field(default_factory=list)
    k: list[float] = field(default_factory=list)

    @property
    def per_layer(self) -> list[float]:
        """For each matched pair of layers, the mean of the Q score and the K score."""
        return [(q + k) / 2 for q, k in zip(self.q, self.k, strict=True)]

    @property
    def score(self) -> float:
        """The sum of the matched layers' similarities, divided by the number of layers of the shallower model.
        Unmatched ones count 0, so one good pair is not enough."""
        return self.covering(min(self.map.shape)) if self.q else 0.0

    def covering(self, layers: int) -> float:
        """The sum of the matched layers' similarities divided by `layers`, so unmatched layers count as 0."""
        return float(np.sum(self.per_layer)) / layers


Matrices = tuple[Array, Array]


def read_qk(weights: Weights, index: int, living: bool = False) -> dict[bool, Matrices]:
    """W_Q and W_K of one layer, read once: raw under the key True (published), canonical under False; `living` removes
    heads without effect from the canonical ones."""
    layer = weights.layer(index, canonical.QK_ROLES)
    folded = canonical.fold(layer, weights.geometry)
    form = canonical.balance_qk(folded | {role: bounded(folded[role]) for role in "qk"}, weights.geometry)
    q, k = form["q"], form["k"]
    if living and (kept := heads.living(weights, index)) is not None:
        g = weights.geometry
        q = q.reshape(g.heads, g.head_dim, -1)[kept].reshape(-1, g.width)
        k = k.reshape(g.kv_heads, g.head_dim, -1)[kept.reshape(g.kv_heads, -1).any(1)].reshape(-1, g.width)
    return {True: (bounded(layer["q"]), bounded(layer["k"])), False: (q, k)}


def bounded(matrix: Array) -> Array:
    """The matrix, divided by its largest absolute value if its Gram matrix could overflow."""
    largest = max(float(matrix.max(initial=0)), -float(matrix.min(initial=0)))
    return matrix / np.float32(largest) if largest > LARGEST else matrix


@dataclass
class Kernel:
    """A Gram matrix prepared for HSIC_u: its lower triangle without the diagonal, its row sums, and its HSIC_u with
    itself."""

    half: Array
    sums: Array
    size: float = 0.0

    @classmethod
    def of(cls, half: Array) -> Kernel:
        """Make a kernel from the lower triangle of a Gram matrix; the array is modified, since its diagonal is set to
        0."""
        np.fill_diagonal(half, 0)
        kernel = cls(half, half.sum(0, dtype=np.float64) + half.sum(1, dtype=np.float64))
        kernel.size = kernel.with_(kernel)
        return kernel

    def with_(self, other: Kernel) -> float:
        """tr K̃L̃ + (1ᵀK̃1)(1ᵀL̃1)/((n−1)(n−2)) − 2/(n−2) 1ᵀK̃L̃1: HSIC_u up to 1/(n(n−3)), or ⟨K_c, L_c⟩."""
        n = len(self.sums)
        total = float(self.sums.sum() * other.sums.sum()) / ((n - 1) * (n - 2))
        return 2 * inner(self.half, other.half) + total - 2 / (n - 2) * float(self.sums @ other.sums)

    def cosine(self, other: Kernel, guard: float = 0.0) -> float:
        """The unbiased CKA of two kernels; 0 if either kernel's HSIC_u with itself is not above `guard`."""
        if self.size <= guard or other.size <= guard:
            return 0.0
        return self.with_(other) / math.sqrt(self.size) / math.sqrt(other.size)


@dataclass
class Kernels:
    """Gram matrices of Q and K over channels: over all selected channels for scores, and over a few, centred,
    normalised and flattened, for matching layers."""

    fine: tuple[Kernel, Kernel]
    coarse: Array  # [2, few²]


def layer_kernels(
    weights: Weights, index: int, methods: list[MatchMethod], side: int, width: int, seed: int, living: bool = False
) -> list[Kernels]:
    """The Gram matrices of one layer for every method. Side 1 is not aligned: its channels keep their order."""
    matrices = read_qk(weights, index, living)
    if side == 0:
        return [_kernels(matrices[m.published], m.how, m, width, seed) for m in methods]
    made: dict[tuple[bool, int | None], Kernels] = {}  # not aligned here: most methods share these
    for method in methods:
        key = method.published, method.channels
        if key not in made:
            made[key] = _kernels(matrices[method.published], identity(width), method, width, seed)
    return [made[method.published, method.channels] for method in methods]


def _kernels(matrices: Matrices, how: Alignment, method: MatchMethod, width: int, seed: int) -> Kernels:
    channels = draw_channels(width, method.channels or width, seed)
    few = draw_channels(len(channels), MAP_CHANNELS, seed)
    fine, coarse = [], []
    for matrix in matrices:
        half = triangle(how.apply(matrix, channels))
        part = centred(mirrored(half[np.ix_(few, few)])).reshape(-1)
        size = float(np.linalg.norm(part))
        coarse.append(part * (0 if size**2 <= method.guard else 1 / max(size, canonical.TINY)))
        fine.append(Kernel.of(half))
    return Kernels((fine[0], fine[1]), np.stack(coarse))


def score_layers(
    weights: tuple[Weights, Weights],
    layers: tuple[list[int], list[int]],
    methods: list[MatchMethod],
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
    living: bool = False,
) -> dict[str, Scores]:
    """Score two stacks by every method, reading each layer once if the depths agree.

    A coarse map of all layer pairs (256 channels) gives the matching; matched pairs are then scored on
    `method.channels`. Pairs are positions in `layers`.
    """
    if not methods:
        return {}
    width, count = weights[1].geometry.width, max(map(len, layers))
    coarse: tuple[list[list[Array]], list[list[Array]]] = ([], [])  # side, layer, method
    fine: dict[tuple[int, int], list[tuple[float, float]]] = {}

    def kernels(side: int, at: int) -> list[Kernels]:
        return layer_kernels(weights[side], layers[side][at], methods, side, width, seed, living)

    for step in range(count):
        progress(f"queries and keys: {step + 1} of {count} layers")
        found = [kernels(side, step) if step < len(layers[side]) else None for side in (0, 1)]
        for side, some in enumerate(found):
            if some is not None:
                coarse[side].append([kernel.coarse for kernel in some])
        if len(layers[0]) == len(layers[1]) and found[0] and found[1]:
            fine[step, step] = _fine(found[0], found[1], methods)
    out = {}
    for number, method in enumerate(methods):
        flat_a, flat_b = (np.stack([some[number] for some in side]) for side in coarse)  # [L, 2, few²]
        table = np.einsum("itx,jtx->ij", flat_a, flat_b, optimize=True).astype(np.float64) / 2
        out[method.name] = Scores(table, matched(table, method.published))
    wanted = {pair for scores in out.values() for pair in scores.pairs}
    for i, j in sorted(wanted - set(fine)):
        progress(f"queries and keys: layers {layers[0][i]} and {layers[1][j]}")
        fine[i, j] = _fine(kernels(0, i), kernels(1, j), methods)
    for number, scores in enumerate(out.values()):
        scores.q = [fine[pair][number][0] for pair in scores.pairs]
        scores.k = [fine[pair][number][1] for pair in scores.pairs]
    return out


def _fine(a: list[Kernels], b: list[Kernels], methods: list[MatchMethod]) -> list[tuple[float, float]]:
    return [
        (x.fine[0].cosine(y.fine[0], m.guard), x.fine[1].cosine(y.fine[1], m.guard))
        for x, y, m in zip(a, b, methods, strict=True)
    ]


def matched(table: Array, published: bool) -> list[tuple[int, int]]:
    """Pairs of matching layers: i ↔ i at equal depth unless an order-preserving shift is clearly better."""
    rows, columns = table.shape
    straight = [(i, i) for i in range(rows)]
    if published:
        return straight if rows == columns else free(table)
    pairs = monotone(table)
    if rows == columns and sum(table[pair] for pair in pairs) <= np.trace(table) + 0.05 * rows:
        return straight
    return pairs


def monotone(similarity: Array) -> list[tuple[int, int]]:
    """The order-preserving matching of layers with the largest total similarity; some layers may stay unmatched."""
    rows, columns = similarity.shape
    best = np.zeros((rows + 1, columns + 1))
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            best[i, j] = max(best[i - 1, j], best[i, j - 1], best[i - 1, j - 1] + similarity[i - 1, j - 1])
    pairs, i, j = [], rows, columns
    while i and j:
        if best[i, j] == best[i - 1, j - 1] + similarity[i - 1, j - 1] and similarity[i - 1, j - 1] > 0:
            pairs.append((i - 1, j - 1))
            i, j = i - 1, j - 1
        elif best[i, j] == best[i - 1, j]:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def free(similarity: Array) -> list[tuple[int, int]]:
    """The published layer matching: Hungarian, regardless of order."""
    rows, columns = linear_sum_assignment(similarity, maximize=True)
    return [(int(i), int(j)) for i, j in zip(rows, columns, strict=True)]


def chosen_layers(count: int, limit: int | None) -> list[int]:
    """The indices of evenly spaced layers, including the first and the last; all layers if there is no limit."""
    if limit is None or limit >= count:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(limit - 1, 1)) for i in range(limit)})


def chunks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
