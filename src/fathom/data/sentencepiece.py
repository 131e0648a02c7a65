"""SentencePiece's `tokenizer.model` as a Hugging Face tokenizer that encodes the same way, without the library.

The file is a protocol buffer with scored pieces, the training settings and the normalisation of texts.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.checkpoints.tokenizers import message_fields
from fathom.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

MAX_BYTES = 1 << 26
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
SPACE = "▁"


@dataclass
class Model:
    """The contents of a `tokenizer.model`."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    """Text, score and type."""
    model_type: int = UNIGRAM
    suffixed: bool = False
    """Whether a space belongs to the word before it."""
    byte_fallback: bool = False
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True

    def special(self) -> dict[str, str]:
        """The tokens of this model that have a name in Hugging Face's tokenizers."""
        named = {"unk": UNKNOWN, "bos": CONTROL, "eos": CONTROL, "pad": CONTROL}
        found = {name: i for name, i in self.ids.items() if 0 <= i < len(self.pieces)}
        return {f"{name}_token": self.pieces[i][0] for name, i in found.items() if self.pieces[i][2] == named[name]}


def load_sentencepiece(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer from a `tokenizer.model`, and its special tokens (`eos_token`, ...)."""
    model = read_model(path)
    kinds = {kind for _, _, kind in model.pieces}
    for wrong, words in (
        (not model.pieces, "it has no pieces"),
        (model.model_type not in (UNIGRAM, BPE), "it is of words or characters"),
        (UNUSED in kinds, "it has unused pieces"),
        (model.suffixed, "its spaces end words"),
        (not model.escape_whitespaces, "it keeps spaces as they are"),
    ):
        if wrong:
            raise DataError(f"{path}: cannot read this SentencePiece model ({words}): give a tokenizer.json")
    return _assemble(model), model.special()


def read_model(path: Path) -> Model:
    """Parse the file."""
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path}: over {MAX_BYTES >> 20} MiB, no SentencePiece model")
    model = Model()
    try:
        for number, value in message_fields(path.read_bytes()):
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                _read_trainer(model, value)
            elif number == 3:
                _read_normalizer(model, value)
    except (ValueError, IndexError, TypeError, struct.error):
        raise DataError(f"{path}: not a SentencePiece model: give a tokenizer.json") from None
    return model


def _piece(data: bytes) -> tuple[str, float, int]:
    values = dict(message_fields(data))
    (score,) = struct.unpack("<f", values.get(2, b"\0\0\0\0"))
    return values[1].decode("utf-8") if 1 in values else "", score, values.get(3, NORMAL)


def _read_trainer(model: Model, data: bytes) -> None:
    values = dict(message_fields(data))
    model.model_type = values.get(3, UNIGRAM)
    model.suffixed, model.byte_fallback = bool(values.get(24)), bool(values.get(35))
    for number, name in ((40, "unk"), (41, "bos"), (42, "eos"), (43, "pad")):
        if number in values:
            model.ids[name] = _signed(values[number])


def _read_normalizer(model: Model, data: bytes) -> None:
    values = dict(message_fields(data))
    model.charsmap = values.get(2, b"")
    model.add_dummy_prefix = bool(values.get(3, 1))
    model.remove_extra_whitespaces = bool(values.get(4, 1))
    model.escape_whitespaces = bool(values.get(5, 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _assemble(model: Model) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = [text for text, _, _ in model.pieces]
    own = [text for text, _, kind in model.pieces if kind == USER]
    inner: models.Model
    if model.model_type == UNIGRAM:
        vocabulary = [(text, score) for text, score, _ in model.pieces]
        inner = models.Unigram(vocabulary, model.ids["unk"], model.byte_fallback)
    else:
        inner = models.BPE(
            {text: i for i, text in enumerate(pieces)},
            _merges(model),
            unk_token=pieces[model.ids["unk"]],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=bool(own),
        )
    tokenizer = Tokenizer(inner)
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if model.remove_extra_whitespaces:  # at the end, the sign itself also counts as a space
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    tokenizer.normalizer = normalizers.Sequence(steps)
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if own:
        alternatives = "|".join(re.escape(text) for text in sorted(own, key=len, reverse=True))
        cuts.append(pre_tokenizers.Split(Regex(alternatives), "isolated"))
    if own or model.model_type == UNIGRAM:
        cuts.append(pre_tokenizers.Split(Regex(_spelled_out(model)), "isolated"))
    if cuts:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    prefix = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *prefix]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text, _, k in model.pieces if k == CONTROL])
    return tokenizer


def _merges(model: Model) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, best-scored result first, in SentencePiece's merge order."""
    parts = {text: i for i, (text, _, kind) in enumerate(model.pieces) if kind == NORMAL}
    made: list[tuple[float, int, int, str, str]] = []
    for text, score, kind in model.pieces:
        if kind == NORMAL:
            halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
            made += [(-score, parts[a], parts[b], a, b) for a, b in halves if a in parts and b in parts]
    return [(a, b) for *_, a, b in sorted(made)]


def _spelled_out(model: Model) -> str:
    """Where a text spells a token that texts may not produce: splitting off its first character prevents it."""
    never = [text for text, _, kind in model.pieces if kind in (UNKNOWN, CONTROL, BYTE) and len(text) > 1]
    return "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in never) or r"\A\z"
