"""The format on disk: what is written is read back, and what is damaged is named."""

from __future__ import annotations

import json
import shutil
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.data import shards
from fathom.data.shards import CorpusIndex, ShardWriter, TokenDataset, read_index, token_dtype, write_index
from fathom.errors import DataError
from tests.data.corpora import stream


@pytest.fixture
def copy(corpus: Path, tmp_path: Path) -> Path:
    """A corpus to damage, verified before."""
    shutil.copytree(corpus, tmp_path / "corpus")
    TokenDataset.open(tmp_path / "corpus")
    return tmp_path / "corpus"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


@given(
    documents=st.lists(st.lists(st.integers(0, 999), max_size=30), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    shard_tokens=st.integers(1, 100),
)
@settings(deadline=None, max_examples=40)
def test_what_is_written_is_read(tmp_path_factory, documents, cuts, shard_tokens) -> None:
    """Whole documents, shards closed by the same document however the appends were grouped, true checksums."""
    folder = tmp_path_factory.mktemp("shards")
    documents = [[*document, 1000] for document in documents]
    writers = [ShardWriter(folder / name, "train", "d", np.dtype("<u2"), shard_tokens) for name in ("one", "many")]
    edges = sorted({0, len(documents), *(cut for cut in cuts if cut < len(documents))})
    groups = [[documents], [documents[a:b] for a, b in pairwise(edges)]]
    for writer, parts in zip(writers, groups, strict=True):
        for part in parts:
            lengths = np.array([len(document) for document in part])
            writer.append(np.concatenate(part).astype("<u2"), lengths, 3 * (lengths - 1))
    assert writers[0].shards == writers[1].shards
    assert all(shard.tokens >= shard_tokens for shard in writers[0].shards[:-1])
    written = [path for path in (folder / "one").rglob("*") if path.is_file()]
    assert len(written) == 2 * len(writers[0].shards)
    for path in written:
        assert path.read_bytes() == (folder / "many" / path.relative_to(folder / "one")).read_bytes()

    index = CorpusIndex({}, 0, 1001, 1000, "uint16", {}, "", {"train": {"d": writers[0].shards}})
    write_index(folder / "one", index)
    dataset = TokenDataset.open(folder / "one")
    flat = np.concatenate(documents)
    assert (dataset.num_tokens, dataset.num_documents) == (len(flat), len(documents))
    assert np.array_equal(stream(dataset), flat)
    for position in range(len(flat) + 1):
        assert dataset.bytes_before(position) == 3 * int((flat[:position] != 1000).sum())


def test_properties(corpus: Path) -> None:
    train, val = TokenDataset.open(corpus), TokenDataset.open(corpus, "val")
    assert train.domains == val.domains == ("rivers", "seas")
    assert train.num_documents + val.num_documents == 600
    assert train.dtype == np.uint16 and 257 < train.vocab_size <= 400
    assert (train.tokenizer_directory / "tokenizer.json").is_file()
    rivers = TokenDataset.open(corpus, domain="rivers")
    assert rivers.num_tokens == train.select("rivers").num_tokens
    assert rivers.num_tokens + train.select("seas").num_tokens == train.num_tokens
    assert [token_dtype(size).itemsize for size in (65536, 65537)] == [2, 4]


@pytest.mark.parametrize(("name", "place"), [("00000.bin", 0), ("00001.bin", 100), ("00000.idx", -1)])
def test_a_flipped_byte_is_found_and_named(copy: Path, name: str, place: int) -> None:
    damaged = copy / "train" / "rivers" / name
    flip(damaged, place)
    with pytest.raises(DataError, match=rf"{damaged} is corrupt: checksum \w+ where the index says \w+"):
        TokenDataset.open(copy)
    TokenDataset.open(copy, "val")
    TokenDataset.open(copy, domain="seas")
    TokenDataset.open(copy, verify=False)


@pytest.mark.parametrize("verify", [True, "cached", False])
def test_a_truncated_shard_is_found_and_named(copy: Path, verify) -> None:
    damaged = copy / "train" / "seas" / "00000.bin"
    size = damaged.stat().st_size
    with damaged.open("r+b") as file:
        file.truncate(size - 2)
    with pytest.raises(DataError, match=f"{damaged} is truncated: {size - 2} bytes where the index says {size}"):
        TokenDataset.open(copy, verify=verify)
    damaged.write_bytes(bytes(size + 4))
    with pytest.raises(DataError, match=f"{damaged} has grown"):
        TokenDataset.open(copy, verify=verify)
    damaged.unlink()
    with pytest.raises(DataError, match=f"{damaged} is missing"):
        TokenDataset.open(copy, verify=verify)


def test_verification_reads_again_only_what_changed(copy: Path, monkeypatch) -> None:
    read: list[Path] = []

    def spy(path: Path) -> int:
        read.append(path)
        return zlib.crc32(path.read_bytes())

    monkeypatch.setattr(shards, "file_crc32", spy)
    TokenDataset.open(copy, verify="cached")
    assert not read
    changed = copy / "train" / "rivers" / "00001.bin"
    data = changed.read_bytes()
    changed.write_bytes(data)
    TokenDataset.open(copy, verify="cached")
    assert read == [changed]
    flip(changed, 5)
    with pytest.raises(DataError, match=r"00001\.bin is corrupt"):
        TokenDataset.open(copy, verify="cached")
    changed.write_bytes(data)
    read.clear()
    TokenDataset.open(copy)
    assert len(read) > 4, "by default everything is read"


def test_verification_survives_a_broken_cache(copy: Path) -> None:
    for content in ("{", "[]"):
        (copy / ".verified.json").write_text(content)
        TokenDataset.open(copy, verify="cached")


def test_a_damaged_index_or_tokenizer_is_found(copy: Path) -> None:
    original = (copy / "index.json").read_text()
    entry = json.loads(original)["eos_token_id"]
    (copy / "index.json").write_text(original.replace(f'"eos_token_id": {entry}', f'"eos_token_id": {entry + 1}'))
    with pytest.raises(DataError, match=r"index\.json is corrupt: its checksum does not match"):
        TokenDataset.open(copy)
    (copy / "index.json").write_text(original[:-20])
    with pytest.raises(DataError, match=r"index\.json is corrupt"):
        TokenDataset.open(copy)
    for other in ("[]", '{"weight_map": {}}'):
        (copy / "index.json").write_text(other)
        with pytest.raises(DataError, match=r"index\.json is not the index of a prepared corpus"):
            TokenDataset.open(copy)
    (copy / "index.json").write_text(original)
    flip(copy / "tokenizer" / "tokenizer.json", 40)
    with pytest.raises(DataError, match=r"tokenizer\.json is corrupt"):
        TokenDataset.open(copy)


def test_a_later_format_is_refused(copy: Path) -> None:
    index = json.loads((copy / "index.json").read_bytes())
    (copy / "index.json").write_text(json.dumps({**index, "version": 2}))
    with pytest.raises(DataError, match="version 2 of the format cannot be read, only version 1"):
        TokenDataset.open(copy)


def test_what_is_not_there_is_said(corpus: Path, tmp_path: Path) -> None:
    for arguments, message in [
        ((tmp_path / "none",), "none: no such directory"),
        ((tmp_path,), r"is not a prepared corpus, since it has no index\.json: `fathom prepare"),
        ((corpus, "test"), "has no split 'test': it has train, val"),
        ((corpus, "val", "lakes"), "split 'val' has no domain 'lakes': it has rivers, seas"),
    ]:
        with pytest.raises(DataError, match=message):
            TokenDataset.open(*arguments)
    (tmp_path / ".prepare").mkdir()
    with pytest.raises(DataError, match="is an unfinished corpus: run the same `fathom prepare` again"):
        TokenDataset.open(tmp_path)
    dataset = TokenDataset.open(corpus)
    with pytest.raises(DataError, match="no domain 'lakes'; allowed: rivers, seas"):
        dataset.select("lakes")
    dataset.require_vocabulary(dataset.vocab_size)
    with pytest.raises(
        DataError, match=f"vocabulary of {dataset.vocab_size} tokens does not fit a model with vocab_size=300"
    ):
        dataset.require_vocabulary(300)


def test_messages_are_one_line() -> None:
    assert shards.first_line(ValueError("one\ntwo")) == "one"
    assert shards.first_line(ValueError()) == "ValueError"


def test_the_advice_keeps_the_tokenizer_of_a_model(tmp_path):
    """A corpus with a tokenizer of its own would be refused for it a command later."""
    with pytest.raises(DataError, match="no such directory: `fathom prepare TEXT --tokenizer 'my model' --out"):
        read_index(tmp_path / "none", tokenizer="my model")
    with pytest.raises(DataError, match="prepare TEXT --train-tokenizer 4096 --out"):
        read_index(tmp_path / "none")
