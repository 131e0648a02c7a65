"""One hosted family of each kind against an oracle in NumPy, in float64: plain, with a loop, a residual and a mixer."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from fathom.models.hosts.hosted_layer import OneLayer

from .cases import ours_of, stepwise, theirs_of, tokens
from .oracle import Model, balance

KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text", "lfm2", "granitemoehybrid")
"""Experts, sinks, latents, delta net, convolution, state space."""
PLAIN = {"gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}}
CLOSE = 1e-9


class Wide:
    """torch with float64 where a family asks for float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def wide(monkeypatch):
    """Families compute norms, weights and states in float64."""
    for name in KINDS:
        module = inspect.getmodule(MODEL_MAPPING[CONFIG_MAPPING[name]])
        monkeypatch.setattr(module, "torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def pair_of(name: str, changes: Any = None, **mechanism: Any) -> tuple[Any, Model]:
    """Fathom's model and the oracle of the same weights; `changes` of the family's shape."""
    theirs = theirs_of(name, backend="eager", **PLAIN.get(name, {}), **(changes or {})).double()
    ours = ours_of(theirs, **mechanism)
    for part in ours.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = "eager"
    return ours, Model(
        theirs.config, {key: value.double().numpy(force=True) for key, value in theirs.state_dict().items()}
    )


@torch.no_grad()
def difference(ours: Any, oracle: Model, **settings: Any) -> float:
    """The largest, relative to the largest logit."""
    ids = tokens(1, 10)
    expected = oracle(ids[0].numpy(force=True), **settings)
    return float(
        np.abs(ours(ids, use_cache=False).logits[0].numpy(force=True) - expected).max() / np.abs(expected).max()
    )


SLOW = [name if name == "qwen3_5_text" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]


@pytest.mark.parametrize("name", SLOW)
def test_plain_loop_and_residual(name, wide):
    assert difference(*pair_of(name)) <= CLOSE
    loop = {"recurrence": "loop", "recurrence_options": {"trips": 3}}
    ours, oracle = pair_of(name, **loop, residual="denseformer")
    alphas = []
    for layer in ours.model.layers:
        torch.nn.init.uniform_(layer.mlp_residual.alpha, 0.1, 0.6)
        alphas.append(layer.mlp_residual.alpha.numpy(force=True))
    assert difference(ours, oracle, trips=3, alphas=alphas) <= CLOSE
    assert difference(ours, oracle, trips=2, alphas=alphas) > 1e-3, "the control: another number of trips"


@pytest.mark.parametrize("name", SLOW)
def test_depth_attention_counts_layers_with_keys(name, wide):
    ours, oracle = pair_of(name, mixer="depth_attention", mixer_options={"stride": 2})
    keyed = ours.config.keyed_layers
    assert difference(ours, oracle, grid=keyed[::2]) <= CLOSE
    assert difference(ours, oracle, grid=()) > 1e-3, "mixing moves logits"
    layers = range(ours.config.num_hidden_layers)
    if len(keyed) < len(layers):  # a grid over all layers would choose others
        assert difference(ours, oracle, grid=layers[::2]) > 1e-3


LOOP: dict[str, Any] = {"recurrence": "loop", "recurrence_options": {"trips": 2}}


def test_biases_steer_the_choice_of_experts(wide):
    """The control of what every shape now has: without its bias the oracle chooses others."""
    ours, oracle = pair_of("deepseek_v3")
    assert difference(ours, oracle) <= CLOSE
    steered = [key for key in oracle.all if key.endswith("e_score_correction_bias")]
    oracle.all = {**oracle.all, **{key: np.zeros_like(oracle.all[key]) for key in steered}}
    assert steered and difference(ours, oracle) > 1e-3


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_a_state_that_leaks_between_trips_is_seen(name, wide, monkeypatch):
    ours, oracle = pair_of(name, **LOOP)
    ids, layers = tokens(1, 10), ours.config.num_hidden_layers
    expected = oracle(ids[0].numpy(force=True), trips=2)
    with torch.no_grad():
        assert np.abs(stepwise(ours, ids)[0].numpy(force=True) - expected).max() <= CLOSE * np.abs(expected).max()
        make, keyed = OneLayer.__init__, ours.config.keyed_layers

        def leaking(self: OneLayer, cache: Any, bank: int) -> None:
            make(self, cache, bank if bank % layers in keyed else bank % layers)

        monkeypatch.setattr(OneLayer, "__init__", leaking)
        assert np.abs(stepwise(ours, ids)[0].numpy(force=True) - expected).max() > 1e-3


def test_a_router_loss_pooled_over_trips_is_seen(wide):
    ours, oracle = pair_of("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 1.0}, **LOOP)
    ids = tokens(1, 10)
    oracle(ids[0].numpy(force=True), trips=2)
    got = ours.train()(ids, labels=ids).aux_losses["router"].item()
    trips, top_k = oracle.routed, ours.model.native_config().num_experts_per_tok
    assert got == pytest.approx(np.mean([balance(one, top_k) for one in trips]), rel=1e-9)
    assert abs(got - balance([*trips[0], *trips[1]], top_k)) > 1e-4
