"""A learning-rate probe: a run of warm-up alone, which finds the learning rates with the least gradient norm and loss.
Above the learning rate at which the gradient norm starts to rise, steps counteract each other. GeoGalactica chose its
learning rate there. A probe is one run without a control: a starting point, not the optimum.

The warm-up is in `optimizer.py`. A probe that diverges is reported too; `loop.py` ends it after `train.max_skipped`
skipped steps in a row, or `first_steps.py` if the loss rises soon after a start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fathom.recipe import Recipe
from fathom.report import html
from fathom.report.plots import Line
from fathom.report.provenance import Provenance, provenance
from fathom.training.hooks import Hook, ObservedRun
from fathom.training.tracking import read_metrics

SMOOTH = 0.05
"""Values are averaged over this share of the steps on either side, because single batches are noisy."""
LEAST = 20
"""Fewest steps of a probe."""


def is_probe(recipe: Recipe) -> bool:
    """Whether a run is a learning-rate probe, i.e. consists of warm-up alone."""
    return recipe.train.steps >= LEAST and recipe.optim.rising(recipe.train.steps) >= recipe.train.steps


@dataclass
class Probe:
    """The result of a probe."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """Smoothed losses, for every learning rate."""
    gradients: tuple[float, ...]
    """Smoothed gradient norms, for every learning rate."""
    loss: float = field(init=False)
    """The learning rate with the least smoothed loss."""
    gradient: float = field(init=False)
    """The learning rate with the least smoothed gradient norm."""
    steps: int = field(init=False)
    """Number of steps, each with another learning rate."""

    def __post_init__(self) -> None:
        self.loss = self.rates[self.losses.index(min(self.losses))]
        self.gradient = self.rates[self.gradients.index(min(self.gradients))]
        self.steps = len(self.rates)

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        return f"{str(self)[0].upper()}{str(self)[1:]}."

    def __str__(self) -> str:
        """The result as text."""
        return (
            f"over {self.steps} learning rates up to {self.rates[-1]:.2g} the gradient norm was least at "
            f"{self.gradient:.2g}, "
            f"the loss at {self.loss:.2g}: start with the smaller one, after a warm-up"
        )


def read_probe(run_dir: str | Path) -> Probe:
    """The result of a probe's run, from its metrics."""
    rows = read_metrics(Path(run_dir))
    steps = [row for row in rows if "grad_norm" in row and math.isfinite(row["loss"] + row["grad_norm"])]
    return find_edges(*([row[key] for row in steps] for key in ("lr", "loss", "grad_norm")))


def find_edges(rates: Sequence[float], losses: Sequence[float], gradients: Sequence[float]) -> Probe:
    """Find the minima of smoothed losses and gradient norms, given for rising learning rates."""
    if len(rates) < LEAST:
        raise ValueError(f"{len(rates)} steps are too few for a learning-rate probe: allowed: {LEAST} or more")
    width = max(2, round(SMOOTH * len(rates)))
    return Probe(tuple(rates), _smoothed(losses, width), _smoothed(gradients, width))


def _smoothed(values: Sequence[float], width: int) -> tuple[float, ...]:
    """Centred moving means of the values, over fewer values near both ends."""
    found = []
    for place in range(len(values)):
        reach = min(width, place, len(values) - 1 - place)
        near = values[place - reach : place + reach + 1]
        found.append(math.fsum(near) / len(near))
    return tuple(found)


class ProbeReport(Hook):
    """Prints and draws the result of a probe at its end, also if the run diverged."""

    def after_run(self, run: ObservedRun, error: BaseException | None) -> None:
        """Read the metrics of all calls of the run, then print and draw the probe's result."""
        try:
            found = read_probe(run.run_dir)
        except (OSError, ValueError):
            return  # it ended too early, which the run reports
        run.say(str(found))
        source = provenance()
        html.write(run.run_dir, {**vars(source), "verdict": str(found), **vars(found)}, page(found, source))


def page(found: Probe, source: Provenance) -> str:
    """The page of a probe that may have diverged; a finished run's page, which shows the same figures, replaces it."""
    where = html.section("Where it comes from", html.source(source))
    return html.page("Learning-rate probe", found.sentence, *figures(found), where)


def figures(found: Probe) -> list[str]:
    """The figures of a probe on a run's page: gradient norm and loss by learning rate."""
    x = [math.log10(rate) for rate in found.rates]
    drawn = []
    for title, values, at in (
        ("Gradient norm", found.gradients, found.gradient),
        ("Loss", found.losses, found.loss),
    ):
        edge = found.rates.index(at)
        lines = [
            Line(title, x, values, 0, marks=False),
            Line(f"least, at {at:.2g}", [x[edge]], [values[edge]], 1, joined=False),
        ]
        words = f"Least at a learning rate of {at:.2g}."
        drawn.append(html.plot(title, lines, ("learning rate, log10", title.lower()), words, words, x_from_zero=False))
    reading = [
        f"Every step has another learning rate; curves are means over {100 * SMOOTH:.0f} % of the steps on either "
        "side.",
        "Above the learning rate at which the gradient norm starts to rise, steps counteract each other. This is one "
        "run without a control: a starting point. Compare it with neighbouring values.",
    ]
    return [html.figures(*drawn), html.bullets(reading)]
