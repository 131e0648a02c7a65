"""Runs extended, branched and cooled down: bitwise the runs that were planned so from the start."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.checkpoints.find import find_model
from fathom.checkpoints.runs import model_directory, open_source
from fathom.cli.main import main
from fathom.errors import ModelError, SettingsError, TrainingError
from fathom.recipe import Recipe, load_recipe
from fathom.training import branch, change, extension, loop, read_history, read_metrics, train
from tests import processes
from tests.tiny import tiny_recipe

from .conftest import StopAt
from .test_steps import poison

TIMING = {"seconds", "tokens_per_second", "memory_bytes", "eta_seconds", "mfu"}
CONSTANT = ("optim.schedule=constant", "train.keep_last=9")


@pytest.fixture(scope="module")
def constant(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight finished steps at a constant rate, one of warm-up."""
    place = tmp_path_factory.mktemp("constant") / "run"
    train(tiny_recipe(corpus, *CONSTANT), place)
    return place


@pytest.fixture
def run(constant: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(constant, tmp_path / "run"))


@pytest.fixture(scope="module")
def planned(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """planned(*overrides): a run that was planned so, of one warm-up step, which no test writes to."""

    @cache
    def plan(*overrides: str) -> Path:
        place = tmp_path_factory.mktemp("planned")
        train(tiny_recipe(corpus, *CONSTANT, "optim.warmup_steps=1", *overrides), place)
        return place

    return plan


@pytest.fixture(scope="module")
def exported(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `constant`, with the model that the end of a run writes."""
    place = tmp_path_factory.mktemp("exported") / "run"
    train(tiny_recipe(corpus, *CONSTANT, "train.export=true"), place)
    return place


@pytest.fixture
def model_run(exported: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(exported, tmp_path / "run"))


def numbers(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMING} for line in read_metrics(run)]


def assert_same(found: Path, expected: Path, step: int) -> None:
    """Weights, optimizer state, guard and metrics."""
    one, other = processes.weights(found, step), processes.weights(expected, step)
    assert one.keys() == other.keys() and any(name.startswith("optimizer.exp_avg") for name in one)
    assert any(name.startswith("guard.") for name in one)
    for name, tensor in other.items():
        assert torch.equal(one[name], tensor), name
    assert numbers(found) == numbers(expected)


def test_extended(run: Path, planned: Callable[..., Path]) -> None:
    """Sixteen steps have two of warm-up at the recipe's share: what the run has had stays."""
    assert main(["train", str(run), "train.steps=16", "evaluate.tokens=1000"]) == 0
    assert_same(run, planned("train.steps=16"), 16)
    with pytest.raises(AssertionError):
        assert_same(run, planned("train.steps=16", "optim.warmup_steps=2"), 16)
    (line,) = read_history(run)
    assert line["changes"] == {"train.steps": [8, 16], "optim.warmup_steps": [None, 1]} and line["step"] == 8
    assert line["command"] == f"fathom train {run} train.steps=16 evaluate.tokens=1000" and line["time"]
    assert json.loads((run / "result.json").read_text())["step"] == 16


def test_an_unfinished_run_is_extended(corpus: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    train(tiny_recipe(corpus, *CONSTANT), tmp_path / "run", callbacks=[StopAt(2)])
    assert not (tmp_path / "run" / "result.json").exists()
    assert train(extension(tmp_path / "run", ["train.steps=12"])).step == 12
    assert_same(tmp_path / "run", planned("train.steps=12"), 12)


def test_a_run_goes_on_by_its_name_alone(corpus: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    train(tiny_recipe(corpus, *CONSTANT), tmp_path / "run", callbacks=[StopAt(2)])
    assert main(["train", str(tmp_path / "run")]) == 0
    assert_same(tmp_path / "run", planned(), 8)
    assert not (tmp_path / "run" / "history.jsonl").exists(), "nothing changed"


def test_wsd_is_extended_before_its_decay(corpus: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    wsd = ("optim.schedule=wsd", "optim.decay_steps=4")
    train(tiny_recipe(corpus, *CONSTANT, *wsd), tmp_path / "run", callbacks=[StopAt(2)])
    train(extension(tmp_path / "run", ["train.steps=16"]))
    assert_same(tmp_path / "run", planned(*wsd, "train.steps=16"), 16)
    with pytest.raises(SettingsError, match="follows a wsd schedule made for 16 steps"):
        extension(tmp_path / "run", ["train.steps=20"])


def test_branched_and_cooled_down(constant: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    """From a checkpoint in the middle; the decay begins there and lasts as long as was said."""
    new = tmp_path / "cooled"
    words = ["train", "--from", f"{constant}@step-4", "--run", str(new), "--cooldown", "4"]
    assert main(words) == 0
    expected = planned("optim.schedule=wsd", "optim.decay_steps=4")
    assert_same(new, expected, 8)
    rates = [line["lr"] for line in read_metrics(new) if "lr" in line]
    assert rates[1:4] == [1e-2] * 3 > rates[4:] and rates[-1] == pytest.approx(1e-3)
    (line,) = read_history(new)
    assert line["from"] == f"{constant}@step-4" and line["step"] == 4
    assert line["command"] == " ".join(["fathom", *words])
    changes = {"optim.schedule": ["constant", "wsd"], "optim.decay_steps": [None, 4]}
    assert line["changes"] == changes, "a run of the same length keeps its warm-up by itself"
    before = (new / "metrics.jsonl").stat().st_mtime_ns
    assert main(words) == 0 and (new / "metrics.jsonl").stat().st_mtime_ns == before, (
        "the same command finds it finished"
    )
    assert len(read_history(new)) == 1


def test_extended_branched_and_cooled_down(run: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    """One after the other, with the histories of all three."""
    train(extension(run, ["train.steps=12"]))
    train(branch(f"{run}@step-10", tmp_path / "branch", ["train.steps=16"]))
    train(branch(f"{tmp_path / 'branch'}@step-14", tmp_path / "cooled", cooldown=6))
    wsd = ("optim.schedule=wsd", "optim.decay_steps=6", "train.steps=20")
    assert_same(tmp_path / "cooled", planned(*wsd), 20)
    assert [line["step"] for line in read_history(tmp_path / "cooled")] == [8, 10, 14]
    assert not (tmp_path / "cooled" / "result.json").samefile(run / "result.json")


def test_a_cooldown_begins_at_the_rate_in_force(recipe: Recipe, tmp_path: Path) -> None:
    """Here on the way down a cosine."""
    train(recipe.override("train.keep_last=9"), tmp_path / "run")
    train(branch(f"{tmp_path / 'run'}@step-4", tmp_path / "cooled", cooldown=2))
    rates = [line["lr"] for line in read_metrics(tmp_path / "cooled") if "lr" in line]
    assert len(rates) == 6 and rates[3] > rates[4] > rates[5] == pytest.approx(0.1 * rates[3])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_made_for_a_length_must_be_said_anew(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    run = tmp_path / "run"
    train(recipe.override(f"optim.schedule={schedule}", "track.display=lines"), run)
    held = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    capsys.readouterr()
    assert main(["train", str(run), "train.steps=16"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"follows a {schedule} schedule made for 8 steps" in error
    assert "learning rate of step 9 would go from 0.001 to 0.00" in error and "set optim.schedule to constant" in error
    assert main(["train", str(run), "train.steps=9"]) == 2
    assert "learning rate of step 9 would stay at 0.001, fallen too early; set" in capsys.readouterr().err
    assert held == {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    assert main(["train", str(run), "train.steps=10", "optim.schedule=constant"]) == 0
    assert "learning rate of step 9: 0.001 as planned before, 0.01 now" in capsys.readouterr().err


def refusals(run: Path, new: Path) -> list[tuple[list[str], str]]:
    branched = ["--from", f"{run}@step-4", "--run", str(new)]
    return [
        ([str(run), "train.steps=8", "optim.lr=1e-3"], "has already taken all of its 8 steps"),
        ([str(run), "train.steps=6"], "has already taken 8"),
        ([str(run), "train.seed=3", "model.mixer=none", "train.steps=9"], "cannot change in a resumed run; a new run"),
        ([str(run), "train.tokens_per_step=512"], "train.tokens_per_step cannot change in a resumed run"),
        ([str(run), "--run", str(new)], "is a run itself"),
        ([str(run), "--cooldown", "3"], "--cooldown needs --from"),
        ([str(run), "train.steps=16", "--new"], "already contains a run"),
        (["--from", f"{run}@step-4"], "needs --run"),
        (["--from", f"{run}@step-5", "--run", str(new)], "has no checkpoint of step 5; it has 2, 4, 6, 8"),
        (["--from", str(new), "--run", str(new)], "no run (recipe.yaml) there"),
        (["--from", str(run), "--run", str(new)], "train.steps=8: "),
        ([*branched, "train.steps=4"], "allowed: more"),
        ([*branched, "train.steps=3"], "has already taken 4"),
        ([*branched, "--cooldown", "0"], "--cooldown 0: allowed: 1 or more"),
        ([*branched, "--cooldown", "4", "train.steps=20"], "--cooldown 4 sets train.steps"),
        ([*branched, "model.hidden_size=64"], "model.hidden_size cannot change"),
        ([*branched, "data.directory=nowhere"], "nowhere: no such directory"),
        (["--from", f"{run}@step-4", "--run", str(run), "optim.lr=1"], "already contains another run"),
        ([*branched, "recipes/tiny.yaml"], "an override is written key=value"),
        ([], "required: recipe, or --from"),
    ]


@pytest.mark.parametrize("number", range(20))
def test_refusals_are_one_line_and_write_nothing(
    constant: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    words, message = refusals(constant, tmp_path / "new")[number]
    held = {path: path.read_bytes() for path in constant.rglob("*") if path.is_file()}
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "new").exists()
    assert held == {path: path.read_bytes() for path in constant.rglob("*") if path.is_file()}


def test_another_corpus_is_refused_before_anything_is_written(run: Path, tmp_path: Path, corpus: Path) -> None:
    from fathom.data.shards import read_index, write_index

    other = Path(shutil.copytree(corpus, tmp_path / "other"))
    write_index(other, replace(read_index(other), eos_token_id=5))
    held = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for made in (
        extension(run, ["train.steps=16", f"data.directory={other}"]),
        branch(f"{run}@step-4", tmp_path / "new", [f"data.directory={other}", "optim.lr=1e-3"]),
    ):
        with pytest.raises(SettingsError, match="differs from the corpus with which this run began"):
            train(made)
    assert held == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("experiment", "place"),
    [
        ("comparison", "arms/arm/seed-0"),
        ("ladder", "rungs/1/arms/arm/seed-0"),
        ("ladder", "tune/1/arm/lr-1/seed-0"),
        ("ladder", "seed_control/1/seed-0"),
    ],
)
def test_a_run_of_an_experiment_stays_as_planned(constant: Path, tmp_path: Path, experiment: str, place: str) -> None:
    run = Path(shutil.copytree(constant, tmp_path / place))
    if experiment == "ladder":
        (tmp_path / "ladder.json").touch()
    with pytest.raises(SettingsError, match=f"part of a {experiment} and cannot change here"):
        extension(run, ["train.steps=16"])


PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "before the history": lambda _: (loop, "record"),
    "between history and recipe": lambda _: (loop, "write_atomically"),
    "before the checkpoint is there": lambda _: (change.os, "replace"),
    "before the metrics are there": lambda _: (change.shutil, "copyfile"),
    "before the first step": lambda _: (loop.Training, "batches"),
    "before the result": lambda _: (loop, "write_json"),
}


def die_at(place: str, words: Sequence[str]) -> None:
    """Change a run, and be killed at a place."""
    target, name = PLACES[place](None)
    original = getattr(target, name)

    def deadly(*arguments: Any, **options: Any) -> Any:
        if name != "replace" or "step-0" in str(arguments[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(target, name, deadly)
    main(words)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("before the history", marks=pytest.mark.slow),
        "between history and recipe",
        pytest.param("before the first step", marks=pytest.mark.slow),
    ],
)
def test_killed_while_a_run_is_extended(run: Path, place: str, planned: Callable[..., Path]) -> None:
    """The same command goes on, and its history has one line."""
    words = ["train", str(run), "train.steps=12"]
    assert processes.run(die_at, place, words) == -signal.SIGKILL
    assert main(words) == 0
    assert_same(run, planned("train.steps=12"), 12)
    assert [line["changes"]["train.steps"] for line in read_history(run)] == [[8, 12]]


def test_a_change_that_never_came_about_leaves_the_history(run: Path) -> None:
    """Killed between history and recipe; the user changes his mind."""
    words = ["train", str(run), "train.steps=12"]
    assert processes.run(die_at, "between history and recipe", words) == -signal.SIGKILL
    assert len(read_history(run)) == 1 and load_recipe(run / "recipe.yaml").train.steps == 8
    assert main(["train", str(run), "train.steps=10"]) == 0
    assert [line["changes"]["train.steps"] for line in read_history(run)] == [[8, 10]]


@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=() if p == "between history and recipe" else pytest.mark.slow) for p in list(PLACES)[:5]],
)
def test_killed_while_a_run_is_branched(
    constant: Path, tmp_path: Path, place: str, planned: Callable[..., Path]
) -> None:
    words = ["train", "--from", f"{constant}@step-4", "--run", str(tmp_path / "new"), "--cooldown", "4"]
    assert processes.run(die_at, place, words) == -signal.SIGKILL
    assert main(words) == 0
    assert_same(tmp_path / "new", planned("optim.schedule=wsd", "optim.decay_steps=4"), 8)
    assert len(read_history(tmp_path / "new")) == 1


def test_a_branch_outlives_its_source(run: Path, tmp_path: Path) -> None:
    train(branch(f"{run}@step-4", tmp_path / "new", ["train.steps=12"]), callbacks=[StopAt(5)])
    shutil.rmtree(run)
    assert train(extension(tmp_path / "new")).step == 12


def branch_on_ranks(source: str, place: Path) -> None:
    train(branch(source, place, ["train.steps=10", "train.export=true"]))


def test_two_ranks_branch_what_one_began(constant: Path, tmp_path: Path) -> None:
    processes.run_ranks(2, branch_on_ranks, f"{constant}@step-4", tmp_path / "new")
    assert len(read_history(tmp_path / "new")) == 1
    found, alone = processes.losses(tmp_path / "new"), processes.losses(constant)
    assert found[:8] == pytest.approx(alone, rel=1e-3) and found[:4] == alone[:4] and len(found) == 10


def test_free_keys_are_recorded_too(corpus: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(corpus)
    train(recipe, tmp_path, callbacks=[StopAt(2)])
    train(recipe.override("train.log_every=4"), tmp_path)
    (line,) = read_history(tmp_path)
    assert line["changes"] == {"train.log_every": [2, 4]}


def test_another_recipe_says_what_changes_a_run(corpus: Path, constant: Path) -> None:
    with pytest.raises(SettingsError, match=r"different: optim\.lr; `fathom train .* key=value` resumes with changes"):
        train(tiny_recipe(corpus, *CONSTANT, "optim.lr=0.5"), constant)
    with pytest.raises(SettingsError, match=r"different: train\.seed$"):
        train(tiny_recipe(corpus, *CONSTANT, "train.seed=5"), constant)


@pytest.mark.parametrize("first", [1, 4])
def test_what_is_proposed_to_a_diverged_run_works(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """With a checkpoint behind it, and without."""
    with monkeypatch.context() as broken:
        poison(broken, set(range(first, 9)), lambda loss: loss * float("nan"))
        with pytest.raises(TrainingError) as stopped:
            train(recipe.override("train.max_skipped=2", "train.checkpoint_every=3"), tmp_path / "run")
    proposal = str(stopped.value).split("`")[1]
    assert proposal == f"fathom train {tmp_path / 'run'} optim.lr=0.005"
    assert main(proposal.split()[1:]) == 0
    (line,) = read_history(tmp_path / "run")
    assert line["changes"] == {"optim.lr": [0.01, 0.005]}
    assert max(line["lr"] for line in read_metrics(tmp_path / "run")[-2:] if "lr" in line) <= 0.005


def damage_weights(checkpoint: Path) -> None:
    weights = next(checkpoint.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")


def assert_opens(run: Path, step: int) -> None:
    """A run's name stands for the weights of a step, and says so."""
    opened, weights = open_source(run), processes.weights(run, step)
    assert opened.facts.step == step
    assert all(torch.equal(p, weights[f"model.{name}"]) for name, p in opened.model.named_parameters())


def test_a_run_that_goes_on_is_not_its_earlier_model(model_run: Path) -> None:
    """Finished and exported after 8 steps, made longer, stopped on the way, and finished without an export."""
    assert_opens(model_run, 8)
    longer = ["train.steps=16", "train.export=false"]
    assert train(extension(model_run, longer), callbacks=[StopAt(10)]).step == 11
    assert not (model_run / "result.json").exists(), "scripts take it for the end"
    assert_opens(model_run, 11)
    with pytest.raises(ModelError, match="wrote no model at its last step"):
        find_model(model_run)
    result = train(extension(model_run))
    assert result.finished and result.model is None and not (model_run / "model").exists()
    assert_opens(model_run, 16)
    assert open_source(model_run).facts.evaluation == json.loads((model_run / "result.json").read_text())["evaluation"]
    result = train(extension(model_run, ["train.steps=18", "train.export=true"]))
    assert find_model(model_run) == result.model == model_run / "model"
    assert_opens(model_run, 18)


def test_a_run_left_by_an_earlier_release_opens_at_its_last_step(model_run: Path) -> None:
    """There a run that went on kept its result."""
    before = (model_run / "result.json").read_text()
    train(extension(model_run, ["train.steps=16"]), callbacks=[StopAt(10)])
    (model_run / "result.json").write_text(before)
    assert_opens(model_run, 11)
    assert open_source(model_run).facts.evaluation is None, "that of step 8"


def test_a_run_shortened_to_an_intact_step_is_its_model(corpus: Path, tmp_path: Path) -> None:
    """The damaged checkpoint that it was shortened for stays, and its number is the larger one."""
    run = tmp_path / "run"
    stopped = train(tiny_recipe(corpus, *CONSTANT, "train.checkpoint_every=4"), run, callbacks=[StopAt(6)])
    damage_weights(run / f"step-{stopped.step:06}")
    assert main(["train", str(run), "train.steps=4", "train.export=true"]) == 0
    assert find_model(run) == run / "model"
    assert_opens(run, 4)
    (run / "result.json").unlink()
    with pytest.raises(ModelError, match="wrote no model at its last step"):
        find_model(run)


@pytest.mark.parametrize("place", ["before the history", "before the first step", "before the result"])
def test_a_run_that_is_killed_while_it_is_made_longer_opens(place: str, model_run: Path) -> None:
    words = ["train", str(model_run), "train.steps=12"]
    assert processes.run(die_at, place, words) == -signal.SIGKILL
    assert_opens(model_run, 12 if place == "before the result" else 8)
    assert main(words) == 0
    assert_opens(model_run, 12)
    assert find_model(model_run) == model_run / "model"


def test_adapters_that_train_on_are_not_their_earlier_model(corpus: Path, tmp_path: Path) -> None:
    """The finished model is their only form as a source; a checkpoint of a later step makes it an earlier one."""
    run = tmp_path / "run"
    train(tiny_recipe(corpus, *CONSTANT, "train.export=true", "train.steps=2"), run)
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("\n  rank: null", "\n  rank: 2"))
    assert model_directory(run) == run / "model"
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("\n  steps: 2", "\n  steps: 4"))
    (run / "step-000003").mkdir()
    assert model_directory(run) is None
    with pytest.raises(ModelError, match="merged when it is finished"):
        open_source(run)


def test_a_change_of_a_run_whose_last_checkpoint_is_damaged_holds(run: Path) -> None:
    """It has steps to take again, under the change."""
    damage_weights(run / "step-000008")
    assert train(extension(run)).step == 8 and not (run / "history.jsonl").exists()
    words = ["train", str(run), "optim.lr=5e-4"]
    assert processes.run(die_at, "before the first step", words) == -signal.SIGKILL
    assert main(words) == 0
    assert [line["changes"] for line in read_history(run)] == [{"optim.lr": [0.01, 0.0005]}]
    rates = [line["lr"] for line in read_metrics(run) if "lr" in line]
    assert rates[-3:] == [1e-2, 5e-4, 5e-4] and load_recipe(run / "recipe.yaml").optim.lr == 5e-4
    assert_opens(run, 8)
