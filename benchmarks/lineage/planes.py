"""Plane words of strangers: how often is the p-value of T6 below 1e-2 and 1e-3?

    python benchmarks/lineage/planes.py --directory planes --out benchmarks/results/lineage-planes.json

Trains 160 very small models of six layers and 48 rotary planes, of four recipes, each from its own seed, and compares
all pairs. Pairs share models, so the intervals come from drawing models again. A further run goes on with what is
trained.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from strangers import commit

import tiny
from fathom.lineage import evidence, open_weights, planes
from fathom.lineage.evidence import test_planes
from tiny import Run, Shape

STEPS, BATCH, DRAWS = 60, 20, 2000
SMALL = dict(width=32, layers=6, heads=2, kv_heads=1, ffn=64, vocab=320, length=32)
RECIPES = {
    "llama": Shape(**SMALL),
    "llama, tied": Shape(**SMALL, tied=True),
    "qwen3": Shape("qwen3", **SMALL),
    "same data and order": Shape(**SMALL),
}
COUNT = 40


def made(directory: Path, seconds: float) -> dict[str, list[Path]]:
    """Train what is not there."""
    tokens, tokenizer = tiny.tokenised(directory, SMALL["vocab"])
    out: dict[str, list[Path]] = {}
    for place, (name, shape) in enumerate(RECIPES.items()):
        out[name] = [directory / f"{name.replace(', ', '-').replace(' ', '-')}-{at}" for at in range(COUNT)]
        for first in range(0, COUNT, BATCH):
            some = out[name][first : first + BATCH]
            if all(path.exists() for path in some):
                continue
            if time.process_time() > seconds:
                raise SystemExit("not all models are trained yet: run the same command again")
            seeds = [20_000 + 1000 * place + first + at for at in range(BATCH)]
            orders = [0] * BATCH if name == "same data and order" else seeds
            runs = [Run(seed, tokens, order) for seed, order in zip(seeds, orders, strict=True)]
            p, losses = tiny.trained(shape, runs, STEPS, rows=4)
            for at, path in enumerate(some):
                tiny.write(path, shape, tiny.tensors_of(p, shape, at), tokenizer)
            print(f"{name}: loss {np.mean(losses):.2f}, {time.process_time():.0f} CPU s", file=sys.stderr)
    return out


def interval(hits: np.ndarray, draw: np.random.Generator) -> list[float]:
    """The 95 % interval of the share of pairs that hit, by drawing models again."""
    found = []
    for _ in range(DRAWS):
        times = np.bincount(draw.integers(0, len(hits), len(hits)), minlength=len(hits)).astype(float)
        weight = np.triu(np.outer(times, times), 1)
        found.append(float((weight * hits).sum() / weight.sum()))
    return [float(value) for value in np.quantile(found, [0.025, 0.975])]


def summary(paths: dict[str, list[Path]], words: list[np.ndarray], draw: np.random.Generator) -> dict[str, Any]:
    """Agreements of all pairs, and the tails of their p-values."""
    every = [path for some in paths.values() for path in some]
    counts = np.zeros((len(every), len(every)), int)
    of = 0
    for i in range(len(every)):
        for j in range(i + 1, len(every)):
            counts[i, j], of = planes.agreements(words[i], words[j])
    pairs = np.triu_indices(len(every), 1)
    p = np.ones(counts.shape)
    p[pairs] = [test_planes(int(count), of).p for count in counts[pairs]]
    tails = {}
    for level in (0.05, 0.01, 0.001):
        hits = np.triu(p <= level, 1)
        tails[str(level)] = {"share": float(hits[pairs].mean()), "interval": interval(hits, draw)}
    return {
        "models": len(every),
        "pairs": len(pairs[0]),
        "planes of a model": 2 * of,
        "pairs of neighbouring planes": of,
        "mean agreement": float(counts[pairs].mean() / of),
        "variance, in those of a binomial distribution": float(counts[pairs].var() / (of / 4)),
        "variance that T6 assumes": evidence.PLANE_SPREAD,
        "p-values below": tails,
        "smallest p": float(p[pairs].min()),
        "within a recipe, share below 0.01": {
            name: float(np.mean([p[i, j] <= 0.01 for i in _places(every, some) for j in _places(every, some) if i < j]))
            for name, some in paths.items()
        },
    }


def _places(every: list[Path], some: list[Path]) -> list[int]:
    return [every.index(path) for path in some]


def main(words: list[str] | None = None) -> int:
    """Train, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600, help="of processor time, after which this run ends")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    paths = made(options.directory, options.seconds)
    layers = list(range(SMALL["layers"]))
    found = [
        planes.words(open_weights(path), layers, layers[: planes.REFERENCES])
        for some in paths.values()
        for path in some
    ]
    body = {
        "command": "python benchmarks/lineage/planes.py " + " ".join(words or sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        **summary(paths, found, np.random.default_rng(0)),
    }
    if options.out:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
