"""Tokens to OpenAI's answers: incremental text, stop strings, log-probabilities; whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fathom.inference.engine import Scored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = "\ufffd"


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before any stop string, and the rest, which may be the beginning of one; None once one was found."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)], None
    held = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
    return text[: len(text) - held], text[len(text) - held :]


class AnswerWords:
    """Tokens to text, whole characters at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._from, self._told = 0, 0  # start of the tokens to decode, and of those whose text was not returned yet

    def add(self, token: int) -> str:
        """The text that a token adds; empty while a character may be incomplete."""
        self.ids.append(token)
        return self._new(False)

    def rest(self) -> str:
        """The text that was held back."""
        return self._new(True)

    def _new(self, all_of_it: bool) -> str:
        before, now = self._decoded(self.ids[self._from : self._told]), self._decoded(self.ids[self._from :])
        if len(now) <= len(before) or (now.endswith(UNKNOWN) and not all_of_it):
            return ""
        self._from, self._told = self._told, len(self.ids)
        return now[len(before) :]

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@dataclass
class Text:
    """One choice of an answer."""

    words: AnswerWords
    stops: Sequence[str]
    with_scores: bool = False
    said: str = ""
    tokens: int = 0
    finish: str | None = None
    scores: list[tuple[Scored, int]] = field(default_factory=list)
    """Scores that were not sent yet, each with the position in the text where its token begins."""
    _held: str = ""
    _length: int = 0

    def echo(self, prompt: str, scores: Sequence[Scored]) -> str:
        """Put the prompt at the beginning of the text; returns it."""
        inside = AnswerWords(self.words.tokenizer)
        for one in scores if self.with_scores else ():
            self.scores.append((one, self._length))
            self._length += len(inside.add(one.token))
        self._length = len(prompt)
        self.said = prompt
        return prompt

    def add(self, scored: Scored) -> str:
        """Add a token; returns the text that can be sent, and sets `finish` if a stop string ends the text."""
        self.tokens += 1
        if self.with_scores:
            self.scores.append((scored, self._length))
        return self._tell(self.words.add(scored.token))

    def end(self, why: str) -> str:
        """End the text; returns the rest of it."""
        new = self._tell(self.words.rest())
        if self.finish is None:
            self.finish, rest, self._held = why, self._held, ""
            self.said += rest
            new += rest
        return new

    def _tell(self, new: str) -> str:
        self._length += len(new)
        new, held = before_stop(self._held + new, self.stops)
        self._held = held or ""
        if held is None:
            self.finish = "stop"
        self.said += new
        return new

    def take_scores(self) -> list[tuple[Scored, int]]:
        """Take the scores that were not sent yet."""
        taken, self.scores = self.scores, []
        return taken


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

    return {
        "content": [
            {**entry(one.token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]} for one, _ in scores
        ]
    }


class Envelope:
    """The JSON around the choices of one answer."""

    def __init__(self, model: str, chat: bool, tokenizer: PreTrainedTokenizerBase) -> None:
        self.chat, self.tokenizer = chat, tokenizer
        kind = "chatcmpl" if chat else "cmpl"
        self.head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, texts: Sequence[Text], prompt_tokens: int) -> dict[str, object]:
        """An answer in one piece."""
        choices = []
        for i, text in enumerate(texts):
            body = {"message": {"role": "assistant", "content": text.said}} if self.chat else {"text": text.said}
            choices.append({"index": i, **body, "logprobs": self._logprobs(text), "finish_reason": text.finish})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": usage(texts, prompt_tokens)}

    def begin(self, index: int) -> dict[str, object]:
        """The first chunk of a streamed chat."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def chunk(self, index: int, text: Text, new: str) -> dict[str, object]:
        """A part of a choice."""
        body = {"delta": {"content": new} if new else {}} if self.chat else {"text": new}
        scores = self._logprobs(text) if text.scores else None
        return self._chunk([{"index": index, **body, "logprobs": scores, "finish_reason": text.finish}])

    def last(self, texts: Sequence[Text], prompt_tokens: int) -> dict[str, object]:
        """The chunk that says how many tokens there were."""
        return {**self._chunk([]), "usage": usage(texts, prompt_tokens)}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices}

    def _logprobs(self, text: Text) -> dict[str, object] | None:
        if not text.with_scores:
            return None
        return (chat_logprobs if self.chat else completion_logprobs)(self.tokenizer, text.take_scores())


def usage(texts: Sequence[Text], prompt_tokens: int) -> dict[str, int]:
    """OpenAI's `usage`: tokens of the prompts and of the texts."""
    made = sum(text.tokens for text in texts)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}
