"""A flipped bit in exported weights is noticed by every command that reads them."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import pytest

import fathom
from fathom.checkpoints import hashes
from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.recipe import Recipe
from fathom.training import train
from tests.tiny import export_tiny


def flip(file: Path) -> None:
    """Flip one bit of the last tensor."""
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return export_tiny(tmp_path / "model")


def test_sha256sum_can_read_the_hashes(model: Path) -> None:
    expected = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert (model / "weights.sha256").read_text() == f"{expected}  model.safetensors\n"


def test_evaluate_warns(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the depth of a river\n")
    words = ["evaluate", str(model), "--perplexity", str(tmp_path / "text.txt")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert main(words) == 0
    flip(model / "model.safetensors")
    with pytest.warns(UserWarning, match="does not have the hash in weights.sha256: the file is damaged, or was saved"):
        assert main(words) == 0


def test_large_weights_are_checked_when_asked(model: Path, monkeypatch) -> None:
    monkeypatch.setattr(hashes, "ALWAYS_CHECKED", 100)
    flip(model / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fathom.load(model)
    with pytest.warns(UserWarning, match="hash"):
        assert main(["generate", str(model), "a", "--max-new-tokens", "1", "--verify"]) == 0


def test_a_model_that_was_saved_again_is_explained(model: Path) -> None:
    """`save_pretrained` leaves the old hashes; deleting them, as the message says, ends it."""
    loaded, _ = fathom.load(model)
    loaded.lm_head.weight.data += 1
    loaded.save_pretrained(model)
    with pytest.warns(UserWarning, match=r"saved again after the export \(then delete weights.sha256\)"):
        fathom.load(model)
    (model / "weights.sha256").unlink()
    assert hashes.changed(model) is None


@pytest.mark.quick("flip")
@pytest.mark.parametrize("harm", [flip, lambda file: file.write_bytes(b""), Path.unlink])
def test_a_finished_run_with_a_damaged_model_is_refused(recipe: Recipe, tmp_path: Path, harm) -> None:
    run = tmp_path / "run"
    recipe = recipe.override("train.steps=2", "train.export=true")
    weights = train(recipe, run).model / "model.safetensors"  # type: ignore[operator]
    expected = weights.read_bytes()
    assert train(recipe, run).finished
    harm(weights)
    with pytest.raises(SettingsError, match=r"delete .*result.json and train again"):
        train(recipe, run)
    (run / "result.json").unlink()
    train(recipe, run)
    assert weights.read_bytes() == expected


def test_training_does_not_begin_with_damaged_weights(recipe: Recipe, model: Path, tmp_path: Path) -> None:
    flip(model / "model.safetensors")
    with pytest.raises(SettingsError, match=r"model.from_pretrained=.*does not have the hash"):
        train(
            recipe.override("model=null", "data.other_tokenizer=true", f"model.from_pretrained={model}"),
            tmp_path / "run",
        )
