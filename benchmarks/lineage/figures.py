"""From measured pairs to numbers with intervals, a table and a QQ plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
DRAWS = 1000


@dataclass
class Sample:
    """Scores of one method on related and unrelated pairs, with the bases each pair came from."""

    scores: Array  # [pairs]
    related: NDArray[np.bool_]
    roots: list[tuple[str, ...]]  # one or two bases a pair

    def weights(self, counts: dict[str, int]) -> Array:
        """How often a resample of the bases holds each pair: the product over its bases."""
        return np.array([np.prod([counts.get(r, 0) for r in roots]) for roots in self.roots], np.float64)


def auc(scores: Array, related: NDArray[np.bool_], weights: Array) -> float:
    """P(a related pair scores above an unrelated one), ties halved."""
    high, low = scores[related], scores[~related]
    w_high, w_low = weights[related], weights[~related]
    total = w_high.sum() * w_low.sum()
    if not total:
        return float("nan")
    wins = (high[:, None] > low) + 0.5 * (high[:, None] == low)
    return float(w_high @ wins @ w_low / total)


def found_at_none(scores: Array, related: NDArray[np.bool_], weights: Array) -> float:
    """Share of related pairs above every unrelated one."""
    present = weights > 0
    low, total = scores[~related & present], weights[related].sum()
    if not len(low) or not total:
        return float("nan")
    return float(weights[related & (scores > low.max())].sum() / total)


def bootstrapped(sample: Sample, statistic: Callable[..., float], seed: int = 0) -> tuple[float, float, float]:
    """A statistic and its 95 % interval over resamples of the bases: pairs that share a base are not independent."""
    names = sorted({root for roots in sample.roots for root in roots})
    draw = np.random.default_rng(seed)
    values = []
    for _ in range(DRAWS):
        drawn, counts = np.unique(draw.choice(names, len(names)), return_counts=True)
        weights = sample.weights(dict(zip(drawn.tolist(), counts.tolist(), strict=True)))
        values.append(statistic(sample.scores, sample.related, weights))
    # resamples without a pair of either kind say nothing
    low, high = np.quantile([v for v in values if np.isfinite(v)] or [float("nan")], [0.025, 0.975])
    return statistic(sample.scores, sample.related, np.ones(len(sample.scores))), float(low), float(high)


def too_small(p_values: Sequence[float]) -> tuple[float, float]:
    """One-sided KS against uniform: D⁺ = sup F(p) − p and its p-value. Small ones mean anti-conservative."""
    found = stats.kstest(np.asarray(p_values), "uniform", alternative="greater")
    return float(found.statistic), float(found.pvalue)


def excess(p_values: Array, weights: Array) -> float:
    """sup F(p) − p for weighted p-values."""
    order = np.argsort(p_values)
    steps = np.cumsum(weights[order]) / weights.sum()
    return float(np.max(steps - p_values[order]))


def excess_interval(p_values: Array, roots: list[tuple[str, ...]], seed: int = 0) -> tuple[float, float]:
    """95 % interval of sup F(p) − p over resamples of the bases."""
    sample = Sample(p_values, np.zeros(len(p_values), bool), roots)

    def statistic(scores: Array, _: NDArray[np.bool_], weights: Array) -> float:
        return excess(scores, weights) if weights.sum() else float("nan")

    return bootstrapped(sample, statistic, seed)[1:]


def disjoint(pairs: Sequence[tuple[str, str]], seed: int = 0) -> list[int]:
    """Indices of pairs no two of which share a base: independent ones."""
    order, used, kept = np.random.default_rng(seed).permutation(len(pairs)).tolist(), set(), []
    for index in order:
        if not used & set(pairs[index]):
            kept.append(index)
            used |= set(pairs[index])
    return sorted(kept)


def qq(p_values: dict[str, list[float]], path: Path) -> None:
    """Sorted p-values of unrelated pairs against uniform quantiles; below the diagonal is anti-conservative."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 5.2), layout="constrained")
    count = max(map(len, p_values.values()))
    ranks = np.arange(1, count + 1)
    middle = ranks / (count + 1)
    low, high = (stats.beta.ppf(q, ranks, count + 1 - ranks) for q in (0.025, 0.975))
    axes.fill_between(middle, low, high, color="0.9", label="95 % if the pairs were independent")
    axes.plot([1e-4, 1], [1e-4, 1], color="0.4", lw=1)
    for (name, values), marker in zip(p_values.items(), "osD^v+x*", strict=False):
        ordered = np.sort(values)
        expected = np.arange(1, len(ordered) + 1) / (len(ordered) + 1)
        axes.plot(expected, ordered, marker, ms=4, alpha=0.75, label=f"{name} ({len(ordered)} pairs)")
    lowest = 0.5 / (count + 1)
    axes.set(
        xscale="log", yscale="log", xlim=(lowest, 1.2), ylim=(lowest, 1.5), xlabel="expected p", ylabel="reported p",
        title="p-values on trained models that share nothing",
    )  # fmt: skip
    axes.legend(fontsize=8, loc="lower right")
    axes.text(lowest * 1.2, 1.05, "above the line: conservative", fontsize=8, color="0.35", va="bottom")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def methods_table(methods: dict[str, dict[str, Any]]) -> str:
    """Markdown: one row a method."""
    lines = [
        "| method | AUC | found at no false alarm | lowest related | highest unrelated |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in methods.items():
        middle, low, high = row["auc"]
        share, least, most = row["found_at_none"]
        lines.append(
            f"| {name} | {middle:.3f} ({low:.3f}–{high:.3f}) | {share:.0%} ({least:.0%}–{most:.0%}) | "
            f"{row['lowest_related']:.3f} | {row['highest_unrelated']:.3f} |"
        )
    return "\n".join(lines)


def kinds_table(kinds: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """Markdown: one row a kind of derivation; the range of each score and the verdicts."""
    lines = ["| made by | pairs | " + " | ".join(columns) + " | verdicts |", "| --- " * (len(columns) + 3) + "|"]
    for row in kinds:
        cells = [span(row["scores"][key]) for key in columns.values()]
        verdicts = ", ".join(f"{label} {n}" for label, n in row["verdicts"].items())
        lines.append(f"| {row['kind']} | {row['pairs']} | {' | '.join(cells)} | {verdicts} |")
    return "\n".join(lines)


def span(values: Sequence[float | None]) -> str:
    """Lowest to highest."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    digits = 0 if all(float(v).is_integer() and abs(v) > 1 for v in known) else 3
    low, high = (f"{v:.{digits}f}" for v in (min(known), max(known)))
    return low if low == high else f"{low}–{high}"
