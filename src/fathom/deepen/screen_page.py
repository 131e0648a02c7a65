"""The output of `fathom deepen --screen`: a table, a page and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from rich.console import Console

from fathom.deepen.screen import Gate, Screened
from fathom.report.files import write_atomically, write_json
from fathom.report.html import bullets, page, section, source, table
from fathom.report.provenance import Provenance, provenance
from fathom.report.tables import terminal_table

REPORT, PAGE = "screen.json", "screen.html"
SHOWN = 30
MECHANISMS = ("mechanism", "gates", "z²", "no gain", "content", "left", "negative")
GATES = ("mechanism", "layer", "head", "source", "wants", "z", "no gain", "content")
WORDS = (
    "Nothing was trained.",
    "z is the mean gradient of a closed gate over documents, divided by its standard error.",
    "No gain: a gain of the same value or sub-layer is projected out.",
    "Content: compared with sources of other documents, which have the same statistics.",
    "Left: the share of the squared gradients without the gain.",
    "Negative: the share of the gates that ask for a negative factor, without the gain.",
    "Wants: whether a gate asks for more or less of the content.",
)


def rows(found: Screened) -> list[list[str]]:
    """A row for each mechanism."""
    return [
        [
            *(one.mechanism, str(one.gates), f"{one.z2:.1f}", f"{one.z2_without_gain:.1f}", f"{one.z2_content:.1f}"),
            *(f"{100 * one.left:.1f} %", f"{100 * one.negative:.0f} %"),
        ]
        for one in found.summaries
    ]


def gate_rows(gates: list[Gate]) -> list[list[str]]:
    """A row for each gate."""

    def words(number: int | None) -> str:
        return "" if number is None else str(number)

    return [
        [
            *(one.mechanism, str(one.place.layer), words(one.place.head), words(one.place.source)),
            *(
                "more" if one.content > 0 else "less",
                f"{one.z:+.1f}",
                f"{one.without_gain:+.1f}",
                f"{one.content:+.1f}",
            ),
        ]
        for one in gates
    ]


def verdict(found: Screened) -> str:
    """The result in one sentence."""
    best = max(found.summaries, key=lambda one: one.z2_content)
    less = sum(gate.content < 0 for gate in found.gates if gate.mechanism == best.mechanism)
    return (
        f"Of {len(found.summaries)} mechanisms, {best.mechanism} responds most to what it would read (content): a mean "
        f"z² of {best.z2_content:.1f} over {best.gates} gates, where chance gives {found.chance:.2f}. {less} of the "
        f"gates ask for less of it, {best.gates - less} for more."
    )


def screen_page(model: str, found: Screened, made: Provenance) -> str:
    """The page."""
    note = f"{found.documents} documents, {found.cpu_seconds:.0f} CPU seconds; chance gives a z² of {found.chance:.2f}."
    return page(
        f"Mechanisms that {model} would use, by the gradients of closed gates",
        verdict(found),
        section("Mechanisms", table("By mechanism", MECHANISMS, rows(found), note=note), bullets(WORDS)),
        section("Gates", table(f"The {SHOWN} strongest", GATES, gate_rows(found.gates[:SHOWN]))),
        section("Where the numbers come from", source(made)),
    )


def write(out: Path, model: str, found: Screened) -> None:
    """Write `screen.json` and `screen.html`."""
    made = provenance()
    write_json(out / REPORT, {**vars(made), "model": model, **values(found)})
    write_atomically(out / PAGE, screen_page(model, found, made))


def values(found: Screened) -> dict[str, object]:
    """Plain values."""
    gates = [{**vars(one), "place": one.place._asdict()} for one in found.gates]
    return {**vars(found), "summaries": [vars(one) for one in found.summaries], "gates": gates}


def show(out: Path, found: Screened, file: TextIO) -> None:
    """Print the scores of the mechanisms, the strongest gates and the time taken."""
    console = Console(file=file, highlight=False)
    console.print(terminal_table("by mechanism", MECHANISMS, rows(found)))
    console.print(terminal_table("strongest gates", GATES, gate_rows(found.gates[:10])))
    console.print(
        f"{verdict(found)} {' '.join(WORDS)}\n\nCPU seconds: {found.cpu_seconds:.0f}\n"
        f"report: {out / REPORT}, {out / PAGE}",
        soft_wrap=True,
        markup=False,
    )
