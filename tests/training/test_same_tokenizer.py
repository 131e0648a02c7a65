"""A checkpoint goes on only with tokens that mean what they meant to it, unless that is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fathom.checkpoints.tokenizers import identity
from fathom.corpus.prepare import prepare
from fathom.errors import SettingsError
from fathom.training import build_training, train
from tests.tiny import tiny_recipe


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer") / "run"
    train(tiny_recipe(corpus, "train.export=true", "train.steps=2"), place)
    return place


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other text, and a tokenizer of the same size that learned from it."""
    folder = tmp_path_factory.mktemp("foreign")
    lines = (json.dumps({"text": f"quick brown foxes jump over {i} lazy dogs, {i * i} times"}) for i in range(400))
    (folder / "a.jsonl").write_text("\n".join(lines))
    prepare([str(folder / "a.jsonl")], folder / "out", train_tokenizer=300, held_out=0.2, workers=1)
    return folder / "out"


def begin(corpus: Path, source: object, *overrides: str) -> None:
    build_training(tiny_recipe(corpus, f"model.from_pretrained={source}", *overrides))


@pytest.mark.slow
def test_another_tokenizer_is_refused_and_named(run: Path, foreign: Path) -> None:
    for source in (run, f"{run}@step-2", run / "model"):
        with pytest.raises(SettingsError) as refused:
            begin(foreign, source)
        message = str(refused.value)
        assert (
            f"model.from_pretrained={source}: its tokenizer (" in message and f"data.directory={foreign} (" in message
        )
        assert "data.other_tokenizer=true" in message and "\n" not in message
        begin(foreign, source, "data.other_tokenizer=true")


def test_the_same_tokenizer_is_the_same_wherever_it_lies(corpus: Path, run: Path, tmp_path: Path) -> None:
    """Also when a corpus is prepared with what an export brought, and in corpora and exports of earlier versions."""
    begin(corpus, run)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"rope and lead {i}" * 40}) for i in range(90)))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer=str(run / "model"), held_out=0.2, workers=1)
    begin(tmp_path / "out", run / "model")
    old = Path(shutil.copytree(run / "model", tmp_path / "old"))
    (old / "tokenizer.sha256").unlink()
    begin(corpus, old)


def test_what_is_kept_speaks_where_the_files_are_gone(corpus: Path, run: Path, foreign: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(run / "model", tmp_path / "bare"))
    for path in bare.glob("tokenizer*.json"):
        path.unlink()
    begin(corpus, bare)
    with pytest.raises(SettingsError, match="its tokenizer"):
        begin(foreign, bare)
    (bare / "tokenizer.sha256").unlink()
    begin(foreign, bare)


def test_vocabulary_and_rules_and_nothing_else(corpus: Path) -> None:
    text = (corpus / "tokenizer" / "tokenizer.json").read_text()

    def changed(*path: str, value: object) -> str:
        content = json.loads(text)
        place = content
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return identity(json.dumps(content, indent=3))

    known, content = identity(text), json.loads(text)
    joined = [" ".join(merge) for merge in content["model"]["merges"]]
    assert known == changed("truncation", value={"max_length": 5}) == changed("model", "merges", value=joined)
    assert known != changed("model", "merges", value=content["model"]["merges"][:-1])
    assert known != changed("pre_tokenizer", value=None) and known != changed("normalizer", value={"type": "NFC"})
    words = content["model"]["vocab"]
    first, second = list(words)[-2:]
    assert known != changed("model", "vocab", value={**words, first: words[second], second: words[first]})
