"""Engines with a cache of their own: right where a token makes one trip, refused where it makes several."""

import subprocess
import sys

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.checkpoints.export import export
from fathom.models import FathomForCausalLM, FathomModel, modeling
from fathom.models.engines import check_engine

from .cases import build, config_of, tokens

TRIPS = ["loop", "loop+depth_attention", "ponder", "ponder-all", "ponder2", "ponder3", "adaponder", "latent_cot"]
PROMPTS = [[5, 9, 31, 7], [44, 3, 17, 8, 12, 29, 6]]


def batched(model: FathomForCausalLM) -> list[list[int]]:
    """Greedy tokens of transformers' continuous batching."""
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # A few pages: by default the cache takes all free memory, which the tests poison number by number.
    pages = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    found = model.generate_batch(
        PROMPTS, generation_config=config, continuous_batching_config=pages, progress_bar=False
    )
    return [
        output.generated_tokens for output in sorted(found.values(), key=lambda o: int(o.request_id.split("_")[-1]))
    ]


def one_by_one(model: FathomForCausalLM) -> list[list[int]]:
    model.generation_config.eos_token_id = None
    outputs = [model.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False)[0, len(p) :] for p in PROMPTS]
    return [output.tolist() for output in outputs]


@pytest.mark.parametrize("case", ["vanilla", "depth_attention"])
def test_one_trip_is_batched_exactly(case):
    model = build(config_of(case))
    assert batched(model) == one_by_one(model)


@pytest.mark.parametrize("case", TRIPS)
def test_several_trips_are_refused_before_the_first_request(case):
    with pytest.raises(ValueError, match=r"passes cache= .* makes \d trips"):
        batched(build(config_of(case)))


def test_the_refusal_is_needed(monkeypatch):
    """Without it, the fault: other tokens, and no error."""
    model = build(config_of("loop"))
    monkeypatch.setattr(modeling, "check_engine", lambda *args: None)
    assert batched(model) != one_by_one(model)


@pytest.mark.parametrize("backend,argument", [("sdpa", "cache"), ("sglang", "attention_instances"), ("vllm", None)])
def test_foreign_caches_are_refused(monkeypatch, backend, argument):
    """Also the backbone alone, which is what vLLM and SGLang open, and whatever name their attention has."""
    called = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, backend, lambda *args, **kwargs: called.append(args))
    model = FathomModel(config_of("loop")).eval()
    model.config._attn_implementation = backend
    with pytest.raises(ValueError, match=f"{argument or backend}.* loop makes 3 trips.*export --as unrolled"):
        model(tokens(1, 4), **({argument: object()} if argument else {}))
    assert not called


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flash_attention_2", "flex_attention", "fathom_kvcache"])
def test_backends_that_leave_the_cache_to_the_model(backend):
    config = config_of("loop")
    config._attn_implementation = backend
    check_engine(config, 3, ("position_ids",))
    config._attn_implementation = "vllm"
    check_engine(config, 1, ("cache", "attention_instances"))


def test_the_refusal_travels(tmp_path):
    """An export opened by an engine that has no Fathom: remote code, a backend by another name."""
    export(build(config_of("loop")), tmp_path / "loop")
    script = f"""
import sys
sys.modules["fathom"] = None
from transformers import AttentionInterface, AutoConfig, AutoModel
AttentionInterface.register("some_engine", lambda *args, **kwargs: None)
config = AutoConfig.from_pretrained({str(tmp_path / "loop")!r}, trust_remote_code=True)
try:
    AutoModel.from_config(config, attn_implementation="some_engine", trust_remote_code=True)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "attn_implementation=some_engine is not known to keep a cache for each trip" in done.stdout, done.stderr
