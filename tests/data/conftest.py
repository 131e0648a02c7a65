"""A small generated corpus, prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.data.tokenizer import save_tokenizer, train_bpe
from tests.data.corpora import write_documents

from .making import prepare


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained tokenizer's directory."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(write_documents(folder / "texts.jsonl", 200), 400), folder)
    return str(folder / "tokenizer")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> Path:
    """Two domains in several shards, a tenth held out."""
    folder = tmp_path_factory.mktemp("corpus")
    write_documents(folder / "a.jsonl", 400, seed=1)
    write_documents(folder / "b.jsonl", 200, seed=2)
    inputs = [f"rivers={folder / 'a.jsonl'}", f"seas={folder / 'b.jsonl'}"]
    prepare(inputs, folder / "out", tokenizer, held_out=0.1, shard_tokens=3000)
    return folder / "out"
