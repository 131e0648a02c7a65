"""A small generated corpus, prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.corpora import write_documents

from .making import prepare


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained tokenizer's directory."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_documents(folder / "texts.jsonl", 200)
    prepare([str(folder / "texts.jsonl")], folder / "out", train_tokenizer=400, held_out=0)
    return str(folder / "out" / "tokenizer")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> Path:
    """Two domains in several shards, a tenth held out."""
    folder = tmp_path_factory.mktemp("corpus")
    write_documents(folder / "a.jsonl", 400, seed=1)
    write_documents(folder / "b.jsonl", 200, seed=2)
    inputs = [f"rivers={folder / 'a.jsonl'}", f"seas={folder / 'b.jsonl'}"]
    prepare(inputs, folder / "out", tokenizer, held_out=0.1, shard_tokens=3000)
    return folder / "out"
