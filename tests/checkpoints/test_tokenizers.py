"""Bytes as tokenizers spell them, and the fields of their files."""

from __future__ import annotations

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fathom.checkpoints.tokenizers import byte_letters, message_fields

MESSAGE = b"\x08\x96\x01" + b"\x12\x02hi" + b"\x1d\x00\x00\x80\x3f" + b"\x21" + bytes(8)


def test_letters_stand_for_the_bytes_of_byte_level_vocabularies() -> None:
    assert byte_letters() == {letter: byte for byte, letter in bytes_to_unicode().items()}


def test_fields_of_every_kind() -> None:
    assert list(message_fields(MESSAGE)) == [(1, 150), (2, b"hi"), (3, b"\0\0\x80\x3f"), (4, bytes(8))]


@pytest.mark.parametrize("data", [b"\x08", b"\x08\x96", b"\x12\x03hi", b"\x0b", b"\x08" + b"\xff" * 11, b"\xff"])
def test_what_does_not_parse_is_an_error_after_what_does(data: bytes) -> None:
    fields = message_fields(b"\x08\x07" + data)
    assert next(fields) == (1, 7)
    with pytest.raises(ValueError, match=r"end|cut off|wire"):
        list(fields)
