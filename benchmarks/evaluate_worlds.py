"""How often `fathom evaluate` is sure of a difference that is not there, and how often it sees one that is.

    python benchmarks/evaluate_worlds.py --out LOG [--before CHECKOUT]

In each world two checkpoints are equal on average. A difference is false if its interval excludes zero and no mark says
that few documents decide it. Power is that of a true difference on documents of equal length, beside another checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fathom.evaluation.paired import Items, rows
from fathom.report.files import write_json
from fathom.report.provenance import provenance

Draw = np.random.Generator


class World(NamedTuple):
    """One experiment: differences, weights, and what their items belong to."""

    gaps: np.ndarray
    weights: np.ndarray | None = None
    clusters: list[object] | None = None


def lengths(draw: Draw, count: int, spread: float = 1.0) -> World:
    """Documents of unequal length, whose difference varies less the longer they are."""
    weights = 300 * draw.lognormal(0, spread, count)
    return World(weights**0.75 * draw.normal(size=count), weights)


def lognormal(draw: Draw, count: int) -> World:
    """Differences with a long tail, of mean zero."""
    return World(draw.lognormal(0, 1.5, count) - np.exp(1.5**2 / 2))


def clustered(draw: Draw, count: int, size: int) -> World:
    """Items in clusters, with an intraclass correlation of 0.2, that name their cluster."""
    shared = np.repeat(draw.normal(size=count // size), size)
    own = draw.normal(size=count)
    return World(np.sqrt(0.2) * shared + np.sqrt(0.8) * own, None, [n // size for n in range(count)])


WORLDS: dict[str, Callable[[Draw], World]] = {
    "5 documents of unequal length": lambda draw: lengths(draw, 5),
    "10 documents of unequal length": lambda draw: lengths(draw, 10),
    "30 documents of unequal length": lambda draw: lengths(draw, 30),
    "200 documents of unequal length": lambda draw: lengths(draw, 200),
    "10 documents, lognormal": lambda draw: lognormal(draw, 10),
    "30 documents, lognormal": lambda draw: lognormal(draw, 30),
    "200 documents, lognormal": lambda draw: lognormal(draw, 200),
    "200 items in clusters of 10": lambda draw: clustered(draw, 200, 10),
    "200 items in clusters of 20": lambda draw: clustered(draw, 200, 20),
    "600 items in clusters of 20": lambda draw: clustered(draw, 600, 20),
}
PLAIN: dict[str, Callable[[Draw], World]] = {
    f"{count} plain documents, a difference of {size}": (
        lambda draw, count=count, size=size: World(size + draw.normal(size=count))
    )
    for count, size in ((30, 0.55), (60, 0.4), (200, 0.2))
}


def sure(world: World) -> bool:
    """Whether the comparison claims a difference."""
    known = world.clusters is not None and "clusters" in Items.__dataclass_fields__
    given: dict[str, Any] = {"clusters": world.clusters} if known else {}
    weights = None if world.weights is None else world.weights.tolist()
    ours, zero = (Items(values.tolist(), weights, **given) for values in (world.gaps, np.zeros(len(world.gaps))))
    (row,) = rows({"base": {("task", "score"): [zero]}, "new": {("task", "score"): [ours]}})
    gap = row.differences["new"]
    if gap.low is None or gap.high is None or getattr(gap, "skewed", False):
        return False
    return gap.low > 0 or gap.high < 0


def shares(draws: int) -> dict[str, float]:
    """The share of experiments in which a difference is claimed, by world."""
    return {
        name: sum(sure(world(np.random.default_rng([1, number]))) for number in range(draws)) / draws
        for name, world in {**WORLDS, **PLAIN}.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3000)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {**vars(provenance()), "draws": options.draws, "now": shares(options.draws)}
    if options.before:
        place = os.pathsep.join([str(options.before.resolve() / "src"), str(Path(__file__).parent)])
        program = f"import json, evaluate_worlds; print(json.dumps(evaluate_worlds.shares({options.draws})))"
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": place}, stdout=subprocess.PIPE, check=True
        )
        found["before"] = json.loads(done.stdout)
    before = found.get("before", {})
    for name, share in found["now"].items():
        print(f"{name}: {100 * share:.1f} %", f"before {100 * before[name]:.1f} %" if before else "")
    if options.out:
        write_json(options.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
