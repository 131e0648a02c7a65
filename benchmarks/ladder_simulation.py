"""What the intervals of `fathom ladder` are worth: simulated ladders whose truth is known.

    python benchmarks/ladder_simulation.py --out benchmarks/results/ladder-simulation.json

Losses are drawn; whatever follows is the code that makes a report. The usual fit, a law for each arm resampled over
seeds, stands beside it to be seen to fail.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fathom.experiments import scaling
from fathom.experiments.iteration_worth import Looped, worth
from fathom.experiments.scaling import DECADE, Rung, agree, horizontal, posterior
from fathom.experiments.simulation import Truth, simulate
from fathom.report.provenance import provenance
from fathom.report.statistics import holm

Values = dict[str, Any]
WALKING = Truth(multiplier=1.0, own=0.0, walk=0.006)
"""An arm that equals the control but for a deviation that walks, as a rate that is carried slightly wrong makes it."""
CASES = {
    "reference": Truth(),
    "seed noise only": Truth(shared=0.0, own=0.0),
    "own deviation .006": Truth(own=0.006),
    "seed control, M = 1": Truth(multiplier=1.0, own=0.0),
    "growing, g = .08": Truth(growth=0.08),
    "flat law, M 1.5": Truth(floor=1.6, slope=0.09, multiplier=1.5),
    "few seeds": Truth(seeds=(2, 2, 1, 1)),
    "toy": Truth(sigma=(0.02, 0.006), shared=0.02, own=0.006),
    "other floor": Truth(arm_floor=1.67),
    "three rungs, 1 decade": Truth(decades=1.0, seeds=(5, 3, 3)),
    "five rungs, 2 decades": Truth(decades=2.0, seeds=(5, 3, 3, 2, 1)),
    "a loop, three times the FLOPs": Truth(ratio=3.0, multiplier=0.5),
    "mis-tuned at the top": Truth(excess=(0.005, 0.012)),
    "walk of .006 a rung, M = 1": WALKING,
}
PUBLISHED = {"reference": 1.05, "seed noise only": 1.04, "own deviation .006": 1.07, "seed control, M = 1": 1.03} | {
    **{"growing, g = .08": 1.05, "flat law, M 1.5": 1.14, "few seeds": 1.06, "toy": 1.14, "other floor": 1.05},
    **{"three rungs, 1 decade": 1.08, "five rungs, 2 decades": 1.05},
}
"""Half-widths at the last rung that an independent simulation of the same cases found."""
PHI_NOISE = {"seeds": (0.003, 0.003, 0.0), "and cells": (0.003, 0.003, 0.01), "toy": (0.008, 0.005, 0.01)}
PHI = 0.46
"""φ of the simulated loops."""


def simulate_trips(
    draw: int,
    noise: tuple[float, float, float],
    budgets: tuple[float, ...] = (10.0, 40.0),
    trips: tuple[int, ...] = (1, 2, 3, 6),
    phi: float = PHI,
) -> list[Looped]:
    """Simulated models of eight effective layers, six of them in the loop, at four widths.

    Args:
        draw: The seed.
        noise: Standard deviations over seeds, of a run's own deviation, and of its cell's.
        budgets: Tokens per parameter of the model that makes one trip.
        trips: Numbers of trips, each through 6 / trips layers.
        phi: The true φ.
    """
    chance = np.random.default_rng([draw, 25])
    runs = []
    for width in (64, 96, 128, 192):
        layer = 12.0 * width**2
        for budget in budgets:
            tokens, cell = budget * 8 * layer, noise[2] * chance.normal()
            for r in trips:
                size = 2 * layer + r**phi * 6 * layer / r
                law = 1.7 + 1.3 * (size / 393_216) ** -0.34 + 1.3 * (tokens / 3_932_160) ** -0.28
                loss = law + cell + math.hypot(*noise[:2]) * chance.normal()
                runs.append(Looped(2 * layer, 6 * layer / r, r, tokens, loss, f"{width}x{budget:g}"))
    return runs


def covered(truth: Truth, draws: int, usual: bool = True) -> Values:
    """Share of 95 % intervals that hold the truth, and their median half-widths as factors."""
    top = float(truth.x[-1]) + math.log(truth.ratio)
    places = {"last rung": top, "half a decade on": top + DECADE / 2, "a decade on": top + DECADE}
    hits: dict[str, int] = {}
    widths: dict[str, list[float]] = {}
    apart = 0
    for draw in range(draws):
        rungs = simulate(truth, draw)
        fit, line = posterior(rungs), horizontal(rungs)
        rows: dict[str, tuple[float, tuple[float, float] | None]] = {}
        for name, x in places.items():
            value, cross = truth.log_multiplier(x), line.interval(x)
            rows[f"grid, {name}"] = value, ends(fit.log_multiplier(x))
            rows[f"line, {name}"] = value, cross and cross[1:]
        rows["grid, trend"] = truth.trend * DECADE, ends(fit.growth * DECADE)
        if usual:
            rows["usual, last rung"] = truth.log_multiplier(top), usual_interval(rungs, top)
        both = rows["grid, last rung"][1], rows["line, last rung"][1]
        apart += both[0] is not None and both[1] is not None and not agree(both[0], both[1])
        for name, (value, found) in rows.items():
            if found is None:
                continue
            hits[name] = hits.get(name, 0) + (found[0] <= value <= found[1])
            widths.setdefault(name, []).append((found[1] - found[0]) / 2)
    return {
        "draws": draws,
        "covered": {name: count / draws for name, count in hits.items()},
        "half_width": {name: math.exp(float(np.median(found))) for name, found in widths.items()},
        "estimators_disagree": apart / draws,
    }


def usual_interval(rungs: Sequence[Rung], x: float, draws: int = 200) -> tuple[float, float]:
    """The usual method: a law for each arm, resampled over seeds. Kept as a negative control, which must fail.

    Args:
        rungs: A ladder.
        x: ln FLOPs of the arm at which ln M is wanted.
        draws: Bootstrap samples.

    Returns:
        The ends of its "95 %" interval of ln M.
    """
    chance = np.random.default_rng(0)
    x_v, x_a = (np.array([getattr(rung, name) for rung in rungs]) for name in ("x_control", "x_arm"))
    picked = [chance.integers(rung.seeds, size=(draws, rung.seeds)) for rung in rungs]
    v, a = (
        np.stack([np.array(getattr(rung, name))[pick].mean(1) for rung, pick in zip(rungs, picked, strict=True)], 1)
        for name in ("control", "arm")
    )
    floor_v, line_v = _own_law(x_v, v)
    floor_a, line_a = _own_law(x_a, a)
    loss = floor_a + np.exp(line_a[:, 0] + line_a[:, 1] * x)
    reached = (np.log(np.maximum(loss - floor_v, 1e-9)) - line_v[:, 0]) / line_v[:, 1]
    low, high = np.quantile(reached - x, [0.025, 0.975])
    return float(low), float(high)


def _own_law(x: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Floor [S] and line [S, 2] of ln(loss - floor) by least squares of the loss, for every row of losses."""
    shares = np.linspace(0.0, 0.98, 99)
    floors = shares[None, :] * losses.min(1)[:, None]  # [S, F]
    reducible = losses[:, None, :] - floors[:, :, None]  # [S, F, R]
    y, w = np.log(reducible), reducible**2
    mean_x, mean_y = ((w * part).sum(-1) / w.sum(-1) for part in (x, y))
    dx, dy = x - mean_x[..., None], y - mean_y[..., None]
    slope = (w * dx * dy).sum(-1) / (w * dx * dx).sum(-1)
    left = (w * (dy - slope[..., None] * dx) ** 2).sum(-1)
    best = left.argmin(1)[:, None]
    floor, intercept, fall = (
        np.take_along_axis(values, best, 1)[:, 0] for values in (floors, mean_y - slope * mean_x, slope)
    )
    return floor, np.stack([intercept, fall], 1)


def ends(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def false_claims(truth: Truth, draws: int, arms: int = 3) -> float:
    """Share of ladders of arms that equal the control in which Holm's rule calls any of them sure."""
    wrong = 0
    for draw in range(draws):
        ladders = [simulate(truth, draw * arms + arm) for arm in range(arms)]
        control = [rung.control for rung in ladders[0]]
        found = []
        for ladder in ladders:
            own = [shifted(rung, ladders[0][i]) for i, rung in enumerate(ladder)]
            rungs = [Rung(r.x_control, c, r.x_arm, a) for r, c, a in zip(ladder, control, own, strict=True)]
            found.append(posterior(rungs).sides(rungs[-1].x_arm))
        wrong += min(holm(found)) < 0.05
    return wrong / draws


def without_walk(draws: int) -> Values:
    """The same where the estimator knows of no walk: the negative control, and the width that the walk costs."""
    with mock.patch.object(scaling, "WALK", (0.0, 1e-9)):
        widths = {
            name: covered(CASES[name], draws, usual=False) for name in ("reference", "walk of .006 a rung, M = 1")
        }
        return {"cases": widths, "false_claims": false_claims(WALKING, draws)}


def shifted(rung: Rung, first: Rung) -> tuple[float, ...]:
    """An arm's losses as they would stand beside another ladder's control: with its deviations from its own."""
    return tuple(c + a - b for c, a, b in zip(first.control, rung.arm, rung.control, strict=True))


def power(draws: int) -> Values:
    """How often 1 is excluded at the last rung, or 0 by the trend."""
    found = {}
    for multiplier in (1.0, 1.05, 1.1):
        truth = Truth(multiplier=multiplier)
        count = 0
        for draw in range(draws):
            low, high = ends(posterior(simulate(truth, draw)).log_multiplier(float(truth.x[-1])))
            count += low > 0 or high < 0
        found[f"M {multiplier:g} excludes 1"] = count / draws
    return found


def phi_covered(draws: int) -> Values:
    """Coverage and half-width of φ in the design of two budgets."""
    found = {}
    for name, noise in PHI_NOISE.items():
        for trips in ((1, 3), (1, 2, 3, 6)):
            fits = [worth(simulate_trips(draw, noise, trips=trips)) for draw in range(draws)]
            found[f"{name}, {len(trips)} numbers of trips"] = {
                "covered": float(np.mean([fit.low <= PHI <= fit.high for fit in fits])),
                "half_width": float(np.median([(fit.high - fit.low) / 2 for fit in fits])),
                "median": float(np.median([fit.value for fit in fits])),
            }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400, help="simulated ladders of each case (default: 400)")
    parser.add_argument("--out", type=Path, help="where the log goes")
    options = parser.parse_args(arguments)
    began = time.process_time()
    report: Values = {**vars(provenance()), "draws": options.draws, "cases": {}}
    for name, truth in CASES.items():
        found = report["cases"][name] = covered(truth, options.draws)
        if name in PUBLISHED:
            found["independent_half_width"] = PUBLISHED[name]
        shares = found["covered"]
        print(
            f"{name:<32} grid {shares['grid, last rung']:.3f} {shares['grid, half a decade on']:.3f} "
            f"{shares['grid, a decade on']:.3f} trend {shares['grid, trend']:.3f}  "
            f"line {shares['line, last rung']:.3f}  "
            f"usual {shares['usual, last rung']:.3f}  "
            f"x {found['half_width']['grid, last rung']:.3f}",
            flush=True,
        )
    alike = {"independent deviations": Truth(multiplier=1.0), "walking deviations": WALKING}
    report["false_claims"] = {name: false_claims(truth, options.draws) for name, truth in alike.items()}
    report["without_walk"] = without_walk(options.draws)
    report["power"] = power(options.draws)
    report["phi"] = phi_covered(options.draws)
    report["cpu_seconds"] = time.process_time() - began
    print(
        json.dumps(
            {key: report[key] for key in ("false_claims", "without_walk", "power", "phi", "cpu_seconds")}, indent=1
        )
    )
    if options.out:
        options.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
