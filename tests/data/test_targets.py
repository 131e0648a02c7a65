"""Conversations in rows: each is whole and separate, and only the tokens of the loss mask are trained on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.data.batches import BatchPlan, evaluation_batches
from fathom.data.collections import open_mixture
from fathom.data.mixture import Mixture, Phase
from fathom.data.puzzles import open_data
from fathom.data.rows import IGNORED
from fathom.data.shards import TokenDataset, file_crc32, read_index, write_index
from fathom.data.targets import TargetDataset, pack_rows
from fathom.errors import DataError
from tests.data.corpora import stream
from tests.tiny import make_conversations

WIDTH = 32


@pytest.fixture(scope="module")
def place(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_conversations(corpus, tmp_path_factory.mktemp("talk") / "talk")


@pytest.fixture(scope="module")
def talk(place: Path) -> TargetDataset:
    return TargetDataset.open(place)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=120), st.integers(0, 2**40))
@settings(max_examples=60)
def test_rows_hold_every_document_once_and_no_two_rows_would_fit_one(lengths: list[int], seed: int) -> None:
    sizes = np.array(lengths, np.int64)
    packed = pack_rows(sizes, 40, seed)
    assert sorted(packed.documents.tolist()) == list(range(len(sizes)))
    loads = sorted(int(sizes[packed.row(row)].sum()) for row in range(len(packed)))
    assert loads[0] > 0
    assert loads[-1] <= 40
    assert len(loads) == 1 or loads[0] + loads[1] > 40
    again = pack_rows(sizes, 40, seed)
    assert (again.documents == packed.documents).all()


def documents_of(data: TokenDataset) -> list[list[int]]:
    return [part.tolist() for part in np.split(stream(data), data.document_ends(0, data.num_tokens)) if len(part)]


def learnt_of(place: Path, split: str = "train") -> dict[tuple[int, ...], list[bool]]:
    """The bits of every document, from what was written and not by the code under test."""
    written = json.loads((place / f"{split}.json").read_text())
    return {tuple(ids): bits for ids, bits in written}


def test_labels_are_the_bits_and_positions_are_each_documents_own(place: Path, talk: TargetDataset) -> None:
    plan = BatchPlan(talk, WIDTH, 4, seed=1, packing="documents")
    expected, seen = learnt_of(place), Counter()
    for step in range(3 * plan.num_windows // 4):
        (batch,) = plan.batch(step)
        assert batch.num_targets == int((batch.labels[:, 1:] != IGNORED).sum())
        for ids, labels, positions in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
            edges = [*np.flatnonzero(positions.numpy() == 0).tolist(), WIDTH]
            for start, stop in pairwise(edges):
                piece, mine = tuple(ids[start:stop].tolist()), labels[start:stop].tolist()
                assert positions[start:stop].tolist() == list(range(stop - start))
                if set(piece) == {talk.eos_token_id} and piece not in expected:
                    assert set(mine) == {IGNORED}  # what is left of a row
                    continue
                bits = [False, *expected[piece][1:]]
                assert mine == [one if bit else IGNORED for one, bit in zip(piece, bits, strict=True)]
                seen[piece] += 1
    assert set(seen) == set(expected)
    assert set(map(len, expected)) > {2, 32}


def test_text_and_conversations_in_one_batch(corpus: Path, place: Path, talk: TargetDataset) -> None:
    """Shares by rows; a row of either kind is what it would be in a run of its own, on any layout."""
    mixed = open_mixture(corpus, ["rivers", str(place)])
    plan = BatchPlan(mixed, WIDTH, 4, 5, "documents", Mixture([Phase(0, (1.0, 3.0))]))
    expected, rivers = learnt_of(place), TokenDataset.open(corpus, "train", "rivers")
    texts, conversations, seen = 0, 0, Counter()
    for step in range(12):
        (batch,) = plan.batch(step)
        assert batch.num_targets == int((batch.labels[:, 1:] != IGNORED).sum())
        for world_size, micro_batch in ((2, 1), (2, 2), (4, 1)):
            parts = [one for rank in range(world_size) for one in plan.batch(step, rank, world_size, micro_batch)]
            for name in ("input_ids", "labels", "position_ids"):
                assert np.array_equal(np.concatenate([getattr(one, name) for one in parts]), getattr(batch, name))
            assert {one.num_targets for one in parts} == {batch.num_targets}
        for ids, labels, positions in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
            edges = [*np.flatnonzero(positions.numpy() == 0).tolist(), WIDTH]
            pieces = [tuple(ids[start:stop].tolist()) for start, stop in pairwise(edges)]
            if pieces[0] in expected:
                conversations += 1
                seen.update(piece for piece in pieces if piece in expected)
                bits = [bit for piece in pieces if piece in expected for bit in (False, *expected[piece][1:])]
                assert (labels[: len(bits)] != IGNORED).tolist() == bits
            else:
                texts += 1
                assert (labels == IGNORED).sum() == len(edges) - 2, "every token but a document's first"
    assert (texts, conversations) == (12, 36)
    rows = len(talk.packed(WIDTH, 5))
    assert plan.epochs(12) == {"rivers": 12 / (rivers.num_tokens // WIDTH), str(place): 36 / rows}
    assert max(seen.values()) - min(seen.values()) <= 1 and len(seen) == len(expected)


def test_held_out_conversations_are_read_once(place: Path) -> None:
    data = TargetDataset.open(place, "val")
    expected = sum(sum(bits[1:]) for bits in learnt_of(place, "val").values())
    for world_size in (1, 2):
        found = [
            batch
            for rank in range(world_size)
            for batch in evaluation_batches(data, WIDTH, 3, None, rank, world_size, "documents")
        ]
        assert sum(int((batch.labels[:, 1:] != IGNORED).sum()) for batch in found) == expected
        assert sum(batch.num_targets for batch in found) == world_size * expected
    (domain,) = data.domains
    assert data.select(domain).fingerprint == data.fingerprint
    assert 0 < sum(batch.num_bytes for batch in found) // 2 < data.num_bytes


def test_what_cannot_be_is_said_in_one_line(corpus: Path, place: Path, tmp_path: Path, talk: TargetDataset) -> None:
    assert isinstance(open_data(place), TargetDataset)
    assert not isinstance(open_data(corpus), TargetDataset)
    with pytest.raises(DataError, match=r"data.packing=windows: allowed: documents, because .* has a loss mask"):
        BatchPlan(talk, WIDTH, 4, 0)
    with pytest.raises(DataError, match=r"data.sequence_length=31: \d+ documents .* allowed: 32 or more$"):
        BatchPlan(talk, 31, 4, 0, "documents").batch(0)
    with pytest.raises(DataError, match=r"data.packing=windows: allowed: documents, because .* has a loss mask"):
        BatchPlan(open_mixture(corpus, ["rivers", str(place)]), WIDTH, 4, 0, mixture=Mixture([Phase(0, (1.0, 1.0))]))
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    bits = copy / "train" / "talk" / "00000.targets"
    data = bytearray(bits.read_bytes())
    data[5] ^= 1
    bits.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"00000.targets is corrupt: checksum"):
        TargetDataset.open(copy)
    index = read_index(copy)
    index.targets_crc32["train/talk/00000.targets"] = file_crc32(bits)
    write_index(copy, index)
    assert TargetDataset.open(copy).fingerprint != talk.fingerprint
    bits.write_bytes(bytes(data[:-1]))
    with pytest.raises(DataError, match=r"00000.targets is truncated"):
        TargetDataset.open(copy)
    bits.unlink()
    with pytest.raises(DataError, match=r"00000.targets is missing"):
        TargetDataset.open(copy)
