"""The notes on registered experiments hold what their logs bear: every row, and no verdict before its time."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import recount

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SEEDS = "| size | seed |"
"""A header with numbers."""
NOTES = {
    "2026-11-29-retrofit.md": recount.retrofit,
    "2026-11-30-looped-experts.md": recount.looped_experts,
}


@pytest.mark.parametrize("name", NOTES)
def test_the_tables_are_those_of_the_logs(name: str) -> None:
    """By numpy alone, without Fathom's evaluation; a changed number, the control, is seen."""
    rows, page = list(NOTES[name]()), (RESULTS / name).read_text(encoding="utf-8")
    tables = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| |"))]
    assert rows and [row for row in rows if row not in tables] == []
    numbered = [line for line in tables if any(letter.isdigit() for letter in line) and not line.startswith(SEEDS)]
    assert [line for line in numbered if line not in rows] == []
    assert rows[0].replace(".", ".1", 1) not in tables


def test_the_verdict_is_that_of_the_log() -> None:
    """Means and ends of the interaction's intervals stand in the note, the first on the front page too."""
    page = (RESULTS / "2026-11-30-looped-experts.md").read_text(encoding="utf-8")
    found = {row.split(" | ")[0]: row.split(" | ")[3] for row in recount.looped_experts() if "(M loop 8" in row}
    assert set(found) == {"| 0.17 M", "| 0.30 M"}
    for size, value in found.items():
        mean, half = map(float, value.split(" ± "))
        low, high = (f"{end:+.2f}".replace("-", "−") for end in (mean - half, mean + half))
        assert low.startswith("−") and high.startswith("+") and "**Result: not decided.**" in page
        assert f"{mean:+.2f}" in page and low in page and high in page, size
    front = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    assert "is not decided: +0.04 (−0.26 to +0.34) nats" in front and "from −0.26 to +0.34" in page


def test_the_script_reads_logs_alone() -> None:
    source = Path(recount.__file__).read_text(encoding="utf-8")
    assert "import fathom" not in source and "from fathom" not in source and "torch" not in source


def test_an_unfinished_experiment_has_no_verdict() -> None:
    assert "there is no verdict" in (RESULTS / "2026-11-29-retrofit.md").read_text(encoding="utf-8")
