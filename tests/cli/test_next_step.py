"""Messages of a newcomer's mistakes: what is wrong in the words of the command, and which command helps."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fathom.cli.following import after_prepare
from fathom.cli.main import main
from fathom.corpus.prepare import Summary
from fathom.deepen.heal import Road
from fathom.settings import overridden

MISTAKES = [
    (
        "train demo",
        "data.directory=demo/data: no such directory: `fathom prepare TEXT --train-tokenizer 4096 --out demo/",
    ),
    ("train tiny 'data.directory=my texts'", "my texts is not a prepared corpus", "`fathom prepare 'my texts' "),
    ("train expert/corpus", "expert/corpus is a file of `fathom corpus`, not a recipe of a run"),
    ("train ladders/cpu", "ladders/cpu is a file of `fathom ladder`, not a recipe of a run"),
    ("compare specialise/corpus --arms vanilla,loop", "a file of `fathom corpus`, not a recipe of a run"),
    ("corpus mine.yaml --out new", "mine.yaml is a file of `fathom train`, not a recipe of a corpus"),
    ("ladder corpus.yaml --arms vanilla,loop", "corpus.yaml is a file of `fathom corpus`, not a ladder"),
    ("train nosuch.yaml", "nosuch.yaml: no such file;"),
    ("train nosuch", "nosuch: no such recipe;"),
    ("train tiny model.num_hidden_layers=six", "model.num_hidden_layers=six: allowed: an integer"),
    ("train tiny 'model.tie_word_embeddings=no way'", "model.tie_word_embeddings=no way: allowed: true or false"),
    ("train tiny model.rope_parameters=3", "model.rope_parameters=3: allowed: a mapping or null"),
    ("train broken.yaml", "broken.yaml: not YAML: ", "(line 3, column 6)"),
    ("train tiny optim.lr=[1", "optim.lr: not YAML: ", "(line 1, column 3)"),
    ("train tiny --stpes 3", "unrecognized arguments: --stpes; did you mean train.steps=...?"),
    ("train tiny --lr 3", "did you mean optim.lr=...?"),
    ("generate model --prompt It", "; prompt is an argument without --: write it alone"),
    ("generate model --promts It", "; did you mean --prompts?"),
    ("train tiny --dryrun", "did you mean --dry-run?"),
    ("prepare a.txt --tokenizer nameless --out new", "nameless: cannot load the tokenizer: it has none"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that a newcomer may have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my texts").mkdir()
    (tmp_path / "mine.yaml").write_text("train: {steps: 3}\n")
    (tmp_path / "corpus.yaml").write_text("collections: {a: {inputs: a.txt}}\n")
    (tmp_path / "broken.yaml").write_text("model:\n  a: [1\ntrain: {}\n")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "nameless").mkdir()
    (tmp_path / "nameless" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.mark.parametrize(("line", "says"), [(line, says) for line, *says in MISTAKES])
def test_a_mistake_names_the_way_on(line: str, says: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    complaint = capsys.readouterr().err
    assert all(words in complaint for words in says), complaint
    assert complaint.count("\n") == 1 and "unicode string" not in complaint


def test_a_trained_tokenizer_of_another_size(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the negative control: the same size finds the corpus finished."""
    words = ["prepare", "a.txt", "--held-out", "0.5", "--out", "made", "--workers", "1", "--train-tokenizer"]
    assert main([*words, "300"]) == 0
    assert main([*words, "301"]) == 2
    assert "was prepared with --train-tokenizer 300, not --train-tokenizer 301: choose" in capsys.readouterr().err
    assert main([*words, "300"]) == 0


@pytest.mark.parametrize("name", ["2024", "null", "~", "[a]", "a: b", "runs #2", "@a", "'a'", "été ☕", "data/tiny"])
def test_printed_overrides_mean_the_same_path(name: str) -> None:
    """YAML reads some names as a number, a list, or as the text before a comment."""
    trained = shlex.split(after_prepare(Summary(Path(name), 300, {}, 0, 1.0), None)[0])
    assert overridden({}, trained[3:4])["data"] == {"directory": name}
    control = overridden({}, shlex.split(Road(Path(name), name).control)[3:6])
    assert control == {"data": {"directory": f"{name}-data"}, "model": {"from_pretrained": name}}


def test_a_run_is_named_after_the_model_without_a_slash(here: Path) -> None:
    (here / "nameless" / "heal.yaml").touch()
    (line,) = after_prepare(Summary(Path("data"), 300, {}, 0, 1.0), "nameless/")
    assert line.endswith("--run nameless-healed")
