"""What `fathom serve --compile` costs at its start, and what a step costs afterwards.

    python benchmarks/compiled.py --mechanism adaponder    # the models of serving.py, 29M parameters

Nothing is in the compiler's cache. Seconds are of the processor, the C++ compiler's included. Then batches of one and
of several rows, compiled and not, take turns A B B A over the same prompts: the middle of the ratios, compiled by not,
and the milliseconds of a step, which makes a token for every row. Texts are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from fathom.evaluation.clock import Clock
from fathom.inference.batches import batch_for
from fathom.inference.compiled import Compiled
from fathom.inference.engine import Engine
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import parse_mechanism
from fathom.report.provenance import provenance
from fathom.report.statistics import quartiles
from serving import SHAPE, Prompts


def worked() -> float:
    """Seconds of processor of this process and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def compiling(model: FathomForCausalLM, compiled: Compiled) -> dict[str, float]:
    """What an engine's start takes."""
    counters.clear()
    engine = Engine(model, 1 << 32, compiled=compiled)
    before, began = worked(), time.perf_counter()
    engine.call(lambda: engine.compile(None)).result()
    found = {"processor_seconds": worked() - before, "clock_seconds": time.perf_counter() - began}
    engine.join(10)
    return {**found, "programs": counters["stats"]["unique_graphs"], "operations": counters["stats"]["calls_captured"]}


@torch.inference_mode()
def steps(
    model: FathomForCausalLM, compiled: Compiled | None, prompts: Prompts, tokens: int
) -> tuple[float, list[list[int]]]:
    """Seconds of a step, and what each row says."""
    batch = batch_for(model, None, compiled=compiled)
    batch.reserve(len(prompts), len(prompts[0]) + tokens)
    said = []
    for prompt in prompts:
        said.append([int(batch.read(prompt)[-1].argmax())])
        batch.join()

    def make() -> None:
        for _ in range(tokens):
            for row, token in zip(said, batch.step([row[-1] for row in said]).argmax(-1).tolist(), strict=True):
                row.append(token)

    return Clock(model.device).seconds(make) / tokens, said


def beside(
    model: FathomForCausalLM, compiled: Compiled, prompts: Prompts, options: argparse.Namespace
) -> dict[str, Any]:
    """Compiled steps by plain ones, in turns."""
    ratios, times, alike = [], ([], []), True  # type: ignore[var-annotated]
    steps(model, None, prompts, 2), steps(model, compiled, prompts, 2)
    for _ in range(options.pairs):
        (a, one), (b, other), (b2, _), (a2, _) = (
            steps(model, way, prompts, options.tokens) for way in (compiled, None, None, compiled)
        )
        ratios.append((a + a2) / (b + b2))
        times[0].extend((a, a2))
        times[1].extend((b, b2))
        alike = alike and one == other
    milliseconds = [round(1000 * quartiles(side)[1], 2) for side in times]
    return {
        "rows": len(prompts),
        "ratio": [round(x, 3) for x in quartiles(ratios)],
        "ms_per_step": dict(zip(("compiled", "plain"), milliseconds, strict=True)),
        "tokens_per_second": round(1000 * len(prompts) / milliseconds[0], 1),
        "texts_identical": alike,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything."""
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**{**SHAPE, **parse_mechanism(options.mechanism)})).to(options.device).eval()
    chance = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, SHAPE["vocab_size"], (options.rows, options.room // 4), generator=chance).tolist()  # type: ignore[call-overload]
    compiled = Compiled(model, 2 * options.rows, options.room)
    return {
        "mechanism": options.mechanism,
        "parameters": sum(p.numel() for p in model.parameters()),
        "visits": sum(map(len, model.model.plan)),
        "room": options.room,
        "compiling": compiling(model, compiled),
        "steps": [beside(model, compiled, prompts[:rows], options) for rows in (1, options.rows)],
    }


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mechanism", default="adaponder")
    parser.add_argument("--rows", type=int, default=8, help="of the larger batch (default: 8)")
    parser.add_argument("--room", type=int, default=128, help="tokens of a row (default: 128)")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each text (default: 24)")
    parser.add_argument("--pairs", type=int, default=4, help="turns A B B A (default: 4)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--note", default="", help="what else the machine did, for the log")
    parser.add_argument("--out", type=Path, help="write the log there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # so that this process waits for the C++ compiler, and counts it
    with tempfile.TemporaryDirectory() as cold:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold
        result = measure(options)
    print(json.dumps(result, indent=1), flush=True)
    if options.out is not None:
        log = {"provenance": vars(provenance()), "note": options.note, "results": [result]}
        options.out.write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
