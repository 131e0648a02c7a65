"""Tables of a terminal: nothing is cut off where there is too little room."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from fathom.report.tables import NAME, print_report, terminal_table, without

LONG = "as-large-as-attention_residuals"
ROWS = [["vanilla", *["4.1379 (5)"] * 4], [LONG, *[f"+0.0{i}83 ± 0.0344 (3)" for i in range(3)], "+0.0307 (1)"]]


def shown(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_table_without_rows_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    full = "Losses", ["arm", "111 k"], [["vanilla", "4.1379 (5)"]]
    print_report([("Empty", ["arm"], []), without("111 k", full), full], "Done.", None)
    lines = capsys.readouterr().out.split("\n\n")
    assert [line.split() for line in lines] == [
        ["Losses", "arm", "vanilla"],
        ["Losses", "arm", "111", "k", "vanilla", "4.1379", "(5)"],
        ["Done."],
    ]


@pytest.mark.parametrize("width", [80, 200])
def test_every_column_is_there(monkeypatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = shown(terminal_table("Losses", ["arm", "111 k", "201 k", "302 k", "454 k"], ROWS), width)
    words = " ".join(lines)
    for part in ("454 k", "+0.0283", "0.0344", "+0.0307 (1)", "4.1379 (5)", LONG[:NAME], LONG[NAME:]):
        assert part in words, part
    assert any(LONG in line for line in lines) == (width == 200)
    assert max(map(len, lines)) <= width
