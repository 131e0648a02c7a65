"""Every window once an epoch, the same rows on every layout, and nothing predicted across documents."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fathom.corpus.prepare import prepare
from fathom.data.batches import Batch, BatchPlan, evaluation_batches
from fathom.data.permutation import Permutation
from fathom.data.rows import IGNORED, evaluation_windows
from fathom.data.shards import TokenDataset
from fathom.errors import DataError
from fathom.models.axes.numerics import IGNORE
from tests.data.corpora import stream

LAYOUTS = [(1, None), (1, 4), (1, 1), (2, None), (2, 3), (3, 2), (4, 1), (6, None), (12, 1)]


@pytest.fixture(scope="module")
def dataset(corpus: Path) -> TokenDataset:
    return TokenDataset.open(corpus)


@pytest.fixture(scope="module")
def held_out(corpus: Path) -> TokenDataset:
    return TokenDataset.open(corpus, "val")


def joined(batches: list[Batch], name: str = "input_ids") -> torch.Tensor:
    return torch.cat([getattr(batch, name) for batch in batches])


def same(left: Batch, right: Batch) -> bool:
    positions = left.position_ids is right.position_ids or torch.equal(left.position_ids, right.position_ids)
    return torch.equal(left.input_ids, right.input_ids) and torch.equal(left.labels, right.labels) and positions


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 100))
@settings(deadline=None, max_examples=60)
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(size, seed, epoch)(np.arange(size)).tolist()) == list(range(size))


@given(st.integers(1, 2**40), st.lists(st.integers(0, 2**40 - 1), max_size=50, unique=True))
@settings(deadline=None)
def test_permutation_of_any_size_is_injective_and_stays_inside(size: int, indices: list[int]) -> None:
    inside = np.array([i for i in indices if i < size], np.int64)
    images = Permutation(size, 1, 2)(inside)
    assert len(set(images.tolist())) == len(inside)
    assert ((images >= 0) & (images < size)).all()
    assert np.array_equal(images, [Permutation(size, 1, 2)(inside[i : i + 1])[0] for i in range(len(inside))])


def test_permutation_shuffles() -> None:
    """Uniform enough: displacement, neighbours and fixed points are those of a random order, and keys matter."""
    size = 10_000
    order = Permutation(size, 0, 0)(np.arange(size))
    assert abs(np.abs(order - np.arange(size)).mean() / size - 1 / 3) < 0.02
    assert (np.abs(np.diff(order)) == 1).sum() < 15
    assert (order == np.arange(size)).sum() < 10
    assert (order == Permutation(size, 0, 1)(np.arange(size))).sum() < 10
    assert (order == Permutation(size, 1, 0)(np.arange(size))).sum() < 10
    # Written down once: a change of the shuffle would silently change what every interrupted run reads next.
    assert order[:8].tolist() == EXPECTED_ORDER


EXPECTED_ORDER = [4734, 2348, 2478, 7992, 990, 7903, 8466, 3075]


@given(length=st.integers(100, 300), rows=st.integers(1, 50), seed=st.integers(0, 1000))
@example(length=20, rows=7, seed=0)  # many windows
@settings(deadline=None, max_examples=12)
def test_an_epoch_has_every_window_once(dataset: TokenDataset, length: int, rows: int, seed: int) -> None:
    plan = BatchPlan(dataset, length, rows, seed)
    count = plan.num_windows
    assert 0 <= dataset.num_tokens - count * length < length, "only what fills no window is left out"
    steps = -(-2 * count // rows)
    windows = np.concatenate([plan.windows(step) for step in range(steps)])
    first, second = windows[:count], windows[count : 2 * count]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(count))
    if count > 20:
        assert (first != second).any()


def test_rows_are_the_windows_of_the_stream(dataset: TokenDataset) -> None:
    """Also across shard borders: the shards are far shorter than the stream."""
    assert len(dataset._tokens) > 3
    tokens = stream(dataset)
    plan = BatchPlan(dataset, 97, 10, seed=3)
    for step in range(plan.num_windows // plan.rows_per_step):
        (batch,) = plan.batch(step)
        for row, window in zip(batch.input_ids, plan.windows(step), strict=True):
            assert np.array_equal(row, tokens[window * 97 : (window + 1) * 97])
        assert torch.equal(batch.labels, batch.input_ids)
        assert batch.position_ids is None and batch.num_targets == 10 * 96


@given(step=st.integers(0, 500), seed=st.integers(0, 50), packing=st.sampled_from(["windows", "documents"]))
@settings(deadline=None, max_examples=8)
def test_layouts_share_the_same_rows(dataset: TokenDataset, step: int, seed: int, packing: str) -> None:
    plan = BatchPlan(dataset, 64, 12, seed, packing)
    (whole,) = plan.batch(step)
    for world_size, micro_batch in LAYOUTS:
        batches = [batch for rank in range(world_size) for batch in plan.batch(step, rank, world_size, micro_batch)]
        assert torch.equal(joined(batches), whole.input_ids)
        assert torch.equal(joined(batches, "labels"), whole.labels)
        if packing == "documents":
            assert torch.equal(joined(batches, "position_ids"), whole.position_ids)
        assert {batch.num_targets for batch in batches} == {whole.num_targets}


def test_a_batch_depends_on_the_step_and_the_seed_alone(corpus: Path, dataset: TokenDataset) -> None:
    plan = BatchPlan(dataset, 64, 4, seed=1, packing="documents")
    late = plan.batch(37)[0]
    for step in range(5):
        plan.batch(step)
    again = BatchPlan(TokenDataset.open(corpus), 64, 4, seed=1, packing="documents").batch(37)[0]
    assert same(late, plan.batch(37)[0]) and same(late, again)
    assert not same(late, plan.batch(38)[0])
    assert not same(late, BatchPlan(dataset, 64, 4, seed=2, packing="documents").batch(37)[0])


def test_documents_are_kept_apart(dataset: TokenDataset) -> None:
    """Against a direct reading of the EOS tokens, which the implementation does not look at."""
    plan = BatchPlan(dataset, 128, 16, seed=0, packing="documents")
    restarts = 0
    for step in range(plan.num_windows // plan.rows_per_step):
        (batch,) = plan.batch(step)
        for row, labels, positions in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
            begins = torch.zeros(128, dtype=torch.bool)
            begins[1:] = row[:-1] == dataset.eos_token_id
            assert torch.equal(labels, torch.where(begins, IGNORED, row))
            expected, last = [], 0
            for place in range(128):
                last = place if begins[place] else last
                expected.append(place - last)
            assert positions.tolist() == expected
            restarts += int(begins.sum())
        assert batch.num_targets == int((batch.labels[:, 1:] != IGNORED).sum())
    assert restarts > 50


def test_prefetch_equals_batch(dataset: TokenDataset) -> None:
    plan = BatchPlan(dataset, 64, 8, seed=5)
    steps = list(plan.prefetch(3, 9, rank=1, world_size=2, micro_batch=2))
    assert [step for step, _ in steps] == list(range(3, 9))
    for step, batches in steps:
        assert len(batches) == 2
        assert all(same(a, b) for a, b in zip(batches, plan.batch(step, 1, 2, 2), strict=True))


def test_prefetch_stops_with_its_consumer_and_hands_on_errors(dataset: TokenDataset, monkeypatch) -> None:
    plan = BatchPlan(dataset, 64, 8, seed=5)
    before = set(threading.enumerate())  # another test's may not have ended yet
    batches = plan.prefetch(0, 10**9)
    next(batches)
    (thread,) = [one for one in set(threading.enumerate()) - before if one.name.startswith("fathom-prefetch")]
    batches.close()
    thread.join(5)
    assert not thread.is_alive()

    def fail(self: TokenDataset, start: int, out: np.ndarray) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(TokenDataset, "read", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        list(plan.prefetch(0, 3))


def test_batch_moves_whole(dataset: TokenDataset) -> None:
    (batch,) = BatchPlan(dataset, 64, 8, 0, "documents").batch(0)
    moved = batch.to("meta")
    assert {moved.input_ids.device.type, moved.labels.device.type, moved.position_ids.device.type} == {"meta"}
    for tensor in (batch.input_ids, batch.labels, batch.position_ids):
        assert tensor.dtype == torch.int64


@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("length", [2, 33, 257, 100_000])
def test_evaluation_predicts_every_token_once(held_out: TokenDataset, packing: str, length: int) -> None:
    tokens = stream(held_out)
    batches = list(evaluation_batches(held_out, length, 5, packing=packing))
    targets = [
        row[1:][labels[1:] != IGNORED]
        for batch in batches
        for row, labels in zip(batch.input_ids, batch.labels, strict=True)
    ]
    begins = np.zeros(len(tokens), bool)
    begins[1:] = tokens[:-1] == held_out.eos_token_id
    expected = tokens[1:] if packing == "windows" else tokens[1:][~begins[1:]]
    assert np.array_equal(np.concatenate(targets), expected)
    assert sum(batch.num_targets for batch in batches) == len(expected)
    assert all(batch.input_ids.shape == (5, length) for batch in batches)
    if packing == "windows":
        assert sum(batch.num_bytes for batch in batches) == held_out.num_bytes - held_out.bytes_before(1)


@given(world_size=st.integers(1, 5), batch_size=st.integers(1, 7), limit=st.integers(1, 10_000))
@settings(deadline=None, max_examples=20)
def test_evaluation_is_shared_by_ranks(held_out: TokenDataset, world_size: int, batch_size: int, limit: int) -> None:
    alone = list(evaluation_batches(held_out, 64, batch_size, limit))
    ranks = [list(evaluation_batches(held_out, 64, batch_size, limit, r, world_size)) for r in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1, "a rank with fewer batches would leave the others waiting"
    together = [batch for step in zip(*ranks, strict=True) for batch in step]

    def rows(batches: list[Batch]) -> list[list[int]]:
        return [row.tolist() for row in joined(batches, "labels") if (row != IGNORED).any()]

    assert rows(together) == rows(alone)
    for name in ("num_targets", "num_bytes"):
        counts = [[getattr(batch, name) for batch in batches] for batches in ranks]
        assert all(count == counts[0] for count in counts)
        assert sum(counts[0]) == sum(getattr(batch, name) for batch in alone)
    assert sum(batch.num_targets for batch in alone) <= max(limit, 63)


@given(total=st.integers(1, 3000), length=st.integers(2, 40), budget=st.integers(1, 5000))
@settings(deadline=None, max_examples=80)
def test_evaluation_is_spread_over_the_split(total: int, length: int, budget: int) -> None:
    everything = evaluation_windows(total + 1, length)
    assert np.array_equal(everything, np.arange(-(-total // (length - 1))))
    some = evaluation_windows(total + 1, length, budget)
    count = min(len(everything), max(1, budget // (length - 1)))
    # One window of each stretch, so that no text is read twice and every part is represented.
    edges = np.arange(count + 1) * len(everything) // count
    assert ((edges[:-1] <= some) & (some < edges[1:])).all() and len(some) == count


def test_the_sample_is_the_same_for_all_time() -> None:
    assert evaluation_windows(100_001, 101, 1000).tolist() == SAMPLED


SAMPLED = [33, 185, 211, 371, 471, 581, 607, 783, 850, 902]


def test_a_budget_reaches_every_file_of_a_domain(tmp_path: Path, tokenizer: str) -> None:
    """Two files in one domain, and a budget that the first of them alone would use up."""
    from transformers import AutoTokenizer

    for name, word in (("a", "river"), ("b", "sea")):
        lines = [json.dumps({"text": f"{word} {i} " * 20}) for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    prepare(inputs, tmp_path / "out", tokenizer, held_out=0.5)
    val = TokenDataset.open(tmp_path / "out", "val")
    batches = evaluation_batches(val, 33, 4, val.num_tokens // 4)
    words = AutoTokenizer.from_pretrained(tokenizer).decode(torch.cat([batch.input_ids for batch in batches]).flatten())
    assert words.count("sea") / 2 < words.count("river") < 2 * words.count("sea")


def test_bytes_are_exact_where_documents_end(corpus: Path, held_out: TokenDataset) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    tokens = stream(held_out)
    ends = [*np.flatnonzero(tokens == held_out.eos_token_id) + 1]
    start = total = 0
    for end in ends:
        total += len(tokenizer.decode(tokens[start : end - 1]).encode())
        assert held_out.bytes_before(int(end)) == total
        assert held_out.bytes_before(int(end) - 1) == total, "EOS stands for no byte"
        start = end
    assert total == held_out.num_bytes
    before = [held_out.bytes_before(position) for position in range(held_out.num_tokens + 1)]
    assert before == sorted(before)


def test_impossible_plans_are_refused(dataset: TokenDataset) -> None:
    for arguments, message in [
        ((10**6, 4, 0), "context of 1000000 tokens is longer than the split 'train'"),
        ((1, 4, 0), "sequence_length must be at least 2"),
        ((64, 0, 0), "rows_per_step must be at least 1"),
        ((64, 4, 0, "pages"), "packing 'pages' is not one of windows, documents"),
    ]:
        with pytest.raises(DataError, match=message):
            BatchPlan(dataset, *arguments)
    for arguments, message in [
        ((1, 4), "sequence_length must be at least 2"),
        ((64, 0), "batch_size=0, rank 0 of 1: allowed"),
        ((64, 4, None, 2, 2), "batch_size=4, rank 2 of 2: allowed"),
    ]:
        with pytest.raises(DataError, match=message):
            evaluation_batches(dataset, *arguments)
    plan = BatchPlan(dataset, 64, 6, 0)
    for layout, message in [
        ((0, 4), "6 sequences per step cannot be divided among 4 ranks"),
        ((0, 2, 2), "3 sequences per rank cannot be divided into micro-batches of 2"),
        ((2, 2), "rank=2: allowed: from 0 to below world_size=2"),
    ]:
        with pytest.raises(DataError, match=message):
            plan.batch(0, *layout)
        with pytest.raises(DataError, match=message):
            plan.prefetch(0, 1, *layout)


def test_the_ignored_label_is_the_models():
    assert IGNORED == IGNORE
