"""Nothing in a training step waits for the device; a halting token costs one question per trip.

By dispatch tracing on a CPU: what would make the host wait is an operator of its own, whatever the device. What the
host reads on purpose goes through `fathom.models.axes.host.to_host`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fathom.data.batches import Batch
from fathom.models.decoder import experts
from fathom.models.trips import slot_table, slots, walk
from fathom.recipe import Optim, Recipe, Train
from fathom.training.build import Training
from fathom.training.guard import Guard
from fathom.training.optimizer import Optimizer
from fathom.training.parallel import Ranks
from tests.models.cases import CASES, build, config_of, in_turn, tokens

from .watch import HostReads

MODULES = (walk, slot_table, slots, experts)


@pytest.fixture
def questions(monkeypatch):
    """Every tensor that `to_host` reads, in order."""
    asked = []
    for module in MODULES:
        monkeypatch.setattr(module, "to_host", lambda x: (asked.append(x), x.tolist())[1])
    return asked


def training_of(case: str, **optim) -> tuple[Training, Batch]:
    """A model about to take a step, and a batch."""
    model, ids = build(config_of(case)), tokens(2, 6)
    recipe = Recipe(train=Train(device="cpu", steps=10), optim=Optim(**optim))
    parts = Optimizer(model, recipe.optim), Guard(10.0, torch.device("cpu"))
    training = Training(recipe, Ranks(), model.config, model, *parts, data=None, plan=None)  # type: ignore[arg-type]
    return training, Batch(ids, ids, None, ids.numel() - 2)


def reads_of_a_step(training: Training, batch: Batch) -> list[str]:
    with HostReads() as reads:
        training.step(3, [batch])
    return reads.seen


@pytest.mark.quick("depth_attention", "loop+depth_attention-grid", "ponder3", "latent_cot@gemma")
@pytest.mark.parametrize("case", in_turn(CASES))
def test_a_training_step_does_not_wait(case, questions):
    """But for sparse layers, which ask how many tokens each expert has."""
    training, batch = training_of(case)
    passes = []
    for module in training.model.modules():
        if isinstance(module, experts.SparseFeedForward):
            module.register_forward_pre_hook(lambda module, args: passes.append(1))
    assert reads_of_a_step(training, batch) == []
    assert len(questions) == len(passes)


def test_muon_does_not_wait():
    training, batch = training_of("vanilla", name="muon")
    assert reads_of_a_step(training, batch) == []


@pytest.mark.parametrize("case", ["vanilla", "loop", "latent_cot"])
def test_packed_documents_wait_once(case):
    """transformers asks whether positions restart anywhere."""
    training, batch = training_of(case)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1)
    (read,) = reads_of_a_step(training, replace(batch, position_ids=positions))
    assert "modeling.py" in read  # `causal_masks`


@pytest.mark.parametrize(
    "planted", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: bool((x > 0).any()), torch.nonzero]
)
def test_a_planted_read_is_seen(planted):
    training, batch = training_of("vanilla")
    training.model.model.norm.register_forward_hook(lambda module, args, out: (planted(out.detach()), None)[1])
    assert len(reads_of_a_step(training, batch)) == 1


@pytest.mark.quick("ponder2", "latent_cot")
@pytest.mark.parametrize("case", ["ponder-all", "ponder2", "ponder3", "adaponder", "latent_cot"])
def test_decoding_asks_once_per_trip(case, questions):
    model, ids = build(config_of(case)), tokens(3, 5)
    trips = model.model.recurrence.trips
    with torch.no_grad(), HostReads() as reads:
        cache = model(ids, use_cache=True).past_key_values
        for step in range(4):
            questions.clear()
            model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
            assert len(questions) <= (trips - 1 if model.model.recurrence.halts else 0)
            assert reads.seen == []


@pytest.mark.parametrize("case", ["adaponder", "latent_cot"])
def test_leaving_out_the_dead_asks_once_per_pass(case, questions):
    training, batch = training_of(case)
    training.model.model.recurrence.skip_dead_rows = True
    passes = []
    training.model.model.norm.register_forward_pre_hook(lambda module, args: passes.append(1))
    assert reads_of_a_step(training, batch) == []
    assert 0 < len(questions) <= len(passes)
