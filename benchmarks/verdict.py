"""How often the verdict of `fathom compare` claims what is not so: simulated experiments whose truth is known.

    python benchmarks/verdict.py --out benchmarks/results/verdict.json

Final losses are drawn; whatever follows is the code that makes a report.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fathom.experiments.compare_results import ArmResult, CacheBytes, RunRow, TrainingLoss, Validation
from fathom.experiments.differences import compare_runs, share_of_gain
from fathom.report.provenance import provenance
from fathom.report.statistics import adjust, paired_difference

Values = dict[str, Any]
SEEDS = (3, 5)
FAR = -1000.0
"""A true difference that cannot be missed."""
COVERED_SEEDS = (3, 5, 10)
LOOKS = ((3, 3), (3, 4), (3, 5), (3, 10), (3, 20))
"""Seeds at the first look and at the last."""
GAINS = (1.0, 3.0, 10.0)
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


def arms_of(losses: np.ndarray, names: Sequence[str] = ()) -> list[ArmResult]:
    """Arms whose runs have these final losses and nothing else; `names` are of mechanisms."""
    nothing = {"tokens": 0, "domains": {}, "position_loss": [], "directory": "", "seconds": 0.0, "epochs": 0.0}
    curves = {"machine": None, "validation": Validation([], [], [], []), "training_loss": TrainingLoss([], [])}
    return [
        ArmResult(
            **{"name": f"arm{i}", "mechanism": names[i] if names else "vanilla", "overrides": ()},
            **{"parameters": 1, "flops_per_token": 1.0, "cache_bytes_per_token": CacheBytes(0, None), "steps": 1},
            **{"tokens": 1, "training_flops": 1.0, "measured": None},
            runs=[RunRow(loss=loss, bits_per_byte=loss, seed=k, **nothing, **curves) for k, loss in enumerate(row)],
        )
        for i, row in enumerate(losses.tolist())  # [arms, seeds]
    ]


def experiments(truth: Sequence[float], seeds: int, draws: int) -> Iterator[list[ArmResult]]:
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
        families = [[arm.gap for arm in arms[1:]], between]
        equal = [arm.gap for arm in arms[1:] if mean[arm.name] == truth[0]]
        equal += [row for row in between if mean[row.a] == mean[row.b]]
        wrong += any(gap.significant for gap in equal)
        for family in families:
            adjust(family)
        former += any(gap.significant for gap in equal)
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


def share(gain: float, seeds: int, draws: int) -> Values:
    """How often the interval of a true share of 50 % holds it, and how often there is one.

    `gain` is depth_attention's, in standard deviations of the noise of one run. An interval without bounds holds
    everything; `of_bounded` counts the others alone.
    """
    chance = np.random.default_rng([seeds, round(10 * gain)])
    truth = np.array([0, -gain / 2, -gain])[None, :, None]
    bounded = held = 0
    naive = []
    for losses in truth + chance.normal(size=(draws, 3, seeds)):
        arms = arms_of(losses, ("vanilla", "uniform_depth", "depth_attention"))
        found = share_of_gain(arms, compare_runs(arms))
        assert found is not None
        bounded += found.low is not None
        held += found.low is not None and found.low <= 0.5 <= found.high
        naive.append(found.share)
    return {
        **{"gain": gain, "seeds": seeds, "bounded": bounded / draws},
        **{"held": 1 - (bounded - held) / draws, "of_bounded": held / bounded if bounded else None},
        "shares_said": [round(x, 3) for x in np.quantile([x for x in naive if x is not None], [0.05, 0.95])],
    }


def shares(draws: int) -> list[Values]:
    """Intervals of a share, for gains of several sizes."""
    rows = [share(gain, seeds, draws) for gain in GAINS for seeds in SEEDS]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


@dataclass(frozen=True)
class NoiseShape:
    """A distribution of paired differences for simulations of interval coverage."""

    words: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    mean: float


NOISE = {
    "normal": NoiseShape("normal", lambda chance, shape: chance.normal(size=shape), 0.0),
    "skewed": NoiseShape("skewed (exponential)", lambda chance, shape: chance.exponential(size=shape), 1.0),
    "outliers": NoiseShape(
        "normal but for one in ten that lies ten standard deviations to one side",
        lambda chance, shape: chance.normal(size=shape) + 10 * (chance.random(shape) < 0.1),
        1.0,
    ),
}
"""Distributions by name. Those that are not normal are skewed, since symmetric outliers only widen the interval."""


def covered(draws: int) -> list[Values]:
    """How often the interval holds the true mean, differences being normal, skewed or with outliers."""
    rows = []
    for name, noise in NOISE.items():
        for seeds in COVERED_SEEDS:
            gaps = noise.draw(np.random.default_rng([seeds, 1]), (draws, seeds)).tolist()
            missed = sum(paired_difference(row, [noise.mean] * seeds).excludes_zero for row in gaps)
            rows.append({"differences": name, "seeds": seeds, "coverage": 1 - missed / draws})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def stopping(draws: int) -> list[Values]:
    """One arm that does nothing: how often its interval excludes zero at some look, from `first` seeds on."""
    rows = []
    for first, most in LOOKS:
        wrong = 0
        for gaps in np.random.default_rng([first, most]).normal(size=(draws, most)).tolist():
            looks = range(first, most + 1)
            wrong += any(paired_difference(gaps[:n], [0.0] * n).excludes_zero for n in looks)
        rows.append({"first": first, "most": most, "looks": most - first + 1, "false_claims": wrong / draws})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000, help="simulated experiments for each number")
    parser.add_argument("--out", type=Path, help="write the results there too")
    options = parser.parse_args()
    start = time.perf_counter()
    results = {**vars(provenance()), "draws": options.draws}
    results |= {"families": families(options.draws), "shares": shares(options.draws)}
    results |= {"coverage": covered(options.draws), "stopping": stopping(options.draws)}
    results["seconds"] = round(time.perf_counter() - start)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
