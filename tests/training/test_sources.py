"""`model.from_pretrained` of a run: its newest checkpoint, or the one of a step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fathom.checkpoints.export import export
from fathom.cli.main import main
from fathom.errors import ModelError, SettingsError
from fathom.models import FathomForCausalLM
from fathom.models.registry import AXES
from fathom.recipe import load_recipe, parse_recipe
from fathom.training import build_training, train
from fathom.training.build import build_model
from tests import processes
from tests.checkpoints.test_lumia import write
from tests.tiny import tiny_recipe


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps, checkpoints of 4 and 8, and the exported model."""
    place = tmp_path_factory.mktemp("source") / "run"
    train(tiny_recipe(corpus, "train.export=true"), place)
    return place


def began(corpus: Path, source: str, *overrides: str) -> dict[str, torch.Tensor]:
    values = {**tiny_recipe(corpus).to_dict(), "model": {"from_pretrained": source}}
    return build_training(parse_recipe(values, overrides)).weights()


@pytest.mark.quick("{}-8", "{}@step-4-4")
@pytest.mark.parametrize(("name", "step"), [("{}", 8), ("{}@step-8", 8), ("{}@step-4", 4), ("{}/step-000004", 4)])
def test_a_run_and_its_checkpoints_are_sources(corpus: Path, run: Path, name: str, step: int) -> None:
    found, expected = began(corpus, name.format(run)), processes.weights(run, step)
    assert all(torch.equal(tensor, expected[f"model.{key}"]) for key, tensor in found.items()) and found
    other = processes.weights(run, 4 if step != 4 else 8)
    assert not torch.equal(found["model.norm.weight"], other["model.model.norm.weight"])


def test_a_mechanism_that_the_run_lacks_is_drawn(corpus: Path, run: Path) -> None:
    found, expected = began(corpus, str(run), "model.residual=attention_residuals"), processes.weights(run, 8)
    new = {key for key in found if f"model.{key}" not in expected}
    assert new and all(torch.equal(found[key], expected[f"model.{key}"]) for key in found.keys() - new)


@pytest.mark.parametrize("name", ["{}", "{}/model"])
def test_arms_begin_equal_in_what_the_run_lacks(corpus: Path, run: Path, name: str) -> None:
    """Each module draws from its name, whatever else its arm has; as without a source."""
    source, arm = name.format(run), "model.recurrence=adaponder"
    one, other = began(corpus, source, arm), began(corpus, source, arm, "model.residual=hyper_connections")
    scratch = build_training(tiny_recipe(corpus, arm)).weights()
    new = {key for key in one if ".recurrence." in key}
    assert new and all(torch.equal(one[key], scratch[key]) for key in new)
    assert one.keys() < other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_a_run_without_checkpoints_has_its_model(corpus: Path, run: Path, tmp_path: Path) -> None:
    for name in ("recipe.yaml", "result.json"):
        (tmp_path / "run").mkdir(exist_ok=True)
        shutil.copy(run / name, tmp_path / "run")
    shutil.copytree(run / "model", tmp_path / "run" / "model")
    assert torch.equal(
        began(corpus, str(tmp_path / "run"))["model.norm.weight"], began(corpus, str(run))["model.norm.weight"]
    )


def test_of_a_run_that_still_trains_a_step_is_named(corpus: Path, run: Path, tmp_path: Path) -> None:
    """Its newest checkpoint is another one for every arm of a comparison, and when a run is continued."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(
        SettingsError, match=r"run: this run is not finished; name one of its checkpoints, as in .*run@step-8"
    ):
        began(corpus, str(tmp_path / "run"))
    assert began(corpus, f"{tmp_path / 'run'}@step-8")


def test_a_run_that_began_from_a_run_can_be_exported(corpus: Path, run: Path, tmp_path: Path) -> None:
    second = tiny_recipe(corpus, f"model.from_pretrained={run}@step-4", "train.steps=2")
    train(second, tmp_path / "second")
    export(tmp_path / "second", tmp_path / "model")
    model = FathomForCausalLM.from_pretrained(tmp_path / "model")
    expected = processes.weights(tmp_path / "second", 2)["model.model.norm.weight"]
    assert torch.equal(model.model.norm.weight.float(), expected)


@pytest.mark.slow
def test_a_run_goes_on_when_its_source_has_deleted_the_checkpoint(corpus: Path, run: Path, tmp_path: Path) -> None:
    """A source that still trains keeps its last checkpoints only; the run has its own."""
    shutil.copytree(run, tmp_path / "run")
    second = tiny_recipe(corpus, f"model={{from_pretrained: {tmp_path / 'run'}@step-4}}", "evaluate.every=0")
    train(second, tmp_path / "whole")
    train(second, tmp_path / "second")
    for name in ("second/step-000008", "run/step-000004"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "second" / "result.json").unlink()
    train(second, tmp_path / "second")
    ended, expected = (processes.weights(tmp_path / name, 8) for name in ("second", "whole"))
    assert all(torch.equal(tensor, ended[name]) for name, tensor in expected.items())
    with pytest.raises(ModelError, match="has no checkpoint of step 4"):
        train(second, tmp_path / "third")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}@step-5", "has no checkpoint of step 5; it has 4, 8"),
        ("{}@5", "neither a directory with a config.json nor a run"),
        ("{}/step-000005", "neither a directory with a config.json nor a run"),
    ],
)
def test_what_is_no_source_is_one_line(
    corpus: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (tmp_path / "r.yaml").write_text(tiny_recipe(corpus, f"model.from_pretrained={name.format(run)}").to_yaml())
    assert main(["train", str(tmp_path / "r.yaml"), "--run", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_is_no_source(corpus: Path, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (shard,) = (tmp_path / "run" / "step-000004").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="step-000004 is damaged"):
        began(corpus, f"{tmp_path / 'run'}@step-4")


@pytest.mark.parametrize(("place", "more"), [("", []), ("@step-4", []), ("/model", []), ("", ["--dry-run"])])
def test_another_shape_is_one_line(
    corpus: Path, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str, more: list[str]
) -> None:
    """The directory, too: neither transformers' table nor a traceback, and no run begins."""
    (tmp_path / "r.yaml").write_text(tiny_recipe(corpus, "model.tie_word_embeddings=true").to_yaml())
    words = ["train", str(tmp_path / "r.yaml"), "--run", str(tmp_path / "new"), *more]
    assert main([*words, f"model.from_pretrained={run}{place}", "model.intermediate_size=64"]) == 2
    assert capfd.readouterr().err == (
        f"fathom: model.from_pretrained={run}{place}: the checkpoint has intermediate_size=48 (not 64), "
        "tie_word_embeddings=false (not true); its config.json decides, so leave these keys out; "
        f"model=null model.from_pretrained={run}{place} drops the recipe's whole model block\n"
    )
    assert not (tmp_path / "new").exists()


def test_a_recipe_without_its_model_block_takes_any_checkpoint(
    corpus: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(tiny_recipe(corpus, "model.hidden_size=64", "train.steps=1").to_yaml())
    words = ["train", str(tmp_path / "r.yaml"), "model=null", f"model.from_pretrained={run}"]
    assert main([*words, "--run", str(tmp_path / "new")]) == 0
    assert load_recipe(tmp_path / "new" / "recipe.yaml").config().hidden_size == 32


@pytest.mark.slow
def test_other_differing_keys_are_printed(
    corpus: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys that agree with the checkpoint, which a shipped recipe has many of, are not."""
    requested = (
        f"model.from_pretrained={run}",
        "model.max_position_embeddings=64",
        "train.steps=1",
        "evaluate.every=0",
    )
    (tmp_path / "r.yaml").write_text(tiny_recipe(corpus, *requested, "track.display=lines").to_yaml())
    assert main(["train", str(tmp_path / "r.yaml"), "--run", str(tmp_path / "new")]) == 0
    assert f"changed from {run}: max_position_embeddings 32 → 64\n" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "r.yaml"), "--dry-run"]) == 0
    assert "from checkpoint  max_position_embeddings 32 → 64\n" in capsys.readouterr().out
    assert main(["train", str(tmp_path / "r.yaml"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == {"max_position_embeddings": [32, 64]}


def test_a_dry_run_says_that_the_corpus_is_not_there(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After what it would cost, which is asked before a corpus is made."""
    (tmp_path / "r.yaml").write_text(tiny_recipe(corpus).to_yaml())
    assert main(["train", str(tmp_path / "r.yaml"), "--dry-run", f"data.directory={tmp_path / 'later'}"]) == 2
    shown = capsys.readouterr()
    assert (
        "FLOPs per token" in shown.out
        and f"data.directory={tmp_path / 'later'}: no such directory: `fathom prepare" in shown.err
    )


@pytest.fixture(scope="module")
def looped(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loop that is given its entry by a matrix, with a norm between trips, and its exported model."""
    place = tmp_path_factory.mktemp("looped") / "run"
    options = "model.recurrence_options={trips: 2, injection: diagonal, norm_between: own}"
    words = ("train.steps=2", "train.export=true", "evaluate.every=0", "model.mixer=none")
    train(tiny_recipe(corpus, *words, "model.recurrence=loop", options), place)
    return place


@pytest.mark.parametrize(
    "words",
    [
        ["model.recurrence_options.trips=3"],
        ["model.recurrence=once"],
        ["model.recurrence=ponder", "model.recurrence_options.trips=2"],
        ["model.mixer=uniform_depth"],
    ],
)
def test_keys_stand_on_a_runs_as_on_its_models(looped: Path, words: list[str]) -> None:
    found = []
    for source in (looped, f"{looped}@step-2", looped / "model"):
        config = parse_recipe({"model": {"from_pretrained": str(source)}}, words).config()
        found.append([getattr(config, f"{axis}{part}") for axis in AXES for part in ("", "_options")])
        found[-1][-1].pop("seed", None)  # a run fills in its own when it begins
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("place", ["", "@step-2", "/model"])
def test_options_that_take_tensors_away_or_need_others_are_refused(corpus: Path, looped: Path, place: str) -> None:
    for words, message in (
        ("model.recurrence_options.injection=add", "the checkpoint holds model.recurrence.entry_map"),
        ("model.recurrence_options.entry_norm=true", "the checkpoint lacks model.recurrence.entry_norm.weight"),
    ):
        with pytest.raises(SettingsError, match=message):
            began(corpus, f"{looped}{place}", words)


def test_a_schedule_goes_on_from_where_a_run_has_it(corpus: Path, tmp_path: Path) -> None:
    options = "model.mixer_options={blend: 0.5, blend_steps: 4}"
    every = ("train.checkpoint_every=2", "train.keep_last=9")
    train(tiny_recipe(corpus, options, "train.export=true", *every), tmp_path / "run")
    for source, blend in (("run@step-2", 0.25), ("run@step-6", 0.5), ("run", 0.5), ("run/model", 0.5)):
        config = parse_recipe({"model": {"from_pretrained": str(tmp_path / source)}}).config()
        assert (config.mixer_options["blend"], config.mixer_options["blend_steps"]) == (blend, 0), source


@pytest.mark.parametrize("name", ["depth-attention", "denseformer", "attnres"])
def test_a_released_directory_is_a_source(tmp_path: Path, name: str) -> None:
    recipe = parse_recipe({"model": {"from_pretrained": str(write(tmp_path, name))}})
    found = build_model(recipe, recipe.config(), torch.device("cpu")).state_dict()
    expected = FathomForCausalLM.from_pretrained(tmp_path).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
