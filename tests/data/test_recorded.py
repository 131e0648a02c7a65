"""A recorded corpus opens, and the present code writes the same shards from the same documents."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fathom.data.shards import TokenDataset
from tests.corpus.prose import tree
from tests.data.making import prepare

RECORDED = Path(__file__).parent / "recorded"
OPTIONS = {"train_tokenizer": 270, "domain_field": "topic", "held_out": 0.2, "shard_tokens": 1500, "workers": 1}


def shards(directory: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(directory).items() if name.endswith((".bin", ".idx", "tokenizer.json"))}


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    shutil.copytree(RECORDED, tmp_path / "recorded")
    monkeypatch.chdir(tmp_path / "recorded")
    return tmp_path / "recorded"


def test_a_recorded_corpus_opens(here: Path) -> None:
    train, val = (TokenDataset.open(here / "corpus", split) for split in ("train", "val"))
    assert (train.num_documents, val.num_documents) == (31, 9)
    assert train.domains == ("river", "sea")


def test_a_recorded_corpus_is_finished_work(here: Path) -> None:
    before = tree(here / "corpus")
    assert not prepare(["documents.jsonl"], Path("corpus"), **OPTIONS).seconds
    assert tree(here / "corpus") == before


def test_shards_are_what_they_were(here: Path) -> None:
    prepare(["documents.jsonl"], Path("new"), **OPTIONS)
    assert shards(here / "new") == shards(here / "corpus")
    assert len(shards(here / "new")) == 9
