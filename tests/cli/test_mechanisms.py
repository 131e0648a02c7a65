"""`fathom mechanisms` lists names at once; figures are of a model that the user names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fathom.cli import mechanisms
from fathom.cli.main import main
from fathom.models.registry import AXES, MECHANISMS

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "which_mechanism.md"


def test_it_lists_what_is_registered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mechanisms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["mechanisms"]
    said = {row["name"]: (row["axis"], row["summary"], row["paper"]) for row in rows}
    assert said == {m.name: (m.axis, m.summary, m.paper) for m in MECHANISMS.values()}
    assert tuple(mechanisms.AXES) == AXES
    assert {row["name"]: row["closed"] for row in rows} == {m.name: m.closed for m in MECHANISMS.values()}


def test_the_page_that_compares_them_names_them_all() -> None:
    """With the start, the cache and vLLM as the code has them."""
    rows = {}
    table = PAGE.read_text(encoding="utf-8").partition("| mechanism | axis |")[2].partition("\n\n")[0]
    for line in table.splitlines():
        if line.startswith(("| [`", "| `")):
            name, _, starts, cache, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.split("`")[1]] = starts, cache
    mixers = {name for name, m in MECHANISMS.items() if name not in mechanisms.FIRST}
    assert rows.keys() == mixers, f"a row for each in {PAGE}"
    for name, (starts, cache) in rows.items():
        assert (starts != "no") == (MECHANISMS[name].closed is not None), name
        assert (cache != "same") == (MECHANISMS[name].axis == "recurrence"), name


def test_the_list_has_no_figures_and_loads_no_torch() -> None:
    code = (
        "import sys; from fathom.cli.main import main; code = main(['mechanisms'])\n"
        "print(code, {'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "0 set()"
    assert "  depth_attention " in said and "parameters" not in said and "FLOPs" not in said


def test_sources_that_are_no_literals_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sorted(row["name"] for row in mechanisms._of_ours())
    monkeypatch.setattr(mechanisms.ast, "literal_eval", lambda node: {}["summary"])
    assert sorted(row["name"] for row in mechanisms._of_ours()) == expected
