"""Formats generated texts as OpenAI's API answers, with log-probabilities: complete, or as streamed chunks.

The `finish_reason` is `tool_calls` if the answer ends with complete calls, and `stop` if a stop string cut them.

`usage_of` reports token counts, those of the reasoning and of the prefix cache among them. `server.py` sends streams,
and ends one that fails with an error object and `[DONE]`; the Responses API has a failure event (`responses.py`).
`texts.py` ends a text at a stop string, and `thoughts.py` and `tools.py` find reasoning and calls.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fathom.checkpoints.tokenizers import added_text
from fathom.inference.engine import Job, Scored
from fathom.inference.texts import UNKNOWN, Text
from fathom.inference.tools import Call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PART = 64
"""Most members of a list that are written at once: other threads wait meanwhile."""


DEEP = 6
"""How deep log-probabilities lie in an answer; what is deeper came from the client."""


def written(value: object, deep: int = DEEP) -> str:
    """An answer as JSON, written in parts, since log-probabilities may be a hundred thousand numbers and names."""
    if deep and isinstance(value, dict):
        return "{" + ",".join(f"{_plainly(str(key))}:{written(one, deep - 1)}" for key, one in value.items()) + "}"
    if deep and isinstance(value, list) and len(value) <= PART:
        return "[" + ",".join(written(one, deep - 1) for one in value) + "]"
    if isinstance(value, list):
        return "[" + ",".join(_plainly(value[i : i + PART])[1:-1] for i in range(0, len(value), PART)) + "]"
    return _plainly(value)


def _plainly(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@lru_cache(1 << 17)  # of a long prompt twenty tokens for each position are named
def word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as text, or as its number if it is not a whole character."""
    text = added_text(tokenizer, token)
    return f"token_id:{token}" if UNKNOWN in text else text


def _by_word(tokenizer: PreTrainedTokenizerBase, scored: Scored) -> dict[str, float]:
    """The log-probabilities of the most likely tokens and of the chosen one, keyed by text; a token whose text is taken
    is keyed by its number."""
    assert scored.logprob is not None
    found = {word(tokenizer, scored.token): scored.logprob}
    for token, logprob in scored.top:
        if token != scored.token:
            name = word(tokenizer, token)
            found[f"token_id:{token}" if name in found else name] = logprob
    return found


def completion_logprobs(tokenizer: PreTrainedTokenizerBase, scores: Sequence[tuple[Scored, int]]) -> dict[str, object]:
    """Log-probabilities in the format of OpenAI's text completions. The first token of a document has none."""
    return {
        "tokens": [word(tokenizer, one.token) for one, _ in scores],
        "token_logprobs": [one.logprob for one, _ in scores],
        "top_logprobs": [None if one.logprob is None else _by_word(tokenizer, one) for one, _ in scores],
        "text_offset": [at for _, at in scores],
    }


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, scores: Sequence[tuple[Scored, int]]) -> dict[str, object]:
    """Log-probabilities in the format of OpenAI's chat completions."""

    def entry(token: int, logprob: float | None) -> dict[str, object]:
        text = word(tokenizer, token)
        whole = None if text == f"token_id:{token}" else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": whole}

    tops = [[entry(*pair) for pair in one.top] for one, _ in scores]
    made = [{**entry(one.token, one.logprob), "top_logprobs": top} for (one, _), top in zip(scores, tops, strict=True)]
    return {"content": made}


class Envelope:
    """The JSON of one API answer, apart from its choices.

    Args:
        model: The name that clients use.
        chat: Whether the answer is a turn of a conversation.
        tokenizer: The model's tokenizer.
        prompts: The prompts as token ids.
        ids: Whether to include token ids of the choices and of the prompts.
        trips: Whether to include the loop iterations of each token.
        reasoning: Whether to include thoughts.
    """

    def __init__(
        self,
        model: str,
        chat: bool,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Sequence[int]],
        ids: bool = False,
        trips: bool = False,
        reasoning: bool = True,
    ) -> None:
        self.reasoning = reasoning
        self.chat, self.tokenizer, self.prompt_tokens = chat, tokenizer, sum(map(len, prompts))
        self.ids, self.trips = ids, trips
        self.first: Sequence[Job] = ()
        """The first job of each prompt."""
        self.prompt_ids = {"prompt_token_ids": list(prompts[0] if len(prompts) == 1 else prompts)} if ids else {}
        self.kind, short = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        self.head = {"id": f"{short}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, texts: Sequence[Text]) -> dict[str, object]:
        """The complete answer."""
        said = [{"message": self._message(text)} if self.chat else {"text": text.said} for text in texts]
        choices = [self._choice(i, text, said[i]) for i, text in enumerate(texts)]
        return {**self.head, "object": self.kind, "choices": choices, **self.prompt_ids, "usage": self._usage(texts)}

    def begin(self, index: int, text: Text) -> dict[str, object]:
        """The first chunk of a streamed chat."""
        chunk = self._chunk([self._choice(index, text, {"delta": {"role": "assistant", "content": ""}})])
        return {**chunk, **self.prompt_ids}

    def chunk(self, index: int, text: Text, new: str) -> dict[str, object] | None:
        """A streamed chunk of a choice; None if there is nothing to send yet."""
        if not self.chat:
            ids, self.prompt_ids = self.prompt_ids, {}  # in the first chunk alone
            return {**self._chunk([self._choice(index, text, {"text": new})]), **ids}
        delta = {**self._thought(text), **_delta(text, new)}
        if not (delta or text.finish or text.scores or (text.made and (self.ids or self.trips))):
            return None
        return self._chunk([self._choice(index, text, {"delta": delta})])

    def last(self, texts: Sequence[Text]) -> dict[str, object]:
        """The final chunk, with token counts."""
        return {**self._chunk([]), "usage": self._usage(texts)}

    def _message(self, text: Text) -> dict[str, object]:
        """A complete message: its reasoning, its text and its tool calls."""
        return {**_message(text), **self._thought(text)}

    def _thought(self, text: Text) -> dict[str, object]:
        """The part of the model's reasoning that was not sent yet."""
        new, text.new_thought = text.new_thought, ""
        return {"reasoning_content": new} if new and self.reasoning else {}

    def _choice(self, index: int, text: Text, said: dict) -> dict[str, object]:
        """The JSON of a choice, with those log-probabilities that were not sent yet."""
        scores, text.scores = text.scores, []
        in_format = chat_logprobs if self.chat else completion_logprobs
        logprobs = in_format(self.tokenizer, scores) if scores else None
        made, text.made = text.made, []
        extra: dict[str, object] = {"token_ids": [one.token for one in made]} if self.ids else {}
        extra |= {"trips": [one.trips for one in made]} if self.trips else {}
        called = text.finish == "stop" and text.reader is not None and text.reader.complete  # not cut by a stop string
        why = "tool_calls" if called else text.finish
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": why, **extra}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        return {**self.head, "object": f"{self.kind}.chunk" if self.chat else self.kind, "choices": choices}

    def _usage(self, texts: Sequence[Text]) -> dict[str, object]:
        return usage_of(self.prompt_tokens, texts, sum(job.cached for job in self.first))


def usage_of(prompt: int, texts: Sequence[Text], cached: int) -> dict[str, Any]:
    """Token counts in the format of OpenAI's chats, and the mean number of loop iterations per token.

    Args:
        prompt: Tokens of the prompts.
        texts: The answers.
        cached: Tokens of the prompts that were not read again.
    """
    made = sum(text.tokens for text in texts)
    counts = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    counted, iterations = (sum(text.trips[i] for text in texts) for i in (0, 1))
    trips = {"trips": round(iterations / counted, 3)} if counted else {}
    thinking = sum(text.thinking for text in texts)
    thoughts = {"completion_tokens_details": {"reasoning_tokens": thinking}} if thinking else {}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}, **thoughts, **trips}


def _message(text: Text) -> dict[str, object]:
    """A complete message: its text and its tool calls."""
    if text.reader is None:
        return {"role": "assistant", "content": text.said}
    text.reader.hear(text.said, last=True)
    message: dict[str, object] = {"role": "assistant", "content": text.reader.content or None}
    calls = [_call(call, call.arguments) for call in text.reader.calls]
    return {**message, "tool_calls": calls} if calls else message


def _delta(text: Text, new: str) -> dict[str, object]:
    """The fields that a new piece of text adds to its streamed message."""
    if text.reader is None:
        return {"content": new} if new else {}
    heard = text.reader.hear(new, last=text.finish is not None)
    calls = [
        {"index": i, **({"function": {"arguments": more}} if begun is None else _call(begun, ""))}
        for i, begun, more in heard.calls
    ]
    return {**({"content": heard.content} if heard.content else {}), **({"tool_calls": calls} if calls else {})}


def _call(call: Call, arguments: str) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
