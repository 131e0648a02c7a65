"""The trained tokenizer: deterministic, lossless, and at home in the Hugging Face world."""

from __future__ import annotations

import ast
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fathom.corpus.prepare import prepare
from fathom.data.tokenizer import load_tokenizer, plain_encoder, quiet, train_bpe, vocabulary_size
from fathom.errors import DataError
from tests.corpus.prose import tree

PROGRAM = """
import sys
from pathlib import Path
from fathom.corpus.prepare import prepare
prepare([sys.argv[1]], Path(sys.argv[2]), train_tokenizer=1000, held_out=0.1)
"""


@pytest.mark.slow
def test_training_is_deterministic_across_processes(tmp_path: Path) -> None:
    """Hash seeds and thread timing differ from process to process; the tokenizer must not."""
    source = str(Path(ast.__file__).parent / "[ab]*.py")
    subprocess.run([sys.executable, "-c", PROGRAM, source, str(tmp_path / "one")], check=True)
    prepare([source], tmp_path / "two", train_tokenizer=1000, held_out=0.1)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


@pytest.fixture(scope="module")
def encoder(tokenizer: str) -> Tokenizer:
    return plain_encoder(Path(tokenizer) / "tokenizer.json")


@given(st.text())
@settings(deadline=None, max_examples=60)
def test_decoding_undoes_encoding(encoder: Tokenizer, text: str) -> None:
    ids = encoder.encode(text.encode("utf-8", "ignore").decode(), add_special_tokens=False).ids
    assert encoder.decode(ids, skip_special_tokens=False) == text.encode("utf-8", "ignore").decode()


def test_transformers_loads_it(tokenizer: str) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    assert (loaded.eos_token, loaded.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert loaded.eos_token_id != loaded.pad_token_id
    assert loaded.decode(loaded("the depth  of\n\ta river").input_ids) == "the depth  of\n\ta river"
    assert vocabulary_size(loaded) == len(loaded) <= 400
    config = json.loads((Path(tokenizer) / "tokenizer_config.json").read_bytes())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert str(Path(tokenizer).parent) not in (Path(tokenizer) / "tokenizer_config.json").read_text()


def test_a_tokenizer_file_alone_is_enough(tokenizer: str) -> None:
    assert load_tokenizer(f"{tokenizer}/tokenizer.json").eos_token_id == load_tokenizer(tokenizer).eos_token_id


def test_the_tokenizer_of_a_model_with_code_runs_none_and_asks_nothing(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal whether to run the code of a directory, fifteen seconds long."""
    model = shutil.copytree(tokenizer, tmp_path / "model")
    config = {"model_type": "elsewhere", "auto_map": {"AutoConfig": "configuration.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "configuration.py").write_text("raise SystemExit('this was run')\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda words: asked.append(words) or "y")
    assert load_tokenizer(str(model)).eos_token_id == load_tokenizer(tokenizer).eos_token_id
    assert not asked


def test_unusable_tokenizers_are_refused(tokenizer: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.eos_token = None
    loaded.save_pretrained(tmp_path / "endless")
    assert load_tokenizer(str(tmp_path / "endless")).eos_token == "<|endoftext|>"
    assert load_tokenizer(str(tmp_path / "endless"), "<|pad|>").eos_token == "<|pad|>"
    with pytest.raises(DataError, match="has no token '</s>'"):
        load_tokenizer(tokenizer, "</s>")
    file = tmp_path / "endless" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<|endoftext|>", "<|end|>"), encoding="utf-8")
    with pytest.raises(DataError, match="names no token to put between documents: set `eos_token`"):
        load_tokenizer(str(file))
    with pytest.raises(DataError, match="none: no such directory or file; as a name on the Hub: "):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "tokenizer.model").write_bytes(b"pieces")
    with pytest.raises(DataError, match="needs `pip install sentencepiece protobuf`"):
        load_tokenizer(str(tmp_path / "old"))
    with pytest.raises(DataError, match="at least 258 tokens"):
        train_bpe(["text"], 257)


def test_what_is_held_out_teaches_nothing(tmp_path: Path) -> None:
    """A word that only held-out documents repeat does not become a token; elsewhere it does."""
    from fathom.data.shards import choose_split

    texts = [f"{i} " + "zyx" * 30 for i in range(400)]
    held_out = [text for text in texts if choose_split(text, 0.2) == "val"]
    plain = [text for text in (f"{i} of plain words" for i in range(400)) if choose_split(text, 0.2) == "train"]
    for name, chosen in (("without", held_out), ("with", texts)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in plain + chosen))
        prepare([str(tmp_path / f"{name}.jsonl")], tmp_path / name, train_tokenizer=300, held_out=0.2)
    trained = {
        name: any("zyx" in token for token in load_tokenizer(str(tmp_path / name / "tokenizer")).get_vocab())
        for name in ("with", "without")
    }
    assert trained == {"with": True, "without": False}


def test_retries_of_the_hub_are_not_reported_one_by_one(monkeypatch: pytest.MonkeyPatch, logged) -> None:
    retries = logging.getLogger("huggingface_hub.utils._http")
    for name in ("huggingface_hub.utils", retries.name):  # whatever other tests left
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    logging.getLogger("huggingface_hub")._cache.clear()
    retries._cache.clear()
    lines = logged("huggingface_hub")
    with quiet():
        retries.warning("Retrying in 1s [Retry 1/5].")
    assert not lines
    retries.warning("Retrying in 1s [Retry 1/5].")
    assert lines == ["Retrying in 1s [Retry 1/5]."]
