"""Greedy tokens of models in vLLM, which has a virtual environment of its own.

python vllm_tokens.py JOBS.json     writes `answers.json` beside it

JOBS.json holds prompts (lists of tokens), a length, and by name the arguments of vLLM's `LLM`; the answers, by the same
names, tokens or the message with which the model was refused.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that a refusal is an exception here
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB

from torch._dynamo.utils import counters
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def answer(prompts: list[list[int]], length: int, arguments: dict[str, object]) -> dict[str, object]:
    """The tokens after each prompt, or why there are none: some are refused when they are opened, some at the first."""
    sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    try:
        settings = {"enforce_eager": True, "max_model_len": 256, "gpu_memory_utilization": 0.1, "seed": 0, **arguments}
        llm = LLM(dtype="float32", **settings)
        outputs = llm.generate(asked, sampling, use_tqdm=False)
    except ValueError as error:
        return {"refused": str(error)}
    graphs = counters["stats"]["unique_graphs"]
    counters.clear()
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "graphs": graphs}


if __name__ == "__main__":
    file = Path(sys.argv[1])
    work = json.loads(file.read_text())
    answers = {}
    for name, arguments in work["jobs"].items():
        answers[name] = answer(work["prompts"], work["length"], arguments)
        gc.collect()
        cleanup_dist_env_and_memory()
    file.with_name("answers.json").write_text(json.dumps(answers))
