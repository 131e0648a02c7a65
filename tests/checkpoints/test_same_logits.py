"""Fathom opens each family as its own class does, and `check` sees it where that is not so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fathom import FathomError, FathomForCausalLM, check
from fathom.checkpoints.families import FAMILIES
from fathom.checkpoints.shrink import shrink
from fathom.checkpoints.twin import VIEWS, cached, difference, make_batch, padded, whole, write_twin
from tests.models.hosts.cases import SHAPE, SHAPES, UNKNOWN

from .families.cases import CASES, stock_config
from .published import PUBLISHED

SCALED = {**CASES["phi3"][1], "max_position_embeddings": 64, "original_max_position_embeddings": 16}
REFUSED = {"opt-350m": "word_embed_proj_dim"}
CROSSED = {"Llama-3.2-1B-Instruct": 1, "Mistral-7B-v0.1": 1, "Phi-3.5-mini": 2, "Phi-4-mini": 2}
CROSSED |= {"gemma-2-2b": 1, "gemma-3-1b-it": 1}
"""How many of a sliding window and an original context of RoPE a text crosses."""
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 9.0, 16.0]}


def config_of(case: str) -> dict[str, Any]:
    """The `config.json` of a family's case."""
    config = stock_config(case)
    return {**config.to_diff_dict(), "model_type": config.model_type}


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("case", CASES)
def test_every_family_agrees(case: str, tmp_path: Path) -> None:
    found = check(write(tmp_path, config_of(case)))
    assert found.agrees, [one for one in found.comparisons if not one.agrees]
    assert {one.way for one in found.comparisons} >= set(VIEWS)
    if FAMILIES[found.model_type].rounding is None:
        assert all(one.difference == 0 for one in found.comparisons)
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_every_hosted_family_agrees(kind: str, tmp_path: Path) -> None:
    found = check(write(tmp_path, {**SHAPE, **SHAPES[kind], "model_type": kind}), ignore_keys=UNKNOWN.get(kind, ()))
    wrong = [one for one in found.comparisons if one.difference > 0]
    if kind == "youtu":  # its class sets the stored row of the padding token to zero, and so that token's logit
        assert len(wrong) == len(found.comparisons)
    else:
        assert found.agrees and not wrong, wrong


@pytest.mark.slow
def test_a_context_that_rope_was_scaled_from(tmp_path: Path) -> None:
    found = check(write(tmp_path, {**config_of("phi3"), **SCALED, "rope_scaling": LONGROPE}))
    assert found.agrees and "RoPE's original context" in found.crossed[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_agree(name: str, tmp_path: Path) -> None:
    write(tmp_path, PUBLISHED[name])
    if name in REFUSED:
        with pytest.raises(FathomError, match=REFUSED[name]):
            check(tmp_path)
        return
    found = check(tmp_path)
    assert found.agrees, [one for one in found.comparisons if not one.agrees]
    assert len(found.crossed) == CROSSED.get(name, 0)


def hooked(model: PreTrainedModel, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the keyword arguments of every forward pass."""
    model.register_forward_pre_hook(lambda _, words, given: (words, {**given, **change(given)}), with_kwargs=True)


def no_gain(model: Any) -> None:
    model.model.layers[1].input_layernorm.weight.fill_(1)


def no_bias(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.bias.zero_()


def no_mask(model: Any) -> None:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        mask = given["attention_mask"]
        return {"attention_mask": torch.ones_like(mask), "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    hooked(model, change)


def counted_padding(model: Any) -> None:
    hooked(model, lambda given: {"position_ids": torch.arange(given["attention_mask"].shape[1])[None]})


@dataclass(frozen=True)
class Plant:
    """A fault of Fathom's, and the view that must see it."""

    case: str
    view: Any
    keys: dict[str, Any] | None = None
    """Keys of the configuration with another value."""
    fault: Callable[[Any], None] | None = None


HALF = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}
PLANTS = {
    "window off": Plant("mistral-window", whole, {"sliding_window": 60}),
    "window one longer": Plant("mistral-window", whole, {"sliding_window": 6}),
    "window one longer, cached": Plant("mistral-window", cached, {"sliding_window": 6}),
    "mask dropped": Plant("llama-gqa", padded, fault=no_mask),
    "rotary factor halved": Plant("gpt_neox", whole, {"rope_parameters": HALF}),
    "another base": Plant("llama-gqa", whole, {"rope_parameters": {"rope_theta": 9999.0, "rope_type": "default"}}),
    "padding counted": Plant("llama-gqa", padded, fault=counted_padding),
    "padding counted in a table": Plant("gpt2", padded, fault=counted_padding),
    "gain ignored": Plant("llama-gqa", whole, fault=no_gain),
    "bias ignored": Plant("qwen2", whole, fault=no_bias),
    "epsilon": Plant("olmo2", whole, {"rms_norm_eps": 1.1e-5}),
    "activation": Plant("gemma", whole, {"hidden_act": "gelu"}),
    "cap": Plant("gemma2", whole, {"attn_logit_softcapping": 2.1}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's case, written once."""
    made: dict[str, Path] = {}

    def directory(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            write_twin(shrink(config_of(case)).config, made[case])
        return made[case]

    return directory


@pytest.mark.quick("window o*", "mask dropped", "rotary factor halved", "padding counted", "gain ignored")
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_seen(plant: str, place: Callable[[str], Path]) -> None:
    one = PLANTS[plant]
    directory, batch = place(one.case), make_batch(20, 97)
    settings = {"attn_implementation": "eager", "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(directory, **settings).eval()
    ours = FathomForCausalLM.from_pretrained(directory, **settings).eval()
    rounding = FAMILIES[theirs.config.model_type].rounding
    allowed = 0.0 if rounding is None else rounding.float32
    assert difference(one.view, theirs, ours, batch) <= allowed
    if one.keys:
        ours = FathomForCausalLM.from_pretrained(directory, **settings, **one.keys).eval()
    if one.fault:
        with torch.no_grad():
            one.fault(ours)
    assert difference(one.view, theirs, ours, batch) > allowed


def test_logits_that_are_not_finite_differ(place: Callable[[str], Path]) -> None:
    model = FathomForCausalLM.from_pretrained(place("llama-gqa")).eval()
    assert difference(whole, model, model, make_batch(6, 97)) == 0
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    assert difference(whole, model, model, make_batch(6, 97)) == torch.inf
