"""The notebooks of `examples/` run from the first cell to the last, with small models in place of those they name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.test_first_hour import llama

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(notebook: Path) -> list[str]:
    body = json.loads(notebook.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in body["cells"] if cell["cell_type"] == "code"]


def follow(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run every cell in one namespace, in a directory where the named model is a small one."""
    display = ModuleType("IPython.display")
    display.HTML = lambda text: text  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict[str, Any] = {"__name__": "__main__"}
    for text in cells(notebook):
        exec(compile(text, notebook.name, "exec"), names)
    return names


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    return tmp_path


def test_notebooks_are_listed_and_hold_no_output() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 2
    for notebook in NOTEBOOKS:
        body = json.loads(notebook.read_text(encoding="utf-8"))
        assert f"[{notebook.name}]({notebook.name})" in listed
        assert not any(cell.get("outputs") for cell in body["cells"])


@pytest.mark.slow
def test_deepen_and_judge(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = follow(EXAMPLES / "deepen_and_judge.ipynb", monkeypatch)
    said = capsys.readouterr().out
    assert "equal logits: True" in said and "no verdict on the mechanism" in said
    assert names["finding"].out == Path("tried") and (place / "tried" / "report.html").is_file()


@pytest.mark.slow
def test_whose_weights(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    follow(EXAMPLES / "whose_weights.ipynb", monkeypatch)
    said = capsys.readouterr().out
    copy, stranger = said.index("copy: "), said.index("stranger: ")
    assert "lineage" in said[copy:stranger] and "no evidence" in said[stranger:]
