"""What a run survives and says of itself: damaged records, a corpus without held-out text, repeats."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from fathom.checkpoints.runs import config_of
from fathom.cli.main import main
from fathom.data.shards import read_index, write_index
from fathom.errors import DataError
from fathom.recipe import Recipe
from fathom.training import read_metrics, train
from fathom.training.estimate import estimate
from fathom.training.tracking import METRICS, JsonLines
from tests.tiny import tiny_recipe

from .test_steps import poison


@pytest.mark.parametrize("damage", [b"", b'{"step": 2, "loss": "\xff\xfe"}\n', b"[1]\n5\n", b"\x00" * 99 + b"\n"])
def test_damaged_metrics_do_not_stop_a_resume(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / METRICS
    path.write_bytes(b'{"step": 1, "loss": 3.0}\n' + damage + b'{"step": 3, "loss": 2.0}\n{"step": 9}\n{"st')
    said: list[str] = []
    JsonLines(path, 3, said.append).log(4, {"loss": 1.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3, 4]
    assert len(path.read_bytes().splitlines()) == 3
    assert said == ([f"{path}: {damage.count(10)} damaged lines are skipped"] if damage else [])


def test_metrics_are_json(tmp_path: Path) -> None:
    """JSON has no NaN; a program in any language reads the file, and ours gets NaN back."""
    JsonLines(tmp_path / METRICS, 0, print).log(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    line = (tmp_path / METRICS).read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}
    (read,) = read_metrics(tmp_path)
    assert math.isnan(read["loss"]) and read["lr"] == 0.5


def test_steps_that_are_not_in_a_row_are_no_reason(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1, 3, 5, 7}, lambda loss: loss * float("nan"))
    assert train(recipe.override("train.max_skipped=2", "train.log_every=100"), tmp_path).finished


@pytest.fixture
def without_val(corpus: Path, tmp_path: Path) -> Path:
    shutil.copytree(corpus, tmp_path / "corpus")
    index = read_index(tmp_path / "corpus")
    del index.splits["val"]
    write_index(tmp_path / "corpus", index)
    return tmp_path / "corpus"


def test_training_needs_no_held_out_text(without_val: Path, tmp_path: Path, capsys) -> None:
    recipe = tiny_recipe(without_val, "evaluate.every=0", "train.export=true")
    result = train(recipe, tmp_path / "run")
    assert result.finished and result.evaluation is None and result.model is not None
    again = train(recipe, tmp_path / "run")
    assert again.finished and again.evaluation is None and again.model == result.model
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    capsys.readouterr()
    assert main(["train", str(tmp_path / "r.yaml"), "--run", str(tmp_path / "run")]) == 0
    assert "no validation split to score" in capsys.readouterr().out


def test_evaluations_that_are_asked_for_need_it(without_val: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "r.yaml").write_text(tiny_recipe(without_val, "evaluate.every=2").to_yaml())
    assert main(["train", str(tmp_path / "r.yaml"), "--run", str(tmp_path / "run")]) == 2
    assert "has no split 'val'" in capsys.readouterr().err


def test_a_damaged_result_is_one_line(recipe: Recipe, tmp_path: Path) -> None:
    short = recipe.override("train.steps=1")
    train(short, tmp_path)
    for text in ("", "{", "[]", "{}", '{"step": 1, "evaluation": {"loss": 1}}'):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(DataError, match=r"result\.json is damaged: delete it and run the same command to evaluate"):
            train(short, tmp_path)
    (tmp_path / "result.json").unlink()
    assert train(short, tmp_path).evaluation is not None


def test_a_mechanism_that_a_short_run_does_not_open_is_named(recipe: Recipe, tmp_path: Path, capsys) -> None:
    options = ("model.mixer=depth_attention", "train.steps=2", "evaluate.every=0", "track.display=lines")
    for steps, says in ((2, False), (100, True)):
        words = (*options, f"model.mixer_options.blend_steps={steps}")
        train(recipe.override(*words), tmp_path / str(steps))
        notice = (
            "model.mixer_options.blend_steps=100 exceeds train.steps=2: the run will end with only 2% of the "
            "mechanism blended in"
        )
        assert (notice in capsys.readouterr().err) == says


def test_a_run_and_its_last_checkpoint_are_one_model(corpus: Path, tmp_path: Path) -> None:
    """Schedules are those of the steps made, also where a run ends that has no step left to make."""
    recipe = tiny_recipe(corpus, "train.steps=2", "model.mixer_options.blend_steps=4", "train.export=true")
    scores = []
    for _ in range(2):
        evaluation = train(recipe, tmp_path).evaluation
        assert evaluation is not None
        scores.append(evaluation.loss)
        for name in (tmp_path / "model", f"{tmp_path}@step-2"):
            assert config_of({"from_pretrained": str(name)}).mixer_options["blend"] == 0.5
        (tmp_path / "result.json").unlink()
    assert scores[0] == scores[1]


def test_repeats_are_said(recipe: Recipe, tmp_path: Path, capsys) -> None:
    cost = estimate(recipe)
    index = read_index(Path(recipe.data.directory))
    tokens = sum(shard.tokens for shards in index.splits["train"].values() for shard in shards)
    windows = tokens // recipe.data.sequence_length
    assert cost.epochs == pytest.approx(recipe.train.steps * recipe.rows_per_step / windows)
    assert estimate(recipe.override("data.directory=nowhere")).epochs is None
    many = recipe.override("train.tokens_per_step=1024", "train.micro_batch=32", "train.checkpoint_every=100")
    many = many.override(f"train.steps={math.ceil(2.5 * windows / many.rows_per_step)}", "evaluate.every=0")
    (tmp_path / "r.yaml").write_text(many.to_yaml())
    assert main(["train", str(tmp_path / "r.yaml"), "--dry-run"]) == 0
    assert "epochs of the corpus" in capsys.readouterr().out
    train(many.override("track.display=lines"), tmp_path / "run")
    assert " epochs: every one of " in capsys.readouterr().err
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["epochs"] == pytest.approx(estimate(many).epochs)
