"""A family's layers in compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from .cases import ours_of, theirs_of, tokens
from .test_sharding import CASES, LOOP


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_training_is_one_graph(name):
    """Whole model; without a graph break, and no other for the next texts of the same length."""
    torch.compiler.reset()
    counters.clear()
    model = ours_of(theirs_of(name), **CASES[name]).train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for seed in (1, 2):
        ids = tokens(seed=seed)
        own, made = model(ids, labels=ids).loss, compiled(ids, labels=ids).loss
        assert (own - made).abs() <= 1e-5 * own.abs()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_decoding_with_a_static_cache_is_one_graph(name):
    torch.compiler.reset()
    counters.clear()
    model, ids = ours_of(theirs_of(name), **LOOP), tokens()
    how = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    plain = model.generate(ids, **how)
    compiling = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiling._compile_all_devices = True
    compiled = model.generate(ids, cache_implementation="static", compile_config=compiling, **how)
    assert torch.equal(plain, compiled) and counters["stats"]["unique_graphs"] == 1
