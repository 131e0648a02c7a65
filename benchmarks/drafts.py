"""Whether drafts change no text, and what they save or cost: with `--lookup` and `--speculate` over without.

    python benchmarks/drafts.py MODEL --out benchmarks/results/drafts.json

MODEL, with a chat template, copies a page and writes freely, greedy and drawn with a seed, alone and by four clients. A
random model of three iterations drafts with its first one: where later ones change little, and where they change much.
Each question is asked with and without drafts, A B B A, of two engines with the same weights. Seconds are processor
time of the engine's thread, of which there is one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from transformers import PreTrainedModel

from fathom.checkpoints.open import open_checkpoint
from fathom.inference.engine import Engine, Event, Job, Scored
from fathom.inference.packed import pack
from fathom.inference.prompt import encode
from fathom.inference.sampling import Choice
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.report.files import write_json
from fathom.report.provenance import provenance

BUDGET, CLIENTS = 1 << 30, 4
PAGE = """def depth(soundings):
    deepest = 0
    for place, fathoms in soundings.items():
        if fathoms > deepest:
            deepest = fathoms
    return deepest
"""
COPY = f"Repeat this program, and nothing else, word for word:\n\n{PAGE}"
FREE = "Write a story about a sailor who measures the depth of the sea in winter."
LOOP: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
LOOP |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.05}
LOOP |= {"recurrence": "loop", "recurrence_options": {"trips": 3}, "max_position_embeddings": 1024}


def texts(engine: Engine, asked: Sequence[tuple[Sequence[int], Choice]], tokens: int) -> tuple[list[list[int]], float]:
    """The tokens of texts that are asked for at once, and the seconds that they took."""
    made: list[list[int]] = [[] for _ in asked]
    left, done = [len(asked)], threading.Event()

    def heard(i: int, event: Event) -> None:
        if isinstance(event, Scored):
            made[i].append(event.token)
        elif isinstance(event, Exception):
            raise event
        elif isinstance(event, str):
            left[0] -= 1
            if not left[0]:
                done.set()

    before = engine.call(thread_time).result()
    engine.submit(
        [
            Job(ids, tokens, choice, lambda event, i=i: heard(i, event))  # type: ignore[misc]
            for i, (ids, choice) in enumerate(asked)
        ]
    )
    done.wait()
    return made, float(engine.call(thread_time).result()) - before  # type: ignore[arg-type]


def compare(
    engines: Sequence[Engine], asked: Sequence[tuple[Sequence[int], Choice]], tokens: int, turns: int
) -> dict[str, Any]:
    """Drafts over none: the ratio of each pair of turns, and whether the texts are alike."""
    ratios, same = list[float](), True
    counts = dict(engines[0].counts)
    for _ in range(turns):
        found = [texts(engines[which], asked, tokens) for which in (0, 1, 1, 0)]
        ratios += [found[0][1] / found[1][1], found[3][1] / found[2][1]]
        same = same and all(one[0] == found[0][0] for one in found)
    drafted, accepted = (engines[0].counts[name] - counts[name] for name in ("drafted", "accepted"))
    quartiles = [round(q, 3) for q in statistics.quantiles(ratios, n=4)]
    return {"ratio": quartiles, "ratios": ratios, "same": same, "drafted": drafted, "accepted": accepted}


def looked_up(path: Path, turns: int, tokens: int) -> dict[str, Any]:
    """The model that is given, with drafts by lookup."""
    model, tokenizer = open_checkpoint(path, "cpu")
    pack(model)
    engines = [Engine(model, BUDGET, lookup=True), Engine(model, BUDGET)]
    copy, free = ([*encode(tokenizer, [{"role": "user", "content": text}])] for text in (COPY, FREE))
    cases = {
        "copy, greedy": [(copy, Choice())],
        "free, greedy": [(free, Choice())],
        "free, drawn": [(free, Choice(1.0, seed=1))],
        "four clients, two copy": [
            (copy, Choice(0.3, seed=i)) if i % 2 else (free, Choice(1.0, seed=i)) for i in range(CLIENTS)
        ],
    }
    return ended(engines, {f"lookup: {name}": compare(engines, asked, tokens, turns) for name, asked in cases.items()})


def of_trips(turns: int, tokens: int) -> dict[str, Any]:
    """A random model of three iterations."""
    found: dict[str, Any] = {}
    for name, scale in (("change little", 0.1), ("change much", 1.0)):
        torch.manual_seed(0)
        model: PreTrainedModel = FathomForCausalLM(FathomConfig(**LOOP)).eval()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.mul_(scale)
                layer.self_attn.o_proj.weight.mul_(scale)
        engines = [Engine(model, BUDGET, draft_trips=1), Engine(model, BUDGET)]
        asked = [(list(range(5, 40)), Choice(0.7, seed=3))]
        found |= ended(engines, {f"trips: later ones {name}": compare(engines, asked, tokens, turns)})
    return found


def ended(engines: Sequence[Engine], found: dict[str, Any]) -> dict[str, Any]:
    """What was found, after the engines have ended."""
    for engine in engines:
        engine.join(10)
    return found


def main() -> None:
    """Measure, print, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = looked_up(options.model, options.turns, options.tokens) | of_trips(options.turns, options.tokens)
    for name, found in results.items():
        print(name, found["ratio"], "same" if found["same"] else "DIFFER", found["drafted"], found["accepted"])
    if options.out is not None:
        write_json(options.out, {"provenance": vars(provenance()), "load": os.getloadavg()[0], "results": results})


if __name__ == "__main__":
    main()
