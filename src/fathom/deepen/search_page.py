"""The result of a search for the layers to loop: a table, a page and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from fathom.deepen.spans import Ranked, Search
from fathom.report.files import write_atomically, write_json
from fathom.report.html import commands, legend, page, plot, section, source, table
from fathom.report.plots import Line, reach
from fathom.report.provenance import provenance
from fathom.report.statistics import Difference

REPORT, PAGE = "spans.json", "spans.html"
SHOWN = 20
COLUMNS = ("layers", "damping", "loss, choosing documents", "loss, other documents")
READING = (
    "Loss: nats per token above the base model's, with 95 % intervals over documents. The right column uses documents "
    "that did not choose the layers."
)


def write(out: Path, model: str, asked: Search, ranked: Sequence[Ranked]) -> None:
    """Write `spans.json` and `spans.html` next to the scores."""
    made, spans = provenance(), [row.to_dict() for row in ranked]
    write_json(out / REPORT, {**vars(made), "model": model, "asked": vars(asked), "spans": spans})
    drawn = curves(asked, ranked)
    title, axes = "Loss by the first layer of the loop", ("first layer of the loop", "nats per token")
    caption = f"Above the base model's, with damping {ranked[0].candidate.damping:g}; bands are 95 % intervals."
    html = page(
        f"Layers of {Path(model).name} to loop",
        verdict(ranked),
        legend([line.name for line in drawn]),
        plot(title, drawn, axes, reach(drawn, "+.4f"), caption, zero=True),
        table(f"The best of {len(ranked)} loops of {asked.trips} iterations", COLUMNS, _rows(ranked), note=READING),
        section("What next", commands([command(model, ranked)])),
        section("Where the numbers come from", source(made)),
    )
    write_atomically(out / PAGE, html)


def verdict(ranked: Sequence[Ranked]) -> str:
    """The best loop and its increase of the loss in words, measured on documents that did not choose it, if there are
    any."""
    best = ranked[0]
    found, where = (best.gap, "the documents that chose it") if best.again is None else (best.again, "other documents")
    return (
        f"A loop over the layers {best.candidate.layers} with damping {best.candidate.damping:g} costs least: "
        f"{_words(found)} nats per token above the base model's loss on {where}, before any training."
    )


def command(model: str, ranked: Sequence[Ranked]) -> str:
    """The command that adds the best loop."""
    best = ranked[0].candidate
    loop = f"loop:trips={best.trips},damping={best.damping:g}"
    return shlex.join(["fathom", "deepen", model, "--with", loop, "--layers", best.layers, "--out", "DIR"])


def _rows(ranked: Sequence[Ranked]) -> list[list[str]]:
    return [
        [row.candidate.layers, f"{row.candidate.damping:g}", _words(row.gap), _words(row.again)]
        for row in ranked[:SHOWN]
    ]


def show(model: str, out: Path, asked: Search, ranked: Sequence[Ranked], file: TextIO) -> None:
    """Print the best ranges of layers to loop, and the command that adds the best loop."""
    shown = Table(*COLUMNS, title=f"loops of {asked.trips}")
    for row in _rows(ranked):
        shown.add_row(*row)
    console = Console(file=file, highlight=False)
    console.print(shown)
    console.print(
        f"{READING}\n\n{command(model, ranked)}\nreport: {out / REPORT}, {out / PAGE}",
        soft_wrap=True,
        markup=False,
    )


def _words(gap: Difference | None) -> str:
    if gap is None:
        return ""
    if gap.low is None or gap.high is None:
        return f"{gap.mean:+.4f}".replace("-", "−")
    return f"{gap.mean:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})".replace("-", "−")


def curves(asked: Search, ranked: Sequence[Ranked]) -> list[Line]:
    """The increase of the loss by the loop's first layer, as one curve for each number of looped layers, at the best
    damping."""
    damping = ranked[0].candidate.damping
    lines: list[Line] = []
    for size in range(asked.sizes[0], asked.sizes[1] + 1):
        rows = [row for row in ranked if row.candidate.damping == damping and _size(row) == size]
        rows.sort(key=lambda row: row.candidate.first)
        if rows:
            gaps = [row.gap for row in rows]
            x, y = [float(row.candidate.first) for row in rows], [gap.mean for gap in gaps]
            low = [gap.mean if gap.low is None else gap.low for gap in gaps]
            high = [gap.mean if gap.high is None else gap.high for gap in gaps]
            lines.append(Line(f"{size} layers", x, y, len(lines), low, high))
    return lines


def _size(row: Ranked) -> int:
    return row.candidate.last - row.candidate.first + 1
