"""Every hosted family in odd shapes: itself to the last bit, and with mechanisms the same whole as decoded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fathom.checkpoints.families.layouts import HOSTS

from .cases import EAGER, SHAPES, ours_of, stepwise, theirs_of, tokens
from .odd_shapes import odd_of
from .test_hosted_layer import LOOP, MIXER, PONDER

PROMPT, SEEDS = 8, range(16)
QUICK = ("gpt_oss", "qwen3_5_text")
"""Sinks and experts, a delta net."""
RESIDUALS = ("hyper_connections", "attention_residuals", "denseformer")


def shapes() -> list[Any]:
    """Sixteen of every family; one of each of two kinds in the fast tests."""
    slow = pytest.mark.slow
    return [
        pytest.param(name, seed, marks=() if name in QUICK and not seed else slow) for name in SHAPES for seed in SEEDS
    ]


FIRST = {"recurrence": "loop", "recurrence_options": {"trips": 2, "kv": "first"}}


def backends(name: str) -> tuple[str, ...]:
    """Those that a family's class has."""
    return ("eager",) if name in EAGER else ("eager", "sdpa")


@torch.no_grad()
def answers(model: PreTrainedModel) -> list[torch.Tensor]:
    """Logits of whole texts, of a padded one, and of tokens that come one by one."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits[:, 4:]
    return [model(ids).logits, padded, stepwise(model, ids, PROMPT)]


@pytest.mark.parametrize(("name", "seed"), shapes())
def test_odd_shape(name, seed):
    changes = odd_of(name, seed)
    for backend in backends(name):
        for dtype in (torch.float32, torch.bfloat16):
            theirs = theirs_of(name, backend, seed, **changes).to(dtype)
            for mine, own in zip(answers(ours_of(theirs)), answers(theirs), strict=True):
                assert torch.equal(mine, own), (changes, backend, dtype)
    theirs = theirs_of(name, seed=seed, **changes)
    residual = {"residual": random.Random(f"{name} {seed}").choice(RESIDUALS)}
    sealed = any(layout.sealed for layout in HOSTS[name].layouts)
    for mechanism in (LOOP, *(() if sealed else (residual, {**LOOP, **residual}))):
        require_decoded(ours_of(theirs, **mechanism), changes)
    plain = ours_of(theirs)
    stateful = len(plain.config.keyed_layers) < plain.config.num_hidden_layers
    if seed and not stateful:
        native, chunked = plain.config.native, "chunked_attention" in plain.config.layer_types
        scaled = native.get("attn_temperature_tuning") and 0 in native["no_rope_layers"]
        for mechanism in (FIRST, *(() if chunked else (PONDER,))):
            if scaled:
                with pytest.raises(ValueError, match="scales queries by the length of the cache"):
                    ours_of(theirs, **mechanism)
            else:
                made = ours_of(theirs, **mechanism)
                require_decoded(made if mechanism is FIRST else steady(made), changes)
    if len(plain.config.keyed_layers) >= 3 and len(heads(plain)) == 1:
        require_mixed(plain, ours_of(theirs, **MIXER), changes)
        require_decoded(ours_of(theirs, **MIXER, **LOOP), changes)
    elif len(plain.config.keyed_layers) >= 3:
        with pytest.raises(ValueError, match="layers differ in number or size of key heads"):
            ours_of(theirs, **MIXER)


def heads(model: PreTrainedModel) -> set[tuple[int, int]]:
    """The width of a head and the queries of a key, by layer."""
    found = [model.model.layers[i]._modules[model.model.layers[i].parts[0]] for i in model.config.keyed_layers]
    return {(getattr(one, "head_dim", 0), getattr(one, "num_key_value_groups", 0)) for one in found}


def steady(model: PreTrainedModel) -> PreTrainedModel:
    """In float64, whose experts run one by one: thoughts that are fed back amplify what float32 rounds."""
    model.set_experts_implementation("eager")
    return model.double()  # type: ignore[return-value]


@torch.no_grad()
def require_decoded(model: PreTrainedModel, changes: Any) -> None:
    """Whole texts and single tokens have the same logits."""
    ids = tokens()
    whole = model(ids).logits
    assert (stepwise(model, ids, PROMPT) - whole).abs().max() <= 1e-4 * (1 + whole.abs().max()), changes


@torch.no_grad()
def require_mixed(plain: PreTrainedModel, mixed: PreTrainedModel, changes: Any) -> None:
    """The control: without an effect all else would agree too."""
    assert (mixed(tokens()).logits - plain(tokens()).logits).abs().max() > 1e-3, changes
