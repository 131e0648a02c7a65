"""A run that dies at any moment ends where an undisturbed one ends, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from fathom.data.shards import read_index, write_index
from fathom.errors import DataError, SettingsError
from fathom.recipe import Recipe
from fathom.training import checkpoint, train
from fathom.training.loop import claimed, stop_signals
from tests import processes
from tests.tiny import tiny_recipe

from .conftest import At, StopAt

STEPS = 8


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    raise ValueError("the node is gone")


def train_until_deletion(recipe: Recipe, run_dir: Path) -> None:
    """Train, and be killed between the renaming of an old checkpoint and its deletion."""
    original = shutil.rmtree

    def deadly(path, *arguments, **options):
        if Path(path).name.startswith(".replaced-") and Path(path).exists():
            die()
        return original(path, *arguments, **options)

    checkpoint.shutil.rmtree = deadly
    train(recipe, run_dir)


def train_until_death(recipe: Recipe, run_dir: Path, place: str) -> None:
    """Train, and be killed at a place: in a step, or at a point within the second save."""
    if place.startswith("step"):
        train(recipe, run_dir, callbacks=[At(int(place.split()[1]), die)])
        return
    target, name = {
        "while tensors are written": (FileSystem, "create_stream"),
        "before the checksums": (checkpoint, "digest"),
        "before the rename": (checkpoint, "publish"),
        "before latest is updated": (checkpoint, "write_atomically"),
    }[place]
    original = getattr(target, name)

    def deadly(*arguments, **options):
        if (run_dir / "step-000002").exists() and "latest" not in str(arguments[0]):
            die()
        if "latest" in str(arguments[0]) and (run_dir / "step-000004").exists():
            die()
        return original(*arguments, **options)

    setattr(target, name, deadly)
    train(recipe, run_dir)


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    assert processes.run(train, tiny_recipe(corpus), run_dir) == 0
    return run_dir


def assert_same_end(run_dir: Path, undisturbed: Path, steps: int = STEPS) -> None:
    found, expected = processes.weights(run_dir, steps), processes.weights(undisturbed, steps)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert processes.losses(run_dir) == processes.losses(undisturbed)


@pytest.mark.quick("step 6", "before the rename")
@pytest.mark.parametrize(
    "place",
    ["step 6", "while tensors are written", "before the checksums", "before the rename", "before latest is updated"],
)
def test_killed_and_continued(recipe: Recipe, tmp_path: Path, undisturbed: Path, place: str) -> None:
    recipe = recipe.override("train.checkpoint_every=2")
    assert processes.run(train_until_death, recipe, tmp_path / "run", place) == -signal.SIGKILL
    assert not (tmp_path / "run" / "step-000008").exists()
    train(recipe, tmp_path / "run")
    assert_same_end(tmp_path / "run", undisturbed)
    assert not list((tmp_path / "run").glob(".unfinished*"))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_killed_where_a_loop_grows(corpus: Path, tmp_path: Path, step: int) -> None:
    """At the step at which a trip is added, whose loss starts from an exact start."""
    options = "{trips: 3, growth: linear, growth_share: 0.75, growth_open: 0.25}"
    grown = tiny_recipe(corpus).override(
        "model.recurrence=loop", f"model.recurrence_options={options}", "train.checkpoint_every=1"
    )
    assert processes.run(train, grown, tmp_path / "whole") == 0
    assert processes.run(train_until_death, grown, tmp_path / "run", f"step {step}") == -signal.SIGKILL
    train(grown, tmp_path / "run")
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_killed_while_an_old_checkpoint_is_deleted(recipe: Recipe, tmp_path: Path, undisturbed: Path) -> None:
    """Neither the old checkpoint nor a half-written export stays on the disk."""
    recipe = recipe.override("train.keep_last=1", "train.checkpoint_every=2")
    assert processes.run(train_until_deletion, recipe, tmp_path) == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob(".replaced-*")] == [".replaced-step-000002"]
    (tmp_path / ".model-half" / "new").mkdir(parents=True)
    train(recipe, tmp_path)
    assert_same_end(tmp_path, undisturbed)
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.slow
def test_killed_twenty_times(corpus: Path, tmp_path: Path) -> None:
    """SIGKILL at random times, over and over, in steps and in saves alike."""
    recipe = tiny_recipe(corpus, "train.steps=1200", "train.checkpoint_every=3", "evaluate.every=0")
    assert processes.run(train, recipe, tmp_path / "undisturbed") == 0
    chance, kills, run_dir = random.Random(0), 0, tmp_path / "run"
    while kills < 20:
        process = processes.start(train, recipe, run_dir)
        time.sleep(chance.uniform(0.3, 0.9))
        process.kill()
        process.join()
        kills += 1
        if (run_dir / "result.json").exists():
            break
    assert kills == 20, "the run ended before it was killed often enough"
    assert processes.run(train, recipe, run_dir) == 0
    assert_same_end(run_dir, tmp_path / "undisturbed", 1200)


@pytest.mark.quick("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_well(
    recipe: Recipe, tmp_path: Path, undisturbed: Path, number: signal.Signals
) -> None:
    result = train(recipe, tmp_path, callbacks=[StopAt(2, number)])
    assert not result.finished
    assert (tmp_path / "latest").read_text().strip() == f"step-{result.step:06d}"
    assert train(recipe, tmp_path).finished
    assert_same_end(tmp_path, undisturbed)


@pytest.mark.parametrize("says", [True, False])
def test_the_first_signal_is_answered_at_once(says: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """The rest of a step may take minutes."""
    with stop_signals(says):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert capfd.readouterr().err.count("stopping after this step, with a checkpoint") == says


def test_a_signal_that_is_passed_on_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with stop_signals() as received:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT] * 2
    monkeypatch.setattr("fathom.training.loop.FORWARDED", 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with stop_signals(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_parameter_may_have_had_no_gradient_yet(corpus: Path, tmp_path: Path) -> None:
    """Trips are drawn as 1, 1, 1, 2, 3, 1: what injects the entry is used from the fourth step on."""
    options = "model.recurrence_options={trips: 3, trips_range: [1, 3], injection: diagonal}"
    words = ("model.mixer=none", "model.recurrence=loop", options, "train.seed=1", "train.steps=6", "evaluate.every=0")
    recipe = tiny_recipe(corpus, *words, "train.checkpoint_every=2")
    train(recipe, tmp_path / "whole")
    with pytest.raises(ValueError, match="the node is gone"):
        train(recipe, tmp_path / "cut", callbacks=[At(4, stop)])
    assert (tmp_path / "cut" / "step-000002").exists() and not (tmp_path / "cut" / "step-000004").exists()
    train(recipe, tmp_path / "cut")
    ended, expected = (processes.weights(tmp_path / name, 6) for name in ("cut", "whole"))
    assert any("entry_map" in name for name in expected)
    assert all(torch.equal(tensor, ended[name]) for name, tensor in expected.items())


def test_a_checkpoint_continues_as_another_run(corpus: Path, tmp_path: Path) -> None:
    first = train(tiny_recipe(corpus, "train.export=true", "model.mixer=none"), tmp_path / "first")
    assert first.model is not None and first.evaluation is not None
    second = tiny_recipe(corpus, f"model.from_pretrained={first.model}", "train.steps=1", "optim.lr=1e-9")
    second = second.override("model.mixer=none")
    continued = train(second, tmp_path / "second")
    assert continued.evaluation is not None
    assert continued.evaluation.loss == pytest.approx(first.evaluation.loss, rel=1e-5)


def test_two_processes_do_not_share_a_run(recipe: Recipe, tmp_path: Path) -> None:
    recipe = recipe.override("train.steps=1")
    with claimed(tmp_path / "run"), pytest.raises(SettingsError, match="another process is training this run"):
        train(recipe, tmp_path / "run")
    assert train(recipe, tmp_path / "run").finished, "and it is free when the other one ends"


def test_the_same_tokens_made_elsewhere_are_the_same_corpus(corpus: Path, tmp_path: Path) -> None:
    processes.run(train_until_death, tiny_recipe(corpus), tmp_path / "run", "step 5")
    shutil.copytree(corpus, tmp_path / "other")
    write_index(tmp_path / "other", replace(read_index(corpus), settings={"others": 1}))
    assert train(tiny_recipe(tmp_path / "other"), tmp_path / "run").finished


def test_a_flipped_byte_in_the_held_out_split_is_found_before_training(corpus: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(corpus, broken)
    shard = next((broken / "val").rglob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=shard.name):
        train(tiny_recipe(broken), tmp_path / "run")
    assert not (tmp_path / "run").exists(), "nothing was begun"
