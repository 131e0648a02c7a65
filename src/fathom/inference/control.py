"""Special tokens in a conversation: the chat template may write them, the texts of messages may not.

A text such as `<|im_end|>` in a message becomes the tokens of its characters. Where a message holds one, each is marked
before the template is rendered, by a character that no message has. Unmarked ones are then the template's. The rendered
text is read by a copy of the tokenizer whose special tokens have names that nobody can guess.

`prompt.py` decides whether control tokens in messages become plain text (`allow_control_tokens`). Markers that are not
special tokens, such as `[INST]` in old templates, are not protected.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from fathom.errors import SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode's noncharacters, which are no part of any text."""


@dataclass(frozen=True)
class RenamedTokenizer:
    """A copy of a tokenizer in which the special tokens have other names."""

    tokenizer: Tokenizer
    names: dict[str, str]
    """Names of the copies, by those in the tokenizer that was copied."""
    special: re.Pattern[str]
    """Any of the names that were copied."""

    def ids(self, text: str, mark: str) -> list[int]:
        """The tokens of a rendered conversation; the names of special tokens count as special tokens unless `mark`
        stands in them."""
        renamed = self.special.sub(lambda found: self.names[found[0]], text).replace(mark, "")
        (found,) = self.tokenizer.encode_batch([renamed], add_special_tokens=False)  # `encode` stops all threads
        return list(found.ids)


def special_names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of a tokenizer's special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return [token.content for token in added if token.special and token.content]


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A regular expression that matches any of these texts, longer ones first."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def written_in(tokenizer: PreTrainedTokenizerBase, messages: object) -> bool:
    """Whether any text in these messages contains the name of a special token."""
    names = special_names(tokenizer)
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    whole = "\0".join(_texts(messages))  # searched at once: there may be thousands of short texts and hundreds of names
    forms = [whole] if normalizer is None else [whole, normalizer.normalize_str(whole)]
    return any(name in form for form in forms for name in names)


def plain_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], render: Callable[[Any], str]
) -> list[int]:
    """A conversation as tokens, in which special tokens come from the chat template only, not from the messages' texts.

    Args:
        tokenizer: It has a chat template.
        messages: The conversation, or anything that `render` takes, as dictionaries, lists and texts.
        render: The template.
    """
    mark = next((mark for mark in MARKS if not any(mark in text for text in _texts(messages))), None)
    if mark is None:
        raise SettingsError("the messages contain all noncharacters U+FDD0 to U+FDEF, of which one must be free")
    reader = _reader(tokenizer)
    marked = _map(messages, lambda text: reader.special.sub(lambda found: found[0][0] + mark + found[0][1:], text))
    return reader.ids(render(marked), mark)


@lru_cache(8)
def _reader(tokenizer: PreTrainedTokenizerBase) -> RenamedTokenizer:
    refusal = SettingsError("a message contains a control token, which this tokenizer cannot encode as plain text")
    if not tokenizer.is_fast:
        raise refusal
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content |= {"truncation": None, "padding": None, "post_processor": None}
    nonce = secrets.token_hex(8)
    names = {name: f"<{nonce}-{i}>" for i, name in enumerate(special_names(tokenizer))}
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    elif "vocab" in model:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        made = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises no class of its own
        raise refusal from error
    if any(made.token_to_id(new) != tokenizer.convert_tokens_to_ids(old) for old, new in names.items()):
        raise refusal
    return RenamedTokenizer(made, names, any_of(names))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _map(value: object, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key) if isinstance(key, str) else key: _map(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_map(one, change) for one in value]
    return value
