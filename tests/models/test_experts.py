"""The sparse feed-forward against numpy; its cost as a counter counts it; a dropped token and a blind loss are seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fathom.checkpoints.export import export
from fathom.errors import ModelError
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.cost import active_parameters, count_parameters, training_flops_per_token
from fathom.models.decoder.experts import SparseFeedForward
from fathom.models.decoder.feed_forward import FeedForward

from .cases import SHAPE, build, config_of, tokens
from .oracle import agree, oracle_of, truth

LOOP = {"recurrence": "loop", "recurrence_options": {"trips": 2, "prelude": 1, "coda": 1}}


def sparse(**keys) -> FathomConfig:
    """A small configuration with experts."""
    return FathomConfig(**{**SHAPE, "experts": 5, "experts_per_token": 2, "router_aux_loss_coef": 0.0, **keys})


@pytest.mark.parametrize(
    "keys", [{}, {**LOOP, "experts_per_token": 3, "mlp_bias": True}, {"gated_mlp": False, "experts_per_token": 1}]
)
def test_logits_and_slopes_are_the_oracles(keys):
    agree(build(sparse(**keys), dtype=torch.float64), tokens(2, 7))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["hyper_connections", "ponder", "adaponder", "latent_cot", "depth_attention"])
def test_the_oracle_agrees_with_every_kind_of_mechanism(mechanism):
    model = build(config_of(f"{mechanism}@experts"), dtype=torch.float64)
    agree(model, tokens(2, 7))


def test_a_dropped_token_is_seen(monkeypatch):
    """An expert that takes no more than its even share, as a capacity would have it."""
    model, ids = build(sparse(), dtype=torch.float64), tokens(2, 9)
    expected, whole = truth(oracle_of(model), ids), FeedForward.forward

    def capped(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        made, most = whole(self, x), -(-2 * 18 // 5)
        return torch.cat([made[:most], torch.zeros_like(made[most:])])

    assert (model(ids).logits - expected).abs().max() < 1e-9
    monkeypatch.setattr(FeedForward, "forward", capped)
    assert (model(ids).logits - expected).abs().max() > 1e-3


def test_all_tokens_may_go_to_the_same_experts():
    """And the others get gradients of zero, not none."""
    mlp, x = SparseFeedForward(sparse()).double(), torch.randn(2, 9, 32, dtype=torch.float64).abs()
    nn.init.zeros_(mlp.router.weight)
    with torch.no_grad():
        mlp.router.weight[3:] = 1.0
        expected = (mlp.experts[3](x) + mlp.experts[4](x)) / 2
    made = mlp(x)
    assert (made - expected).abs().max() < 1e-12
    made.sum().backward()
    seen = [bool(expert.up_proj.weight.grad.abs().sum() > 0) for expert in mlp.experts]
    assert seen == [False, False, False, True, True]
    one = mlp(x[:1, :1])
    assert one.shape == (1, 1, 32) and (one - expected[:1, :1]).abs().max() < 1e-12


@pytest.mark.parametrize("keys", [{}, {**LOOP, "experts": 12}, {"mlp_bias": True, "gated_mlp": False}])
def test_the_cost_is_that_of_the_active_parameters(keys):
    config = sparse(hidden_size=64, intermediate_size=192, router_aux_loss_coef=0.01, **keys)
    dense = FathomConfig.from_dict({**config.to_dict(), "experts": 0})
    routers = config.num_hidden_layers * config.experts * config.hidden_size
    biases = config.num_hidden_layers * config.hidden_size * (config.experts_per_token - 1) * config.mlp_bias
    assert active_parameters(config) == count_parameters(dense) + routers + biases
    model, ids = build(config).train(), tokens(2, 64)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    # eager attention makes every score of 64 tokens: as many for each as the causal ones of 127
    declared = training_flops_per_token(config, 127) * ids.numel()
    assert counter.get_total_flops() == pytest.approx(declared, rel=0.02)
    assert declared != pytest.approx(training_flops_per_token(dense, 127) * ids.numel(), rel=1e-4)


def test_the_loss_is_the_hosted_families():
    """Of even logits it is k; it comes once a trip, in training alone."""
    model = build(sparse(router_aux_loss_coef=0.5, **LOOP))
    for layer in model.model.layers:
        nn.init.zeros_(layer.mlp.router.weight)
    ids = tokens(2, 8)
    assert model.eval()(ids, labels=ids).aux_losses is None
    made = model.train()(ids, labels=ids)
    assert made.aux_losses["router"].item() == pytest.approx(0.5 * 2)
    assert build(sparse()).model.balance is None
    with pytest.raises(ValueError, match="output_router_logits is read when a model opens"):
        model(ids, output_router_logits=False)


def test_impossible_experts_are_refused():
    for keys, said in (
        ({"experts": 1}, "experts_per_token must be between 1 and experts"),
        ({"experts": 8, "experts_per_token": 5}, "must be a multiple of experts_per_token"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef must be"),
    ):
        with pytest.raises(ValueError, match=said):
            FathomConfig(**{**SHAPE, **keys})


def test_a_family_without_experts_is_no_form_of_them(tmp_path):
    model = FathomForCausalLM(sparse())
    with pytest.raises(ModelError, match="no model family of transformers has its switches"):
        export(model, tmp_path / "native", form="native")
    assert export(model, tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("experts", "eight"),
        ("experts", 2.5),
        ("experts", True),
        ("experts_per_token", "x"),
        ("router_aux_loss_coef", "x"),
    ],
)
def test_what_is_no_number_of_experts_is_one_line(key, value):
    with pytest.raises(ValueError, match=f"{key}"):
        FathomConfig(**{"experts": 4, key: value})


def test_a_mask_of_who_reads_whom_leaves_no_token_out():
    """Experts are balanced over all tokens then, since such a mask does not say which are padding."""
    model, ids = build(config_of("vanilla@experts", router_aux_loss_coef=0.01)).train(), tokens(2, 7)
    causal = torch.ones(7, 7).tril().bool().expand(2, 1, 7, 7)
    wanted, found = model(ids, labels=ids), model(ids, attention_mask=causal, labels=ids)
    assert found.aux_losses["router"] > 0 and found.loss.item() == pytest.approx(wanted.loss.item(), abs=1e-5)
