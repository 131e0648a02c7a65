"""The page of `fathom evaluate --out`: every score, differences with their intervals, and the loss by context."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from fathom.evaluation.paired import table_of
from fathom.evaluation.results import ScoresReport
from fathom.report import html
from fathom.report.provenance import Provenance

INTERVALS = "Intervals: 95 %, Student's t over paired documents or items; × is the ratio of perplexities."
ASTERISK = "An asterisk marks significance after Holm's adjustment over all rows."


def page(report: ScoresReport, source: Provenance) -> str:
    """The whole report."""
    names = list(report.checkpoints)
    scores = html.table("Scores", *table_of(report.rows, names))
    return html.page(
        f"Scores of {', '.join(names)}",
        verdict(report),
        html.section("Scores", scores, html.bullets(list(notes(report)))),
        html.section("Loss by context", *_by_context(report)),
        html.section("Where the numbers come from", html.source(source)),
    )


def verdict(report: ScoresReport) -> str:
    """The verdict in one sentence."""
    first, *others = report.checkpoints
    if others:
        gaps = report.gaps()
        found = sum(gap.significant for gap in gaps)
        return f"{found} of {len(gaps)} differences from {first} are significant after Holm's adjustment."
    entry = report.checkpoints[first]
    if not entry.perplexity:
        return f"{first} was scored on {len(entry.tasks)} tasks."
    score = entry.perplexity[entry.text]
    return f"{first} has a perplexity of {score.perplexity:.4f} on {entry.text}, over {score.tokens:,} tokens."


def interval_notes(report: ScoresReport) -> Iterator[str]:
    """How to read the intervals, where there are some: too few documents give none."""
    gaps = report.gaps()
    if any(gap.low is not None for gap in gaps):
        yield INTERVALS
    if any(gap.significant for gap in gaps):
        yield ASTERISK


def notes(report: ScoresReport) -> Iterator[str]:
    """Notes on the numbers."""
    yield from interval_notes(report)
    for name, entry in report.checkpoints.items():
        yield from (f"{name}: {task} failed: {reason}" for task, reason in entry.failed.items())
        yield from entry.notes


def context_table(report: ScoresReport) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: the loss by context length."""
    columns, rows = {}, []
    for name, entry in report.checkpoints.items():
        columns[name] = {place.from_: place for place in entry.perplexity[entry.text].by_context}
    for start in sorted({start for places in columns.values() for start in places}):
        stop = min(2 * start - 1, report.context or sys.maxsize)
        cells = [f"{places[start].loss:.4f}" if start in places else "" for places in columns.values()]
        rows.append([f"{start}-{stop}" if stop > start else str(start), *cells])
    return ["tokens of context", *(f"loss of {name}" for name in columns)], rows


def _by_context(report: ScoresReport) -> Sequence[Markup]:
    if not all(entry.perplexity for entry in report.checkpoints.values()):
        return []
    return [html.table("Nats per token", *context_table(report))]
