"""Texts as OpenAI's answers, with log-probabilities: whole, or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathom.inference.engine import Scored
from fathom.inference.texts import UNKNOWN, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as text; by its number if it is not a whole character."""
    text = str(tokenizer.decode([token]))
    return f"token_id:{token}" if UNKNOWN in text else text


def _by_word(tokenizer: PreTrainedTokenizerBase, scored: Scored) -> dict[str, float]:
    """Log-probabilities of the likeliest tokens and of the chosen one, by text; by number if two texts are equal."""
    assert scored.logprob is not None
    found = {word(tokenizer, scored.token): scored.logprob}
    for token, logprob in scored.top:
        if token != scored.token:
            name = word(tokenizer, token)
            found[f"token_id:{token}" if name in found else name] = logprob
    return found


def completion_logprobs(tokenizer: PreTrainedTokenizerBase, scores: Sequence[tuple[Scored, int]]) -> dict[str, object]:
    """Log-probabilities in the format of completions; the first token of a document has none."""
    return {
        "tokens": [word(tokenizer, one.token) for one, _ in scores],
        "token_logprobs": [one.logprob for one, _ in scores],
        "top_logprobs": [None if one.logprob is None else _by_word(tokenizer, one) for one, _ in scores],
        "text_offset": [at for _, at in scores],
    }


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, scores: Sequence[tuple[Scored, int]]) -> dict[str, object]:
    """Log-probabilities in the format of chats."""

    def entry(token: int, logprob: float | None) -> dict[str, object]:
        text = word(tokenizer, token)
        whole = None if text == f"token_id:{token}" else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": whole}

    tops = [[entry(*pair) for pair in one.top] for one, _ in scores]
    made = [{**entry(one.token, one.logprob), "top_logprobs": top} for (one, _), top in zip(scores, tops, strict=True)]
    return {"content": made}


class Envelope:
    """The JSON around the choices of one answer."""

    def __init__(self, model: str, chat: bool, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> None:
        self.chat, self.tokenizer, self.prompt_tokens = chat, tokenizer, prompt_tokens
        self.kind, short = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        self.head = {"id": f"{short}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, texts: Sequence[Text]) -> dict[str, object]:
        """An answer in one piece."""
        said = [{"message": {"role": "assistant", "content": x.said}} if self.chat else {"text": x.said} for x in texts]
        choices = [self._choice(i, text, said[i]) for i, text in enumerate(texts)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self._usage(texts)}

    def begin(self, index: int, text: Text) -> dict[str, object]:
        """The first chunk of a streamed chat."""
        return self._chunk([self._choice(index, text, {"delta": {"role": "assistant", "content": ""}})])

    def chunk(self, index: int, text: Text, new: str) -> dict[str, object]:
        """A part of a choice."""
        said = {"delta": {"content": new} if new else {}} if self.chat else {"text": new}
        return self._chunk([self._choice(index, text, said)])

    def last(self, texts: Sequence[Text]) -> dict[str, object]:
        """The chunk that says how many tokens there were."""
        return {**self._chunk([]), "usage": self._usage(texts)}

    def _choice(self, index: int, text: Text, said: dict) -> dict[str, object]:
        """With the scores that were not sent yet."""
        scores, text.scores = text.scores, []
        in_format = chat_logprobs if self.chat else completion_logprobs
        logprobs = in_format(self.tokenizer, scores) if scores else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": text.finish}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        return {**self.head, "object": f"{self.kind}.chunk" if self.chat else self.kind, "choices": choices}

    def _usage(self, texts: Sequence[Text]) -> dict[str, int]:
        made = sum(text.tokens for text in texts)
        total = self.prompt_tokens + made
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": made, "total_tokens": total}
