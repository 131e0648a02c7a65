"""The same run gives the same losses however many ranks carry it, and moves between them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fathom.recipe import Recipe
from fathom.training import build_training, start, train
from tests import processes
from tests.tiny import tiny_recipe

from .conftest import StopAt

STEPS = 4
ONCE = f"train.checkpoint_every={STEPS}"  # at the end: what nobody continues needs none before


def small(corpus: Path, *words: str) -> Recipe:
    """The tiny recipe with two micro-batches a step on each of two ranks."""
    return tiny_recipe(corpus, f"train.steps={STEPS}", "train.micro_batch=2", *words)


def train_on_two_ranks(corpus: Path, folder: Path) -> None:
    joined = build_training(small(corpus))  # in a script that calls nothing else, it joins the ranks by itself
    first = [joined.step(0).loss.item(), build_training(small(corpus, "train.precision=bf16")).step(0).loss.item()]
    if joined.ranks.first:
        (folder / "joined.json").write_text(json.dumps({"losses": first, "ranks": joined.ranks.world_size}))
    for name in ("ddp", "fsdp", "hsdp"):
        train(small(corpus, ONCE, f"parallel.name={name}"), folder / name)
    train(small(corpus, ONCE, "optim.name=muon"), folder / "muon")
    train(small(corpus, ONCE, "train.activation_checkpointing=true"), folder / "checkpointed")
    # Continue what one process began, and begin what one process will continue. The signal reaches one rank only.
    train(small(corpus, "parallel.name=ddp"), folder / "one-then-two")
    result = train(small(corpus), folder / "two-then-one", callbacks=[StopAt(2)])
    assert not result.finished and 2 <= result.step < STEPS
    ranks = start(small(corpus))
    wrong = build_training(small(corpus), ranks)
    found = []
    for step in range(STEPS):
        batches = wrong.plan.batch(step, ranks.rank, 2, wrong.micro_batch)
        mine = sum(int((batch.labels[:, 1:] >= 0).sum()) for batch in batches)
        metrics = wrong.step(step, [replace(batch, num_targets=2 * mine) for batch in batches])
        found.append(metrics.loss.item())
    if ranks.first:
        (folder / "mean-of-means.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(small(corpus, ONCE), folder / "single")
    train(small(corpus, ONCE, "optim.name=muon"), folder / "single-muon")
    assert not train(small(corpus), folder / "one-then-two", callbacks=[StopAt(2)]).finished
    processes.run_ranks(2, train_on_two_ranks, corpus, folder)
    train(small(corpus), folder / "two-then-one")
    return folder


def test_build_training_joins_the_ranks_that_torchrun_started(runs: Path) -> None:
    joined, alone = json.loads((runs / "joined.json").read_text()), processes.losses(runs / "single")[0]
    assert joined["ranks"] == 2
    assert joined["losses"] == [pytest.approx(alone, rel=1e-6), pytest.approx(alone, rel=1e-2)]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "hsdp", "checkpointed"])
def test_two_ranks_train_like_one(runs: Path, name: str) -> None:
    assert processes.losses(runs / name) == pytest.approx(processes.losses(runs / "single"), rel=1e-6)


def test_two_ranks_train_like_one_with_muon(runs: Path) -> None:
    assert processes.losses(runs / "muon") == pytest.approx(processes.losses(runs / "single-muon"), rel=1e-6)
    assert processes.losses(runs / "muon") != pytest.approx(processes.losses(runs / "single"), rel=1e-2)


def test_a_mean_of_rank_means_would_be_noticed(runs: Path) -> None:
    """Rows differ in how many targets they have, so dividing by each rank's own count is wrong, and visibly so."""
    wrong, right = json.loads((runs / "mean-of-means.json").read_text()), processes.losses(runs / "single")
    assert len(wrong) == len(right) == STEPS
    assert wrong != pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("name", ["one-then-two", "two-then-one"])
def test_a_run_moves_to_another_number_of_ranks(runs: Path, name: str) -> None:
    assert processes.losses(runs / name) == pytest.approx(processes.losses(runs / "single"), rel=1e-6)


def test_evaluation_does_not_depend_on_ranks(runs: Path) -> None:
    results = [json.loads((runs / name / "result.json").read_text())["evaluation"] for name in ("single", "fsdp")]
    assert results[0]["tokens"] == results[1]["tokens"]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-6)
    assert results[0]["position_loss"] == pytest.approx(results[1]["position_loss"], rel=1e-5)
    assert set(results[0]["domains"]) == {"rivers", "seas"}


def test_bf16_follows_fp32(corpus: Path, runs: Path, tmp_path: Path) -> None:
    processes.run(train, small(corpus, ONCE, "train.precision=bf16"), tmp_path / "bf16")
    lowered, full = processes.losses(tmp_path / "bf16"), processes.losses(runs / "single")
    assert lowered == pytest.approx(full, rel=0.02)
    assert lowered != full
    tensors = processes.weights(tmp_path / "bf16", STEPS)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.float32"}, "master weights stay fp32"
