"""The notes on registered experiments hold what their logs bear: every row, and no verdict before its time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks import recount, retrofit

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
    assert "by +0.04 (−0.26 to +0.34) nats more with experts" in front and "from −0.26 to +0.34" in page


def test_the_registered_analysis_is_that_of_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contrasts, intervals, p-values and Holm's correction on invented losses; none while a run is missing."""
    draw = np.random.default_rng(0)
    log = retrofit.Log(Path("nowhere.jsonl"))
    log.rows = [{"step": "score", "variant": None, "rate": None, "seed": None, "losses": invented(draw, 3.0)}]
    for variant in retrofit.VARIANTS:
        for rate in retrofit.RATES:
            row = {"variant": variant, "rate": rate, "seed": 0, "gates": {"": [0.1]}}
            log.rows.append({"step": "train", **row, "validation": abs(rate - 0.015)})
        shift = {"depth_attention": -0.01, "loop": 0.002}.get(variant, 0.0)
        for seed in range(retrofit.SEEDS):
            row = {"variant": variant, "rate": 0.015, "seed": seed, "gates": {"": [0.1]}}
            log.rows += [{"step": "train", **row, "validation": 0.0}] if seed else []
            log.rows.append({"step": "score", **row, "losses": invented(draw, 3 + shift)})
    monkeypatch.setattr(recount, "lines", lambda _: log.rows)
    monkeypatch.setattr(recount, "screened", lambda *_: "| screened |")
    rows = [row for row in recount.retrofit() if " to " in row and row.count("|") == 9]
    rates = dict.fromkeys(retrofit.VARIANTS, 0.015)
    assert len(rows) == 16
    for row in rows[:14]:
        name, text, *_, mean, ends, p, _, _ = row.strip("| ").split(" | ")
        found = retrofit.contrast(log, *name.split(" − "), text, rates, range(retrofit.SEEDS))
        low, high = map(float, ends.split(" to "))
        assert (float(mean), low, high) == pytest.approx((found["mean"], found["low"], found["high"]), abs=6e-5), row
        assert float(p) == pytest.approx(found["p"], abs=6e-5), row
    primary = [row.strip("| ").split(" | ") for row in rows if " − queries | wiki" in row]
    assert [float(row[6]) for row in primary] == pytest.approx(
        retrofit.holm([float(row[5]) for row in primary]), abs=4e-4
    )
    assert float(primary[0][6]) < 0.05 < float(primary[1][6]), "the planted effect, and its control"
    log.rows.pop()
    assert not [row for row in recount.retrofit() if " to " in row and row.count("|") == 9]


def invented(draw: np.random.Generator, mean: float) -> dict[str, list[float]]:
    """Losses of 40 documents of each text, with a seed's own shift."""
    return {text: (mean + 0.001 * draw.normal() + 0.005 * draw.normal(size=40)).tolist() for text in retrofit.SCORED}


def test_the_script_reads_logs_alone() -> None:
    source = Path(recount.__file__).read_text(encoding="utf-8")
    assert "import fathom" not in source and "from fathom" not in source and "torch" not in source


def test_the_verdict_on_learned_gates_is_that_of_the_log() -> None:
    """The ends of the primary intervals, and what the registered rule makes of them."""
    page = (RESULTS / "2026-11-29-retrofit.md").read_text(encoding="utf-8")
    front = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    found = {tuple(row.strip("| ").split(" | ")[:2]): row.strip("| ").split(" | ") for row in recount.retrofit()}
    for name in recount.PRIMARY:
        _, _, _, mean, ends, _, holm, _ = found[name, "wiki"]
        low, high = map(float, ends.split(" to "))
        assert low > -retrofit.SMALLEST and float(mean) > 0, "no mechanism helps"
        nothing = high < retrofit.SMALLEST
        assert nothing == (name != "depth_attention − queries") and (float(holm) < 0.05) == (low > 0)
        assert f"{mean} ({ends})".replace("-", "−") in page, name
    assert "**Result: no mechanism meets the registered rule" in page
    assert "by 0.004 (0.002 to 0.006) at its chosen learning rate" in front
