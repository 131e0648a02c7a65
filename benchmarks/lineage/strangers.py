"""Strangers and runs from one seed: how often is a relation claimed that is none, or more than is true?

    python benchmarks/lineage/strangers.py --directory strangers --out benchmarks/results/lineage-strangers.json

Trains some 120 very small models: roots of several families, tied and untied, and for some of the roots seven more
runs from the same seed on other data, batches, lengths and learning rates. Pairs of different seeds are strangers. Some
strangers are also turned: to their principal axes, at random, onto the other model, or permuted onto it. What exists
is not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import tiny
from fathom.lineage import Weights, aligning, canonical, comparison, evidence, neurons, open_weights
from fathom.lineage.pairs import Pair
from tiny import Run, Shape

STEPS = 200
SHAPES = {
    "llama": (Shape(), 10),
    "llama-tied": (Shape(tied=True), 24),
    "qwen3": (Shape("qwen3"), 6),
    "qwen3-tied": (Shape("qwen3", tied=True), 8),
    "gpt2": (Shape("gpt2", kv_heads=4), 6),
    "gpt2-tied": (Shape("gpt2", kv_heads=4, tied=True), 8),
    "wide": (Shape(width=96, heads=6, kv_heads=2, ffn=240), 4),
    "deep": (Shape(layers=5), 4),
}
"""Shape, and how many roots."""
SEEDED = ("llama", "llama-tied", "qwen3", "qwen3-tied", "gpt2", "gpt2-tied", "llama", "llama-tied")
"""Families of the roots that have siblings from their seed."""
SIBLINGS = (
    (1, 200, 3e-3),
    (2, 200, 3e-3),
    (1, 60, 3e-3),
    (2, 60, 3e-3),
    (0, 400, 3e-3),
    (1, 200, 1e-3),
    (2, 200, 1e-3),
)
"""Of each sibling: the part of the text (0 all, 1 and 2 halves), steps, learning rate."""


@dataclass(frozen=True)
class Member:
    """One model."""

    name: str
    family: str
    seed: int
    part: int = 0
    steps: int = STEPS
    lr: float = 3e-3


def members() -> list[Member]:
    """Roots, then the siblings of some."""
    out, seed = [], 1000
    firsts: dict[str, list[int]] = {}
    for family, (_, count) in SHAPES.items():
        for number in range(count):
            out.append(Member(f"{family}-{number}", family, seed, part=number % 3))
            firsts.setdefault(family, []).append(seed)
            seed += 1
    for number, family in enumerate(SEEDED):
        root = firsts[family][SEEDED[:number].count(family)]
        for at, (part, steps, lr) in enumerate(SIBLINGS):
            out.append(Member(f"{family}-{SEEDED[:number].count(family)}-again-{at}", family, root, part, steps, lr))
    return out


def made(directory: Path, every: list[Member]) -> None:
    """Train what is not there, models of one shape and length together."""
    tokens, tokenizer = tiny.tokenised(directory, Shape().vocab)
    parts = (tokens, tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :])
    missing = [m for m in every if not (directory / m.name / "model.safetensors").exists()]

    def alike(m: Member) -> tuple[str, int, float]:
        return m.family, m.steps, m.lr

    for key, group in itertools.groupby(sorted(missing, key=alike), alike):
        shape, alike_ones = SHAPES[key[0]][0], list(group)
        for at in range(0, len(alike_ones), 8):
            batch = alike_ones[at : at + 8]
            started = time.process_time()
            runs = [Run(m.seed, parts[m.part], order=hash_of(m.name), lr=m.lr) for m in batch]
            p, losses = tiny.trained(shape, runs, key[1])
            for place, member in enumerate(batch):
                tiny.write(directory / member.name, shape, tiny.tensors_of(p, shape, place), tokenizer)
            spent = time.process_time() - started
            print(f"{key}: {len(batch)} models, loss {np.mean(losses):.2f}, {spent:.0f} CPU s", file=sys.stderr)


def hash_of(name: str) -> int:
    """A number from a name, the same in every run."""
    return int.from_bytes(name.encode(), "little") % 1_000_003


def turned(source: Weights, rotation: np.ndarray, path: Path, family: str) -> Path:
    """A llama or qwen3 model with its residual stream rotated: the same function."""
    shape = replace(SHAPES[family][0], tied=False)
    r = torch.from_numpy(rotation).double()
    tensors: dict[str, torch.Tensor] = {}
    store = source.store

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(store.read(name).astype(np.float64))

    head = "lm_head.weight" if "lm_head.weight" in store.tensors else "model.embed_tokens.weight"
    tensors["model.embed_tokens.weight"] = read("model.embed_tokens.weight") @ r
    tensors["lm_head.weight"] = (read(head) * read("model.norm.weight")) @ r
    tensors["model.norm.weight"] = torch.ones(shape.width).double()
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        gains = {n: read(f"{at}{n}.weight") for n in ("input_layernorm", "post_attention_layernorm")}
        for name in (n for n in store.tensors if n.startswith(at)):
            value = read(name)
            if any(role in name for role in ("q_proj", "k_proj", "v_proj")):
                value = (value * gains["input_layernorm"]) @ r
            elif any(role in name for role in ("gate_proj", "up_proj")):
                value = (value * gains["post_attention_layernorm"]) @ r
            elif any(role in name for role in ("o_proj", "down_proj")):
                value = r.T @ value
            elif "layernorm" in name:
                value = torch.ones_like(value)
            tensors[name] = value
    tokenizer = Path(source.name) / "tokenizer.json"
    return tiny.write(path, shape, {n: t.float() for n, t in tensors.items()}, tokenizer)


def rotations(a: Weights, b: Weights, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Rotations of B: some that anybody uses, and some that try to make a stranger look like A."""
    own = neurons.axes(lambda: iter([canonical.embedding(b)])).basis.astype(np.float64)
    yield "principal axes", own
    yield "random", np.linalg.qr(np.random.default_rng(seed).normal(size=own.shape))[0]
    found = aligning.align(a, b, True, lambda _: None).ways
    yield "onto the other", found["procrustes"].rotation.T.astype(np.float64)  # type: ignore[union-attr]
    lap = found["lap"]
    order = np.zeros(own.shape)
    order[np.arange(len(own)), lap.columns] = lap.signs
    yield "permuted onto the other", order


def axes_of(a: Weights, path: Path, family: str) -> Path:
    """A turned to its own principal axes."""
    return turned(a, neurons.axes(lambda: iter([canonical.embedding(a)])).basis.astype(np.float64), path, family)


@dataclass
class Row:
    """What was said of one pair."""

    a: str
    b: str
    kind: str
    roots: tuple[int, int]
    tied: bool
    label: str
    signs: list[str]
    label_with_controls: str
    signs_with_controls: list[str]
    p: dict[str, float]
    statistic: dict[str, float]
    best: float
    margin: float | None


def judged(pair: Pair, kind: str, roots: tuple[int, int], tied: bool, controls: list[tuple[str, list[Pair]]]) -> Row:
    """The verdict without controls, and with them."""
    alone, beside = comparison.judge(pair, []), comparison.judge(pair, controls)
    tests = {t.name: t for t in alone.tests}
    return Row(
        Path(pair.a.name).name, Path(pair.b.name).name, kind, roots, tied,
        alone.verdict.label, alone.tampering, beside.verdict.label, beside.tampering,
        {n: t.p for n, t in tests.items()}, {n: float(t.statistic) for n, t in tests.items()},
        max((s.score for n, s in pair.scores.items() if n != "awm"), default=0.0),
        None if alone.inherited is None else round(alone.inherited.margin, 3),
    )  # fmt: skip


@dataclass
class Bench:
    """Models, and pairs measured once."""

    directory: Path
    every: dict[str, Member]
    opened: dict[str, Weights]
    pairs: dict[tuple[str, str], Pair]

    def weights(self, name: str) -> Weights:
        """An open model."""
        if name not in self.opened:
            self.opened[name] = open_weights(self.directory / name)
        return self.opened[name]

    def pair(self, a: str, b: str) -> Pair:
        """One pair, measured."""
        key = (a, b) if a < b else (b, a)
        if key not in self.pairs:
            options = comparison.Options(extras=False)
            self.pairs[key] = comparison.measure(self.weights(key[0]), self.weights(key[1]), options)
        return self.pairs[key]

    def controls(self, a: str, b: str, draw: np.random.Generator) -> list[tuple[str, list[Pair]]]:
        """Two roots of the family of A that neither of the two descends from."""
        used = {self.every[n].seed for n in (a, b)}
        family = self.every[a].family
        free = [
            m.name for m in self.every.values() if m.family == family and m.seed not in used and "again" not in m.name
        ]
        picked = [str(name) for name in draw.choice(free, 2, replace=False)]
        return [(n, [self.pair(a, n), self.pair(b, n)]) for n in picked]


def rows(bench: Bench, strangers: int, rotated: int, draw: np.random.Generator) -> Iterator[Row]:
    """Every same-seed pair, a sample of the strangers, and turned strangers."""
    names = list(bench.every)
    together = list(itertools.combinations(names, 2))
    seed = {n: bench.every[n].seed for n in names}
    tied = {n: "tied" in bench.every[n].family for n in names}
    for a, b in (p for p in together if seed[p[0]] == seed[p[1]]):
        yield judged(bench.pair(a, b), "same seed", (seed[a], seed[b]), tied[a] and tied[b], bench.controls(a, b, draw))
    apart = [p for p in together if seed[p[0]] != seed[p[1]]]
    first = [p for p in apart if tied[p[0]] and tied[p[1]] and "again" not in "".join(p)]
    rest = [p for p in apart if p not in set(first)]
    chosen = first + [rest[i] for i in draw.permutation(len(rest))[: max(0, strangers - len(first))]]
    for a, b in chosen:
        yield judged(bench.pair(a, b), "strangers", (seed[a], seed[b]), tied[a] and tied[b], bench.controls(a, b, draw))
    yield from turned_rows(bench, rotated, draw)


def turned_rows(bench: Bench, count: int, draw: np.random.Generator) -> Iterator[Row]:
    """Strangers of one family, one of them turned; of the principal axes both."""
    usable = [
        m
        for m in bench.every.values()
        if m.family in {"llama", "llama-tied", "qwen3", "qwen3-tied"} and "again" not in m.name
    ]
    pairs = [(a, b) for a, b in itertools.permutations(usable, 2) if a.family == b.family]
    where = bench.directory / "turned"
    for number in draw.permutation(len(pairs))[: count // 4]:
        a, b = pairs[number]
        one, two = bench.weights(a.name), bench.weights(b.name)
        for kind, rotation in rotations(one, two, int(number)):
            other = open_weights(turned(two, rotation, where / "b", b.family))
            own = open_weights(axes_of(one, where / "a", a.family)) if kind == "principal axes" else one
            options = comparison.Options(extras=False)
            pair = comparison.measure(own, other, options)
            controls = [
                (n, [bench.pair(a.name, n)])
                for n in [m.name for m in usable if m.family == a.family and m not in (a, b)][:2]
            ]
            yield judged(pair, f"turned: {kind}", (a.seed, b.seed), "tied" in a.family, controls)
            shutil.rmtree(where)


def summary(found: list[Row]) -> dict[str, Any]:
    """Labels by kind, signs, bounds by root, and whether p-values are too small."""
    out: dict[str, Any] = {}
    for kind in dict.fromkeys(row.kind for row in found):
        some = [row for row in found if row.kind == kind]
        out[kind] = {
            "pairs": len(some),
            "both tied": sum(row.tied for row in some),
            "labels": dict(Counter(row.label for row in some)),
            "labels with controls": dict(Counter(row.label_with_controls for row in some)),
            "with signs of tampering": sum(bool(row.signs) for row in some),
            "with signs, with controls": sum(bool(row.signs_with_controls) for row in some),
            "roots": len({seed for row in some for seed in row.roots}),
            "smallest p": {n: min(r.p[n] for r in some if n in r.p) for n in {n for r in some for n in r.p}},
            "largest statistic": {
                n: max(r.statistic[n] for r in some if n in r.p) for n in {n for r in some for n in r.p}
            },
            "largest margin": max((r.margin for r in some if r.margin is not None), default=None),
        }
        if kind != "same seed":
            roots = out[kind]["roots"]
            out[kind]["KS, p of p-values too small"] = {
                name: float(
                    stats.kstest([r.p[name] for r in some if name in r.p], "uniform", alternative="greater").pvalue
                )
                for name in out[kind]["smallest p"]
            }
            out[kind]["false accusation below, by root"] = evidence.false_positive_bound(roots // 2)
            out[kind]["false accusation below, if pairs were independent"] = evidence.false_positive_bound(len(some))
    return out


def commit() -> str:
    """The commit that is measured."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def remarkable(row: Row) -> bool:
    """A pair of strangers of which something was said."""
    return row.kind != "same seed" and {row.label, row.label_with_controls} != {"no evidence found"}


def main(words: list[str] | None = None) -> int:
    """Train, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--strangers", type=int, default=2000)
    parser.add_argument("--rotated", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), help="these families alone")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    every = [m for m in members() if m.family in options.only]
    made(options.directory, every)
    if options.train_only:
        return 0
    bench = Bench(options.directory, {m.name: m for m in every}, {}, {})
    started = time.process_time()
    found = []
    for row in rows(bench, options.strangers, options.rotated, np.random.default_rng(options.seed)):
        found.append(row)
        if len(found) % 200 == 0:
            print(f"{len(found)} pairs, {time.process_time() - started:.0f} CPU s", file=sys.stderr, flush=True)
    body = {
        "command": "python benchmarks/lineage/strangers.py " + " ".join(words or sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "CPU seconds": round(time.process_time() - started),
        "models": len(every),
        "roots": len({m.seed for m in every}),
        "summary": summary(found),
        "not none": [asdict(row) for row in found if remarkable(row)],
    }
    if options.out:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
