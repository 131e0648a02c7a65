"""Turns a prompt or a conversation into token ids, and decides whether messages may contain control tokens.

Only the chat template writes control tokens (special tokens such as `<|im_end|>`), unless `allow_control_tokens` is
set: `control.py` makes those in messages plain text. An empty prompt starts a new document. The prompt of a completion
may contain special tokens.

`api.py` decides what a request may hold, such as at most 4,096 messages. `server.py` refuses tools and earlier calls if
the template writes none. `tokenising.py` has the server's threads for this work.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE
from transformers import PreTrainedTokenizerBase

from fathom.errors import RequestError, SettingsError
from fathom.inference.control import plain_ids, written_in

PROBE = 8
"""Characters for each token of the context, of the beginning that is tokenised first."""
SLACK = 256
"""Tokens by which a beginning must exceed the context: where it is cut, it may have a few more than in the whole."""
NOTHING: Mapping[str, object] = {}


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[dict[str, Any]],
    /,
    variables: Mapping[str, object] = NOTHING,
    context: int | None = None,
    allow_control: bool = False,
) -> list[int]:
    """The ids of a text, or of a conversation's messages. An empty text is the token that begins a document.

    Args:
        tokenizer: The tokenizer; a conversation needs its chat template.
        prompt: A text, or messages.
        variables: Further template variables.
        context: A text far longer than this is a `RequestError`, judging by its beginning; slightly longer ones pass.
        allow_control: Whether texts of messages may write special tokens, as `<|im_end|>`. A prompt always may.
    """
    if isinstance(prompt, str):
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = _ids(tokenizer, prompt, context) if prompt else [begin] if begin is not None else []
    elif tokenizer.chat_template:
        ids = _conversation(tokenizer, prompt, variables, context, allow_control)
    else:
        raise SettingsError("this model has no chat template; use a prompt instead of messages")
    if not ids:
        raise SettingsError("this prompt has no tokens")
    return ids


def reserved_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names that a client's template variables must not have, because Fathom, transformers or jinja use them."""
    arguments = inspect.signature(type(tokenizer).apply_chat_template).parameters  # including `self`
    ours = {"messages", "raise_exception", "strftime_now", *tokenizer.special_tokens_map}
    return frozenset({*arguments, *ours, *DEFAULT_NAMESPACE})


def _conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    variables: Mapping[str, object],
    context: int | None,
    allow_control: bool,
) -> list[int]:
    turns = [_turn(message) for message in messages]
    given = [*turns, dict(variables)]  # the text of a variable is as untrusted as that of a message
    if allow_control or not written_in(tokenizer, given):
        whole = written(tokenizer, turns, **variables)
        return _ids(tokenizer, whole, context, add_special_tokens=False)
    # A tokenizer of another kind reads the text as a whole, so the length is checked first.
    _ids(tokenizer, "".join(str(turn.get("content", "")) for turn in turns), context, probe=True)
    return plain_ids(tokenizer, given, lambda marked: written(tokenizer, marked[:-1], **marked[-1]))


def _ids(
    tokenizer: PreTrainedTokenizerBase, text: str, context: int | None, probe: bool = False, **how: bool
) -> list[int]:
    """The tokens of a text; with `probe`, an empty list unless the text is far too long."""

    def read(part: str) -> list[int]:
        return list(tokenizer(part, verbose=False, **how)["input_ids"])  # a prompt that is too long is reported later

    if context is not None:
        beginning = text[: PROBE * (context + SLACK)]
        if len(beginning) < len(text) and len(read(beginning)) > context + SLACK:
            message = f"this model's context is {context} tokens; the prompt has more"
            raise RequestError(message, "context_length_exceeded")
    return [] if probe else read(text)


def written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], /, **variables: object) -> str:
    """A conversation as text, rendered by the tokenizer's chat template. A conversation that the template rejects is a
    `SettingsError`.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: As templates expect them.
        variables: Further template variables.
    """
    variables = {"add_generation_prompt": True, **variables}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SettingsError(f"this conversation cannot be read: {reason}") from error


def _turn(message: object) -> dict[str, object]:
    """A message in the form that templates expect: a `content` of several parts becomes one text, and null values are
    left out."""
    if not isinstance(message, dict):
        raise SettingsError(f"a conversation is a list of messages, each with role and content: {message!r:.80}")
    content = one_text(message.get("content"))
    if not isinstance(content, str | None):
        raise SettingsError(f"the content of a message must be a text or a list of text parts: {content!r:.80}")
    return {key: value for key, value in {**message, "content": content}.items() if value is not None}


def one_text(content: object) -> object:
    """The text of a message's `content` that is a list of text parts; other keys of a part, such as `cache_control`,
    are ignored. Anything else as it is."""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, dict) and part.get("type", "text") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else content
