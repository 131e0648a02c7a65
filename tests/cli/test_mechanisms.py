"""`fathom mechanisms` lists names at once; figures are of a model that the user names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fathom.cli import mechanisms
from fathom.cli.main import main
from fathom.models.registry import AXES, MECHANISMS


def test_it_lists_what_is_registered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mechanisms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["mechanisms"]
    said = {row["name"]: (row["axis"], row["summary"], row["paper"]) for row in rows}
    assert said == {m.name: (m.axis, m.summary, m.paper) for m in MECHANISMS.values()}
    assert tuple(mechanisms.AXES) == AXES


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


def test_bytes_are_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mechanisms", "--bytes-per-scalar", "4"]) == 2
    assert "needs --config MODEL" in capsys.readouterr().err
