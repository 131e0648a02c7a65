"""The notes on registered experiments hold what their logs bear: every row, and no verdict before its time."""

from __future__ import annotations

from pathlib import Path

from benchmarks import recount

ROOT = Path(__file__).parents[1]
NOTE = ROOT / "docs" / "results" / "2026-11-29-retrofit.md"


def test_the_tables_are_those_of_the_logs() -> None:
    """By numpy alone, without Fathom's evaluation; a changed number, the control, is seen."""
    rows = [*recount.retrofit(), *recount.looped_experts()]
    page = NOTE.read_text(encoding="utf-8")
    tables = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| |"))]
    assert rows and [row for row in rows if row not in tables] == []
    numbered = [line for line in tables if any(letter.isdigit() for letter in line)]
    assert [line for line in numbered if line not in rows] == []
    assert rows[0].replace("3.", "4.") not in tables


def test_the_script_reads_logs_alone() -> None:
    source = Path(recount.__file__).read_text(encoding="utf-8")
    assert "import fathom" not in source and "from fathom" not in source and "torch" not in source


def test_an_unfinished_experiment_has_no_verdict() -> None:
    assert "there is no verdict" in NOTE.read_text(encoding="utf-8")
