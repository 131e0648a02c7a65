"""Schedules over training steps: which mechanisms have one, and what a trainer hears that tells no step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.axes.roles import MechanismModule
from fathom.models.registry import MECHANISMS
from fathom.training.callback import FollowSteps

from .cases import SHAPE, tokens

STUCK = "nobody called `set_step`"


def with_mechanism(name: str, **options: object) -> FathomForCausalLM:
    axis = MECHANISMS[name].axis
    torch.manual_seed(0)
    return FathomForCausalLM(FathomConfig(**SHAPE, **{axis: name, f"{axis}_options": options})).train()


def state_of(module: nn.Module) -> dict[str, object]:
    """Its plain attributes and buffers."""
    plain = {key: value for key, value in vars(module).items() if isinstance(value, int | float)}
    return plain | {name: buffer.tolist() for name, buffer in module.named_buffers()}


def follows_steps(model: FathomForCausalLM) -> bool:
    """Whether a mechanism's state differs between steps."""
    seen = []
    for step in (0, 1, 2, 3, 50, 100, 5000):
        model.set_step(step, 5001)
        seen.append([state_of(one) for one in model.modules() if isinstance(one, MechanismModule)])
    return any(one != seen[0] for one in seen)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_says_whether_it_follows_the_steps(name: str) -> None:
    """At its defaults, and with λ rising if it can."""
    for options in ({}, {"blend_steps": 7}):
        if options and "blend" not in (MECHANISMS[name].closed or {}):
            continue
        model = with_mechanism(name, **options)
        said = any(one.scheduled for one in model.modules() if isinstance(one, MechanismModule))
        assert said == follows_steps(model), options


def two_passes(model: FathomForCausalLM) -> list[str]:
    """What two passes of training warn of."""
    ids = tokens(1, 6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
    return [str(one.message) for one in caught if STUCK in str(one.message)]


def test_a_trainer_that_tells_no_step_is_warned_once() -> None:
    (words,) = two_passes(with_mechanism("ponder3"))
    assert "recurrence=ponder3" in words and "stay at step 0" in words and "FollowSteps()" in words


def test_a_mechanism_that_never_opens_fails_at_the_second_training_pass() -> None:
    """Also one in a decoder without a head. What is no training, and what a backward pass repeats, does not count."""
    model, ids = with_mechanism("depth_attention", blend_steps=4), tokens(1, 6)
    model.eval()(ids, labels=ids).loss.backward()
    model.train()
    with torch.no_grad():
        model(ids, labels=ids)
    checkpoint(lambda: model(ids, labels=ids).loss, use_reentrant=False).backward()
    for one in (model, model.model):
        with pytest.raises(RuntimeError, match=r"mixer=depth_attention: nobody called `set_step`.*no effect") as caught:
            one(ids)
        assert "FollowSteps()" in str(caught.value) and "\n" not in str(caught.value)
    model.set_step(1, 4)
    assert not two_passes(model)


def test_nothing_is_said_without_a_reason() -> None:
    """The step is told, nothing is scheduled, or nothing is trained."""
    told = with_mechanism("depth_attention", blend_steps=4)

    class State:
        global_step, max_steps = 3, 4

    FollowSteps().on_step_begin(None, State(), None, model=told)
    assert not two_passes(told)
    assert not two_passes(with_mechanism("depth_attention"))
    assert not two_passes(with_mechanism("depth_attention", blend_steps=4).eval())
