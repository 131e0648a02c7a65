"""A `tokenizer.json` with the attributes that corpora need, for machines without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom.checkpoints.file_names import TOKENIZER_CONFIG, TOKENIZER_JSON
from fathom.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class PlainTokenizer:
    """A stand-in for `PreTrainedTokenizerFast` with the methods that corpora use; transformers can open the directory
    that it saves."""

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        self.backend_tokenizer, self._settings = tokenizer, dict(settings)
        self.chat_template: str | None = self._settings.pop("chat_template", None)
        self.eos_token = _text(self._settings.get("eos_token"))

    @classmethod
    def read(cls, name: str) -> PlainTokenizer:
        """The tokenizer of a directory or of a file."""
        from tokenizers import Tokenizer

        place = Path(name)
        file = place / TOKENIZER_JSON if place.is_dir() else place
        if not file.is_file():
            raise DataError(f"{name}: without transformers, a tokenizer is a {TOKENIZER_JSON} or a folder with one")
        config = file.with_name(TOKENIZER_CONFIG)
        settings = json.loads(config.read_bytes()) if place.is_dir() and config.is_file() else {}
        return cls(Tokenizer.from_file(str(file)), settings)

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos: str, pad: str, others: Sequence[str]) -> PlainTokenizer:
        """Wrap a tokenizer that Fathom has trained, with its special tokens."""
        further = {"additional_special_tokens": list(others)} if others else {}
        settings = {"eos_token": eos, "pad_token": pad, "clean_up_tokenization_spaces": False, **further}
        return cls(tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", **settings})

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a document."""
        return None if self.eos_token is None else self.backend_tokenizer.token_to_id(self.eos_token)

    def get_vocab(self) -> dict[str, int]:
        """Every token's id."""
        return self.backend_tokenizer.get_vocab()

    def save_pretrained(self, directory: Path) -> None:
        """Write the directory's two files."""
        directory.mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(directory / TOKENIZER_JSON))
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        settings = {**self._settings, "eos_token": self.eos_token, **template}
        (directory / TOKENIZER_CONFIG).write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")


def _text(token: object) -> str | None:
    """The text of a special token, which a tokenizer's configuration gives as text or as an object that contains the
    text."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
