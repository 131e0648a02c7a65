"""`fathom recipes`: what there is, and a copy to edit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fathom.cli.main import main
from fathom.recipe import load_recipe
from fathom.settings import packaged_recipes


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Outside the repository, whose `recipes/` must not help."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_recipe_is_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # a line for each
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(packaged_recipes())
    assert main(["recipes", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed.keys() == packaged_recipes().keys()
    assert all(found["summary"] in line for found, line in zip(listed.values(), lines, strict=True))


def test_lines_break_between_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["recipes"]) == 0
    words = capsys.readouterr().out.split()
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["recipes"]) == 0
    narrow = capsys.readouterr().out
    assert narrow.split() == words and max(map(len, narrow.splitlines())) <= 60


def test_recipes_in_folders_are_copied(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "specialise/continue"]) == main(["recipes", "copy", "ladders/evening"]) == 0
    assert capsys.readouterr().out == "continue.yaml\nevening.yaml\n"
    assert load_recipe("continue.yaml") == load_recipe("specialise/continue")
    assert main(["recipes", "copy", "specialise/contnue"]) == 2
    assert "did you mean specialise/continue?" in capsys.readouterr().err


def test_heads_name_recipes_as_the_command_takes_them() -> None:
    """By name, since a wheel has no `recipes/` to type; each name is a recipe's."""
    heads = {
        name: re.findall(r"^#   fathom train (\S+)", path.read_text(), re.M)
        for name, path in packaged_recipes().items()
    }
    assert {name for said in heads.values() for name in said} <= packaged_recipes().keys()
    assert all(heads[name] for name in ("tiny", "500m", "tiny_gates"))


def test_a_copy_is_the_same_recipe(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "60m"]) == 0
    assert main(["recipes", "copy", "1.5b", "--to", "mine.yaml", "--json"]) == 0
    plain, machine = capsys.readouterr().out.splitlines()
    assert plain == "60m.yaml" and json.loads(machine) == {"path": "mine.yaml"}
    assert load_recipe("60m.yaml") == load_recipe("60m") and load_recipe("mine.yaml") == load_recipe("1.5b")
    assert "#" in (elsewhere / "60m.yaml").read_text(encoding="utf-8")
    assert main(["recipes", "copy", "60m"]) == 2, "nothing is overwritten"
    assert "60m.yaml exists" in capsys.readouterr().err


def test_commands_take_names(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "1.5b", "--dry-run", "--json", f"data.directory={corpus}"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 1_343_774_208
    assert main(["mechanisms", "--config", "360m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vanilla"]
    assert main(["mechanisms", "--config", "36m"]) == 2
    assert "36m: no such recipe; did you mean 360m?" in capsys.readouterr().err


def test_runs_are_named_after_the_recipe(
    elsewhere: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dots and all: `1.5b` is no file name with a suffix."""
    copy = elsewhere / "here" / "0.1b.yaml"
    copy.parent.mkdir()
    copy.write_bytes(packaged_recipes()["tiny"].read_bytes())
    monkeypatch.setattr("fathom.recipe.packaged_recipes", lambda: {"0.1b": copy})
    short = ("train.steps=1", "train.tokens_per_step=512", "train.micro_batch=2", "train.device=cpu")
    given = (*short, f"data.directory={corpus}", "model.vocab_size=304", "evaluate.tokens=512", "train.export=false")
    assert main(["train", "0.1b", *given]) == 0
    assert (elsewhere / "runs" / "0.1b" / "recipe.yaml").is_file()
