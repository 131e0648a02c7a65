"""Align the residual channels of two models, and compute the matchings of channels that tests T1 and T2 use.

`awm.py` makes the maps (in order, signed permutation, rotation) and the matchings, which break ties at random. Rows are
scaled to unit length there, and zero rows and copies are left out; only AWM as published takes all rows as they are.
`pairs.py` leaves out T1 and T2 if the embeddings are not close. `comparison.py` adds the maps that need no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import awm, canonical, evidence, vocabulary
from fathom.lineage.weights import Told, Weights

HEAD_ROWS = 8192
CLOSE = 0.95
"""A stranger's embedding can be rotated onto another to cosines of 0.4, tied ones to 0.84; T1 and T2 ask for more."""


@dataclass(frozen=True)
class Aligned:
    """How the residual channels of model A correspond to those of model B, by each reliable method, with the matchings
    behind T1 and T2."""

    rows: tuple[Array, Array]  # embedding rows of the same strings
    pairing: str  # how rows were paired: strings | row numbers | nothing
    ways: dict[str, awm.Alignment]  # order | lap | published | procrustes
    fixed: awm.Matching | None = None  # matched by the embedding
    ordered: bool = False  # energy explains the channel order of both models
    alike: float = 1.0  # share of channels that AWM as published matches the same way
    head: awm.Matching | None = None  # matched by the output heads
    close: float = 0.0  # median |cosine| of the matched columns of the embeddings
    skipped: list[str] = field(default_factory=list)

    @property
    def shared(self) -> int:
        """Number of paired rows."""
        return len(self.rows[0])


def paired_rows(a: Weights, b: Weights) -> tuple[Array, Array, str]:
    """Embedding rows of the same strings in both models, and how they were paired."""
    words_a, words_b = a.vocabulary(), b.vocabulary()
    limit = max(vocabulary.SHARED_LIMIT, 4 * max(a.geometry.width, b.geometry.width))
    if words_a is not None and words_b is not None:
        return *vocabulary.shared_rows(words_a, words_b, a.geometry.vocab, b.geometry.vocab, limit), "strings"
    if a.geometry.vocab == b.geometry.vocab:
        rows = np.arange(min(a.geometry.vocab, limit))
        return rows, rows, "row numbers"
    return np.zeros(0, np.int64), np.zeros(0, np.int64), "nothing"


def align(a: Weights, b: Weights, rotation: bool, progress: Told) -> Aligned:
    """Compute all reliable alignments of two models; `skipped` holds the reasons why other alignments were not
    computed.

    Args:
        a: The wider model.
        b: The other model.
        rotation: Whether to compute the rotation.
        progress: Called before each step.
    """
    rows_a, rows_b, pairing = paired_rows(a, b)
    d_a, d_b = a.geometry.width, b.geometry.width
    ways = {"order": awm.identity(d_a)} if d_a == d_b else {}
    few = f"alignment by the embedding: {len(rows_a):,} shared strings"
    if len(rows_a) < 2 * d_b:
        return Aligned((rows_a, rows_b), pairing, ways, skipped=[f"{few}, {2 * d_b} would be needed for width {d_b}"])
    progress("embeddings")
    cross = awm.cross_products(a, b, rows_a, rows_b, published=True)
    if cross.rows < 2 * d_b:
        why = f"{few}, {cross.rows:,} of them neither zero nor copies of others; {2 * d_b} would be needed"
        return Aligned((rows_a, rows_b), pairing, ways, skipped=[f"{why} for width {d_b}"])
    progress("channel matching")
    cosines = cross.cosines()
    close = float(np.median(np.abs(cosines).max(0)))
    ways["lap"], fixed = awm.lap(cosines, evidence.EMBEDDING)
    del cosines
    assert cross.published is not None
    ways["published"], published = awm.lap(cross.published.cosines(), evidence.EMBEDDING)
    skipped = []
    if fixed.size < d_b:
        skipped.append(
            f"T1 and T2 leave out {d_b - fixed.size} of {d_b:,} channels, which are zero or copies of others"
        )
    if close < CLOSE:
        skipped.append(
            f"T1 and T2: columns of the embeddings agree to a cosine of {close:.2f}, {CLOSE} would be needed: "
            "an unrelated model can be rotated to less"
        )
    if rotation:
        progress("rotation")
        ways["procrustes"] = awm.procrustes(cross)
    else:
        skipped.append("Procrustes alignment: slow at this width in fast mode; use exact mode")
    head, why_not = _head_matching(a, b, rows_a, rows_b, progress)
    return Aligned(
        (rows_a, rows_b),
        pairing,
        ways,
        fixed,
        evidence.is_ordered(cross.square_a) and evidence.is_ordered(cross.square_b),
        float(np.mean(published.columns == fixed.columns)),
        head,
        close,
        [*skipped, *why_not],
    )


def _head_matching(
    a: Weights, b: Weights, rows_a: Array, rows_b: Array, progress: Told
) -> tuple[awm.Matching | None, list[str]]:
    """The second matching for T2: channels matched by the output heads, if neither model's head is tied to its
    embedding."""
    what = "T2 embedding and output head"
    if any(w.geometry.tied for w in (a, b)):
        stored = a.has("head") or b.has("head")
        return None, [f"{what}: a head tied to its embedding is no second witness"] if stored else []
    kept_a, kept_b = evidence.middle(rows_a, rows_b, HEAD_ROWS)
    rows = [w.store.tensors[w.views["head", None].tensor].shape[0] for w in (a, b)]
    usable = (kept_a < rows[0]) & (kept_b < rows[1])
    if usable.sum() < 2 * b.geometry.width:
        return None, []
    progress("output heads")
    for w, kept in ((a, kept_a[usable]), (b, kept_b[usable])):
        likeness = evidence.head_likeness(w, evidence.middle(kept, kept, evidence.PROBES)[0])
        if likeness >= evidence.ALIKE:
            almost = f"the head of {w.name} is all but its embedding (cosine {likeness:.2f})"
            return None, [f"{what}: {almost}, so it is no second witness"]
    cross = awm.cross_products(a, b, kept_a[usable], kept_b[usable], canonical.head)
    return awm.match(cross.cosines(), evidence.HEAD), []
