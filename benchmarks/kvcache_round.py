"""What a compression costs beside the prefill of the tokens that it makes room for, on a real model.

    python benchmarks/kvcache_round.py MODEL --out FILE.json [--window 1024]

A cache holds N random entries. The model reads the F tokens that a compression makes room for, and all layers are
compressed once; interleaved, in thread CPU time, the least of several.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fathom.kvcache import METHODS, MemoryCache, build_cache
from fathom.kvcache.memory import Memory
from fathom.report.provenance import provenance


def filled(model: torch.nn.Module, method: str, window: int) -> MemoryCache:
    """A cache that is full, of random entries."""
    config = model.config
    given = {"kept": window // 2 - 4} if method == "sinks" else {}
    cache = build_cache(model, method, window=window, **given)
    heads, d = config.num_key_value_heads, config.head_dim
    for layer in cache.layers:
        assert isinstance(layer, Memory)
        keys, values = torch.randn(2, 1, heads, window, d)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.seen = keys, values, window
        if layer.method.observed:
            queries = torch.randn(1, config.num_attention_heads, window, d)
            layer.queries = layer.method.note(None, queries, 0, layer.rotation)
    cache.watched = True
    return cache


def clock(work: Callable[[], object]) -> float:
    """Thread CPU seconds."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


@torch.no_grad()
def main() -> None:
    """Measure, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="sdpa").eval()
    ids = torch.randint(0, model.config.vocab_size, (1, options.window // 2))
    methods = [name for name in METHODS if name != "learned"]
    rounds: dict[str, list[float]] = {name: [] for name in methods}
    prefill: list[float] = []
    for _ in range(options.times):
        for name in methods:
            cache = filled(model, name, options.window)
            rounds[name].append(clock(lambda: [layer._compress() for layer in cache.layers]))  # noqa: B023
        plain = filled(model, "drop", options.window)
        prefill.append(clock(lambda: model(ids, past_key_values=plain, logits_to_keep=1)))  # noqa: B023
        print({name: round(min(spent), 4) for name, spent in rounds.items()}, round(min(prefill), 3), flush=True)
    share = {name: min(spent) / min(prefill) for name, spent in rounds.items()}
    found = {"window": options.window, "layers": model.config.num_hidden_layers, "seconds": rounds, "prefill": prefill}
    options.out.write_text(json.dumps({**vars(provenance()), **found, "share": share}) + "\n", encoding="utf-8")
    for name, part in share.items():
        print(f"| {name} | {1000 * min(rounds[name]):.0f} ms | {100 * part:.1f} % |")


if __name__ == "__main__":
    main()
