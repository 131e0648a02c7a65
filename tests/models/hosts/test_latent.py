"""Mixers, lent keys, halted tokens and earlier trips over latents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fathom.models.cost import cache_bytes_per_token, flops_per_token, mechanism_cost
from fathom.models.hosts import latent

from ..test_modeling import lend
from .cases import LATENT, SHAPE, ours_of, stepwise, theirs_of, tokens
from .test_hosted_layer import LOOP, MIXER
from .test_layer_cost import held, model_of

slow = pytest.mark.slow
MECHANISMS: dict[str, dict[str, Any]] = {
    "mixer in a loop": {**MIXER, **LOOP},
    "mixer whose keys are lent": {**MIXER, "recurrence": "loop", "recurrence_options": {"trips": 3, "kv": "first"}},
    "average": {"mixer": "uniform_depth"},
    "first layer": {"mixer": "value_residual"},
    "halting": {"recurrence": "adaponder"},
    "all trips": {"recurrence": "ponder2", "recurrence_options": {"prefill": "exact"}},
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ("mixer whose keys are lent", "halting") else slow) for case in MECHANISMS],
)
@torch.no_grad()
def test_whole_texts_and_single_tokens_agree(case):
    model, ids = ours_of(theirs_of("minicpm3"), **MECHANISMS[case]), tokens()
    whole = model(ids).logits
    assert (stepwise(model, ids) - whole).abs().max() <= 2e-5 * whole.abs().max()
    assert (ours_of(theirs_of("minicpm3"))(ids).logits - whole).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{"blend": 0.0}, {"blend": "learned", "gates": "channel"}])
@torch.no_grad()
def test_a_closed_mixer_is_the_family_to_the_bit(options):
    theirs, ids = theirs_of("deepseek_v3"), tokens()
    ours = ours_of(theirs, mixer="depth_attention", mixer_options={"stride": 1, **options})
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    added = sum(p.numel() for p in ours.parameters()) - sum(p.numel() for p in theirs.parameters())
    assert added == mechanism_cost(ours.config).parameters


class Wrapped(nn.Module):
    """An adapter, whose own matrix is not all that it computes."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.weight = inner, torch.zeros_like(inner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@torch.no_grad()
@pytest.mark.parametrize("offloaded", [False, True])
def test_an_adapter_or_an_offloaded_matrix_is_asked_for_what_it_computes(offloaded):
    model, ids = ours_of(theirs_of("deepseek_v3"), **MIXER), tokens()
    whole = model(ids).logits
    for layer in model.model.layers:
        if offloaded:
            lend(layer.self_attn.kv_b_proj)
        else:
            layer.self_attn.kv_b_proj = Wrapped(layer.self_attn.kv_b_proj)
    assert (model(ids).logits - whole).abs().max() <= 1e-5


@torch.no_grad()
def test_cost_and_cache_are_what_is_declared():
    length, plain = 64, model_of("deepseek_v3")
    mixed = model_of("deepseek_v3", **MIXER)
    counted = []
    for model in (plain, mixed):
        with FlopCounterMode(display=False) as counter:
            model(tokens(1, length), use_cache=False)
        counted.append(counter.get_total_flops())
    again = 2 * LATENT["kv_lora_rank"] * SHAPE["num_attention_heads"] * 16 * SHAPE["num_hidden_layers"]  # one token's
    beyond = flops_per_token(mixed.config, length) - flops_per_token(plain.config, length)
    assert counted[1] - counted[0] - again == beyond * length
    grown = held(mixed, 9) - held(mixed, 8)
    assert grown == held(plain, 9) - held(plain, 8) == cache_bytes_per_token(mixed.config, 4)


@torch.no_grad()
def test_a_key_without_its_rotated_part_is_seen(monkeypatch):
    """The control: scores over content alone are others."""
    model, ids = ours_of(theirs_of("deepseek_v3"), **MIXER), tokens()
    whole, absorbed = model(ids).logits, latent.absorbed
    halves = torch.tensor([1.0] * LATENT["kv_lora_rank"] + [0.0] * LATENT["qk_rope_head_dim"])
    monkeypatch.setattr(latent, "absorbed", lambda *given: absorbed(*given) * halves)
    assert (model(ids).logits - whole).abs().max() > 1e-4
