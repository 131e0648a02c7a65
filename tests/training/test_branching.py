"""Runs branched and cooled down: bitwise the runs that were planned so from the start."""

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
from safetensors.torch import load_file

from fathom.checkpoints.export import export
from fathom.checkpoints.find import find_model
from fathom.checkpoints.runs import config_of, open_source
from fathom.cli.main import main
from fathom.errors import ModelError, SettingsError, TrainingError
from fathom.recipe import Recipe, load_recipe
from fathom.report.files import asdict, digest
from fathom.training import branch, branching, loop, read_history, read_metrics, train
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


@pytest.mark.slow
def test_made_longer(constant: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    """Sixteen steps have two of warm-up at the recipe's share: what the run has had stays."""
    new = tmp_path / "new"
    words = ["train", "--from", str(constant), "--run", str(new), "train.steps=16"]
    assert main(words) == 0
    assert_same(new, planned("train.steps=16"), 16)
    (line,) = read_history(new)
    changes = {"train.steps": [8, 16], "optim.warmup_steps": [None, 1]}
    assert changes.items() <= line["changes"].items() and line["step"] == 8
    assert line["command"] == " ".join(["fathom", *words]) and line["time"]
    assert json.loads((new / "result.json").read_text())["step"] == 16


@pytest.mark.slow
def test_an_unfinished_run_is_branched(corpus: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    train(tiny_recipe(corpus, *CONSTANT), tmp_path / "run", callbacks=[StopAt(2)])
    assert not (tmp_path / "run" / "result.json").exists()
    assert train(branch(tmp_path / "run", tmp_path / "new", ["train.steps=12"])).step == 12
    assert_same(tmp_path / "new", planned("train.steps=12"), 12)


@pytest.mark.slow
def test_a_run_goes_on_by_its_name_alone(corpus: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    train(tiny_recipe(corpus, *CONSTANT), tmp_path / "run", callbacks=[StopAt(2)])
    assert main(["train", str(tmp_path / "run")]) == 0
    assert_same(tmp_path / "run", planned(), 8)
    assert not (tmp_path / "run" / "history.jsonl").exists(), "nothing changed"


@pytest.mark.slow
def test_wsd_is_made_longer_before_its_decay(corpus: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    wsd = ("optim.schedule=wsd", "optim.decay_steps=4")
    train(tiny_recipe(corpus, *CONSTANT, *wsd), tmp_path / "run", callbacks=[StopAt(2)])
    train(branch(tmp_path / "run", tmp_path / "new", ["train.steps=16"]))
    assert_same(tmp_path / "new", planned(*wsd, "train.steps=16"), 16)
    with pytest.raises(SettingsError, match="follows a wsd schedule made for 16 steps"):
        branch(tmp_path / "new", tmp_path / "more", ["train.steps=20"])


def test_branched_and_cooled_down(constant: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    """From a checkpoint in the middle; the decay begins there and lasts as long as was said."""
    new = tmp_path / "cooled"
    words = ["train", "--from", f"{constant}@step-4", "--run", str(new), "--cooldown", "4"]
    assert main(words) == 0
    expected = planned("optim.schedule=wsd", "optim.decay_steps=4")
    assert_same(new, expected, 8)
    with pytest.raises(AssertionError):
        assert_same(constant, expected, 8)
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


@pytest.mark.slow
def test_branched_twice_and_cooled_down(constant: Path, tmp_path: Path, planned: Callable[..., Path]) -> None:
    """One after the other, with the histories of all three."""
    train(branch(constant, tmp_path / "longer", ["train.steps=12", "train.checkpoint_every=2"]))
    train(branch(f"{tmp_path / 'longer'}@step-10", tmp_path / "branch", ["train.steps=16"]))
    train(branch(f"{tmp_path / 'branch'}@step-14", tmp_path / "cooled", cooldown=6))
    wsd = ("optim.schedule=wsd", "optim.decay_steps=6", "train.steps=20")
    assert_same(tmp_path / "cooled", planned(*wsd), 20)
    assert [line["step"] for line in read_history(tmp_path / "cooled")] == [8, 10, 14]


def test_a_cooldown_begins_at_the_rate_in_force(recipe: Recipe, tmp_path: Path) -> None:
    """Here on the way down a cosine."""
    train(recipe.override("train.keep_last=9"), tmp_path / "run")
    train(branch(f"{tmp_path / 'run'}@step-4", tmp_path / "cooled", cooldown=2))
    rates = [line["lr"] for line in read_metrics(tmp_path / "cooled") if "lr" in line]
    assert len(rates) == 6 and rates[3] > rates[4] > rates[5] == pytest.approx(0.1 * rates[3])


def test_a_loop_that_grows_keeps_its_length_until_it_has_grown(constant: Path, tmp_path: Path) -> None:
    """Or it would lose iterations in a longer run, and in a shorter one get those that were never trained."""
    options = "model.recurrence_options={trips: 3, growth: linear, growth_share: 0.9}"
    run, grows = tmp_path / "run", ("model.recurrence=loop", options)
    shutil.copytree(constant, run)
    for place in (run, *run.glob("step-*")):
        (place / "recipe.yaml").write_text(load_recipe(place / "recipe.yaml", grows).to_yaml())
        for manifest in place.glob("manifest.json"):
            files = json.loads(manifest.read_text())
            files["files"]["recipe.yaml"] = asdict(digest(place / "recipe.yaml"))
            manifest.write_text(json.dumps(files))
    for step, steps in ((4, 16), (4, 5), (8, 16)):
        with pytest.raises(SettingsError, match=f"made for 8 steps, which would jump at step {step + 1}"):
            branch(f"{run}@step-{step}", tmp_path / "new", [f"train.steps={steps}", "optim.schedule=constant"])
    assert branch(f"{run}@step-8", tmp_path / "new", cooldown=2).recipe.train.steps == 10
    for step, trips in ((4, 2), (8, 3)):  # by the length of the run, as its own exports
        opened = open_source(Path(f"{run}@step-{step}")).model.settled_config()
        for config in (opened, config_of({"from_pretrained": f"{run}@step-{step}"})):
            assert config.recurrence_options["trips"] == trips


@pytest.mark.quick("cosine")
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_made_for_a_length_must_be_said_anew(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    run = tmp_path / "run"
    train(recipe.override(f"optim.schedule={schedule}", "track.display=lines"), run)
    held = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    capsys.readouterr()
    words = ["train", "--from", str(run), "--run", str(tmp_path / "new")]
    assert main([*words, "train.steps=16"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"follows a {schedule} schedule made for 8 steps" in error
    assert "learning rate of step 9 would go from 0.001 to 0.00" in error and "set optim.schedule to constant" in error
    assert main([*words, "train.steps=9"]) == 2
    assert "learning rate of step 9 would stay at 0.001, fallen too early; set" in capsys.readouterr().err
    assert held == {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    assert main([*words, "train.steps=10", "optim.schedule=constant"]) == 0
    assert "learning rate of step 9: 0.001 as planned before, 0.01 now" in capsys.readouterr().err


def test_a_dry_run_shows_the_changes_and_writes_nothing(
    constant: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--from", f"{constant}@step-4", "--run", str(tmp_path / "new"), "--dry-run"]
    assert main([*words, "train.steps=16", "optim.schedule=linear"]) == 0
    changes = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("change ")]
    assert changes == [
        *("optim.schedule constant → linear", "optim.warmup_steps null → 1", "train.steps 8 → 16"),
        "learning rate of step 5: 0.01 as planned before, 0.008071 now",
    ]
    assert not (tmp_path / "new").exists()


def refusals(run: Path, new: Path) -> list[tuple[list[str], str]]:
    branched = ["--from", f"{run}@step-4", "--run", str(new)]
    return [
        ([str(run), "train.steps=9"], f"different: train.steps; `fathom train --from {run} --run NEW key=value`"),
        ([*branched, "train.seed=3", "train.steps=9"], "train.seed cannot change in a branch; a new run"),
        ([str(run), "--run", str(new)], "is already a run"),
        ([str(run), "--cooldown", "3"], "--cooldown needs --from"),
        ([str(run), "--new"], "already contains a run"),
        (["--from", f"{run}@step-4"], "needs --run"),
        (["--from", f"{run}@step-5", "--run", str(new)], "has no checkpoint of step 5; it has 4, 8"),
        (["--from", str(new), "--run", str(new)], "no run (recipe.yaml) there"),
        (["--from", str(run), "--run", str(new)], "train.steps=8: "),
        ([*branched, "train.steps=4"], "has already taken 4 steps; allowed: more"),
        ([*branched, "train.steps=3"], "has already taken 4"),
        ([*branched, "--cooldown", "0"], "--cooldown 0: allowed: 1 or more"),
        ([*branched, "--cooldown", "4", "train.steps=20"], "--cooldown 4 sets train.steps"),
        ([*branched, "model.hidden_size=64"], "model.hidden_size cannot change"),
        ([*branched, "data.directory=nowhere"], "nowhere: no such directory"),
        (["--from", f"{run}@step-4", "--run", str(run), "optim.lr=1"], "already contains another run"),
        ([*branched, "recipes/tiny.yaml"], "an override is written key=value"),
        ([], "required: recipe, or --from"),
    ]


@pytest.mark.parametrize("number", range(18))
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


def test_another_corpus_is_refused_before_anything_is_written(constant: Path, tmp_path: Path, corpus: Path) -> None:
    from fathom.data.shards import read_index, write_index

    other = Path(shutil.copytree(corpus, tmp_path / "other"))
    write_index(other, replace(read_index(other), eos_token_id=5))
    with pytest.raises(SettingsError, match="differs from the corpus with which this run began"):
        train(branch(f"{constant}@step-4", tmp_path / "new", [f"data.directory={other}", "optim.lr=1e-3"]))
    assert not (tmp_path / "new").exists()


PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "before the history": lambda _: (branching, "write_atomically"),
    "between history and recipe": lambda _: (loop, "write_atomically"),
    "before the checkpoint is there": lambda _: (branching.os, "replace"),
    "before the metrics are there": lambda _: (branching.shutil, "copyfile"),
    "before the first step": lambda _: (loop.Training, "batches"),
}


def die_at(place: str, words: Sequence[str]) -> None:
    """Branch a run, and be killed at a place."""
    target, name = PLACES[place](None)
    original = getattr(target, name)

    def deadly(*arguments: Any, **options: Any) -> Any:
        if name != "replace" or "step-0" in str(arguments[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(target, name, deadly)
    main(words)


@pytest.mark.quick("between history and recipe")
@pytest.mark.parametrize("place", PLACES)
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
    assert (
        main(["train", str(tmp_path / "new")]) == 0 and load_recipe(tmp_path / "new" / "recipe.yaml").train.steps == 12
    )


def branch_on_ranks(source: str, place: Path) -> None:
    train(branch(source, place, ["train.steps=10", "train.export=true"]))


@pytest.mark.slow
def test_two_ranks_branch_what_one_began(constant: Path, tmp_path: Path) -> None:
    processes.run_ranks(2, branch_on_ranks, f"{constant}@step-4", tmp_path / "new")
    assert len(read_history(tmp_path / "new")) == 1
    found, alone = processes.losses(tmp_path / "new"), processes.losses(constant)
    assert found[:8] == pytest.approx(alone, rel=1e-3) and found[:4] == alone[:4] and len(found) == 10


def test_what_changes_no_number_may_change(corpus: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(corpus)
    train(recipe, tmp_path, callbacks=[StopAt(2)])
    assert train(recipe.override("train.log_every=4", "train.keep_last=9"), tmp_path).step == 8
    assert load_recipe(tmp_path / "recipe.yaml").train.log_every == 4 and not read_history(tmp_path)


def test_another_recipe_says_what_changes_a_run(corpus: Path, constant: Path) -> None:
    with pytest.raises(SettingsError, match=r"different: optim\.lr; `fathom train --from .* key=value` branches"):
        train(tiny_recipe(corpus, *CONSTANT, "optim.lr=0.5"), constant)
    with pytest.raises(SettingsError, match=r"different: model\.mixer, train\.seed$"):
        train(tiny_recipe(corpus, *CONSTANT, "train.seed=5", "model.mixer=none", "train.log_every=3"), constant)
    with pytest.raises(SettingsError, match="already contains a run"):
        train(tiny_recipe(corpus, *CONSTANT), constant, resume=False)


def test_a_run_without_a_checkpoint_says_so(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(tiny_recipe(corpus, "optim.lr=0.5").to_yaml())
    with pytest.raises(SettingsError, match=r"optim\.lr; it has no checkpoint: delete it, or choose another --run$"):
        train(tiny_recipe(corpus), tmp_path)


def test_a_checkpoint_is_exported_by_its_step(constant: Path, tmp_path: Path) -> None:
    """The last step has the weights of the run, another one has others; nothing else opens it."""
    names = f"{constant}@step-8", str(constant / "step-000004")
    found = [load_file(export(name, tmp_path / str(i)) / "model.safetensors") for i, name in enumerate(names)]
    whole = load_file(export(constant, tmp_path / "whole") / "model.safetensors")
    assert [all(torch.equal(one[name], whole[name]) for name in whole) for one in found] == [True, False]
    for name in names:
        with pytest.raises(
            ModelError, match=r"is a training checkpoint, .*`fathom export .* --to DIR` writes its model$"
        ):
            find_model(name)
    with pytest.raises(ModelError, match="no checkpoint of step 99"):
        export(f"{constant}@step-99", tmp_path / "none")


@pytest.mark.quick("4")
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
    source = f"--from {tmp_path / 'run'}" if first > 1 else f"{tmp_path / 'run' / 'recipe.yaml'}"
    assert proposal == f"fathom train {source} --run {tmp_path / 'run'}-slower optim.lr=0.005"
    assert main(proposal.split()[1:]) == 0
    assert max(line["lr"] for line in read_metrics(tmp_path / "run-slower")[-2:] if "lr" in line) <= 0.005
