"""Corpora and lineage without torch and transformers: the same tokens, and a directory that transformers opens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fathom.corpus.prepare import prepare
from fathom.data import tokenizer as tokenizers
from fathom.data.tokenizer import load_tokenizer
from fathom.errors import DataError
from tests.test_dependencies import declared, normal

ROOT = Path(__file__).parents[2]
TEXTS = [f"Line {i}: the depth of a river is measured in {i * i} fathoms.<|endoftext|> It ends." for i in range(60)]
BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from importlib import import_module
for name in ("lineage", "corpus", "corpus_audit", "prepare"):
    import_module(f"fathom.cli.{name}")
import fathom.corpus.pipeline
"""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "texts"


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_has_transformers", lambda: False)


def shards(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.rglob("*.bin"))}


def test_the_same_tokens_with_and_without(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"held_out": 0.1, "workers": 1}
    prepare([str(texts)], tmp_path / "with", train_tokenizer=300, **given)
    prepare([str(texts)], tmp_path / "again", tokenizer=str(tmp_path / "with" / "tokenizer"), **given)
    without(monkeypatch)
    prepare([str(texts)], tmp_path / "trained", train_tokenizer=300, **given)
    prepare([str(texts)], tmp_path / "opened", tokenizer=str(tmp_path / "with" / "tokenizer"), **given)
    found = shards(tmp_path / "with")
    assert found and all(found == shards(tmp_path / name) for name in ("again", "trained", "opened"))
    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / name / "tokenizer") for name in ("with", "trained"))
    assert theirs(TEXTS[0])["input_ids"] == ours(TEXTS[0])["input_ids"]
    assert (theirs.eos_token, theirs.pad_token, len(theirs)) == (ours.eos_token, ours.pad_token, len(ours))


def test_what_it_cannot_open_is_one_line(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    with pytest.raises(DataError, match=r"gpt2: without transformers, a tokenizer is a tokenizer\.json"):
        load_tokenizer("gpt2")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.slow
def test_lineage_and_corpus_import_neither() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bad = subprocess.run([sys.executable, "-c", BLOCKED + "import fathom.models"], capture_output=True, check=False)
    assert bad.returncode == 1, "the control: a room that needs torch"


def test_the_requirements_are_the_core_without_the_two() -> None:
    lines = (ROOT / "requirements-without-torch.txt").read_text(encoding="utf-8").splitlines()
    listed = {normal(re.split("[<>=]", line)[0]) for line in lines if line and not line.startswith("#")}
    assert listed == declared()[0] - {"torch", "transformers"}
