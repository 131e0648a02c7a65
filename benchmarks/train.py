"""Training speed in ratios of interleaved steps: ours against stock Qwen3, each mechanism against our vanilla.

    python benchmarks/train.py                      # both CPU shapes, eager
    python benchmarks/train.py --shape tiny --batch 2 --batch 8   # 512 and 2,048 tokens a step
    python benchmarks/train.py --compile --pairs 20
    python benchmarks/train.py --shape 410m --device cuda --dtype bfloat16 --compile

Every pair is timed A B B A in one process on the same batch and the same weights; the ratio is taken pair by pair and
its median and interquartile range are printed. A step is forward, backward, clipping and AdamW, as in training.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.cost import flops_per_token
from fathom.models.registry import parse_mechanism

SHAPES = {
    # layers, hidden, intermediate, heads, key-value heads, head_dim, vocabulary, batch, sequence
    "tiny": (6, 128, 384, 4, 2, 32, 4096, 8, 256),
    "512x8": (8, 512, 1536, 8, 4, 64, 4096, 2, 512),
    "410m": (32, 1024, 2816, 16, 4, 64, 32_000, 16, 2048),
    "1.5b": (48, 1536, 4096, 24, 6, 64, 50_304, 8, 2048),
    "3b": (48, 2048, 6912, 32, 8, 64, 50_304, 8, 2048),
}
PEAK = 989e12  # dense bf16 of one H100 or H200, as the data sheet says


def shape_of(name: str) -> tuple[dict[str, int], int, int]:
    """Configuration keys, batch and sequence length."""
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    *values, head_dim, vocabulary, batch, sequence = SHAPES[name]
    return {**dict(zip(keys, values, strict=True)), "head_dim": head_dim, "vocab_size": vocabulary}, batch, sequence


def step_of(model: torch.nn.Module, ids: torch.Tensor, compiled: bool, dtype: torch.dtype) -> Callable[[], None]:
    """One training step as a function without arguments."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    call = torch.compile(model) if compiled else model
    autocast = torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32)

    def step() -> None:
        with autocast:
            loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step: Callable[[], None], device: str, clock: Callable[[], float]) -> float:
    """One step, with the device idle before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def paired(a: Callable[[], None], b: Callable[[], None], pairs: int, device: str, clock: Callable[[], float]) -> dict:
    """Ratios a / b, timed A B B A: median, quartiles, and each side's median seconds."""
    for step in (a, b, a, b):
        step()
    gc.disable()
    ratios, times_a, times_b = [], [], []
    for _ in range(pairs):
        a1, b1, b2, a2 = (seconds(step, device, clock) for step in (a, b, b, a))
        ratios.append((a1 + a2) / (b1 + b2))
        times_a += [a1, a2]
        times_b += [b1, b2]
    gc.enable()
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "seconds": [round(statistics.median(t), 4) for t in (times_a, times_b)],
        "pairs": pairs,
    }


def build(name: str, keys: dict[str, int], state: dict | None, device: str) -> torch.nn.Module:
    """Stock Qwen3 (`hf`) or one of our mechanisms, with the given weights where they fit."""
    torch.manual_seed(0)
    with torch.device(device):
        if name == "hf":
            model = Qwen3ForCausalLM(Qwen3Config(**keys))
        else:
            model = FathomForCausalLM(FathomConfig(**keys, **parse_mechanism(name)))
    if state is not None:
        model.load_state_dict(state, strict=False)
    return model


def hardware(device: str) -> str:
    """What this ran on, in words."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} thread(s)"


def commit() -> str:
    """The commit that is measured, marked when the tree is dirty."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip()


def compare(shape: str, batch: int | None, a: str, b: str, options: argparse.Namespace) -> dict:
    """One row: `a` against `b` at a shape, with its own batch or another."""
    keys, own, sequence = shape_of(shape)
    batch = batch or own
    dtype = getattr(torch, options.dtype)
    state = build("vanilla", keys, None, "cpu").state_dict()
    ids = torch.randint(0, keys["vocab_size"], (batch, sequence), device=options.device)
    torch._dynamo.reset()
    steps = []
    for side in (a, b):
        name, _, how = side.partition("@")
        model = build(name, keys, state, options.device)
        steps.append(step_of(model, ids, options.compile or how == "compiled", dtype))
    clock = time.perf_counter if options.device == "cuda" or options.wall else time.thread_time
    row = {
        "shape": shape,
        "tokens": batch * sequence,
        "a": a,
        "b": b,
        "compiled": options.compile,
        "dtype": options.dtype,
    }
    row |= paired(*steps, options.pairs, options.device, clock)
    if options.device == "cuda":
        tokens = batch * sequence / row["seconds"][0]
        row["tokens_per_second"] = round(tokens)
        # 3 forwards; causal attention once, (T + 1) / 2; head counted, embeddings not, mechanism not
        vanilla = FathomConfig(**keys)
        row["mfu"] = round(3 * flops_per_token(vanilla, sequence) * tokens / PEAK, 4)
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    against = (
        "a further pair, each hf or a mechanism; @compiled behind a name compiles that side alone; may be repeated"
    )
    parser.add_argument("--against", metavar="A:B", action="append", default=[], help=against)
    parser.add_argument("--batch", type=int, action="append", help="sequences a step; may be repeated")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--wall", action="store_true", help="wall clock on a CPU too, instead of this thread's CPU time"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pairs = [("vanilla", "hf"), ("depth_attention", "vanilla"), *(pair.split(":") for pair in options.against)]
    print(
        json.dumps(
            {
                "command": " ".join(["python", *sys.argv]),
                "date": date.today().isoformat(),
                "commit": commit(),
                "hardware": hardware(options.device),
                "torch": torch.__version__,
            }
        )
    )
    for shape in options.shape or ["tiny", "512x8"]:
        for batch in options.batch or [None]:
            for a, b in pairs:
                print(json.dumps(compare(shape, batch, a, b, options)), flush=True)


if __name__ == "__main__":
    main()
