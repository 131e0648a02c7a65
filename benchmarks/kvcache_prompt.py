"""What a long prompt needs in memory: stored bytes at their peak and the process's peak, compressed and not.

    python benchmarks/kvcache_prompt.py --out LOG.json [--tokens 16384]

A random Llama of 8 layers reads the prompt within `compressed(model, …, ratio=0.25)`, which keeps a quarter. Each case
has a process of its own. Stored are the tensors of the cache and what a layer attends to, looked at whenever one does;
memory is the process's peak above what it used before the prompt, activations included. Run again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from fathom.evaluation.caches.measure import Peak
from fathom.kvcache import cache_bytes, compressed
from fathom.report.provenance import provenance

CASES = ("full", "drop", "snapkv")
SHAPE = dict(hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=2, head_dim=64)
LAYERS, RATIO = 8, 0.25


def stored(cache: DynamicCache, reading: tuple[Tensor, ...] = ()) -> int:
    """Bytes of a cache and of what a layer reads, each tensor once."""
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in reading}
    for layer in cache.layers:
        for x in vars(layer).values():
            if isinstance(x, Tensor):
                held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(held.values())


@torch.no_grad()
def case(method: str, tokens: int) -> dict[str, float]:
    """One prompt, read once."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=97, num_hidden_layers=LAYERS, max_position_embeddings=2 * tokens, **SHAPE)
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(5, 90, (1, tokens))
    cache, most = DynamicCache(), [0]

    def around() -> AbstractContextManager[None]:
        return nullcontext() if method == "full" else compressed(model, method, ratio=RATIO)

    with around():
        model(ids[:, :256])  # what is allocated once
    with around():
        attend = torch.nn.functional.scaled_dot_product_attention

        def watched(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
            most[0] = max(most[0], stored(cache, (key, value)))
            return attend(query, key, value, *args, **kwargs)

        torch.nn.functional.scaled_dot_product_attention = watched  # type: ignore[assignment]
        peak, began = Peak(model), time.process_time()
        model(ids, past_key_values=cache, logits_to_keep=1)
    return {
        "stored_peak_bytes": most[0],
        "stored_bytes": cache_bytes(cache),
        "memory_peak_bytes": peak.bytes() or 0,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    """Every case in its own process, and the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--case", choices=CASES, help="this one alone, printed")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case, options.tokens)))
        return
    given = {"tokens": options.tokens, "layers": LAYERS, "ratio": RATIO, **SHAPE}
    found = json.loads(options.out.read_text())["found"] if options.out.exists() else {}
    # freed memory returns to the system, so that the peak is that of what is in use
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for method in (one for one in CASES if one not in found):
        command = [sys.executable, __file__, "--out", str(options.out), "--tokens", str(options.tokens)]
        done = subprocess.run([*command, "--case", method], env=env, capture_output=True, text=True, check=True)
        found[method] = json.loads(done.stdout.splitlines()[-1])
        for key in ("stored_peak", "memory_peak"):
            found[method][f"{key}_share"] = round(found[method][f"{key}_bytes"] / found["full"][f"{key}_bytes"], 3)
        print(method, found[method], flush=True)
        options.out.write_text(
            json.dumps({"given": given, "found": found, "provenance": asdict(provenance())}, indent=1)
        )


if __name__ == "__main__":
    main()
