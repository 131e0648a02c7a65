"""Strangers of many recipes: is a lineage said of any, and how often is "no evidence found" said?

    python benchmarks/lineage/bystanders.py --directory bystanders --rows bystanders.jsonl --out lineage-bystanders.json

Every model starts from its own seed, except in the recipes of one seed. Within a recipe the models share what the
recipe names: a formula of the start, data and order, a teacher, a frozen embedding. Formulas are compared rotated too.
A further run with the same --rows goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from strangers import commit
from torch import Tensor

import tiny
from fathom.lineage import comparison, evidence, open_weights, verdict
from fathom.lineage.attacks import attack
from tiny import How, Parameters, Run, Shape

SHAPE = Shape()
STEPS = 80
ACCUSED = {verdict.SHARED, verdict.INITIALISATION, verdict.PARTIAL}
Start = Callable[[Parameters, np.random.Generator], None]


def _matrices(p: Parameters) -> list[str]:
    return [name for name, value in p.items() if value.ndim == 2 and name[0].isdigit()]


def _formula(make: Callable[[int, int], Tensor]) -> Start:
    def start(p: Parameters, draw: np.random.Generator) -> None:
        for name in _matrices(p):
            noise = torch.from_numpy(draw.normal(size=tuple(p[name].shape))).float()
            p[name] = make(*p[name].shape) * 0.1 + 0.002 * noise

    return start


def _hadamard(rows: int, columns: int) -> Tensor:
    out = torch.ones(1, 1)
    while len(out) < max(rows, columns):
        out = torch.cat([torch.cat([out, out], 1), torch.cat([out, -out], 1)])
    return out[:rows, :columns] / columns**0.5


def _sinusoid(p: Parameters, draw: np.random.Generator) -> None:
    rows, width = p["embed"].shape
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    noise = torch.from_numpy(draw.normal(size=(rows, width))).float()
    p["embed"] = 0.02 * torch.cat([angles.sin(), angles.cos()], 1) + 0.0005 * noise


def _orthogonal(p: Parameters, draw: np.random.Generator) -> None:
    for name in _matrices(p):
        noise = torch.from_numpy(draw.normal(size=(max(p[name].shape),) * 2)).float()
        p[name] = torch.linalg.qr(noise)[0][: p[name].shape[0], : p[name].shape[1]] * 0.2


def _mup(p: Parameters, draw: np.random.Generator) -> None:
    """Matrices of size 1/√fan-in, an output head of zeros."""
    for name in _matrices(p):
        noise = torch.from_numpy(draw.normal(size=tuple(p[name].shape))).float()
        p[name] = noise / p[name].shape[1] ** 0.5
    p["head"] = 0 * p["head"]


def _zero_outputs(p: Parameters, draw: np.random.Generator) -> None:
    for name in (n for n in _matrices(p) if n.endswith((".o", ".down"))):
        p[name] = 0 * p[name]


def _low_rank(p: Parameters, draw: np.random.Generator) -> None:
    for name in _matrices(p):
        left, right = (torch.from_numpy(draw.normal(size=(n, 16))).float() for n in p[name].shape)
        p[name] = 0.01 * left @ right.T


@dataclass(frozen=True)
class Recipe:
    """How some strangers are made."""

    count: int = 8
    steps: int = STEPS
    seed: int | None = None  # of every model, in place of one of its own
    start: Start = field(default=lambda p, draw: None)
    shape: Shape = SHAPE
    same_order: bool = False
    how: How = field(default_factory=How)
    teacher: str = ""  # logits | states | embedding
    ordinary: bool = True  # whether "no evidence" is expected of nearly all
    turned: bool = False  # compared with a rotated one too


RECIPES = {
    "plain": Recipe(20),
    "other tokenizer": Recipe(shape=Shape(vocab=384)),
    "same data and order": Recipe(same_order=True),
    "tied": Recipe(shape=Shape(tied=True)),
    "muP": Recipe(start=_mup),
    "orthogonal": Recipe(start=_orthogonal),
    "zero outputs": Recipe(start=_zero_outputs),
    "low rank": Recipe(start=_low_rank),
    "heavy decay": Recipe(how=How(decay=1.0)),
    "qwen3": Recipe(shape=Shape("qwen3")),
    "identity": Recipe(start=_formula(torch.eye), ordinary=False, turned=True),
    "hadamard": Recipe(start=_formula(_hadamard), ordinary=False, turned=True),
    "sinusoid": Recipe(start=_sinusoid, ordinary=False, turned=True),
    "student of logits": Recipe(teacher="logits"),
    "student of states": Recipe(steps=240, teacher="states", ordinary=False),
    "frozen embedding": Recipe(teacher="embedding", ordinary=False),
    "student of states, long": Recipe(4, steps=450, teacher="states", ordinary=False),
    "hadamard, long": Recipe(4, steps=300, start=_formula(_hadamard), ordinary=False, turned=True),
    "one seed": Recipe(seed=9000, ordinary=False),
    "one seed, no decay": Recipe(seed=9000, how=How(decay=0.0), ordinary=False),
}
ONE_SEED = ("one seed", "one seed, no decay", "one seed and order")
"""Recipes whose models are no strangers; those of the last differ in their weight decay alone."""


def _teaching(kind: str, teacher: Parameters, shape: Shape) -> Callable[[Parameters, Tensor], Tensor]:
    """The loss of a student: the teacher's scores, or its embedding and hidden states as in TinyBERT."""

    def loss(p: Parameters, ids: Tensor) -> Tensor:
        own = tiny.hidden(p, shape, ids[..., :-1])
        wide = {name: value.expand(len(ids), *value.shape) for name, value in teacher.items()}
        with torch.no_grad():
            theirs = tiny.hidden(wide, shape, ids[..., :-1])
        if kind == "states":
            pairs = zip(own, theirs, strict=True)
            return sum(((a - b).square().mean((1, 2)) / b.square().mean((1, 2))) for a, b in pairs)  # type: ignore[return-value]
        target = tiny.scores(wide, shape, theirs[-1]).softmax(-1)
        return -(target * tiny.scores(p, shape, own[-1]).log_softmax(-1)).sum(-1).mean(1)

    return loss


def made(directory: Path, only: Sequence[str], seconds: float) -> dict[str, list[Path]]:
    """Train what is not there. The teacher is the first plain model."""
    seeds = itertools.count(5000)
    out: dict[str, list[Path]] = {}
    teacher: Parameters = {}
    for name, recipe in RECIPES.items():
        own = [next(seeds) if recipe.seed is None else recipe.seed for _ in range(recipe.count)]
        out[name] = [directory / f"{name.replace(' ', '-')}-{at}" for at in range(recipe.count)]
        kept = directory / f"{name.replace(' ', '-')}.pt"
        if name in only and not kept.exists():
            if time.process_time() > seconds:
                raise SystemExit(f"{name} and what follows is not trained yet: run the same command again")
            started = time.process_time()
            tokens, tokenizer = tiny.tokenised(directory, recipe.shape.vocab)
            p, losses = _trained(recipe, own, tokens, teacher)
            for at, path in enumerate(out[name]):
                tiny.write(path, recipe.shape, tiny.tensors_of(p, recipe.shape, at), tokenizer)
            torch.save(p, kept)
            print(f"{name}: loss {np.mean(losses):.2f}, {time.process_time() - started:.0f} CPU s", file=sys.stderr)
        if name == "plain" and kept.exists():
            teacher = {role: value[0] for role, value in torch.load(kept).items()}
    for name in ("student of logits", "student of states", "student of states, long"):
        out[name].append(out["plain"][0])
    return out


def _trained(recipe: Recipe, seeds: list[int], tokens: Tensor, teacher: Parameters) -> tuple[Parameters, list[float]]:
    starts = [tiny.initial(recipe.shape, seed) for seed in seeds]
    for seed, start in zip(seeds, starts, strict=True):
        recipe.start(start, np.random.default_rng(seed))
    p = {role: torch.stack([start[role] for start in starts]) for role in starts[0]}
    how = recipe.how
    if recipe.teacher == "embedding":
        p["embed"] = teacher["embed"].repeat(len(seeds), 1, 1)
        how = How(frozen=frozenset({"embed"}))
    elif recipe.teacher:
        how = How(loss=_teaching(recipe.teacher, teacher, recipe.shape))
    runs = [Run(seed, tokens, order=0 if recipe.same_order else seed + at) for at, seed in enumerate(seeds)]
    return tiny.trained(recipe.shape, runs, recipe.steps, p, how=how)


def pairs(
    paths: dict[str, list[Path]], only: Sequence[str], across: int, where: Path
) -> Iterator[tuple[str, Path, Path]]:
    """All pairs within each recipe, rotated ones of formulas, and ordinary pairs across recipes."""
    for name, some in ((name, paths[name]) for name in only):
        for a, b in itertools.combinations(some, 2):
            yield name, a, b
            if RECIPES[name].turned:
                other = where / f"{b.name}-rotated"
                if not other.exists():
                    attack(open_weights(b), ("rotate",), other, seed=len(b.name), dtype="float64")
                yield f"{name}, rotated", a, other
    draw = np.random.default_rng(0)
    ordinary = [name for name in only if RECIPES[name].ordinary and not RECIPES[name].teacher]
    for _ in range(across):
        one, other = draw.choice(ordinary, 2, replace=False)
        yield "across recipes", paths[one][draw.integers(8)], paths[other][draw.integers(8)]
    if set(ONE_SEED[:2]) <= set(only):
        for a, b in zip(paths[ONE_SEED[0]], paths[ONE_SEED[1]], strict=True):
            yield ONE_SEED[2], a, b


def main(words: list[str] | None = None) -> int:
    """Train, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--across", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=3600, help="of processor time, after which this run ends")
    parser.add_argument("--controls", type=int, default=0, help="plain models as controls")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), help="these recipes")
    parser.add_argument("--rows", type=Path, required=True, help="one line a pair; a further run adds its own")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    paths = made(options.directory, options.only, options.seconds)
    known = options.rows.read_text().splitlines() if options.rows.exists() else []
    done = {(row["recipe"], *row["pair"]) for row in map(json.loads, known)}
    for number, (recipe, a, b) in enumerate(pairs(paths, options.only, options.across, options.directory / "rotated")):
        if (recipe, a.name, b.name) in done:
            continue
        if time.process_time() > options.seconds:
            break
        done.add((recipe, a.name, b.name))
        controls = [p for p in paths["plain"] if p not in (a, b)][: options.controls]
        quiet = comparison.Options(extras=False, nonce=number)
        found = comparison.compare(open_weights(a), open_weights(b), controls, None, quiet)
        tests = {test.name: [test.statistic, test.p] for test in found.tests if test.p < 0.01}
        row = {"recipe": recipe, "pair": [a.name, b.name], "label": found.verdict.label, "tests": tests}
        row["seed named"] = verdict.SEED_AND_ORDER in found.verdict.alternatives
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    body = summary(rows, words or sys.argv[1:])
    if options.out:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))
    return 0


def summary(rows: list[dict[str, Any]], words: Sequence[str]) -> dict[str, Any]:
    """Labels by recipe, and every pair of which something was said."""
    usual = [r for r in rows if r["recipe"] == "across recipes" or getattr(RECIPES.get(r["recipe"]), "ordinary", False)]
    apart = [row for row in rows if row["recipe"] not in ONE_SEED]
    accused = [row for row in apart if row["label"] in ACCUSED]
    roots = sum(recipe.count for recipe in RECIPES.values() if recipe.seed is None)
    return {
        "command": "python benchmarks/lineage/bystanders.py " + " ".join(words),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "pairs of strangers": len(apart),
        "strangers": roots,
        "pairs of one seed": len(rows) - len(apart),
        "of those shared lineage": sum(row["label"] == verdict.SHARED for row in rows if row not in apart),
        "of those with one seed and order named": sum(row["seed named"] for row in rows if row not in apart),
        "labels": {name: dict(Counter(r["label"] for r in rows if r["recipe"] == name)) for name in _names(rows)},
        "accused": len(accused),
        "accusation below, by root": evidence.false_positive_bound(roots // 2) if not accused else None,
        "ordinary pairs": len(usual),
        "of those no evidence": sum(row["label"] == verdict.NONE for row in usual),
        "not none": [row for row in rows if row["label"] != verdict.NONE],
    }


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["recipe"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
