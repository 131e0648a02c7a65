"""Schedules under transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.training.callback import FollowSteps
from tests.models.cases import SHAPE, tokens

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")


def blending() -> FathomConfig:
    return FathomConfig(**SHAPE, mixer="depth_attention", mixer_options={"blend_steps": 4})


def trainer(folder: Path, callbacks: list[FollowSteps], **further: Any) -> Trainer:
    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(8, 6)]
    settings = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, report_to="none", use_cpu=True, **further
    )
    return Trainer(FathomForCausalLM(blending()), settings, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)


def test_the_callback_opens_a_mechanism(tmp_path: Path) -> None:
    """λ is that of the steps made, and a saved model has it."""
    running = trainer(tmp_path, [FollowSteps()])
    running.train()
    running.save_model(str(tmp_path / "saved"))
    saved = FathomConfig.from_pretrained(tmp_path / "saved")
    assert (saved.mixer_options["blend"], saved.mixer_options["blend_steps"]) == (0.75, 0)


def test_the_best_checkpoint_has_its_own_step(tmp_path: Path) -> None:
    """The Trainer loads its weights after the last step, with whose λ they were not saved."""
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    running = trainer(tmp_path, [FollowSteps()], **often, load_best_model_at_end=True)
    running.train()
    assert (running.state.best_global_step, running.state.global_step) == (2, 3)
    assert running.model.settled_config().mixer_options["blend"] == 0.5
    best = FathomConfig.from_pretrained(tmp_path / "checkpoint-2")
    assert best.mixer_options["blend"] == 0.5


def test_a_resumed_training_has_the_step_of_its_checkpoint() -> None:
    """Before its next step, as `eval_on_start` needs it, and if there is none."""
    model, arguments = FathomForCausalLM(blending()), cast("TrainingArguments", None)
    FollowSteps().on_train_begin(arguments, TrainerState(global_step=3, max_steps=3), TrainerControl(), model=model)
    assert model.settled_config().mixer_options["blend"] == 0.75


def test_without_it_training_stops(tmp_path: Path) -> None:
    running = trainer(tmp_path, [])
    with pytest.raises(RuntimeError, match=r"callbacks=\[fathom.training.callback.FollowSteps\(\)\]"):
        running.train()
    assert running.state.global_step == 1


def test_learnt_gates_open_without_it(tmp_path: Path) -> None:
    """No schedule opens them, so no callback is needed; frozen gates, the control, stay shut."""
    torch.manual_seed(0)
    learned = {"blend": "learned", "gates": "head", "stride": 1}
    model = FathomForCausalLM(FathomConfig(**SHAPE, mixer="depth_attention", mixer_options=learned))
    gates = {name: p for name, p in model.named_parameters() if "gates" in name}
    shut = [name for name in gates if name.startswith("model.layers.1.")]
    for name in shut:
        gates[name].requires_grad_(False)
    assert gates and shut and not any(p.any() for p in gates.values())
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(8, 6)]
    settings = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True, learning_rate=0.01
    )
    running = Trainer(model, settings, train_dataset=rows)
    running.train()
    assert {name for name, p in gates.items() if not p.any()} == set(shut)
    running.save_model(str(tmp_path / "saved"))
    saved = FathomForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(saved.get_parameter(name), p) for name, p in gates.items())
