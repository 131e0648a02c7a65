"""Planted families: which edges does `fathom lineage tree` state, and are they right?

    python benchmarks/lineage/families.py --directory families --rows rows.jsonl --out lineage-families.json

Fifty families of six to twelve very small models. The first is trained from its own seed; the others are fine-tunes,
fine-tunes of these, a mean and its fine-tune, int8 and pruned copies, and permuted and rotated ones. Two strangers are
added to each. Every family is judged again without its first model, where a root would be wrong. A further run with
the same --rows goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edited
import numpy as np
import torch
from strangers import commit

import tiny
from checkpoints import Checkpoint
from fathom.lineage import open_weights, tree
from fathom.lineage.attacks import attack
from tiny import Parameters, Run, Shape

SHAPE = Shape(width=32, layers=4, heads=2, kv_heads=1, ffn=64, vocab=320, length=32)
FAMILIES, STEPS, TUNED, BATCH = 50, 150, 40, 25
TRAINED = {"a": "base", "b": "base", "c": "base", "aa": "a", "bb": "b", "ab": "a", "post": "mean"}
"""Fine-tunes, and what each was made from."""
EDITS = {"int8": "quantised to 8 bits", "sparse": "pruned", "turned": "permuted or rotated"}


@dataclass(frozen=True)
class Planted:
    """A family: its models, the parent of each that has one, and the merge with its parents."""

    models: tuple[str, ...]
    parents: dict[str, str]
    merge: tuple[str, str]


def planted(number: int) -> Planted:
    """What family a number gives: the base, a and b, their mean, and two to four others."""
    draw = np.random.default_rng([3, number])
    parents = {"a": "base", "b": "base"}
    others = ["c", "aa", "bb", "ab", "post", *EDITS]
    for name in draw.choice(others, int(draw.integers(2, 9)), replace=False):
        parents[str(name)] = TRAINED.get(str(name)) or str(draw.choice(["base", "a", "b"]))
    return Planted(("base", *parents, "mean"), parents, ("a", "b"))


def trained(directory: Path) -> Path:
    """The base and the fine-tunes of every family, trained in batches."""
    tokens, tokenizer = tiny.tokenised(directory, SHAPE.vocab)
    parts = (tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :])
    for first in range(0, FAMILIES, BATCH):
        known: dict[str, Parameters] = {}
        for place, name in enumerate(["base", *TRAINED]):
            paths = [directory / f"{number}" / name for number in range(first, first + BATCH)]
            kept = directory / f"{name}-{first}.pt"
            if not kept.exists():
                runs = [
                    Run(
                        first + at + 70_000,
                        parts[place % 2],
                        order=100 * place + at,
                        lr=3e-3 if name == "base" else 5e-4,
                    )
                    for at in range(BATCH)
                ]
                known["mean"] = {role: (known["a"][role] + known["b"][role]) / 2 for role in known.get("b", ())}
                start = known[TRAINED[name]] if name in TRAINED else None
                p, _ = tiny.trained(SHAPE, runs, STEPS if name == "base" else TUNED, start, rows=4)
                for at, path in enumerate(paths):
                    tiny.write(path, SHAPE, tiny.tensors_of(p, SHAPE, at), tokenizer)
                torch.save(p, kept)
                print(f"{name}: {time.process_time():.0f} CPU s", file=sys.stderr)
            known[name] = torch.load(kept)
    return tokenizer


def completed(directory: Path, number: int) -> Planted:
    """A family with its edited members."""
    found, here = planted(number), directory / str(number)
    for name in (n for n in found.models if not (here / n).exists()):
        if name == "mean":
            both = [Checkpoint.read(here / parent) for parent in found.merge]
            edited.merged(both, [0.5, 0.5]).write(here / name)
        elif name == "turned":
            kind = ("permute", "rotate")[number % 2]
            attack(open_weights(here / found.parents[name]), (kind, "neuron"), here / name, seed=number)
        else:
            source = Checkpoint.read(here / found.parents[name])
            (edited.quantised(source, 8) if name == "int8" else edited.sparse(source, 0.3)).write(here / name)
    return found


def judged(directory: Path, number: int) -> dict[str, Any]:
    """What the tree says of one family and two strangers, and of the root if the first model is missing."""
    found = completed(directory, number)
    strangers = [directory / str((number + step) % FAMILIES) / "base" for step in (7, 19)]
    where = [directory / str(number) / name for name in found.models]
    said = tree.tree([*where, *strangers])
    orphans = tree.tree(where[1:]).families[0]
    short = {str(directory / str(number) / name): name for name in found.models}
    edges, directed = [], []
    for family in said.families:
        for edge in family.edges:
            pair = (short.get(edge.a, "stranger"), short.get(edge.b, "stranger"))
            right = found.parents.get(pair[0]) == pair[1] or found.parents.get(pair[1]) == pair[0]
            edges.append({"edge": pair, "stated": not edge.undecided, "right": right, "why not": edge.undecided})
            if edge.direction.made:
                made, source = short[edge.direction.made], short[str(edge.direction.source)]
                directed.append({"made": made, "source": source, "right": found.parents.get(made) == source})
    merges = [
        {"child": short[merge.child], "parents": sorted(short[p] for p in merge.parents), "undecided": merge.undecided}
        for family in said.families
        for merge in family.merges
    ]
    whole = [sorted(short[m] for m in family.models) for family in said.families if len(family.models) > 1]
    alike = whole == [sorted(found.models)]
    return {
        "number": number,
        "models": found.models,
        "together": alike,
        "edges": edges,
        "directed": directed,
        "merges": merges,
        "root": [short[name] for family in said.families for name in family.root],
        "root without the first": [short[name] for name in orphans.root],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How much was stated, and how much of it is right."""
    edges = [edge for row in rows for edge in row["edges"]]
    stated = [edge for edge in edges if edge["stated"]]
    directed = [one for row in rows for one in row["directed"]]
    right = [m for row in rows for m in row["merges"] if m["child"] == "mean" and m["parents"] == ["a", "b"]]
    return {
        "families": len(rows),
        "sizes": [len(row["models"]) for row in rows],
        "families found whole and without strangers": sum(row["together"] for row in rows),
        "edges": len(edges),
        "edges stated": len(stated),
        "stated edges that are right": sum(edge["right"] for edge in stated),
        "undecided edges that are right": sum(edge["right"] for edge in edges if not edge["stated"]),
        "directions stated": len(directed),
        "directions that are right": sum(one["right"] for one in directed),
        "roots stated": sum(bool(row["root"]) for row in rows),
        "roots that are right": sum(row["root"] == ["base"] for row in rows),
        "roots stated as base or a copy of it in another order": sum(row["root"] == ["base", "turned"] for row in rows),
        "roots stated of families without their first": sum(bool(row["root without the first"]) for row in rows),
        "merges planted": len(rows),
        "merges found with their two parents": len(right),
        "other merges claimed": sum(len(row["merges"]) for row in rows) - len(right),
    }


def main(words: list[str] | None = None) -> int:
    """Train, draw trees, count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--count", type=int, default=FAMILIES)
    parser.add_argument("--seconds", type=float, default=3600, help="of processor time, after which this run ends")
    parser.add_argument("--rows", type=Path, required=True, help="one line a family; a further run adds its own")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    trained(options.directory)
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    for number in sorted({*range(options.count)} - {row["number"] for row in rows}):
        if time.process_time() > options.seconds:
            break
        rows.append(judged(options.directory, number))
        with options.rows.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    body = {
        "command": "python benchmarks/lineage/families.py " + " ".join(words or sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        **summary(rows),
        "stated and wrong": [
            [row["number"], *edge["edge"]]
            for row in rows
            for edge in row["edges"]
            if edge["stated"] and not edge["right"]
        ],
        "every": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
