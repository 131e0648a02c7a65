"""Training some parameters and no others, and taking a trained model to another recurrence that way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.recipe import Recipe
from fathom.training import build_training, train
from fathom.training.estimate import estimate
from fathom.training.optimizer import OPTIMIZERS
from tests import processes
from tests.tiny import tiny_recipe

from .conftest import StopAt

GATES = (
    *("model.mixer=none", "model.recurrence=adaponder", "model.recurrence_options.top_k=9", "train.steps=4"),
    *("model.recurrence_options.trips=2", "evaluate.every=0", "optim.only=[model.recurrence]"),
)


def weights(recipe: Recipe, steps: int = 0) -> dict[str, Tensor]:
    training = build_training(recipe)
    for step in range(steps):
        training.step(step)
    return {name: tensor.clone() for name, tensor in training.weights().items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_rest_stays_bit_for_bit(corpus: Path, optimizer: str) -> None:
    recipe = tiny_recipe(corpus, *GATES, f"optim.name={optimizer}", "optim.weight_decay=0.5")
    before, after = weights(recipe), weights(recipe, steps=2)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("model.recurrence.")} != set()


def test_patterns(corpus: Path) -> None:
    recipe = tiny_recipe(corpus, "optim.only=['*.mlp.*', model.norm.weight]", "optim.name=muon")
    training = build_training(recipe)
    trained = {name for name, p in training.model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in training.model.named_parameters() if ".mlp." in n or n == "model.norm.weight"}
    training.step(0)
    assert {name.partition(".")[2] for name in training.optimizer.state()} == trained
    matrices = tiny_recipe(corpus, "optim.only=['*.mlp.*']", "optim.name=muon")  # nothing is left for adamw
    assert weights(matrices, steps=1).keys() == weights(matrices).keys()


def test_bad_patterns(corpus: Path) -> None:
    with pytest.raises(SettingsError, match=r"optim\.only=model\.recurence: matches no parameter of this model"):
        build_training(tiny_recipe(corpus, "optim.only=[model.recurence]"))


def test_a_dry_run_counts_what_trains(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tiny_recipe(corpus)
    frozen = whole.override("optim.only=['*.mlp.*']")
    trained = sum(p.numel() for p in build_training(frozen).optimizer.parameters.values())
    cost = estimate(frozen)
    assert (estimate(whole).trained_parameters, cost.trained_parameters) == (cost.parameters, trained)
    (tmp_path / "recipe.yaml").write_text(frozen.to_yaml())
    assert main(["train", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 0
    assert f"{cost.parameters:,}, {trained:,} trained\n" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("only", ["[]", "['*.mlp.*']"])
def test_memory_is_that_of_a_real_run(corpus: Path, only: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights have no gradient and no moments; in bf16 they have a copy like all others."""
    recipe = tiny_recipe(corpus, f"optim.only={only}", f"train.precision={precision}")
    training = build_training(recipe)
    monkeypatch.setattr(training.optimizer, "zero_grad", lambda: None)  # which would drop the gradients
    training.step(0)
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    state, weights = training.optimizer.state(), training.weights()
    moments = [tensor for name, tensor in state.items() if name.startswith("exp_avg")]
    copies = sum(p.numel() for p in weights.values()) * (2 if precision == "bf16" else 0)  # not measured
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*weights.values(), *moments, *gradients))
    assert estimate(recipe).state_bytes == held + copies


def on_two_ranks(corpus: Path, folder: Path) -> None:
    train(tiny_recipe(corpus, *GATES), folder / "two")


@pytest.mark.slow
def test_resumes_and_shards(corpus: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(corpus, *GATES)
    train(recipe, tmp_path / "whole")
    assert not train(recipe, tmp_path / "stopped", callbacks=[StopAt(2)]).finished
    train(recipe, tmp_path / "stopped")
    assert processes.losses(tmp_path / "stopped") == processes.losses(tmp_path / "whole")
    processes.run_ranks(2, on_two_ranks, corpus, tmp_path)
    assert processes.losses(tmp_path / "two") == pytest.approx(processes.losses(tmp_path / "whole"), rel=1e-6)


@pytest.mark.slow
def test_from_vanilla_through_gates_to_everything(corpus: Path, tmp_path: Path) -> None:
    """A retrofit with shut gates is the model it began with; its second phase begins where the first ended."""
    shape = ("model.mixer=none", "train.steps=2", "evaluate.every=0", "train.export=true")
    train(tiny_recipe(corpus, *shape), tmp_path / "vanilla")
    source = f"model.from_pretrained={tmp_path / 'vanilla' / 'model'}"
    shut = build_training(tiny_recipe(corpus, *GATES, source, "model.recurrence_options.gate_bias=-20"))
    plain = build_training(tiny_recipe(corpus, *shape, source))
    assert shut.step(0).loss == plain.step(0).loss

    gates = tiny_recipe(corpus, *GATES, source, "train.export=true")
    assert all(torch.equal(a, b) for a, b in zip(weights(gates).values(), weights(gates).values(), strict=True))
    train(gates, tmp_path / "gates")
    ended = build_training(gates).weights()
    begun = weights(tiny_recipe(corpus, *GATES[:-1], f"model.from_pretrained={tmp_path / 'gates' / 'model'}"))
    same = {name for name in ended if torch.equal(ended[name], begun[name])}
    assert same == {name for name in ended if not name.startswith("model.recurrence.")}
    with pytest.raises(SettingsError, match=r"neither a directory with a config\.json"):
        build_training(tiny_recipe(corpus, "model.from_pretrained=nowhere"))


@pytest.mark.parametrize("recurrence", ["loop", "ponder2", "ponder3", "adaponder", "latent_cot"])
def test_from_ponder_to_another(corpus: Path, ponder: Path, recurrence: str) -> None:
    recipe = tiny_recipe(
        corpus, "model.mixer=none", f"model.recurrence={recurrence}", f"model.from_pretrained={ponder}"
    )
    training = build_training(recipe)
    assert training.config.recurrence == recurrence
    assert torch.isfinite(training.step(0).loss)


@pytest.fixture(scope="module")
def ponder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ponder")
    overrides = ("model.mixer=none", "model.recurrence=ponder", "model.recurrence_options.trips=2", "train.steps=1")
    train(tiny_recipe(corpus, *overrides, "evaluate.every=0", "train.export=true"), folder / "run")
    return folder / "run" / "model"
