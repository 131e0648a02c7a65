"""transformers' tensor parallelism over two processes of a CPU: the tokens are those of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.outside.models import ONE_TRIP, SEVERAL_TRIPS, exported

LENGTH = 16
BACKBONES: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": "none"},
    "olmo2": {"qk_norm": "full", "norm_placement": "after", "norm": "rms_wide"},
    "gpt_neox": {
        **{"qk_norm": "none", "norm": "layer", "parallel_residual": True, "gated_mlp": False, "hidden_act": "gelu"},
        **{"attention_bias": True, "output_bias": True, "mlp_bias": True},
    },
}
"""Switches of other families than Qwen3, under depth_attention."""
GATES: dict[str, dict[str, Any]] = {
    "depth_attention:blend=learned,gates=channel": {"blend": "learned", "gates": "channel"},
    "value_gain:queries=true": {"queries": True},
}
"""Numbers of each key-value head, which are split with the heads."""
PROMPTS = [torch.randint(3, 384, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 23)]
RANK = """
import json, sys
import fathom.models, torch
import torch.distributed as dist
from tests.outside.test_tensor_parallel import tokens
from transformers import AutoModelForCausalLM

answers = {}
for name, directory in json.load(open(sys.argv[1])).items():
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, tp_plan="auto")
    share = model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0]
    answers[name] = {"tokens": tokens(model), "share": share / model.model.layers[0].self_attn.q_proj.weight.shape[0]}
if dist.get_rank() == 0:
    json.dump(answers, open(sys.argv[1] + ".answers", "w"))
dist.barrier()
dist.destroy_process_group()
"""


def tokens(model: Any) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    model.generation_config.eos_token_id = None
    settings = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
    every = [model.generate(torch.tensor([prompt]), **settings) for prompt in PROMPTS]
    return [row[0, len(prompt) :].tolist() for row, prompt in zip(every, PROMPTS, strict=True)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("exports")
    found = {name: exported(name, place) for name in (*ONE_TRIP, *SEVERAL_TRIPS, "loop+depth_attention")}
    found |= {name: exported(name.split(":")[0], place / name, mixer_options=GATES[name]) for name in GATES}
    return found | {name: exported("depth_attention", place / name, **BACKBONES[name]) for name in BACKBONES}


@pytest.fixture(scope="module")
def answers(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By both ranks together."""
    place = tmp_path_factory.mktemp("ranks")
    (place / "rank.py").write_text(RANK)
    file = place / "models.json"
    file.write_text(json.dumps({name: str(path) for name, path in directories.items()}))
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, place / "rank.py", file], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(file.with_name("models.json.answers").read_text())


@pytest.mark.parametrize("name", [*ONE_TRIP, *SEVERAL_TRIPS, "loop+depth_attention", *BACKBONES, *GATES])
def test_tokens_are_those_of_one_process(name: str, answers: dict[str, Any], directories: dict[str, Path]) -> None:
    alone = AutoModelForCausalLM.from_pretrained(directories[name], dtype=torch.float32)
    assert answers[name] == {"tokens": tokens(alone), "share": 0.5}
