"""The page of `fathom evaluate --out`: every score, differences with their intervals, and the loss by context.

`paired.py` computes the differences, and marks those that few documents decide (`skewed`). `results.py` formats a
difference, with an asterisk or as a ratio. `perplexity.py` measures the loss by context.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fathom.evaluation.results import ScoreRow, ScoresReport
from fathom.report import html
from fathom.report.provenance import Provenance
from fathom.report.statistics import LEAST_DOCUMENTS
from fathom.report.tables import PlainTable

INTERVALS = (
    "Intervals: 95 %, Student's t over paired documents or items, or over the clusters that they name; × is the ratio "
    "of perplexities."
)
TOO_FEW = f"Without an interval: fewer than {LEAST_DOCUMENTS} documents, items or clusters."
NO_SPREAD = "the same difference in every document, which shows no noise, or a score that is not finite"
UNMEASURED = f"Without an interval: {NO_SPREAD}."
SKEWED = "Few documents decide the differences of {}: their intervals may be too narrow. Score more documents."
ASTERISK = "An asterisk marks significance after Holm's adjustment over all rows."


def page(report: ScoresReport, source: Provenance, effects: Sequence[str] = ()) -> str:
    """The whole report as a page; the `effects` of a mechanism, if given, replace the verdict."""
    scores = html.table(*score_table(list(report.checkpoints), report.rows))
    names = list(report.checkpoints)
    title = f"{names[1]} against {names[0]} and {names[2]}" if effects else f"Scores of {', '.join(names)}"
    return html.page(
        title,
        "\n".join(effects) or verdict(report),
        html.section("Scores", scores, html.bullets([*_better(report), *notes(report)])),
        html.section("Loss by context", html.table(*context_table(report))),
        html.section("Where the numbers come from", html.source(source)),
    )


def _better(report: ScoresReport) -> Iterator[str]:
    """A note that lower is better, if text was scored."""
    if any(row.metric in ("bits_per_byte", "perplexity") for row in report.rows):
        yield "Fewer bits per byte and a lower perplexity are better."


def verdict(report: ScoresReport) -> str:
    """The verdict in one sentence."""
    first, *others = report.checkpoints
    if others:
        return " ".join([*_whole_text(report, first), _significant(report, first)])
    entry = report.checkpoints[first]
    if not entry.perplexity:
        return f"{first} was scored on {len(entry.tasks)} tasks."
    score = entry.perplexity[entry.text]
    return f"{first} has a perplexity of {score.perplexity:.4f} on {entry.text}, over {score.tokens:,} tokens."


def _whole_text(report: ScoresReport, first: str) -> Iterator[str]:
    """A sentence for each later checkpoint's difference from the first in bits per byte, over all text."""
    entry = report.checkpoints[first]
    rows = [row for row in report.rows if entry.perplexity and (row.task, row.metric) == (entry.text, "bits_per_byte")]
    for name, gap in ((name, gap) for row in rows for name, gap in row.differences.items()):
        yield f"{name} minus {first}: {str(gap).strip().replace('-', '−')} bits per byte."


def _significant(report: ScoresReport, first: str) -> str:
    """A sentence on how many of the differences with an interval are significant."""
    tested = [gap for gap in report.gaps() if gap.low is not None]
    if not list(report.gaps()):
        return f"No difference from {first} could be paired, so there is no interval and no test."
    if not tested and all(gap.few for gap in report.gaps()):
        return f"There are fewer than {LEAST_DOCUMENTS} documents, too few for an interval or a test."
    if not tested:
        return "No difference has an interval, so there is no test."
    found = sum(gap.significant for gap in tested)
    return f"{found} of {len(tested)} tested differences from {first} are significant after Holm's adjustment."


def interval_notes(rows: Sequence[ScoreRow]) -> Iterator[str]:
    """Notes on how to read the intervals, and on differences without an interval."""
    gaps = [gap for row in rows for gap in row.differences.values()]
    if any(gap.low is not None for gap in gaps):
        yield INTERVALS
    if any(gap.few for gap in gaps):
        yield TOO_FEW
    if any(gap.low is None and not gap.few for gap in gaps):
        yield UNMEASURED
    if any(gap.significant for gap in gaps):
        yield ASTERISK
    if skewed := [f"{row.task} ({row.metric})" for row in rows if any(gap.skewed for gap in row.differences.values())]:
        yield SKEWED.format(", ".join(skewed))


def notes(report: ScoresReport) -> Iterator[str]:
    """Notes on the numbers."""
    yield from interval_notes(report.rows)
    for name, entry in report.checkpoints.items():
        yield from (f"{name}: {task} failed: {reason}" for task, reason in entry.failed.items())
        yield from entry.notes


def score_table(names: Sequence[str], shown: Sequence[ScoreRow]) -> PlainTable:
    """The table of the given rows; an asterisk marks differences that are significant after Holm's adjustment over all
    differences."""
    cells = []
    for row in shown:
        values = [_number(row.scores.get(name)) for name in names]
        gaps = [str(row.differences.get(name, "not paired")) for name in names[1:]]
        cells.append([row.task, row.metric, *values, *gaps])
    return (
        "Each model, and its difference from the first",
        ["task", "metric", *names, *(f"{name} against {names[0]}" for name in names[1:])],
        cells,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def context_table(report: ScoresReport) -> PlainTable:
    """The table of the loss by context length; it has no rows if no text was scored."""
    columns, rows = {}, []
    for name, entry in report.checkpoints.items():
        places = entry.perplexity[entry.text].by_context if entry.perplexity else []
        columns[name] = {place.from_: place for place in places}
    for start in sorted({start for places in columns.values() for start in places}):
        stop = min(2 * start - 1, report.context or sys.maxsize)
        cells = [f"{places[start].loss:.4f}" if start in places else "" for places in columns.values()]
        rows.append([f"{start}–{stop}" if stop > start else str(start), *cells])
    return "Nats per token", ["tokens of context", *(f"loss of {name}" for name in columns)], rows
