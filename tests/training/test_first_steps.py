"""The first steps of a continued run: as an evaluation says, and never back towards knowing nothing."""

from __future__ import annotations

import json
import math
import re
import types
from pathlib import Path

import pytest
import torch

from fathom.errors import TrainingError
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import Recipe
from fathom.training import branch, train
from fathom.training.build import Training
from fathom.training.first_steps import FirstSteps
from tests.tiny import export_tiny, make_conversations


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import tiny_recipe

    place = tmp_path_factory.mktemp("base") / "run"
    long = ("train.steps=24", "train.checkpoint_every=24", "evaluate.every=0", "optim.lr=0.02")
    train(tiny_recipe(corpus, *long), place)
    return place


def continued(recipe: Recipe, base: Path, *words: str) -> Recipe:
    return recipe.override(f"model.from_pretrained={base}", "train.steps=12", "track.display=lines", *words)


@pytest.mark.quick("conversations")
@pytest.mark.parametrize("kind", ["text", "documents", "conversations", "accumulated"])
def test_the_first_batch_is_evaluated_to_its_loss(
    kind: str, recipe: Recipe, corpus: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "text": (),
        "documents": ("data.packing=documents",),
        "conversations": (
            "data.packing=documents",
            f"data.directory={make_conversations(corpus, tmp_path / 'talk')}",
        ),
        "accumulated": ("train.micro_batch=1",),
    }[kind]
    train(continued(recipe, base, *words, "train.steps=1"), tmp_path / "run")
    said = capsys.readouterr()
    (loss,) = re.findall(r"first batch: loss ([\d.]+), equal to its evaluation", said.out + said.err)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert float(loss) == pytest.approx(first["loss"], abs=1e-4)


def test_the_penalty_of_routers_is_no_fault(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = export_tiny(tmp_path / "model", vocab_size=304, experts=4, experts_per_token=2, router_aux_loss_coef=0.5)
    words = ("model=null", "data.other_tokenizer=true", "track.display=lines", "train.steps=1", "evaluate.every=0")
    train(recipe.override(*words, f"model.from_pretrained={model}"), tmp_path / "run")
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(first["cross_entropy"] + first["router"], abs=1e-5) and first["router"] > 0.1
    assert f"first batch: ce {first['cross_entropy']:.4f}, equal to its evaluation" in capsys.readouterr().err


def test_a_loop_that_computes_another_loss_is_stopped(
    recipe: Recipe, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a forward pass of training that is off by one token in the shift."""
    from fathom.training import build

    plain = build.forward

    def shifted(model: FathomForCausalLM, batch: object) -> object:
        wrong = types.SimpleNamespace(**{**vars(batch), "labels": torch.roll(batch.labels, 1, 1)})
        return plain(model, wrong)

    monkeypatch.setattr(build, "forward", shifted)
    with pytest.raises(
        TrainingError, match=r"first batch has a loss of [\d.]+ in training and of [\d.]+ in evaluation"
    ):
        train(continued(recipe, base), tmp_path / "run")


@pytest.mark.parametrize("stopped", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_that_are_thrown_away_are_noticed(
    stopped: int, recipe: Recipe, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer that begins anew with a huge step, as one that lost its state does; before or after a restart."""
    words = ("train.checkpoint_every=4", "train.skip_spikes=null", "optim.lr=1e-4")
    recipe = continued(recipe, base, *words)
    if stopped:
        train(recipe.override("optim.schedule=constant", f"train.steps={stopped}"), tmp_path / "run")
        recipe = recipe.override("optim.schedule=constant")
    plain = Training.step

    def lost(self: Training, step: int, batches: object = None) -> object:
        if step == stopped + 1:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * 0.02)
        return plain(self, step, batches)

    monkeypatch.setattr(Training, "step", lost)
    again = branch(tmp_path / "run", tmp_path / "new", ["train.steps=12"]) if stopped else recipe
    with pytest.raises(
        TrainingError, match=r"the loss went from [\d.]+ to [\d.]+, towards the 5.72 of an untrained model"
    ):
        train(again, None if stopped else tmp_path / "run")


def test_what_knows_nothing_has_nothing_to_lose() -> None:
    """From scratch, and from a base to which the text is new, a loss may go where it will."""
    run = types.SimpleNamespace(training=types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=300)))
    watch = FirstSteps()
    watch._run, watch._watched = run, range(1, 11)  # type: ignore[assignment]
    watch.log(1, {"loss": 0.9 * math.log(300)})
    watch.log(2, {"loss": 3 * math.log(300)})
    watch.log(3, {"loss": math.nan})
    watch.log(4, {"held_out_loss": 1.0})


def test_dropout_is_no_fault(recipe: Recipe, base: Path, tmp_path: Path) -> None:
    """A training forward pass with dropout has another loss than an evaluation, so the first batch is not compared."""
    assert train(continued(recipe, base, "model.attention_dropout=0.5", "train.steps=1"), tmp_path / "run").finished


def test_a_comparison_counts_what_forgets_as_diverged(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the worker would end, and the same command would meet the same run again."""
    from fathom.experiments import scheduler
    from fathom.experiments.task_claims import Claims

    def forgets(*arguments: object, **given: object) -> None:
        raise TrainingError("step 3: the loss went from 2.0 to 5.0", 3)

    monkeypatch.setattr(scheduler, "train", forgets)
    with Claims(tmp_path / "claims").take("run") as claim:
        assert scheduler.Task(tmp_path, tmp_path / "run", "arm", 0, lambda: recipe).run(claim)
    assert json.loads((tmp_path / "run" / "failed.json").read_text())["step"] == 3
