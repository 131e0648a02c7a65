"""Mixtures: every prefix keeps the shares, every row is a function of the seed and its number alone."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.corpus.prepare import prepare
from fathom.data.batches import BatchPlan
from fathom.data.collections import MixedDataset, collection_sizes, open_mixture
from fathom.data.mixture import Mixture, Phase, row_order, whole_weights
from fathom.data.permutation import Permutation
from fathom.data.puzzles import has_split
from fathom.data.shards import TokenDataset
from fathom.errors import DataError
from tests.data.corpora import stream

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=5).filter(lambda shares: sum(shares) > 0.01)


@pytest.fixture(scope="module")
def mixed(corpus: Path) -> MixedDataset:
    return open_mixture(corpus, ["seas", "rivers"])


def within(weights: list[int], order: list[int]) -> bool:
    """Whether -1 < w n - c < k - 1 at every prefix, k being the collections that are read."""
    total, counts = sum(weights), [0] * len(weights)
    for n, chosen in enumerate(order, 1):
        counts[chosen] += 1
        gaps = [Fraction(w * n, total) - c for w, c in zip(weights, counts, strict=True) if w]
        if not all(-1 < gap < max(len(gaps) - 1, 1) for gap in gaps):
            return False
    return True


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 400), SHARES), min_size=1, max_size=4), st.integers(1, 1000))
@settings(max_examples=25)
def test_every_prefix_of_a_phase_keeps_its_shares(phases: list[tuple[int, list[float]]], rows: int) -> None:
    size = max(len(shares) for _, shares in phases)
    firsts = [0, *np.cumsum([length for length, _ in phases[:-1]]).tolist()]
    padded = [tuple(shares + [0.0] * (size - len(shares))) for _, shares in phases]
    mixture = Mixture([Phase(first, shares) for first, shares in zip(firsts, padded, strict=True)])
    collections, numbers = mixture.places(np.arange(rows))
    for first, last, shares in zip(firsts, [*firsts[1:], rows], padded, strict=True):
        read = [number for number, share in enumerate(shares) if share > 0]
        weights = [0] * size
        for number, weight in zip(read, whole_weights([shares[number] for number in read]), strict=True):
            weights[number] = weight
        assert within(weights, collections[first : min(last, rows)].tolist())
    # Each collection is read row by row, across phases; the counts are those of the rows.
    for number in range(size):
        mine = numbers[collections == number]
        assert mine.tolist() == list(range(len(mine)))
    assert mixture.counts(rows) == np.bincount(collections, minlength=size).tolist()
    # Any row, asked alone, is the same.
    chosen = random.Random(rows).randrange(rows)
    alone = mixture.places(np.array([chosen]))
    assert (alone[0][0], alone[1][0]) == (collections[chosen], numbers[chosen])


def test_a_random_order_does_not_keep_them() -> None:
    """Negative control of `within`: drawing the collection of each row by chance, as others do."""
    drawn = np.random.default_rng(0).choice(3, 500, p=[0.7, 0.2, 0.1]).tolist()
    assert within([7, 2, 1], row_order([7, 2, 1], 500).tolist())
    assert not within([7, 2, 1], drawn)


def test_more_collections_than_a_byte_has_numbers() -> None:
    """In every run of as many rows as there are collections of one share, each has its row."""
    assert row_order([1] * 256, 256).dtype == np.uint8
    order = row_order([1] * 300, 600)
    assert order.tolist() == 2 * list(range(300))
    collections, numbers = Mixture([Phase(0, (1.0,) * 300)]).places(np.array([0, 299, 300 + 257]))
    assert collections.tolist() == [0, 299, 257] and numbers.tolist() == [0, 0, 1]
    with pytest.raises(DataError, match="a mixture of 65,537 collections: allowed: 65,536 at most"):
        Mixture([Phase(0, (1.0,) * 65_537)])


def test_rows_are_the_windows_of_their_collection(mixed: MixedDataset) -> None:
    """Against a loop that knows largest deficits and shuffles alone; over the end of an epoch and of a phase."""
    mixture = Mixture([Phase(0, (0.25, 0.75)), Phase(40, (1.0, 0.0)), Phase(60, (0.5, 0.5))])
    plan = BatchPlan(mixed, 32, 4, seed=5, mixture=mixture)
    parts = list(mixed.collections.values())
    had, counts = [0, 0], [0, 0]
    epochs = set()
    for step in range(160):
        (batch,) = plan.batch(step)
        for place, row in enumerate(batch.input_ids.numpy()):
            n = step * 4 + place
            weights, first = ([1, 3], 0) if n < 40 else ([1, 0], 40) if n < 60 else ([1, 1], 60)
            if n == first:
                counts = [0, 0]
            owed = [w * (n - first + 1) - sum(weights) * c for w, c in zip(weights, counts, strict=True)]
            chosen = owed.index(max(owed))
            counts[chosen] += 1
            windows = parts[chosen].num_tokens // 32
            epoch, where = divmod(had[chosen], windows)
            epochs.add((chosen, epoch))
            window = int(Permutation(windows, 5, chosen, epoch)(np.array([where]))[0])
            expected = np.empty(32, np.int64)
            parts[chosen].read(window * 32, expected)
            assert np.array_equal(row, expected)
            had[chosen] += 1
    assert (0, 1) in epochs, "a collection must be begun anew for this to test anything"
    windows_of_each = [part.num_tokens // 32 for part in parts]
    assert plan.epochs(160) == {
        name: count / each for name, count, each in zip(["seas", "rivers"], had, windows_of_each, strict=True)
    }


def test_collections_are_one_stream(mixed: MixedDataset) -> None:
    """Reads, document ends and bytes of the joined stream are those of its parts."""
    parts = list(mixed.collections.values())
    whole = stream(mixed)
    assert np.array_equal(whole, np.concatenate([stream(part) for part in parts]))
    ends = [0, *(np.flatnonzero(whole == mixed.eos_token_id) + 1).tolist()][1:-1]
    assert mixed.document_ends(0, mixed.num_tokens).tolist() == ends
    border = parts[0].num_tokens
    assert border in mixed.document_ends(border - 3, border + 3)
    piece = np.empty(10, np.int64)
    mixed.read(border - 4, piece)
    assert np.array_equal(piece, whole[border - 4 : border + 6])
    assert mixed.bytes_before(border) == parts[0].num_bytes
    assert mixed.bytes_before(mixed.num_tokens) == mixed.num_bytes == sum(part.num_bytes for part in parts)


def test_corpora_and_domains_mix_and_what_does_not_fit_is_named(corpus: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the lead is heavy and the rope is long " * 40)
    one = str(tmp_path / "same")
    prepare([str(text)], one, tokenizer=str(corpus / "tokenizer"), held_out=0.0, workers=1)
    mixed = open_mixture(corpus, ["rivers", one])
    assert mixed.domains == ("rivers", one)
    assert collection_sizes(corpus, ["rivers", one]) == [part.num_tokens for part in mixed.collections.values()]
    assert mixed.select(one).fingerprint == TokenDataset.open(one).fingerprint
    assert open_mixture(corpus, ["rivers", one], "val").domains == ("rivers",)
    assert mixed.fingerprint != open_mixture(corpus, [one, "rivers"]).fingerprint
    assert has_split(corpus, "val", [one, "seas"])
    assert not has_split(corpus, "val", [one])
    with pytest.raises(DataError, match=r"none of .* has a split 'val'"):
        open_mixture(corpus, [one], "val")
    with pytest.raises(DataError, match=r"data.mixture.oceans: no such directory, and no domain .* rivers, seas$"):
        open_mixture(corpus, ["oceans"])
    other = str(tmp_path / "other")
    prepare([str(text)], other, train_tokenizer=280, held_out=0.0, workers=1)
    with pytest.raises(
        DataError, match=r"its tokenizer \(\w{12}\) is not that of .*prepare both with the same tokenizer$"
    ):
        open_mixture(corpus, ["rivers", other])
    with pytest.raises(DataError, match="a context of 4096 tokens is longer"):
        BatchPlan(mixed, 4096, 4, 0, mixture=Mixture([Phase(0, (1.0, 1.0))]))
