"""Checkpoints: kept, pruned, checked, and never the worse for a failure."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem

from fathom.checkpoints.runs import damage, load_tensors
from fathom.errors import TrainingError
from fathom.recipe import Recipe
from fathom.training import train
from fathom.training.checkpoint import Checkpointer, trainer_state
from fathom.training.parallel import Ranks
from fathom.training.results import TrainerState
from tests import processes
from tests.tiny import tiny_recipe

STEPS = 8


def tensors(value: float) -> dict[str, Tensor]:
    return {"matrix": torch.full((5, 3), value), "scalar": torch.tensor(value)}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, said: list[str]) -> Checkpointer:
    return Checkpointer(tmp_path, Ranks(), keep_last=2, say=said.append)


def trainer(step: int) -> TrainerState:
    return TrainerState(step, 1.5, 0, 0, None, 1, "2", {})


def save(checkpoints: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpoints.save(tensors(step), trainer(step), "recipe: text\n")
    checkpoints.wait()


def test_round_trip(checkpoints: Checkpointer) -> None:
    """What changes once `save` returns is not saved."""
    changing = tensors(2)
    checkpoints.save(changing, trainer(2), "recipe: text\n")
    for tensor in changing.values():
        tensor.fill_(7)
    checkpoints.wait()
    saved = checkpoints.newest()
    assert saved is not None and saved.step == 2
    found = tensors(0)
    load_tensors(saved.directory, found)
    assert trainer_state(saved) == trainer(2)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(2).items())
    assert (saved.directory / "recipe.yaml").read_text() == "recipe: text\n"
    assert not [path for path in saved.directory.iterdir() if path.suffix not in (".safetensors", ".json", ".yaml")]


def test_the_last_k_are_kept(checkpoints: Checkpointer, tmp_path: Path) -> None:
    save(checkpoints, 1, 2, 3, 4)
    assert checkpoints.steps() == [3, 4]
    assert (tmp_path / "latest").read_text() == "step-000004\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003", "step-000004"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "file", "words"),
    [
        (truncate, "*.safetensors", "bytes instead of"),
        (flip, "*.safetensors", "another checksum"),
        (flip, "trainer.json", "another checksum"),
        (Path.unlink, "*.safetensors", "is missing"),
        (Path.unlink, "manifest.json", "cannot be read"),
        (truncate, "manifest.json", "cannot be read"),
    ],
)
def test_a_damaged_newest_gives_way(
    checkpoints: Checkpointer, tmp_path: Path, said: list[str], harm: Callable[[Path], Any], file: str, words: str
) -> None:
    save(checkpoints, 1, 2)
    assert damage(tmp_path / "step-000002") is None, "intact as long as nobody harms it"
    (path,) = (tmp_path / "step-000002").glob(file)
    harm(path)
    saved = checkpoints.newest()
    assert saved is not None and saved.step == 1
    (message,) = said
    assert "step-000002 is damaged" in message and words in message
    save(checkpoints, 2)
    assert checkpoints.newest() == checkpoints.newest() and damage(tmp_path / "step-000002") is None


def test_another_model_is_refused(checkpoints: Checkpointer) -> None:
    save(checkpoints, 1)
    saved = checkpoints.newest()
    assert saved is not None
    with pytest.raises(TrainingError, match="does not fit"):
        load_tensors(saved.directory, {**tensors(0), "another": torch.zeros(2)})


def full_disk(monkeypatch: pytest.MonkeyPatch, until: Callable[[], bool]) -> None:
    original = FileSystem.create_stream

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        if until() and "w" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", create_stream)


def test_a_full_disk_costs_one_checkpoint(
    checkpoints: Checkpointer, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 1)
    full = [True]
    full_disk(monkeypatch, lambda: full[0])
    save(checkpoints, 2)
    (message,) = said
    assert "step 2 was not saved" in message and "No space left" in message and "step 1 is kept" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    full[0] = False
    save(checkpoints, 3)
    assert checkpoints.steps() == [1, 3]


@pytest.mark.slow
def test_training_outlives_a_full_disk(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on while later saves may succeed; if the last does not, it fails with the last good state on disk."""
    run_dir = tmp_path / "run"
    full_disk(monkeypatch, lambda: (run_dir / "step-000004").exists())
    with pytest.raises(TrainingError, match="step 8 could not be written"):
        train(recipe, run_dir)
    monkeypatch.undo()
    assert len(processes.losses(run_dir)) == STEPS
    result = train(recipe, run_dir)
    assert result.finished
    train(recipe, tmp_path / "undisturbed")
    for name, tensor in processes.weights(tmp_path / "undisturbed", STEPS).items():
        assert torch.equal(processes.weights(run_dir, STEPS)[name], tensor)


def train_with_small_files(recipe: Recipe, run_dir: Path) -> None:
    """As on a disk that takes metrics but no checkpoint: the kernel refuses, not a stand-in."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(TrainingError, match="could not be written"):
        train(recipe, run_dir)


def test_the_kernel_refuses_to_write(corpus: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(corpus)
    assert processes.run(train_with_small_files, recipe, tmp_path) == 0
    assert len(processes.losses(tmp_path)) == STEPS
    assert not list(tmp_path.glob("step-*")) and not list(tmp_path.glob(".unfinished*"))
    assert train(recipe, tmp_path).finished
