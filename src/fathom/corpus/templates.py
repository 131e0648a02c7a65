"""Conversations as token ids with a loss mask: the assistant's messages and the token that ends each are trained on.

A template returns a list of pieces, text or special tokens, each trained on or not. The text between two special tokens
is encoded in one go and never parsed for special tokens, so a user's text cannot end a turn.

`plain` in `data/tokenizer.py` makes a tokenizer encode text literally. `chat_template.py` reads a tokenizer's own
template. `tokens.py` stores a template of `CHATS` in a tokenizer without one, and trains a new tokenizer with the
template's tokens. `converse.py` lists in `rejected.jsonl` what cannot be encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from fathom.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ChatMessage = Mapping[str, object]
END = "<end of document>"
"""A piece that stands for the tokenizer's EOS."""


class TemplatePart(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    trained: bool = False
    token: bool = False
    """Whether it is a token of the vocabulary rather than text."""


class EncodedConversation(NamedTuple):
    """A conversation as tokens."""

    ids: list[int]
    trained: list[bool]
    dropped: int
    """Number of oldest exchanges that were dropped."""
    kept: list[ChatMessage]
    """The messages that the tokens stand for."""


def chatml(messages: Sequence[ChatMessage]) -> Iterator[TemplatePart]:
    """Qwen's chat format: each message stands between <|im_start|> and <|im_end|>; a tool's output becomes a user
    message."""
    for message in messages:
        trained = is_trained(message)
        role, content = message["role"], str(message["content"])
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        yield TemplatePart("<|im_start|>", token=True)
        yield TemplatePart(f"{role}\n")
        yield TemplatePart(content, trained)
        yield TemplatePart("<|im_end|>", trained, token=True)
        yield TemplatePart("\n")


ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


def alpaca(messages: Sequence[ChatMessage]) -> Iterator[TemplatePart]:
    """Alpaca's format: messages under its headings, such as `### Instruction:`; every answer ends with EOS."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else ALPACA
    yield TemplatePart(f"{system}\n\n")
    for message in messages[1:] if messages[0]["role"] == "system" else messages:
        content, trained = str(message["content"]), is_trained(message)
        if message["role"] == "user":
            yield TemplatePart(f"### Instruction:\n{content}\n\n")
        elif message["role"] == "tool":
            yield TemplatePart(f"### Input:\n{content}\n\n")
        elif message["role"] == "assistant":
            yield TemplatePart("### Response:\n")
            yield TemplatePart(content, trained)
            yield TemplatePart(END, trained, token=True)
            yield TemplatePart("\n\n")
        else:
            raise DataError("a system message must be the first message")


def react(messages: Sequence[ChatMessage]) -> Iterator[TemplatePart]:
    """ReAct's format: a question, thoughts and actions (trained on), observations (not trained on), and EOS at the
    end."""
    last = len(messages) - 1
    for number, message in enumerate(messages):
        content, trained = str(message["content"]), is_trained(message)
        if message["role"] == "assistant":
            yield TemplatePart(content, trained)
            yield TemplatePart(END, trained, token=True) if number == last else TemplatePart("\n", trained)
        elif message["role"] == "tool":
            yield TemplatePart(f"Observation: {content}\n")
        else:
            yield TemplatePart(f"Question: {content}\n" if message["role"] == "user" else f"{content}\n\n")


Template = Callable[[Sequence[ChatMessage]], Iterator[TemplatePart]]
TEMPLATES: dict[str, Template] = {
    "chatml": chatml,
    "alpaca": alpaca,
    "react": react,
}


CHATS = {
    "chatml": "{% for m in messages %}<|im_start|>{% if m['role'] == 'tool' %}"
    "{{ 'user\\n<tool_response>\\n' + m['content'] + '\\n</tool_response>' }}"
    "{% else %}{{ m['role'] + '\\n' + m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "alpaca": "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}"
    + ALPACA
    + "{% endif %}{{ '\\n\\n' }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '### Instruction:\\n' + m['content'] + '\\n\\n' }}"
    "{% elif m['role'] == 'tool' %}{{ '### Input:\\n' + m['content'] + '\\n\\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ '### Response:\\n' + m['content'] + eos_token + '\\n\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}",
}
"""The same as Jinja chat templates, for tokenizers without one, so that prompts have the form of the training data."""


def is_trained(message: ChatMessage) -> bool:
    """Whether a message is trained on. The assistant's messages are, unless they have `train: false`, which clears the
    message's bits in the loss mask."""
    return bool(message["role"] == "assistant" and message.get("train", True))


def tokens_of(template: Template) -> list[str]:
    """The special tokens that a template needs, other than EOS."""
    probe = [{"role": role, "content": "x"} for role in ("user", "assistant")]
    return sorted({piece.text for piece in template(probe) if piece.token} - {END})


class ConversationEncoder:
    """Encodes conversations by one template, given as a function or by name."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, template: str | Template, most_tokens: int) -> None:
        self._tokenizer, self._eos, self._most = tokenizer, eos_token_id, most_tokens
        self._template = TEMPLATES[template] if isinstance(template, str) else template

    def missing_tokens(self) -> list[str]:
        """Special tokens that the template needs and the tokenizer lacks."""
        return [text for text in tokens_of(self._template) if self._tokenizer.token_to_id(text) is None]

    def encode(self, messages: Sequence[ChatMessage]) -> EncodedConversation | None:
        """A conversation as token ids that end with EOS; if it is too long, the oldest exchanges are dropped; None if
        the last exchange alone is too long."""
        head = 1 if messages and messages[0]["role"] == "system" else 0
        starts = [number for number, one in enumerate(messages) if one["role"] == "user" and number > head]
        for dropped, start in enumerate([head, *starts]):
            kept = [*messages[:head], *messages[start:]]
            ids, trained = self._encode(kept)
            if len(ids) <= self._most:
                return EncodedConversation(ids, trained, dropped, kept)
        return None

    def _encode(self, messages: Sequence[ChatMessage]) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        trained: list[bool] = []
        pieces = [piece for piece in self._template(messages) if piece.text]
        if pieces and pieces[-1].text.isspace() and not pieces[-1].token:
            # Text after the last turn is dropped, since the document ends there.
            before = pieces[-2] if len(pieces) > 1 else None
            if before is not None and before.token and self._id(before.text) == self._eos:
                pieces.pop()
        for (is_token, is_target), group in groupby(pieces, lambda piece: (piece.token, piece.trained)):
            members = list(group)
            if is_token:
                found = [self._id(piece.text) for piece in members]
            else:
                text = "".join(piece.text for piece in members)
                found = self._tokenizer.encode(text, add_special_tokens=False).ids
            ids += found
            trained += [is_target] * len(found)
        if not ids or ids[-1] != self._eos:
            ids.append(self._eos)
            trained.append(False)
        return ids, trained

    def _id(self, token: str) -> int:
        found = self._eos if token == END else self._tokenizer.token_to_id(token)
        if found is None:
            raise DataError(f"the template needs the token {token}, which the tokenizer lacks")
        return int(found)
