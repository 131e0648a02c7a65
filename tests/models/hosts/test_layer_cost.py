"""The cost of hosted layers: what torch counts, and what a cache holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fathom import FathomForCausalLM
from fathom.models.cost import (
    active_parameters,
    cache_bytes_per_token,
    count_parameters,
    flops_per_token,
    mechanism_cost,
    training_flops_per_token,
)
from fathom.models.decoder.arithmetic import keys_read
from fathom.models.hosts.layer_cost import layer_costs
from tests.models.test_cost import UNCOUNTED

from .cases import ours_of, theirs_of, tokens
from .test_hosted_layer import KINDS, LOOP

STATES = {"qwen3_5_text": 1.6, "granitemoehybrid": 1.35}
"""How far chunks of a text may exceed the recurrent form that is declared; 64 tokens are one chunk of a delta net."""


def model_of(name: str, **mechanism: Any) -> FathomForCausalLM:
    """On backends whose products torch counts."""
    model = ours_of(theirs_of(name, backend="eager"), **mechanism)
    for part in model.model.layers.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = "eager"
    return model


@pytest.mark.quick(
    "once-gpt_oss", "once-lfm2", "once-granitemoehybrid", "loop-qwen3_moe", "loop-deepseek_v3", "loop-qwen3_5_text"
)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mechanism", [{}, LOOP], ids=["once", "loop"])
def test_flops_are_what_torch_counts(name, mechanism):
    model, length = model_of(name, **mechanism), 64
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(1, length), use_cache=False)
    config = model.config
    config.sliding_window = None  # eager makes every score
    declared = flops_per_token(config, 2 * length - 1)
    counted = counter.get_total_flops() / length
    if name in STATES:
        assert declared <= counted <= STATES[name] * declared
    else:
        assert counted == pytest.approx(declared, rel=1e-3)


@pytest.mark.parametrize("mechanism", [{}, {"recurrence": "ponder", "recurrence_options": {"trips": 2, "top_k": 50}}])
def test_logits_with_a_bias_are_made_again_in_training(mechanism):
    """By the loss, and by a mixture of the likeliest words, which otherwise gathers their rows."""
    model, length = ours_of(theirs_of("phi", backend="eager", vocab_size=1500), **mechanism).train(), 16
    ids = tokens(2, length)
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        model(ids, labels=ids).loss.backward()
    counted = counter.get_total_flops() / ids.numel()
    assert counted == pytest.approx(training_flops_per_token(model.config, 2 * length - 1), rel=1e-3)


def held(model: FathomForCausalLM, length: int) -> int:
    """Bytes of keys, values and latents after a text."""
    cache = model(tokens(1, length), use_cache=True).past_key_values
    stored = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in stored if tensor is not None)


@pytest.mark.quick("once-qwen3_5_text", "once-lfm2", "loop-granitemoehybrid", "loop-deepseek_v3")
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("gpt_oss", "olmo3")])
@pytest.mark.parametrize("mechanism", [{}, LOOP], ids=["once", "loop"])
def test_a_cache_grows_by_what_is_declared(name, mechanism):
    """States do not grow; windows, which stop to, are tried with Fathom's own layers."""
    model = ours_of(theirs_of(name), **mechanism)
    with torch.no_grad():
        assert held(model, 9) - held(model, 8) == cache_bytes_per_token(model.config, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "lfm2", "arcee"])
def test_what_training_keeps_is_near_what_is_declared(name):
    """Counted by every tensor that autograd saves; `arcee` has no gate, of which as much is counted."""
    model, length = ours_of(theirs_of(name, hidden_size=128)).train(), 64
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(tokens(1, length))
    counted = sum(storage.nbytes() for storage in saved.values()) / 4 / length
    declared = sum(cost.kept for cost in layer_costs(model.config))
    assert 0.75 <= counted / declared <= 1.25


@pytest.mark.parametrize(("name", "key"), [("qwen3_moe", "num_experts_per_tok"), ("gemma4_text", "top_k_experts")])
def test_active_parameters_leave_out_experts(name, key):
    some, all_ = (ours_of(theirs_of(name, **{key: k})).config for k in (1, 4))
    assert active_parameters(all_) == count_parameters(all_) == count_parameters(some)
    assert count_parameters(some) - active_parameters(some) == 4 * 3 * (3 * 32 * 24)  # layers, experts, matrices


@pytest.mark.parametrize(
    "mechanism",
    [
        {"mixer": "value_gain"},
        {
            "mixer": "uniform_depth",
            "mixer_options": {"blend": "learned"},
            "recurrence": "loop",
            "recurrence_options": {"trips": 2, "prelude": 1},
        },
    ],
    ids=["value_gain", "looped-learned"],
)
def test_gates_are_those_of_layers_with_keys(mechanism):
    """The looped layer 1 is the first of two with keys, so it reads its own first iteration alone."""
    model = ours_of(theirs_of("lfm2"), **mechanism)
    gates = [parameter for name, parameter in model.named_parameters() if "gates" in name]
    assert mechanism_cost(model.config).parameters == sum(gate.numel() for gate in gates)
    model(tokens()).logits.sum().backward()
    assert all(gate.grad is not None for gate in gates)


def test_chunks_and_windows_bound_the_keys_that_are_read():
    """Counted position by position."""
    for name, key, read in (
        ("llama4_text", "chunked_attention", lambda t: t % 8 + 1),
        ("ministral", "sliding_attention", lambda t: min(t + 1, 5)),
    ):
        config = ours_of(theirs_of(name)).config
        layer = config.layer_types.index(key)
        for length in (3, 8, 29):
            assert keys_read(config, layer, length) == pytest.approx(sum(map(read, range(length))) / length)
