"""φ, the exponent of loop iterations: a layer that runs r times is worth r^φ layers.

    L = E + A (N_once + r^φ N_rec)^-α + B D^-β

N_once and N_rec are the parameters outside and inside of the loop, counted once, r the iterations, D the tokens. With φ
= 1 another iteration is worth as much as another layer, with φ = 0 nothing. Models of one width and token budget are a
cell: they share batches and shape, and therefore a deviation from the law. With a single token budget φ is not
identified.

`multipliers.py` chooses the models (`_phi`). The iterations per token in a comparison's report are measured by
`training/heldout.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from scipy.special import stdtrit

from fathom.experiments.ladder_results import Phi

Floats = NDArray[np.float64]
SHARES = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Candidate values for the variance of a cell over that of a run within it."""
STARTS = ((0.3, 0.3, 0.5), (0.15, 0.3, 0.3), (0.3, 0.15, 0.8), (0.5, 0.4, 0.5), (0.2, 0.2, 0.2))
"""Starting points of α, β and φ."""
LEAST_CELLS = 4
ONE_BUDGET = "one token budget: φ is not identified; add another budget at the same sizes"


@dataclass(frozen=True)
class Looped:
    """A model of one size and token budget, with its number of loop iterations and its loss."""

    once: float
    """Parameters outside of the loop, embeddings left out."""
    inside: float
    """Parameters inside of it, counted once."""
    trips: int
    tokens: float
    loss: float
    cell: str
    """Models of one cell share width, depth in layers times trips, and tokens."""


def refusal(runs: Sequence[Looped]) -> str | None:
    """The reason why φ cannot be estimated from these runs; None if it can."""
    if budgets_of(runs) < 2:
        return ONE_BUDGET
    if len({run.trips for run in runs}) < 2:
        return "all models have the same number of iterations: there is nothing to compare"
    cells = len({run.cell for run in runs})
    if cells < LEAST_CELLS:
        return f"{cells} cells of width and tokens; the law alone needs {LEAST_CELLS}"
    return None if len(runs) > 7 else f"{len(runs)} runs for six unknowns"


def budgets_of(runs: Sequence[Looped]) -> int:
    """The largest number of token budgets with which any one model was trained."""
    by_model: dict[tuple[float, float, int], set[float]] = {}
    for run in runs:
        by_model.setdefault((run.once, run.inside, run.trips), set()).add(run.tokens)
    return max(len(tokens) for tokens in by_model.values())


def worth(runs: Sequence[Looped]) -> Phi:
    """Estimate φ by least squares with a random effect for each cell, or say why it cannot be estimated; intervals use
    Student's t with (cells - 2) degrees of freedom. The losses are means over seeds.
    """
    if (why := refusal(runs)) is not None:
        return Phi(refused=why)
    fit = _Fit(runs)
    value, error = fit.best()
    half = float(stdtrit(len(fit.cells) - 2, 0.975)) * error
    return Phi(None, value, value - half, value + half, budgets_of(runs), len(fit.cells))


class _Fit:
    """The law through some runs."""

    def __init__(self, runs: Sequence[Looped]) -> None:
        self.once, self.inside, self.trips, self.tokens, self.loss = (
            np.array([getattr(run, name) for run in runs], float)
            for name in ("once", "inside", "trips", "tokens", "loss")
        )
        names = sorted({run.cell for run in runs})
        self.cells = [np.flatnonzero([run.cell == name for run in runs]) for name in names]
        self.scale_n = float(np.exp(np.log(self.once + self.inside * self.trips).mean()))
        self.scale_d = float(np.exp(np.log(self.tokens).mean()))

    def best(self) -> tuple[float, float]:
        """φ and its standard error, at the most likely share of variance between cells."""
        start = min((self.solve(0.0, self.start(*start)) for start in STARTS), key=lambda found: found[1])[0]
        likeliest, answer = -np.inf, (0.0, np.inf)
        for share in SHARES:
            values, squares, jacobian = self.solve(share, start)
            freedom = len(self.loss) - len(values)
            variance = squares / freedom
            sign, size = np.linalg.slogdet(jacobian.T @ jacobian)
            determinant = sum(np.log1p(share * len(cell)) for cell in self.cells)
            likelihood = -0.5 * (freedom * np.log(max(variance, 1e-30)) + determinant + (size if sign > 0 else np.inf))
            if likelihood > likeliest:
                spread = np.linalg.pinv(jacobian.T @ jacobian) * variance
                likeliest, answer = likelihood, (float(values[5]), float(np.sqrt(max(spread[5, 5], 0.0))))
        return answer

    def start(self, alpha: float, beta: float, phi: float) -> Floats:
        """Starting values of (E, ln A, ln B, α, β, φ) from the exponents alone: for given exponents the rest is a
        linear fit."""
        n, d = self.terms(alpha, beta, phi)
        design = np.stack([np.ones_like(n), n, d], 1)
        floor, a, b = optimize.nnls(design, self.loss)[0]
        return np.array([floor, np.log(max(a, 1e-6)), np.log(max(b, 1e-6)), alpha, beta, phi])

    def terms(self, alpha: float, beta: float, phi: float) -> tuple[Floats, Floats]:
        """The two decreasing terms of the law without their factors A and B, in units of the middle run."""
        n = (self.once + self.trips**phi * self.inside) / self.scale_n
        return n**-alpha, (self.tokens / self.scale_d) ** -beta

    def solve(self, share: float, start: Floats) -> tuple[Floats, float, Floats]:
        """Fitted values, sum of squares and Jacobian, with residuals whitened for a cell variance of `share`."""

        def residual(values: Floats) -> Floats:
            floor, a, b, alpha, beta, phi = values
            n, d = self.terms(alpha, beta, phi)
            return self.whiten(floor + np.exp(a) * n + np.exp(b) * d - self.loss, share)

        def jacobian(values: Floats) -> Floats:
            _, a, b, alpha, beta, phi = values
            n, d = self.terms(alpha, beta, phi)
            n, d = np.exp(a) * n, np.exp(b) * d
            grown = self.trips**phi * self.inside
            by_n = np.log((self.once + grown) / self.scale_n)
            by_phi = -alpha * n * grown * np.log(self.trips) / (self.once + grown)
            rows = [np.ones_like(n), n, d, -n * by_n, -d * np.log(self.tokens / self.scale_d), by_phi]
            return np.stack([self.whiten(row, share) for row in rows], 1)

        low = [0.0, -20.0, -20.0, 0.01, 0.01, -3.0]
        high = [np.inf, 20.0, 20.0, 3.0, 3.0, 4.0]
        found = optimize.least_squares(
            residual, np.clip(start, low, high), jacobian, bounds=(low, high), x_scale="jac", max_nfev=200
        )
        return found.x, float(2 * found.cost), found.jac

    def whiten(self, values: Floats, share: float) -> Floats:
        """Whiten residuals whose covariance is I + s 11ᵀ within each cell: multiply each cell by (I + s 11ᵀ)^-½."""
        if share == 0:
            return values
        made = values.copy()
        for cell in self.cells:
            size = len(cell)
            made[cell] -= (1 - 1 / np.sqrt(1 + share * size)) * values[cell].mean()
        return made
