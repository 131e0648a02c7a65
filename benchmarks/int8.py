"""Weights in eight bits beside float32: perplexity, and processor time of decoding and reading.

    python benchmarks/int8.py MODEL TEXT --out benchmarks/results/int8.json

Ratios are of interleaved turns (A B C C B A) in one process on one thread: float32 as it is, float32 packed
(`fathom serve`'s default), and eight bits.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fathom.checkpoints.int8 import quantise
from fathom.checkpoints.open import open_checkpoint
from fathom.inference.packed import pack
from fathom.report.provenance import provenance

CHUNK = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, for perplexity")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="tokens decoded in a turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {}
    for name in ("float32", "packed", "int8"):
        models[name], tokenizer = open_checkpoint(options.model, "cpu", "float32")
    pack(models["packed"])
    quantise(models["int8"])
    ids = torch.tensor(tokenizer(options.text.read_text())["input_ids"][: options.tokens])
    found: dict[str, Any] = {**vars(provenance()), "tokens": len(ids), "threads": 1}
    with torch.inference_mode():
        found["perplexity"] = {name: perplexity(models[name], ids) for name in ("float32", "int8")}
        for rows in (1, 8):
            found[f"decode, {rows} rows"] = turns(
                models, options.turns, lambda model, rows=rows: decode(model, ids, rows, options.steps)
            )
        found[f"read {min(CHUNK, len(ids))}"] = turns(models, options.turns, lambda model: read(model, ids))
    print(json.dumps(found, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def perplexity(model: Any, ids: Tensor) -> float:
    """Of the text in pieces of `CHUNK` tokens."""
    total, count = 0.0, 0
    for piece in ids.split(CHUNK):
        logs = model(piece[None]).logits[0, :-1].float().log_softmax(-1)
        total -= float(logs.gather(1, piece[1:, None]).sum())
        count += len(piece) - 1
    return math.exp(total / count)


def turns(models: dict[str, Any], count: int, work: Any) -> dict[str, Any]:
    """Milliseconds of processor time (least and median), and median ratios of neighbouring turns with quartiles."""
    times: dict[str, list[float]] = {name: [] for name in models}
    order = [*models, *reversed(models)]
    for name in models:
        work(models[name])
    for _ in range(count):
        for name in order:
            times[name].append(work(models[name]))
    made: dict[str, Any] = {
        name: {"least_ms": round(min(each), 2), "median_ms": round(statistics.median(each), 2)}
        for name, each in times.items()
    }
    for other in ("float32", "packed"):
        ratios = [a / b for a, b in zip(times["int8"], times[other], strict=True)]
        made[f"int8 / {other}"] = [round(x, 3) for x in statistics.quantiles(ratios, n=4)]
    return made


def decode(model: Any, ids: Tensor, rows: int, steps: int) -> float:
    """Milliseconds of processor time for a token of each row."""
    cache = DynamicCache(config=model.config)
    model(ids[:64].expand(rows, -1), past_key_values=cache, use_cache=True, logits_to_keep=1)
    began = time.process_time()
    for i in range(steps):
        model(ids[64 + i].expand(rows, 1), past_key_values=cache, use_cache=True)
    return (time.process_time() - began) / steps * 1000


def read(model: Any, ids: Tensor) -> float:
    """Milliseconds of processor time for a prompt."""
    began = time.process_time()
    model(ids[None, :CHUNK], logits_to_keep=1)
    return (time.process_time() - began) * 1000


if __name__ == "__main__":
    main()
