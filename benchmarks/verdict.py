"""How often the verdict of `fathom compare` claims what is not so: simulated experiments whose truth is known.

    python benchmarks/verdict.py --out benchmarks/results/verdict.json

Final losses are drawn; whatever follows is the code that makes a report.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fathom.comparison.findings import compare_runs, is_sure
from fathom.report.provenance import provenance
from fathom.report.statistics import holm

Values = dict[str, Any]
SEEDS = (3, 5)
FAR = -1000.0
"""A true difference that cannot be missed."""
FAMILIES = {
    "1 arm, no difference": (0, 0),
    "2 arms, no difference": (0, 0, 0),
    "3 arms, no difference": (0, 0, 0, 0),
    "5 arms, no difference": (0,) * 6,
    "7 arms, no difference": (0,) * 8,
    "2 arms, equal to each other": (0, FAR, FAR),
    "3 arms, 2 of them equal to each other, 1 to the control": (0, FAR, FAR, 0),
    "7 arms, 2 of them equal to each other, 5 to the control": (0, FAR, FAR, 0, 0, 0, 0, 0),
}
"""True losses, the control's first."""


def arms_of(losses: np.ndarray) -> list[Values]:
    """Arms whose runs have these final losses and nothing else."""
    nothing = {"position_loss": [], "domains": {}, "training_loss": {"step": [], "loss": []}}
    return [
        {
            **{"name": f"arm{i}", "tokens": 1, "steps": 1, "parameters": 1, "position_loss": [], "domains": {}},
            "runs": [{"seed": k, "loss": loss, "bits_per_byte": loss, **nothing} for k, loss in enumerate(row)],
        }
        for i, row in enumerate(losses.tolist())  # [arms, seeds]
    ]


def experiments(truth: Sequence[float], seeds: int, draws: int) -> Iterator[list[Values]]:
    """Simulated comparisons: a true loss for each arm, what a seed does to all of them, and noise."""
    chance = np.random.default_rng([seeds, len(truth)])
    shared = 3 * chance.normal(size=(draws, 1, seeds))
    for losses in np.asarray(truth)[None, :, None] + shared + chance.normal(size=(draws, len(truth), seeds)):
        yield arms_of(losses)


def false_claims(truth: Sequence[float], seeds: int, draws: int) -> tuple[float, float]:
    """The share of reports that call a difference sure where there is none: as they are, and by the former rule.

    That rule had two families, the arms against the control and the arms among each other.
    """
    wrong = former = 0
    mean = {f"arm{i}": value for i, value in enumerate(truth)}
    for arms in experiments(truth, seeds, draws):
        between = compare_runs(arms)
        families = [[arm["difference"] for arm in arms[1:]], between]
        equal = [arm["difference"] for arm in arms[1:] if mean[arm["name"]] == truth[0]]
        equal += [row for row in between if mean[row["a"]] == mean[row["b"]]]
        wrong += any(map(is_sure, equal))
        for family in families:
            for row, p in zip(family, holm([row["p"] for row in family]), strict=True):
                row["p_holm"] = p
        former += any(map(is_sure, equal))
    return wrong / draws, former / draws


def families(draws: int) -> list[Values]:
    """False claims of whole reports, for several numbers of arms and seeds."""
    rows = []
    for name, truth in FAMILIES.items():
        for seeds in SEEDS:
            now, former = false_claims(truth, seeds, draws)
            rows.append({"experiment": name, "seeds": seeds, "false_claims": now, "two_families": former})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20_000, help="simulated experiments for each number")
    parser.add_argument("--out", type=Path, help="write the results there too")
    options = parser.parse_args()
    start = time.perf_counter()
    results = {**provenance(), "draws": options.draws, "families": families(options.draws)}
    results["seconds"] = round(time.perf_counter() - start)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
