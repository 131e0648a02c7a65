"""Mixers over a family's layers that rotate queries and keys differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fathom import FathomForCausalLM
from fathom.checkpoints.families.layouts import HOSTS, SANDWICH, Host, gemma
from fathom.models.hosts import turning
from fathom.models.hosts.layout import Layout

from .cases import SHAPES, ours_of, stepwise, theirs_of, tokens

MIXER: dict[str, Any] = {"mixer": "depth_attention", "mixer_options": {"stride": 1}}
BOTH: dict[str, Any] = {"mixer": "depth_attention", "mixer_options": {"stride": 1, "mixes": "both"}}
LOOP: dict[str, Any] = {"recurrence": "loop", "recurrence_options": {"trips": 2}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
BY_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": YARN}
TURNING: dict[str, dict[str, Any]] = {
    "exaone4": {},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0]},
    "olmo3": {"rope_parameters": BY_TYPE},
}
"""Some layers are not rotated; angles as complex numbers; angles by type, with a scale."""
GEMMA: dict[str, Any] = {"sliding_window": 5, "head_dim": 8, "rope_parameters": BY_TYPE}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
NATIVE: dict[str, tuple[Host, dict[str, Any]]] = {
    "smollm3": (Host((Layout(),)), {"no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0}),
    "gemma3_text": (Host((Layout(**SANDWICH),), gemma), GEMMA),
}
"""Families of Fathom's own decoder, as hosts."""


@torch.no_grad()
def moved(model: PreTrainedModel) -> float:
    """By how much logits change if all positions do."""
    ids = tokens()
    there = model(ids, position_ids=torch.arange(ids.shape[1]).unsqueeze(0) + 50).logits
    return (there - model(ids).logits).abs().max().item()


@pytest.mark.parametrize("mechanism", [BOTH, pytest.param({**MIXER, **LOOP}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TURNING)
def test_whole_texts_are_as_decoded_padded_and_moved(name, mechanism, monkeypatch):
    """The control: scores of rotated keys depend on the position."""
    theirs, ids = theirs_of(name, **TURNING[name]), tokens()
    model, mask = ours_of(theirs, **mechanism), torch.ones_like(ids)
    assert model.model.mixes_unrotated
    mask[0, :4] = 0
    with torch.no_grad():
        whole, alone = model(ids).logits, model(ids[:1, 4:]).logits
        padded = model(ids, attention_mask=mask).logits
    assert (stepwise(model, ids) - whole).abs().max() <= 2e-5
    assert (padded[:1, 4:] - alone).abs().max() <= 2e-5
    assert moved(model) <= 2e-5
    monkeypatch.setattr(turning, "back", lambda angles: (torch.ones_like(angles[0]), torch.zeros_like(angles[1])))
    assert name == "llama4_text" or moved(model) > 1e-3


def test_asking_the_layers_draws_nothing_and_needs_no_numbers():
    """With dropout; and on the meta device, where a rotary embedding cannot compare the length of a text."""
    changes = {"attention_dropout": 0.3, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    theirs = theirs_of("exaone4", **changes)
    model = ours_of(theirs, **MIXER)
    drawn = torch.random.get_rng_state()
    ours_of(theirs)
    assert torch.equal(drawn, torch.random.get_rng_state()) and model.training is False
    with torch.device("meta"):
        assert FathomForCausalLM(model.config).model.mixes_unrotated


@pytest.mark.slow
@pytest.mark.parametrize("name", TURNING)
def test_a_mixer_that_is_closed_leaves_the_familys_bits(name):
    theirs, ids = theirs_of(name, **TURNING[name]), tokens()
    closed = {"mixer": "depth_attention", "mixer_options": {"stride": 1, "blend": 0.0}}
    with torch.no_grad():
        assert torch.equal(ours_of(theirs, **closed)(ids).logits, theirs(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [MIXER, BOTH, {**MIXER, **LOOP}])
@pytest.mark.parametrize("name", NATIVE)
def test_a_host_is_as_the_native_decoder(name, mechanism, monkeypatch, tmp_path):
    """Logits and gradients of the same weights."""
    host, changes = NATIVE[name]
    monkeypatch.setitem(HOSTS, name, host)
    monkeypatch.setitem(SHAPES, name, changes)
    theirs, ids = theirs_of(name), tokens()
    theirs.save_pretrained(tmp_path)
    native = FathomForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **mechanism).eval()
    hosted = ours_of(theirs, **mechanism)
    assert hosted.model.mixes_unrotated and native.model.mixes_unrotated and not native.config.host
    found = []
    for model in (native, hosted):
        logits = model(ids).logits
        logits.logsumexp(-1).sum().backward()
        found.append((logits.detach(), model.model.layers[1].self_attn.k_proj.weight.grad))
    for ours, own in zip(*found, strict=True):
        assert (ours - own).abs().max() <= 1e-5 * (1 + own.abs().max())
