"""A prompt or a conversation as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fathom.inference.settings import GenerateError


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[dict[str, Any]], /, **variables: object
) -> list[int]:
    """A text as ids, an empty one as the token that begins a document; or the messages of a conversation.

    Args:
        tokenizer: For a conversation it has a template.
        prompt: What to read.
        variables: Further ones for the template.
    """
    if isinstance(prompt, str):
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        # Too long a prompt is reported later.
        ids = list(tokenizer(prompt, verbose=False)["input_ids"]) if prompt else [begin] if begin is not None else []
    elif tokenizer.chat_template:
        whole = written(tokenizer, prompt, **variables)
        ids = list(tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])
    else:
        raise GenerateError("this model has no chat template: it continues texts, give it a prompt")
    if not ids:
        raise GenerateError("this prompt has no tokens, and there is nothing to continue")
    return ids


def written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], /, **variables: object) -> str:
    """A conversation as text, by the tokenizer's chat template; one that it does not take is a `GenerateError`.

    Args:
        tokenizer: It has a template.
        messages: As `role` and `content`.
        variables: Further ones for the template.
    """
    turns = [_turn(message) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **variables))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GenerateError(f"this conversation cannot be read: {reason}") from error


def _turn(message: object) -> dict[str, object]:
    """A message as templates take it: a content of several parts is one text, and one that is null is none."""
    if not isinstance(message, dict):
        raise GenerateError(f"a conversation is a list of messages, each with role and content: {message!r:.80}")
    content = message.get("content")
    if isinstance(content, list):
        content = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in content):
            raise GenerateError("a content of several parts may hold text alone")
        content = "".join(content)
    if not isinstance(content, str | None):
        raise GenerateError(f"the content of a message is text: {content!r:.80}")
    return {key: value for key, value in {**message, "content": content}.items() if value is not None}
