"""Converts tokenizers' vocabularies: finds the string of bytes that each row of an embedding represents.

Tokenizers write one string in several ways (`Ġthe`, `▁the`, `<0xE2>`). All are converted to bytes, so that rows of two
models can be paired by their strings.

`aligning.py` decides how many shared strings an alignment needs, and pairs rows by number if a tokenizer is missing.
`comparison.py` decides how many anchors HuRef's scores take, and `publishing/cards.py` how many a card takes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import numpy as np

from fathom.checkpoints.file_names import QWEN_TIKTOKEN, SENTENCEPIECE_MODEL, TOKENIZER_JSON, VOCABULARY
from fathom.checkpoints.origin import Origin, read_json, read_whole
from fathom.checkpoints.tensors import Array
from fathom.checkpoints.tokenizers import byte_letters, message_fields
from fathom.errors import ModelError

Vocabulary = Mapping[bytes, int]

SHARED_LIMIT = 16_384  # rows, or four for each channel of wider models
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD = re.compile(rb" [A-Za-z]{3,}")
_ALPHABET = byte_letters()


def piece_bytes(piece: str, byte_level: bool) -> bytes:
    """The string of bytes that a vocabulary entry stands for."""
    if byte_level and all(char in _ALPHABET for char in piece):
        return bytes(_ALPHABET[char] for char in piece)
    if found := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.replace("▁", " ").encode("utf-8", "surrogatepass")


def read_vocabulary(origin: Origin) -> dict[bytes, int] | None:
    """The tokenizer in the model directory, or None if there is no readable one."""
    if origin.exists(TOKENIZER_JSON):
        return _from_tokenizer_json(read_json(origin, TOKENIZER_JSON))
    for name in (SENTENCEPIECE_MODEL, QWEN_TIKTOKEN):
        if origin.exists(name):
            return _from_model_file(read_whole(origin, name), name)
    if origin.exists(VOCABULARY):
        table = read_json(origin, VOCABULARY)
        return _collect(((piece, index) for piece, index in table.items()), byte_level=True)
    return None


def _from_tokenizer_json(table: dict[str, object]) -> dict[bytes, int]:
    model = table.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise ModelError("tokenizer.json: no model.vocab")
    vocab, added = model["vocab"], table.get("added_tokens")
    pairs: Iterable[tuple[object, object]]
    if isinstance(vocab, dict):
        pairs = vocab.items()
    else:
        pairs = ((entry[0] if isinstance(entry, list) and entry else None, index) for index, entry in enumerate(vocab))
    special = {item.get("content") for item in added if isinstance(item, dict)} if isinstance(added, list) else set()
    return _collect(
        (pair for pair in pairs if pair[0] not in special),
        _is_byte_level([table.get("pre_tokenizer"), table.get("decoder")]),
    )


def _is_byte_level(table: object) -> bool:
    """Whether a part of a tokenizer, however deep, is of the type ByteLevel."""
    left = [table]
    while left:
        node = left.pop()
        if isinstance(node, dict) and node.get("type") == "ByteLevel":
            return True
        left += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return False


def _from_model_file(raw: bytes, name: str) -> dict[bytes, int]:
    """Read a vocabulary from a tiktoken text file (base64, rank per line) or a sentencepiece protocol buffer."""
    try:
        lines = [line.split() for line in raw.decode("ascii").splitlines() if line]
        return {base64.b64decode(text, validate=True): int(rank) for text, rank in lines}
    except (UnicodeDecodeError, ValueError, binascii.Error):
        pieces = list(_sentencepieces(raw))
    if not pieces:
        raise ModelError(f"{name}: neither tiktoken nor sentencepiece")
    return _collect(((piece, index) for index, (piece, kind) in enumerate(pieces) if kind in (1, 6)), byte_level=False)


def _readable(raw: bytes) -> Iterator[tuple[int, object]]:
    """The fields of a protocol buffer message, up to the first byte that does not parse."""
    with suppress(ValueError):
        yield from message_fields(raw)


def _sentencepieces(raw: bytes) -> Iterator[tuple[str, int]]:
    """The pieces of a sentencepiece model with their types (1 normal, 6 byte; all other types are control entries)."""
    for number, message in _readable(raw):
        if number == 1 and isinstance(message, bytes):
            entry = dict(_readable(message))
            piece, kind = entry.get(1), entry.get(3, 1)
            if isinstance(piece, bytes) and isinstance(kind, int):
                yield piece.decode("utf-8", "replace"), kind


def _collect(pairs: Iterable[tuple[object, object]], byte_level: bool) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for piece, index in pairs:
        if isinstance(piece, str) and type(index) is int and index >= 0:
            found.setdefault(piece_bytes(piece, byte_level), index)
    return found


def from_pieces(pieces: Iterable[str], byte_level: bool) -> dict[bytes, int]:
    """A vocabulary from a plain list of pieces; entries such as `<s>` are skipped."""
    listed = ((piece, index) for index, piece in enumerate(pieces))
    return _collect((p for p in listed if not re.fullmatch(r"<(?!0x)[^>]*>|<\|.*\|>", p[0])), byte_level)


def rows_as_strings(rows: int) -> dict[bytes, int]:
    """A vocabulary of row numbers in place of strings, for models without a tokenizer."""
    return {b"#%d" % row: row for row in range(rows)}


def string_hash(text: bytes, key: bytes = b"fathom") -> int:
    """A 64-bit keyed hash of a string, equal on every machine; strings are chosen in the order of their hashes."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little")


def shared_rows(
    a: Vocabulary, b: Vocabulary, rows_a: int, rows_b: int, limit: int = SHARED_LIMIT
) -> tuple[Array, Array]:
    """Row numbers in A and B of strings that both vocabularies contain, at most `limit`: whole blocks of A's rows,
    chosen by hash."""
    shared = [text for text, row in a.items() if row < rows_a and b.get(text, rows_b) < rows_b]
    if len(shared) > limit:
        # in blocks of neighbours, so that a sample is read in long runs
        order = {block: string_hash(b"%d" % block) for block in {a[text] // 64 for text in shared}}
        shared = sorted(shared, key=lambda text: (order[a[text] // 64], a[text]))[:limit]
    shared.sort(key=a.__getitem__)
    return np.array([a[text] for text in shared], np.int64), np.array([b[text] for text in shared], np.int64)


def anchors(vocabulary: Vocabulary, rows: int, count: int) -> list[bytes]:
    """The anchor strings of a vocabulary: the words with the smallest hashes.

    Because hashes choose them, vocabularies that share words mostly choose the same ones, without a fixed list. Most
    tokenizers have words (a space and at least three letters) in common. If a vocabulary has too few words, other
    strings are used.
    """
    usable = [text for text, row in vocabulary.items() if row < rows]
    words = [text for text in usable if _WORD.fullmatch(text)]
    return sorted(words if len(words) >= count else usable, key=string_hash)[:count]


def rarest(vocabulary: Vocabulary, rows: int, count: int) -> list[int]:
    """HuRef's own anchors: the embedding rows of the `count` tokens that a byte-pair tokenizer created last, in order
    of creation.

    HuRef counts tokens on Wikipedia and takes each model's 4,096 rarest. A byte-pair tokenizer makes the rarest last.
    """
    return sorted(row for row in vocabulary.values() if row < rows)[-count:]
