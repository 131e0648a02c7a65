"""Tokenizers of model directories: open one, identify it, and read how its files encode bytes and numbers.

`special_tokens.py` decides which tokens begin, end and pad texts; `data/tokenizer.py` trains tokenizers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom.checkpoints.file_names import (
    QWEN_TIKTOKEN,
    SENTENCEPIECE_MODEL,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    VOCABULARY,
)
from fathom.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

PROBE = "To fathom is to measure a depth, 6 feet at a time."
"""The text that a tokenizer reads when it is opened."""


def open_tokenizer(
    directory: Path, config: PretrainedConfig | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory; nothing is downloaded.

    Args:
        directory: A model or tokenizer directory.
        config: The model's configuration, if already known.
        trust_remote_code: Let transformers run Python files of the directory.
    """
    from transformers import AutoTokenizer

    given = {} if config is None else {"config": config}
    try:
        made = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code, **given
        )
        made.decode(made(PROBE, verbose=False)["input_ids"])  # some settings are first read here
    except BaseException as error:  # every error is about the directory's files
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's errors
            raise
        hint = "; `trust_remote_code` allows it" if "trust_remote_code" in str(error) else ""
        words = what_lacks(directory) or missing(error) or " ".join(str(error).split()) + hint
        raise ModelError(f"{directory}: cannot load the tokenizer: {words}") from error
    return made


def missing(error: BaseException) -> str | None:
    """A message for a `KeyError` raised by a tokenizer's files, since Python's message is only the key; None for other
    errors."""
    return f"its files have no {error}" if isinstance(error, KeyError) else None


def what_lacks(directory: Path) -> str | None:
    """What is missing if a directory has no `tokenizer.json`: tokenizer files, or the package that reads its
    `tokenizer.model`; None if it has a tokenizer in another format."""
    if not directory.is_dir() or (directory / TOKENIZER_JSON).exists():
        return None
    others = (SENTENCEPIECE_MODEL, VOCABULARY, QWEN_TIKTOKEN, TOKENIZER_CONFIG, "*.tiktoken", "vocab.txt", "*.spm")
    if not any(found for name in others for found in directory.glob(name)):
        return f"it has none, no {TOKENIZER_JSON} for example"
    if not (directory / SENTENCEPIECE_MODEL).exists():
        return None
    return f"{SENTENCEPIECE_MODEL} needs `pip install sentencepiece protobuf`, or its {TOKENIZER_JSON}"


def identity(tokenizer_json: str) -> str:
    """SHA-256 of a tokenizer's vocabulary and rules: equal for tokenizers that turn equal text into equal tokens.

    Settings that do not affect tokens of a text are excluded: padding, truncation, decoding, tokens added around a
    text, and the formatting of the file.
    """
    content = json.loads(tokenizer_json)
    model = {key: value for key, value in content["model"].items() if value not in (None, False, "")}
    vocabulary = model.pop("vocab", {})
    if isinstance(vocabulary, list):  # with scores, in the order of the ids
        model["scores"] = [score for _, score in vocabulary]
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.pop("merges", [])]
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    rules = [content.get(key) for key in ("normalizer", "pre_tokenizer")]
    whole = [model, {**vocabulary, **added}, merges, rules]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def added_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text that a token adds to a text; decoded alone, a token of SentencePiece loses the blank that begins it."""
    alone, twice = str(tokenizer.decode([token])), str(tokenizer.decode([token, token]))
    return twice[len(alone) :] if twice.startswith(alone) else alone


def byte_letters() -> dict[str, int]:
    """The byte for each character of GPT-2's byte-level vocabularies: visible Latin-1 stands for itself, U+0100 on for
    the rest."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}


def message_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Parse a protocol-buffer message into field numbers and values: varints as integers, all other types as bytes.

    If it does not parse, a `ValueError` follows the valid fields.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError("a protobuf field has an unknown wire type")
        if at + length > len(data):
            raise ValueError("cut off")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift, byte in zip(range(0, 70, 7), data[at : at + 10], strict=False):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + shift // 7 + 1
    raise ValueError("a number without an end")
