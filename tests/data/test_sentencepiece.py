"""A `tokenizer.model` encodes as SentencePiece does: recorded encodings, and the library where it is installed."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path

import pytest

from fathom.data import sentencepiece as module
from fathom.data.prepare import prepare
from fathom.data.shards import TokenDataset
from fathom.data.tokenizer import load_tokenizer, plain_encoder, save_tokenizer
from fathom.errors import DataError
from tests.data.corpora import SENTENCE, WORDS, write_documents
from tests.data.test_prepare import documents

RECORDED = Path(__file__).parent / "recorded" / "sentencepiece"


def encoded(source: Path, folder: Path, texts: list[str]) -> list[list[int]]:
    """As `prepare` encodes: through the saved tokenizer, with nothing added."""
    save_tokenizer(load_tokenizer(str(source)), folder)
    encoder = plain_encoder(folder / "tokenizer" / "tokenizer.json")
    return [encoder.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("name", ["bpe", "unigram"])
@pytest.mark.parametrize("place", ["file", "folder"])
def test_recorded_encodings(tmp_path: Path, name: str, place: str) -> None:
    recorded = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    source = RECORDED / f"{name}.model"
    if place == "folder":
        (tmp_path / "model").mkdir()
        source = tmp_path / "model"
        shutil.copy(RECORDED / f"{name}.model", source / "tokenizer.model")
    found = encoded(source, tmp_path, [text for text, _ in recorded])
    assert found == [ids for _, ids in recorded]
    assert any("</s>" in text for text, _ in recorded), "and what a document spells out is text"
    assert not {1, 2} & {i for ids in found for i in ids}


def test_special_tokens_have_their_names() -> None:
    tokenizer = load_tokenizer(str(RECORDED / "unigram.model"))
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(4)] == ["<unk>", "<s>", "</s>", "<pad>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 3)


def test_a_corpus_is_prepared_with_it(tmp_path: Path) -> None:
    texts = write_documents(tmp_path / "a.jsonl", 30)
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", str(RECORDED / "bpe.model"), held_out=0)
    assert TokenDataset.open(tmp_path / "out").eos_token_id == 2
    assert list(documents(tmp_path / "out", "train")) == texts


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-5], lambda d: b"", lambda d: b"IQ== 0\nIg== 1\n", lambda d: b"\xff" * 99]
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, damage) -> None:
    (tmp_path / "a.model").write_bytes(damage((RECORDED / "bpe.model").read_bytes()))
    with pytest.raises(DataError, match=r"a\.model: .*give a tokenizer\.json") as caught:
        load_tokenizer(str(tmp_path / "a.model"))
    assert "\n" not in str(caught.value)


def test_a_length_beyond_the_file_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(b"\x0a" + b"\xff\xff\xff\xff\x0f" + b"x")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        module.read_model(tmp_path / "a.model")


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},
        {"user_defined_symbols": ["<sep>"]},
        {"pad_id": 3, "split_digits": True},
    ],
)
def test_the_library_agrees(tmp_path: Path, model_type: str, byte_fallback: bool, options: dict) -> None:
    library = pytest.importorskip("sentencepiece")
    chance = random.Random(0)
    words = [*WORDS, *SENTENCE.split(), "ﬁne", "①", "x²", "<sep>", "3.14"]
    texts = [" ".join(chance.choices(words, k=chance.randint(1, 60))) for _ in range(1500)]
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=(text.replace("\n", " ") for text in texts),
        model_writer=model,
        vocab_size=360 if byte_fallback else 110,
        model_type=model_type,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    (tmp_path / "a.model").write_bytes(model.getvalue())
    letters = "ab cd\n\té水  🌊 ﬁ①▁<sep>"
    texts = texts[:300] + ["".join(chance.choices(letters, k=chance.randint(1, 40))) for _ in range(500)]
    # A control token that a text spells out stays text here too, but unknown characters in it are not joined.
    texts = [text for text in texts if "<s>" not in text]
    processor = library.SentencePieceProcessor(model_file=str(tmp_path / "a.model"))
    assert encoded(tmp_path / "a.model", tmp_path, texts) == [processor.encode(text) for text in texts]
