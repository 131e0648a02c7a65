"""Which parameters of hosted layers decay, and which optimizer takes them."""

from __future__ import annotations

import pytest

from fathom.errors import SettingsError
from fathom.recipe import Optim
from fathom.training.adapters import require_adaptable
from fathom.training.optimizer import Optimizer, decays

from .cases import ours_of, theirs_of


def last(name: str) -> str:
    """The last part of a parameter's name."""
    return name.rpartition(".")[2]


@pytest.mark.parametrize(
    ("name", "decaying", "spared"),
    [
        ("gpt_oss", {"gate_up_proj", "down_proj"}, {"gate_up_proj_bias", "down_proj_bias", "sinks", "bias"}),
        ("qwen3_5_text", set(), {"A_log", "dt_bias"}),
        ("granitemoehybrid", set(), {"A_log", "D", "dt_bias"}),
        ("jamba", {"gate_up_proj", "down_proj"}, {"A_log", "D"}),
    ],
)
def test_groups(name, decaying, spared):
    """Jamba's `A_log` and the biases of gpt-oss's experts have two dimensions, as matrices have."""
    model = ours_of(theirs_of(name))
    answer = decays(model)
    assert {last(key) for key in answer} >= decaying | spared
    for key, decay in answer.items():
        if last(key) in spared:
            assert not decay, key
        elif last(key) in decaying or ("conv" in key and last(key) == "weight") or "q_proj.weight" in key:
            assert decay, key
    _, muon = Optimizer(model, Optim(name="muon")).parts
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    named = {last(key) for key, p in model.named_parameters() if id(p) in taken}
    stacked = {last(key) for key, p in model.named_parameters() if p.ndim == 3}
    assert "weight" in named and not named & spared and not (stacked - {"weight"}) & named


@pytest.mark.parametrize("target", ["experts", "gate"])
def test_adapters_do_not_reach_stacked_experts(target):
    model = ours_of(theirs_of("qwen3_moe"))
    require_adaptable(model, ["q_proj", "o_proj"])
    with pytest.raises(SettingsError, match=rf"model.layers.0.mlp.{target} is no linear layer"):
        require_adaptable(model, ["q_proj", target])
