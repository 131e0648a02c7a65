"""How often rounding changes a sampled token, and what a draw costs.

    python benchmarks/seeds.py --out benchmarks/results/seeds.json

A request is computed alone or next to others, and the logits then differ in their last bits. The script takes such
pairs of logits from a random model (alone, and as one of eight sequences), with a flat and with a peaked distribution.
It draws a million tokens under each pair, with the same seeds, and counts those that differ: by Gumbel-max, which
`fathom serve` uses, and by a lookup in the running sum of the probabilities. Then it measures a draw against a decoding
step of a model with that vocabulary, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fathom.inference.draws import Source
from fathom.inference.sampling import Choice
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import parse_mechanism
from fathom.report.provenance import provenance

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
TOGETHER = 8
SHARP = {"flat": 1.0, "peaked": 20.0}
"""Factors of the logits."""


def build(mechanism: str, vocabulary: int) -> FathomForCausalLM:
    """A random model."""
    torch.manual_seed(0)
    return FathomForCausalLM(FathomConfig(**{**SHAPE, "vocab_size": vocabulary, **parse_mechanism(mechanism)})).eval()


def pairs(model: FathomForCausalLM) -> list[tuple[Tensor, Tensor]]:
    """Logits of the last token of each of several sequences: alone, and together."""
    ids = torch.randint(0, model.config.vocab_size, (TOGETHER, 33), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together = model(ids, logits_to_keep=1).logits[:, 0]
        alone = [model(row[None], logits_to_keep=1).logits[0, 0] for row in ids]
    return list(zip(alone, together, strict=True))


def flips(found: list[tuple[Tensor, Tensor]], sharp: float, draws: int) -> dict[str, Any]:
    """How many of so many draws differ, both ways."""
    each, changed, looked_up, differs = draws // len(found), 0, 0, 0.0
    for which, both in enumerate(found):
        weights = [(logits.double() * sharp).softmax(0) for logits in both]
        differs = max(differs, float((both[0] - both[1]).abs().max()) * sharp)
        one, other = ([Source(seed, which).draw(p, 0) for seed in range(each)] for p in weights)
        changed += sum(a != b for a, b in zip(one, other, strict=True))
        places = torch.from_numpy(Source(which).uniforms(0, each))
        one, other = (torch.searchsorted(p.cumsum(0), places) for p in weights)
        looked_up += int((one != other).sum())
    likeliest = max(float((one.double() * sharp).softmax(0).max()) for one, _ in found)
    return {
        "draws": each * len(found),
        "largest_logit_difference": differs,
        "largest_probability": likeliest,
        "changed": changed,
        "changed_at_most_95": _at_most(changed) / (each * len(found)),
        "changed_by_lookup": looked_up,
    }


def _at_most(count: int) -> float:
    """The upper end of the 95 % interval of a Poisson count, two-sided where something was seen."""
    if count == 0:
        return -math.log(0.05)
    from scipy.stats import chi2

    return float(chi2.ppf(0.975, 2 * count + 2)) / 2


def cost(model: FathomForCausalLM, turns: int) -> dict[str, float]:
    """Milliseconds of a decoding step, and of a draw from its probabilities; medians of interleaved turns."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(torch.ones(1, 64, dtype=torch.long), past_key_values=cache).logits[0, -1]
        weights = logits.double().softmax(0)

        def step() -> object:
            return model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache).logits

        def lookup() -> object:
            running = weights.cumsum(0)
            return int(torch.searchsorted(running, 0.5 * running[-1], right=True))

        ways: dict[str, Callable[[], object]] = {
            "step_ms": step,
            "draw_ms": lambda: Source(0).draw(weights, 0),
            "lookup_ms": lookup,
            "softmax_ms": lambda: logits.double().softmax(0),
            "token_ms": lambda: Choice(1.0).token(logits, [0], [1]),
            "token_top_p_ms": lambda: Choice(1.0, top_p=0.95).token(logits, [0], [1]),
            "token_top_p_peaked_ms": lambda: Choice(0.05, top_p=0.95).token(logits, [0], [1]),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                taken[name].append(1000 * (time.perf_counter() - began))
    medians = {name: sorted(times)[len(times) // 2] for name, times in taken.items()}
    shares = {
        name.replace("_ms", "_by_step"): medians[name] / medians["step_ms"] for name in ("draw_ms", "token_top_p_ms")
    }
    return {**medians, **shares}


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mechanism", default="hyper_connections")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--draws", type=int, default=1_000_000, help="under each pair of distributions; 0: cost alone")
    parser.add_argument("--turns", type=int, default=60, help="of the measurement of time")
    parser.add_argument("--note", default="", help="what else the machine did, for the log")
    parser.add_argument("--out", type=Path, help="write the log there")
    arguments = parser.parse_args()
    results = []
    for vocabulary in arguments.vocabulary:
        model = build(arguments.mechanism, vocabulary)
        found = pairs(model)
        rates = {name: flips(found, sharp, arguments.draws) for name, sharp in SHARP.items() if arguments.draws}
        one = {"mechanism": arguments.mechanism, "vocabulary": vocabulary, "threads": torch.get_num_threads()}
        results.append({**one, **rates, "cost": cost(model, arguments.turns)})
        print(json.dumps(results[-1], indent=1), flush=True)
    if arguments.out is not None:
        log = {"provenance": vars(provenance()), "note": arguments.note, "results": results}
        arguments.out.write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
