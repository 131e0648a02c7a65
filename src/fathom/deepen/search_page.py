"""The result of a search for the layers to loop: a table, a figure and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from fathom.deepen.spans import Ranked, Search
from fathom.report.files import write_atomically, write_json
from fathom.report.plots import Line, line_plot
from fathom.report.provenance import provenance
from fathom.report.statistics import Difference

REPORT, FIGURE = "spans.json", "spans.svg"
SHOWN = 20


def write(out: Path, model: str, asked: Search, ranked: Sequence[Ranked]) -> None:
    """Write `spans.json` and `spans.svg` next to the scores."""
    spans = [row.to_dict() for row in ranked]
    write_json(out / REPORT, {**vars(provenance()), "model": model, "asked": vars(asked), "spans": spans})
    write_atomically(out / FIGURE, figure(asked, ranked))


def show(model: str, out: Path, asked: Search, ranked: Sequence[Ranked], file: TextIO) -> None:
    """Print the best spans, and the command that adds the first of them."""
    table = Table("layers", "damping", "loss, all spans", "loss, other documents", title=f"loops of {asked.trips}")
    for row in ranked[:SHOWN]:
        table.add_row(row.candidate.layers, f"{row.candidate.damping:g}", _words(row.gap), _words(row.again))
    console = Console(file=file, highlight=False)
    console.print(table)
    best = ranked[0].candidate
    words = f"loop:trips={best.trips},damping={best.damping:g}"
    console.print(
        "Nats per token above the base model's loss, with 95 % intervals over documents. The right column uses "
        "documents that did not choose the layers.\n\n"
        f"fathom deepen {model} --with {words} --layers {best.layers} --out DIR\n"
        f"report: {out / REPORT}, {out / FIGURE}",
        soft_wrap=True,
        markup=False,
    )


def _words(gap: Difference | None) -> str:
    if gap is None:
        return ""
    if gap.low is None or gap.high is None:
        return f"{gap.mean:+.4f}"
    return f"{gap.mean:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"


def figure(asked: Search, ranked: Sequence[Ranked]) -> str:
    """The loss by first layer, one curve for each number of layers, at the best damping."""
    damping = ranked[0].candidate.damping
    lines = []
    for series, size in enumerate(range(asked.sizes[0], asked.sizes[1] + 1)):
        rows = [row for row in ranked if row.candidate.damping == damping and _size(row) == size]
        rows.sort(key=lambda row: row.candidate.first)
        if rows:
            gaps = [row.gap for row in rows]
            x, y = [float(row.candidate.first) for row in rows], [gap.mean for gap in gaps]
            low = [gap.mean if gap.low is None else gap.low for gap in gaps]
            high = [gap.mean if gap.high is None else gap.high for gap in gaps]
            lines.append(Line(f"{size} layers", x, y, series, low, high))
    words = f"Loss above the base model's, by the first layer of a loop of {asked.trips} with damping {damping:g}."
    return str(line_plot(lines, "first layer of the loop", "nats per token", words, zero=True))


def _size(row: Ranked) -> int:
    return row.candidate.last - row.candidate.first + 1
