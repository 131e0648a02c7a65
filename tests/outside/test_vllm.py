"""Greedy tokens in a real vLLM on a CPU are those of transformers, for every mechanism whose trips read no other and on
several backbones."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.cases import BACKBONES
from tests.outside.models import ONE_TRIP, SEVERAL_TRIPS, exported

VLLM = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
LENGTH = 24
PROMPTS = [torch.randint(3, 384, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 23, 61)]
WINDOW = {
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 16,
}
BOTH, LOOPED = "depth_attention+hyper_connections", "loop+depth_attention"
STOCK = {"qwen3": "vanilla", "unrolled": "loop"}
BANKED = ["loop", "ponder", LOOPED]
"""Several trips that do not read one another: the plugin gives every visit a layer of vLLM's cache."""
FUSED = [name for name in ONE_TRIP if name != "mudd"]
"""One trip, and one input for queries, keys and values, whose projections vLLM fuses."""
ONE_WAY = {"residual_options": {"ways": "r"}}
SLOTTED = [name for name in SEVERAL_TRIPS if name not in BANKED]
BACKED = [(name, kind) for name in ("depth_attention", "loop") for kind in ("llama", "neox")]
COMPILED = [LOOPED, "hyper_connections"]
COMPILE = {"enforce_eager": False, "max_num_seqs": 4, "max_num_batched_tokens": 256}
SHARED = ["depth_attention", LOOPED, "hyper_connections"]
"""Over two ranks, each with half of the heads."""
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
RANKS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 8, "max_num_seqs": 4}


def run(jobs: dict[str, dict[str, Any]], scratch: Path, **environment: str) -> dict[str, dict[str, Any]]:
    """Tokens or a refusal for each job, from a process of vLLM's own environment."""
    scratch.mkdir()
    file = scratch / "jobs.json"
    file.write_text(json.dumps({"prompts": PROMPTS, "length": LENGTH, "jobs": jobs}))
    script = Path(__file__).with_name("vllm_tokens.py")
    with open(scratch / "log", "w+") as log:
        done = subprocess.run(
            [VLLM, script, file], cwd=scratch, env={**os.environ, **environment}, stdout=log, stderr=log
        )
        log.seek(0)
        assert done.returncode == 0, log.read()[-5000:]
    return json.loads(file.with_name("answers.json").read_text())


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model that is asked."""
    place = tmp_path_factory.mktemp("exports")
    found = {name: exported(name, place) for name in (*ONE_TRIP, *SEVERAL_TRIPS, BOTH, LOOPED)}
    found["mudd, one way"] = exported("mudd", place / "one-way", **ONE_WAY)
    found["window"] = exported("depth_attention", place / "window", **WINDOW)
    found |= {f"{name}@{kind}": exported(name, place / kind, **BACKBONES[kind]) for name, kind in BACKED}
    return found | {form: exported(name, place, form) for form, name in STOCK.items()}


@pytest.fixture(scope="module")
def answers(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM says with Fathom's plugin, and without it to the code in the directory."""
    jobs: dict[str, dict[str, Any]] = {name: {"model": str(path)} for name, path in directories.items()}
    for name in ("depth_attention", LOOPED):
        jobs[f"{name}, chunks of 8"] = {**jobs[name], **CHUNKS}
        jobs[f"{name}, prefix caching"] = {**jobs[name], "enable_prefix_caching": True}
    jobs |= {f"{name}, compiled": {**jobs[name], **COMPILE} for name in COMPILED}
    jobs["one trip of loop"] = {**jobs["loop"], "hf_overrides": {"max_trips": 1}}
    jobs["loop without the plugin's class"] = {**jobs["loop"], "model_impl": "transformers"}
    place = tmp_path_factory.mktemp("vllm")
    with_plugin = run(jobs, place / "plugin")
    code = {"trust_remote_code": True, "model_impl": "transformers"}
    remote = {name: {**jobs[name], **code} for name in ("depth_attention", "loop", "ponder2")}
    without = run(remote, place / "remote", VLLM_PLUGINS="")
    ranks = {f"{name}, two ranks": {**jobs[name], **TWO_RANKS} for name in SHARED}
    shared = run(ranks, place / "ranks", **RANKS)
    return with_plugin | shared | {f"remote code, {name}": answer for name, answer in without.items()}


def expected(directory: Path, **arguments: int) -> list[list[int]]:
    """Greedy tokens in transformers, in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    settings = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0, **arguments}
    every = [model.generate(torch.tensor([prompt]), **settings) for prompt in PROMPTS]
    return [tokens[0, len(prompt) :].tolist() for tokens, prompt in zip(every, PROMPTS, strict=True)]


SAME = {
    **{name: name for name in (*FUSED, "mudd, one way", BOTH, "window", *STOCK, *BANKED)},
    **{f"{name}, {how}": name for name in ("depth_attention", LOOPED) for how in ("chunks of 8", "prefix caching")},
    **{f"{name}@{kind}": f"{name}@{kind}" for name, kind in BACKED},
    **{f"{name}, compiled": name for name in COMPILED},
    **{f"{name}, two ranks": name for name in SHARED},
    "remote code, depth_attention": "depth_attention",
}


@pytest.mark.parametrize("name", SAME)
def test_tokens_are_the_same(name: str, answers: dict[str, Any], directories: dict[str, Path]) -> None:
    assert "refused" not in answers[name], answers[name]["refused"]
    assert answers[name]["tokens"] == expected(directories[SAME[name]])


@pytest.mark.parametrize("name", COMPILED)
def test_a_model_is_compiled_whole(name: str, answers: dict[str, Any]) -> None:
    """Prompts and decoding by one graph without a break; eager runs have none."""
    assert answers[f"{name}, compiled"]["graphs"] == 1 and answers[name]["graphs"] == 0


def test_a_budget_of_trips(answers: dict[str, Any], directories: dict[str, Path]) -> None:
    assert answers["one trip of loop"]["tokens"] == expected(directories["loop"], max_trips=1)
    assert answers["one trip of loop"]["tokens"] != answers["loop"]["tokens"]


def test_the_tokens_tell_the_mechanisms_apart(answers: dict[str, Any]) -> None:
    """So that equality says something about each."""
    different = [*FUSED, "mudd, one way", BOTH, "window", *BANKED, *(f"{name}@{kind}" for name, kind in BACKED)]
    assert len({json.dumps(answers[name]["tokens"]) for name in different}) == len(different)
    assert answers["qwen3"]["tokens"] == answers["vanilla"]["tokens"]
    assert all(len(tokens) == LENGTH for tokens in answers["vanilla"]["tokens"])


REFUSED = {
    "mudd": "with residual=mudd each has its own",
    **{name: f"{name} needs slots" for name in SLOTTED},
    "remote code, ponder2": "ponder2 needs slots",
    "remote code, loop": "loop makes 2 trips",
    "loop without the plugin's class": "loop makes 2 trips",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_cannot_run_is_refused_by_name(name: str, answers: dict[str, Any]) -> None:
    assert REFUSED[name] in answers[name].get("refused", f"these tokens: {answers[name].get('tokens')}")
