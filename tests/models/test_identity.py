"""A finite self_bias makes a model start as itself only for small gains of the query and key norms; opening says so."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fathom.models import FathomForCausalLM
from fathom.models.identity import largest_lead
from tests.models.cases import build, config_of, tokens


def retrofitted(folder: Path, gain: float, bias: float) -> tuple[FathomForCausalLM, float]:
    """A retrofitted model whose query and key gains are `gain`, and the largest change of a logit."""
    model = build(config_of("vanilla", head_dim=64, initializer_range=0.2)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(gain)
            layer.self_attn.k_norm.weight.fill_(gain)
    model.save_pretrained(folder)
    options = {"stride": 1, "self_bias": bias}
    other = FathomForCausalLM.from_pretrained(folder, mixer="depth_attention", mixer_options=options).eval()
    ids = tokens(1, 24)
    with torch.no_grad():
        return other, float((other(ids).logits - model(ids).logits).abs().max())


def test_small_gains_start_as_themselves_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, moved = retrofitted(tmp_path, 1.0, 30.0)
    assert moved < 1e-4 and 0 < largest_lead(model) < 15


def test_large_gains_are_warned_of_and_the_bias_that_is_named_is_enough(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"self_bias=30 does not dominate: .* self_bias=\d+ would do$") as caught:
        model, moved = retrofitted(tmp_path, 4.0, 30.0)
    assert moved > 0.01 and largest_lead(model) > 30 and "\n" not in str(caught[0].message)
    enough = float(str(caught[0].message).rpartition("self_bias=")[2].split()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert retrofitted(tmp_path, 4.0, enough)[1] < 1e-3


def test_a_model_of_its_own_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathom.models.identity.largest_lead", None)
    build(config_of("depth_attention", head_dim=64)).save_pretrained(tmp_path)
    FathomForCausalLM.from_pretrained(tmp_path)
