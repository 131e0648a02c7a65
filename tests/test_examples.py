"""The scripts of `examples/` run as they stand, one after the other in one process, and say what they promise."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from fathom.models.registry import MECHANISMS

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = ("train", "hook", "compare", "mechanism", "shards", "minerals")
MODULES = {"gated_mean", "settle"}  # which others import


def test_scripts_are_short_and_listed():
    listed = (EXAMPLES / "README.md").read_text()
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - MODULES
    assert scripts == set(SCRIPTS) and all(f"[{name}.py]({name}.py)" in listed for name in scripts)
    for path in EXAMPLES.glob("*.py"):
        if path.stem != "minerals":
            assert len(path.read_text().splitlines()) <= (50 if path.stem in MODULES else 40), path


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    """What each script prints, and the folder that they ran in."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("examples"))
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(sys, "argv", ["example"])
        patch.setitem(sys.modules, "gated_mean", None)
        del sys.modules["gated_mean"]
        for name in SCRIPTS:
            lines: list[str] = []
            patch.setattr("builtins.print", lambda *words, lines=lines, **_: lines.append(" ".join(map(str, words))))
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
            found[name] = "\n".join(lines)
        found["folder"] = str(Path.cwd())
    MECHANISMS.pop("gated_mean", None)
    return found


@pytest.mark.slow
def test_train(said):
    assert "vocabulary of 512" in said["train"] and "after 8 steps" in said["train"]
    assert len(said["train"].splitlines()) > 2  # the sample


@pytest.mark.slow
def test_the_hook_stops_the_run(said):
    assert "stopped after 8 of 8" not in said["hook"] and "stopped after" in said["hook"]


@pytest.mark.slow
def test_compare(said):
    assert "depth_attention: " in said["compare"] and "±" in said["compare"] and "With 2 seeds" in said["compare"]


@pytest.mark.slow
def test_mechanism(said):
    assert "own value: 0." in said["mechanism"] and "travels with the model: True" in said["mechanism"]


@pytest.mark.slow
def test_shards_agree_with_the_index(said):
    folder = Path(said["folder"])
    index = json.loads((folder / "data/example/index.json").read_text())
    shards = [shard for domain in index["splits"]["train"].values() for shard in domain]
    counts = (sum(shard[key] for shard in shards) for key in ("documents", "tokens"))
    assert "{} documents, {} tokens".format(*counts) in said["shards"]
    first = next(runpy.run_path(str(EXAMPLES / "shards.py"))["documents"](folder / "data/example"))
    assert int(first[-1]) == index["eos_token_id"]


@pytest.mark.slow
def test_minerals(said):
    folder = Path(said["folder"]) / "data" / "minerals"
    assert "questions.jsonl" in said["minerals"]
    assert len((folder / "questions.jsonl").read_text().splitlines()) == 192
