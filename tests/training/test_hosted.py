"""A family's own layers, trained with a loop and hyper-connections: killed, resumed, recomputed, exported, opened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from fathom.checkpoints.runs import find_checkpoint, load_tensors, read_weights
from fathom.models import FathomForCausalLM
from fathom.recipe import Recipe
from fathom.training.loop import train
from tests import processes
from tests.models.hosts.cases import theirs_of
from tests.tiny import tiny_recipe

from .conftest import At

MECHANISMS = ("model.recurrence=loop", "model.recurrence_options={trips: 2}", "model.residual=hyper_connections")
SHAPES = {"qwen3_moe": {"output_router_logits": True}, "qwen3_5_text": {"num_hidden_layers": 4}}


def continued(corpus: Path, base: Path) -> Recipe:
    """Twenty steps on from a family's directory."""
    recipe = tiny_recipe(corpus, "train.steps=20", "evaluate.every=0", "evaluate.tokens=256", "train.export=true")
    often = ("train.checkpoint_every=5", "train.keep_last=9", "train.log_every=1")
    return recipe.override("model=null", f"model.from_pretrained={base}", *MECHANISMS, *often)


def killed_in(recipe: Recipe, run: Path, step: int) -> None:
    """Train, and die in a step."""
    train(recipe, run, callbacks=[At(step, lambda: os.kill(os.getpid(), signal.SIGKILL))])


@pytest.mark.parametrize("way", ["", "lora.rank=2", "train.precision=bf16"])
def test_the_bias_of_experts_is_saved_and_exported(way: str, corpus: Path, tmp_path: Path) -> None:
    """It is a buffer, which no gradient changes, and it chooses the experts of every token."""
    if way.startswith("lora"):
        pytest.importorskip("peft")
    theirs = theirs_of("deepseek_v3", vocab_size=304)
    name, bias = next(one for one in theirs.named_buffers() if one[0].endswith("e_score_correction_bias"))
    theirs.save_pretrained(tmp_path / "base")
    one = ("model=null", f"model.from_pretrained={tmp_path / 'base'}", "train.steps=1", "train.export=true")
    words = (*one, "evaluate.every=0", "evaluate.tokens=32", *way.split())
    run = train(tiny_recipe(corpus, *words), tmp_path / "run")
    tensors = {"model." + name: torch.empty_like(bias)}
    load_tensors(find_checkpoint(run.run_dir).directory, tensors)
    assert torch.equal(tensors["model." + name], bias)
    if not way:
        assert torch.equal(read_weights(find_checkpoint(run.run_dir))[name], bias)
    assert torch.equal(FathomForCausalLM.from_pretrained(run.model).get_buffer(name), bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_killed_resumed_recomputed_and_opened(name: str, corpus: Path, tmp_path: Path) -> None:
    theirs_of(name, vocab_size=304, **SHAPES[name]).save_pretrained(tmp_path / "base")
    wanted = continued(corpus, tmp_path / "base")
    whole = train(wanted, tmp_path / "whole")
    assert processes.run(killed_in, wanted, tmp_path / "killed", 12) == -signal.SIGKILL
    again = train(wanted, tmp_path / "killed")
    recomputed = train(wanted.override("train.activation_checkpointing=true"), tmp_path / "recomputed")
    one, *others = (FathomForCausalLM.from_pretrained(run.model).eval() for run in (whole, again, recomputed))
    base = FathomForCausalLM.from_pretrained(tmp_path / "base")
    for other in others:
        assert all(torch.equal(p, other.get_parameter(key)) for key, p in one.named_parameters())
    moved = [key for key, p in base.named_parameters() if not torch.equal(p, one.get_parameter(key))]
    assert len(moved) == len(list(base.parameters())), "every parameter of the family is trained"
    logged = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert any("router" in key for line in logged for key in line) == (name == "qwen3_moe")
    assert one.config.recurrence == "loop" and one.config.residual == "hyper_connections"
