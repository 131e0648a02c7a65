"""Distillation: loss and gradients against numpy in float64, and runs that heal, resume and share their work."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from fathom.checkpoints.export import export
from fathom.deepen.request import parse_request
from fathom.deepen.write import deepen
from fathom.errors import SettingsError
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.recipe import Recipe
from fathom.training import build_training, train
from fathom.training.distill import forward_kl
from tests import processes
from tests.tiny import tiny_recipe

from .conftest import At, StopAt


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def oracle(z: np.ndarray, theirs: np.ndarray, counted: np.ndarray, tau: float) -> tuple[float, np.ndarray]:
    """τ² Σ KL(p_T ‖ p), and its gradient by z, one row at a time."""
    total, grad = 0.0, np.zeros_like(z)
    for place in np.argwhere(counted):
        at = tuple(place)
        goal, own = log_softmax(theirs[at] / tau), log_softmax(z[at] / tau)
        total += tau**2 * float((np.exp(goal) * (goal - own)).sum())
        grad[at] = tau * (np.exp(own) - np.exp(goal))
    return total, grad


@pytest.mark.parametrize("tau", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("dtype,close", [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_the_divergence_and_its_gradient(tau, dtype, close, monkeypatch):
    monkeypatch.setattr("fathom.training.distill.chunk_rows", lambda *_: 3)  # several chunks, the last one short
    draw = np.random.default_rng(0)
    z, theirs = (torch.tensor(draw.normal(0, 3, (2, 7, 19))).to(dtype) for _ in range(2))
    targets = torch.tensor(draw.integers(0, 19, (2, 7)))
    targets[0, 3] = targets[1, -1] = -100
    z.requires_grad_()
    found = forward_kl(z, theirs, targets, tau)
    (found * 2.5).backward()
    numbers = [t.detach().double().numpy() for t in (z, theirs)]
    total, grad = oracle(*numbers, (targets != -100).numpy(), tau)
    assert found.item() == pytest.approx(total, rel=close)
    assert np.abs(z.grad.double().numpy() - 2.5 * grad).max() < 2.5 * close
    backward, _ = oracle(*reversed(numbers), (targets != -100).numpy(), tau)
    assert abs(total - backward) > 0.02 * total, "the other direction is another number"


def test_the_loss_of_a_step_is_the_formula(recipe: Recipe, tmp_path: Path) -> None:
    """(1 - w) CE + w KL and the gradients of every weight, beside torch's own functions."""
    base = train(recipe.override("train.export=true", "train.steps=2"), tmp_path / "base").model
    words = [f"distill.teacher={base}", "distill.weight=0.25", "distill.temperature=2.0", "optim.clip=null"]
    training = build_training(recipe.override(*words, "train.micro_batch=2"))
    assert training.teacher is not None and not any(p.requires_grad for p in training.teacher.parameters())
    batches = training.plan.batch(0, 0, 1, training.micro_batch)
    assert len(batches) > 1, "the divergence of micro-batches adds up"
    seen: dict[str, torch.Tensor] = {}
    training.optimizer.step = lambda *_: seen.update(  # type: ignore[method-assign]
        {name: p.grad.clone() for name, p in training.model.named_parameters()}
    )
    metrics = training.step(0, batches)

    model, total, parts = training.model, torch.zeros(()), []
    model.zero_grad()
    for batch in batches:
        logits, theirs = (m(batch.input_ids, position_ids=batch.position_ids).logits for m in (model, training.teacher))
        own, goal, targets = logits[:, :-1], theirs[:, :-1].detach(), batch.labels[:, 1:]
        cross = torch.nn.functional.cross_entropy(own.flatten(0, 1), targets.flatten(), reduction="sum")
        rows = (targets != -100).flatten()
        divergence = torch.nn.functional.kl_div(
            (own / 2).log_softmax(-1).flatten(0, 1)[rows],
            (goal / 2).log_softmax(-1).flatten(0, 1)[rows],
            reduction="sum",
            log_target=True,
        )
        total = total + (0.75 * cross + 0.25 * 4 * divergence) / batch.num_targets
        parts.append(4 * float(divergence) / batch.num_targets)
    total.backward()
    assert metrics.loss.item() == pytest.approx(float(total), rel=1e-5)
    assert metrics.extra["distill"].item() == pytest.approx(sum(parts), rel=1e-4)
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.allclose(seen[name], p.grad, atol=1e-6), name


def test_a_teacher_with_another_vocabulary_or_a_shorter_context(recipe: Recipe, tmp_path: Path) -> None:
    config = recipe.config().to_dict()
    for key, value, message in (
        ("vocab_size", 999, "the teacher has vocab_size=999"),
        ("max_position_embeddings", 8, r"data\.sequence_length=\d+: allowed: at most 8"),
    ):
        export(FathomForCausalLM(FathomConfig(**{**config, key: value})), tmp_path / key)
        with pytest.raises(SettingsError, match=message):
            build_training(recipe.override(f"distill.teacher={tmp_path / key}"))


def test_a_run_goes_on_with_its_own_teacher(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder the name that was typed is another model's."""
    for place, seed in (("here", 0), ("there", 1)):
        torch.manual_seed(seed)
        export(FathomForCausalLM(recipe.config()), tmp_path / place / "teacher")
    wanted = recipe.override(
        "distill.teacher=teacher", "train.steps=4", "train.log_every=1", "train.checkpoint_every=1"
    )
    monkeypatch.chdir(tmp_path / "here")
    run = tmp_path / "run"
    train(wanted, run, callbacks=[StopAt(2)])
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(SettingsError, match="differs from the teacher with which this run began"):
        train(wanted, run)
    monkeypatch.chdir(tmp_path / "here")
    assert train(wanted, shutil.copytree(run, tmp_path / "again")).finished
    settings = json.loads((tmp_path / "here" / "teacher" / "config.json").read_text())
    (tmp_path / "here" / "teacher" / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.1}))
    with pytest.raises(SettingsError, match="differs from the teacher with which this run began"):
        train(wanted, run)


# --- healing ----------------------------------------------------------------------------------------------------------


def healing(recipe: Recipe, folder: Path, *words: str) -> Recipe:
    """A loop and Depth-Attention added to a model that was trained a little, opened beside it as the teacher."""
    base = folder / "base"
    if not base.exists():
        train(recipe.override("model.mixer=none", "train.export=true", "train.steps=4"), base)
        deepen(base, parse_request("loop:trips=2+depth_attention:stride=1"), folder / "deeper")
    opening = "{blend: 1.0, blend_steps: 6}"
    return recipe.override(
        *("model=null", f"model.from_pretrained={folder / 'deeper'}", f"distill.teacher={base}", "train.steps=8"),
        *(f"model.mixer_options={opening}", f"model.recurrence_options={opening}", "train.export=true"),
        *("train.checkpoint_every=2", "train.keep_last=9", *words),
    )


def killed_in(recipe: Recipe, run: Path, step: int) -> None:
    """Train, and die in a step."""
    train(recipe.override("train.log_every=1"), run, callbacks=[At(step, lambda: os.kill(os.getpid(), signal.SIGKILL))])


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["null", "2"])
def test_killed_while_healing_and_resumed(recipe: Recipe, tmp_path: Path, lora: str) -> None:
    """λ stands where it was: the same weights, to the last bit."""
    if lora != "null":
        pytest.importorskip("peft")
    wanted = healing(recipe, tmp_path, f"lora.rank={lora}", "train.log_every=1")
    whole = train(wanted, tmp_path / "whole")
    assert processes.run(killed_in, wanted, tmp_path / "killed", 5) == -signal.SIGKILL
    again = train(wanted, tmp_path / "killed")
    assert again.step == 8
    one, other = (FathomForCausalLM.from_pretrained(run.model) for run in (whole, again))
    assert all(torch.equal(p, other.get_parameter(name)) for name, p in one.named_parameters())
    for model in (one, other):
        assert model.config.mixer_options["blend"] == model.config.recurrence_options["blend"] == 1.0
        assert model.config.mixer_options["blend_steps"] == 0


def test_mechanisms_train_in_full_beside_adapters(recipe: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = train(recipe.override("train.export=true", "train.steps=2"), tmp_path / "base").model
    deepen(base, parse_request("denseformer"), tmp_path / "deeper")
    words = [f"model.from_pretrained={tmp_path / 'deeper'}", "lora.rank=2", "train.steps=3", "train.export=true"]
    for mechanisms in ("true", "false"):
        run = train(recipe.override(*words, f"lora.mechanisms={mechanisms}", "optim.lr=0.02"), tmp_path / mechanisms)
        alphas = {n: p for n, p in FathomForCausalLM.from_pretrained(run.model).named_parameters() if "alpha" in n}
        one_hot = [torch.equal(p, torch.eye(len(p))[-1]) for p in alphas.values()]
        assert one_hot and all(one_hot) == (mechanisms == "false")


def first_losses(corpus: Path, folder: Path, name: str) -> None:
    """The losses of four steps of healing."""
    training = build_training(healing(tiny_recipe(corpus), folder))
    found = [training.step(step).loss.item() for step in range(4)]
    if training.ranks.first:
        (folder / f"{name}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_two_ranks_heal_as_one(corpus: Path, tmp_path: Path) -> None:
    """The teacher is sharded with the model."""
    healing(tiny_recipe(corpus), tmp_path)
    assert processes.run(first_losses, corpus, tmp_path, "one") == 0
    processes.run_ranks(2, first_losses, corpus, tmp_path, "two")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_a_damaged_model_gets_back_what_it_lost(recipe: Recipe, tmp_path: Path) -> None:
    """One of its layers writes nothing: training beside the whole model returns at least half of the lost nats. Only
    from the teacher, of whose text no label is read."""
    recipe = recipe.override("train.checkpoint_every=60", "evaluate.every=0")
    base = train(recipe.override("train.export=true", "train.steps=60", "optim.lr=0.01"), tmp_path / "base").model
    assert base is not None
    damaged = FathomForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for last in (damaged.model.layers[0].self_attn.o_proj, damaged.model.layers[0].mlp.down_proj):
            last.weight.zero_()
    export(damaged, tmp_path / "damaged")

    def lost(*words: str) -> float:
        return float(train(recipe.override(*words), tmp_path / f"run{len(list(tmp_path.iterdir()))}").evaluation.loss)

    of = [f"model.from_pretrained={tmp_path / 'damaged'}", "optim.warmup=0.1"]
    whole = lost(f"model.from_pretrained={base}", "train.steps=1", "optim.lr=1e-12")
    broken = lost(*of, "train.steps=1", "optim.lr=1e-12")
    healed = lost(*of, "train.steps=60", "optim.lr=0.01", f"distill.teacher={base}", "distill.weight=1.0")
    assert broken - whole > 0.1, "the damage must be seen"
    assert healed - whole < 0.5 * (broken - whole)
