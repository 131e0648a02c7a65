"""`make specialise`, line for line: a base that guesses, an expert that knows, and a page that says so."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from fathom.cli.main import main
from fathom.corpus.recipe import load_corpus_recipe
from fathom.recipe import load_recipe
from fathom.report.statistics import wilson

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes" / "specialise"


def commands() -> list[list[str]]:
    """What the target runs, without the virtual environment's programs."""
    body = re.search(r"^specialise:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert body is not None
    lines = body[1].replace("\\\n", " ").splitlines()
    words = [shlex.split(line.strip().removeprefix("@")) for line in lines]
    ours = [[word for word in line if "=" not in word or "/" in word] for line in words if line[0] != "echo"]
    return [[word.removeprefix("$(BIN)/") for word in line] for line in ours]


def test_every_recipe_is_one_and_the_stages_fit() -> None:
    """Each reads what the one before wrote, and a row holds a conversation."""
    corpus = load_corpus_recipe(RECIPES / "corpus.yaml")
    base, onward, tuned = (load_recipe(RECIPES / f"{name}.yaml") for name in ("base", "continue", "tune"))
    names = {line[2]: line[-1] for line in commands() if line[:2] == ["fathom", "train"]}
    assert onward.model == {"from_pretrained": names["recipes/specialise/base.yaml"]}
    assert tuned.model == {"from_pretrained": names["recipes/specialise/continue.yaml"]}
    assert base.model["vocab_size"] == corpus.tokenize.train
    assert corpus.converse.max_tokens == tuned.data.sequence_length == corpus.mix.block
    assert set(base.data.mixture) == {"general"} and set(onward.data.mixture) == set(corpus.mix.shares)


@pytest.mark.slow
def test_the_expert_knows_what_the_base_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'fathom-lm[evaluate]'")
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face models need accelerate")
    for folder in ("recipes", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    for line in commands():
        if line[0] == "python":
            monkeypatch.setattr(sys, "argv", line[1:])
            runpy.run_path(line[1])
        else:
            assert main(line[1:]) == 0, line
    report = json.loads(Path("specialise/report/report.json").read_text())
    clean = next(row for row in report["questions"] if (row["way"], row["part"]) == ("text", "clean"))
    base, expert = (wilson(right, clean["asked"]) for right in clean["right"])
    assert clean["asked"] == 180 and base[0] < 0.25 < base[1]
    assert clean["right"][1] / clean["asked"] >= 0.4 and expert[0] > 0.25 and clean["p"] < 0.01
    assert report["texts"]["minerals"]["difference"]["high"] < 0, "the domain is read better"
    assert [one["run"] for one in report["runs"]] == ["continued", "expert"]
    assert report["corpus"]["dropped"] == 12
    assert "expert is better than base" in report["verdict"]
