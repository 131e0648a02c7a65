"""A generated text as an answer of OpenAI's Responses API: complete, or as the events of a stream.

`api_responses.py` reads the request, and `answers.py` has the token counts and log-probabilities.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fathom.errors import RequestError
from fathom.inference.answers import chat_logprobs, usage_of, written
from fathom.inference.engine import Job
from fathom.inference.texts import Text
from fathom.inference.tools import Call, Heard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Event = dict[str, Any]
Write = Callable[[Callable[[], str], int], Awaitable[str]]
"""Writes what has so many log-probabilities."""


class Response:
    """The answer of one request: a message, function calls, or both.

    Args:
        model: The name that clients use.
        tokenizer: The model's tokenizer.
        job: The job that generates it.
        text: Its text.
        asked: The request's fields that the answer repeats.
        ids: Whether to include the token ids of the prompt and of the answer.
        trips: Whether to include the loop iterations of each token.
        reasoning: Whether to include thoughts.
    """

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        job: Job,
        text: Text,
        asked: Mapping[str, object],
        ids: bool = False,
        trips: bool = False,
        reasoning: bool = True,
    ) -> None:
        self.tokenizer, self.job, self.text = tokenizer, job, text
        self.ids, self.trips, self.reasoning = ids, trips, reasoning
        self.head: Event = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": time.time()}
        self.head |= {"model": model, **asked, "store": False, "previous_response_id": None, "service_tier": "default"}
        self.output: list[Event] = []
        """Items that are complete."""
        self.number = 0
        """The next event's."""
        self._open: Event | None = None
        self._scores: list[Event] = []
        """Log-probabilities of tokens whose text has not come yet, such as the first bytes of a character."""
        self._thinks = self._thinking

    async def events(self, parts: AsyncIterator[tuple[int, str]], write: Write) -> AsyncIterator[str]:
        """The stream of server-sent events; `write` writes those that repeat the whole text's log-probabilities."""
        for kind in ("response.created", "response.in_progress"):
            yield self._line({"type": kind, "response": self._whole("in_progress")})
        try:
            async for _, new in parts:
                for event in self._hear(new):
                    yield await write(partial(self._line, event), self._told(event))
        except RequestError as error:
            fault = {"code": "server_error", "message": str(error)}
            yield self._line({"type": "response.failed", "response": {**self._whole("failed"), "error": fault}})
        else:
            made = self.whole()
            event = {"type": f"response.{made['status']}", "response": made}
            yield await write(partial(self._line, event), self._told(event))

    async def heard(self, parts: AsyncIterator[tuple[int, str]]) -> Event:
        """The complete answer."""
        async for _, new in parts:
            for _ in self._hear(new):
                pass
        return self.whole()

    def whole(self) -> Event:
        """The whole answer, as the API's response object, after its text has ended."""
        return self._whole("incomplete" if self.text.finish == "length" else "completed")

    def _whole(self, status: str) -> Event:
        short = {"reason": "max_output_tokens"} if status == "incomplete" else None
        over = status in ("completed", "incomplete")
        usage = self._usage() if over else None
        made = {"status": status, "error": None, "incomplete_details": short, "output": self.output, "usage": usage}
        return {**self.head, **made, **(self._tokens() if over else {})}

    def _tokens(self) -> Event:
        """What the request asked for about single tokens, which `text` holds until the answer is complete."""
        prompt, made = list(self.job.prompt), self.text.made
        ids = {"prompt_token_ids": prompt, "token_ids": [one.token for one in made]} if self.ids else {}
        return ids | ({"trips": [one.trips for one in made]} if self.trips else {})

    def _usage(self) -> Event:
        given = usage_of(len(self.job.prompt), [self.text], self.job.cached)
        counts = {"input_tokens": given["prompt_tokens"], "output_tokens": given["completion_tokens"]}
        counts |= {
            "total_tokens": given["total_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.text.thinking},
        }
        counts |= {"input_tokens_details": {"cached_tokens": self.job.cached, "cache_write_tokens": 0}}
        return counts | ({"trips": given["trips"]} if "trips" in given else {})

    def _hear(self, new: str) -> Iterator[Event]:
        """The stream events that a new piece of text causes."""
        text, last = self.text, self.text.finish is not None
        heard = Heard(new) if text.reader is None else text.reader.hear(new, last)
        scores, text.scores = text.scores, []
        found: Any = chat_logprobs(self.tokenizer, scores)["content"]
        self._scores += found
        if (self._thinks or self._thinking) and not heard.content:  # of the reasoning, up to its closing mark
            self._scores = []
        self._thinks = self._thinking
        thought, text.new_thought = text.new_thought if self.reasoning else "", ""
        if thought:
            if self._open is None:
                yield from self._begin(_reasoning())
            assert self._open is not None
            self._open["content"][0]["text"] += thought
            yield self._inside("response.reasoning_text.delta", content_index=0, delta=thought)
        over = last and self._open is None and not self.output
        if heard.content or (over and not heard.calls):
            if self._open is not None and self._open["type"] == "reasoning":
                yield from self._end()
            if self._open is None:
                yield from self._begin(_message())
            yield from self._say(heard.content)
        for _, begun, more in heard.calls:
            if begun is not None:
                yield from self._end()
                yield from self._begin(_call(begun))
            if more:
                assert self._open is not None
                self._open["arguments"] += more
                yield self._inside("response.function_call_arguments.delta", delta=more)
        if last:
            if self._open is not None and self._open["type"] == "message":
                self._open["content"][0]["logprobs"] += self._scores  # such as that of the end token
            cut = text.reader is not None and bool(text.reader.calls) and not text.reader.complete  # by a stop string
            yield from self._end("incomplete" if text.finish == "length" or cut else "completed")

    def _begin(self, item: Event) -> Iterator[Event]:
        self._open = item
        item = {**item, "content": []} if "content" in item else item
        yield {"type": "response.output_item.added", "output_index": len(self.output), "item": dict(item)}
        if item["type"] == "message":
            yield self._inside("response.content_part.added", content_index=0, part=_part(""))

    @property
    def _thinking(self) -> bool:
        """Whether the reasoning has begun and not ended."""
        return self.text.thoughts is not None and self.text.thoughts.inside

    def _say(self, new: str) -> Iterator[Event]:
        assert self._open is not None
        scores, self._scores = self._scores, []
        self._open["content"][0]["text"] += new
        self._open["content"][0]["logprobs"] += scores
        if new:
            yield self._inside("response.output_text.delta", content_index=0, delta=new, logprobs=scores)

    def _end(self, status: str = "completed") -> Iterator[Event]:
        """The stream events that complete the output item that is now open."""
        if (item := self._open) is None:
            return
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._inside(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
            yield self._inside("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            yield self._inside("response.reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._inside("response.function_call_arguments.done", **done)
        yield {"type": "response.output_item.done", "output_index": len(self.output), "item": item}
        self.output.append(item)
        self._open = None

    def _inside(self, kind: str, **more: object) -> Event:
        """A stream event for the output item that is now open."""
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.output), **more}

    def _line(self, event: Event) -> str:
        numbered = {**event, "sequence_number": self.number}
        self.number += 1
        text = written(numbered) if self._told(event) else json.dumps(numbered, ensure_ascii=False)
        return f"event: {event['type']}\ndata: {text}\n\n"

    def _told(self, event: Event) -> int:
        """The number of log-probabilities that an event may repeat."""
        ends = event["type"].endswith((".done", ".completed", ".incomplete"))
        return 0 if self.job.logprobs is None or not ends else len(self.job.made) * (1 + self.job.logprobs)


def _part(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message() -> Event:
    made = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": "in_progress", "role": "assistant"}
    return {**made, "content": [_part("")]}


def _reasoning() -> Event:
    made = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "status": "in_progress", "summary": []}
    return {**made, "content": [{"type": "reasoning_text", "text": ""}]}


def _call(call: Call) -> Event:
    made = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress"}
    return {**made, "call_id": call.id, "name": call.name, "arguments": ""}
