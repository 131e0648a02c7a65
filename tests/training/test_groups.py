"""Rates of some parameters alone: a factor of 1 changes no bit, others change the update by that factor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.recipe import Recipe, load_recipe
from fathom.training import build_training, train
from fathom.training.optimizer import OPTIMIZERS
from tests import processes
from tests.tiny import tiny_recipe

from .conftest import StopAt

MIXED = ("model.mixer=none", "model.residual=denseformer")


def moved(recipe: Recipe, steps: int = 1) -> dict[str, tuple[Tensor, Tensor]]:
    """Every parameter, before and after some steps."""
    training = build_training(recipe)
    before = {name: tensor.clone() for name, tensor in training.weights().items()}
    for step in range(steps):
        training.step(step)
    return {name: (before[name], tensor.clone()) for name, tensor in training.weights().items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_factors(corpus: Path, optimizer: str) -> None:
    keys = (f"optim.name={optimizer}", "optim.warmup=0", "optim.clip=null")
    base = tiny_recipe(corpus, *keys)
    plain, one = (moved(recipe, 3) for recipe in (base, base.override("optim.groups={'*.mlp.*': {lr: 1}}")))
    assert all(torch.equal(plain[name][1], one[name][1]) for name in plain), "a factor of 1 changes no bit"

    bare = base.override("optim.weight_decay=0")
    groups = "optim.groups={'*.mlp.*': {lr: 0.25}, model.norm: {lr: 0}, model.embed_tokens: {lr: 3}}"
    plain, scaled = moved(bare), moved(bare.override(groups))
    seen = set()
    for name, (before, after) in scaled.items():
        factor = 0.25 if ".mlp." in name else {"model.norm": 0, "model.embed_tokens": 3}.get(name[: -len(".weight")], 1)
        update = plain[name][1] - plain[name][0]
        torch.testing.assert_close(after - before, factor * update, rtol=1e-3, atol=1e-6)
        assert update.abs().max() > 1e-3 and (factor != 1 or torch.equal(after, plain[name][1]))
        seen.add(factor)
    assert seen == {0.25, 0, 3, 1}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weight_decay(corpus: Path, optimizer: str) -> None:
    keys = (f"optim.name={optimizer}", "optim.warmup=0", "optim.weight_decay=0.5", "optim.lr=0.1")
    base = tiny_recipe(corpus, *keys)
    plain = moved(base)
    other = moved(base.override("optim.groups={'*.mlp.*': {weight_decay: 3}, '*_norm.*': {weight_decay: 2}}"))
    for name, (before, after) in other.items():
        further = -0.1 * 0.5 * 2 * before if ".mlp." in name else torch.zeros_like(before)
        torch.testing.assert_close(after - plain[name][1], further, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (
            "{model.recurence: {lr: 2}}",
            r"optim\.groups=model\.recurence: matches no trainable parameter; there are",
        ),
        (
            "{'*.mlp.*': {lr: 2}, '*.gate_proj.*': {lr: 3}}",
            r"gate_proj\.weight is matched twice, by \*\.mlp\.\* and by",
        ),
        ("{lm_head: {lr: -1}}", r"optim\.groups=.*: allowed: by pattern, lr and weight_decay, 0 or more"),
        ("{lm_head: {rate: 1}}", r"allowed: by pattern, lr and weight_decay"),
        ("{lm_head: {}}", r"allowed: by pattern, lr and weight_decay"),
        ("{lm_head: {lr: 2}} optim.only=[model.norm]", r"optim\.groups=lm_head: matches no trainable parameter"),
        ("{lm_head: 2}", r"optim\.groups=.*: allowed: a mapping of names to a mapping of names to a number"),
    ],
)
def test_bad_groups(corpus: Path, groups: str, says: str) -> None:
    given, *frozen = groups.split(" optim.")
    with pytest.raises(SettingsError, match=says):
        build_training(tiny_recipe(corpus, f"optim.groups={given}", *(f"optim.{word}" for word in frozen)))


@pytest.mark.slow
def test_resumed_and_changed_on_the_way(corpus: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(corpus, "optim.groups={'*.mlp.*': {lr: 0.5}, lm_head: {weight_decay: 0}}", "evaluate.every=0")
    train(recipe, tmp_path / "whole")
    assert not train(recipe, tmp_path / "stopped", callbacks=[StopAt(3)]).finished
    assert main(["train", str(tmp_path / "stopped")]) == 0
    assert processes.losses(tmp_path / "stopped") == processes.losses(tmp_path / "whole")
    assert load_recipe(tmp_path / "stopped" / "recipe.yaml").optim.groups == recipe.optim.groups
    words = ["train", "--from", f"{tmp_path / 'whole'}@step-4", "--run", str(tmp_path / "other")]
    assert main([*words, "optim.groups={'*.mlp.*': {lr: 2}}"]) == 0
    assert processes.losses(tmp_path / "other")[:5] == processes.losses(tmp_path / "whole")[:5]
    assert processes.losses(tmp_path / "other") != processes.losses(tmp_path / "whole")


@pytest.mark.parametrize(
    "word,message",
    [
        ("model.vocab_size=200", "does not fit a model with vocab_size=200"),
        ("model.max_position_embeddings=8", "max_position_embeddings=8"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(corpus: Path, tmp_path: Path, capsys, word: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text(tiny_recipe(corpus).to_yaml())
    words = ["train", str(tmp_path / "recipe.yaml"), word, "--run", str(tmp_path / "run")]
    said = []
    for more in ([], ["--dry-run"]):
        assert main([*words, *more]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and message in said[0]


def test_a_dry_run_shows_them(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_recipe(corpus, "optim.groups={'*.mlp.*': {lr: 0.25, weight_decay: 0}}")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    words = ["train", str(tmp_path / "recipe.yaml"), "--dry-run"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "group            *.mlp.*: 9,216 parameters, learning rate 0.0025, weight decay 0" in shown
    assert main([*words, "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group == {"pattern": "*.mlp.*", "parameters": 9216, "lr": 0.0025, "weight_decay": 0.0}
    assert main([*words, "optim.groups={nothing: {lr: 2}}"]) == 2
    assert "optim.groups=nothing: matches no trainable parameter" in capsys.readouterr().err
