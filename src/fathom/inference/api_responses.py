"""`POST /v1/responses`: a request in the form of OpenAI's Responses API, read as a chat.

The server keeps no answers, so a request holds its whole conversation. Tools are the client's own functions.

`responses.py` writes the answer and the events of its stream. `api.py` has the fields that completions and chats share
(`Body`), and the rules of a chat (`ChatBody`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fathom.inference.api import HALF, TOOLS, TURNS, ApiError, Body, ChatBody, Effort, wrong
from fathom.inference.api_structure import Strict

LOGPROBS = "message.output_text.logprobs"
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The field with the text of a message's part, by the part's type."""
NAMED = {
    "messages": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "max_tokens": "max_output_tokens",
}
"""The field here, by the field of a chat."""
STATELESS = "this server stores no answers; send the whole conversation as input"


class _Format(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool = True


class _TextOptions(Strict):
    format: _Format = Field(default_factory=partial(_Format, schema=None))
    verbosity: Literal["low", "medium", "high"] | None = None


class _Reasoning(BaseModel):
    model_config = ConfigDict(strict=True)
    effort: Effort | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    input: str | Annotated[list[dict[str, object]], Field(fail_fast=True, max_length=TURNS)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, object]] = Field([], max_length=TOOLS)
    tool_choice: str | dict[str, object] = "auto"
    parallel_tool_calls: bool = True
    text: _TextOptions = _TextOptions()
    reasoning: _Reasoning = _Reasoning()
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = []
    top_logprobs: int = Field(0, ge=0, le=20)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    chat_template_kwargs: dict[str, bool | int | str] = Field({}, max_length=64)
    max_tool_calls: int | None = None  # of OpenAI's own tools
    n: Literal[1] = 1
    previous_response_id: str | None = None
    conversation: object = None
    prompt: object = None

    def chat(self) -> ChatBody:
        """Translate the request to a chat request; a field that chat requests lack is an error that names the field."""
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                raise wrong(name, STATELESS)
        for name in ("max_tokens", "response_format"):
            if name in self.model_fields_set:
                raise wrong(name, f"is {NAMED[name]} here")
        fields: dict[str, Any] = self.model_dump(include=set(Body.model_fields) & self.model_fields_set, by_alias=True)
        fields.pop("stream_options", None)
        fields |= {"messages": self._messages(), "max_tokens": self.max_output_tokens}
        fields |= {"tools": [_tool(one) for one in self.tools], "tool_choice": _choice(self.tool_choice)}
        fields |= {"parallel_tool_calls": self.parallel_tool_calls, "response_format": _format(self.text.format)}
        fields |= {"reasoning_effort": self.reasoning.effort, "chat_template_kwargs": self.chat_template_kwargs}
        if LOGPROBS in self.include or self.top_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            place = [NAMED.get(str(first["loc"][0]), first["loc"][0]), *first["loc"][1:]] if first["loc"] else ["input"]
            raise RequestValidationError([{**first, "loc": ("body", *place)}]) from error

    def _messages(self) -> list[dict[str, Any]]:
        items: Sequence[Mapping[str, object]]
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        made: list[dict[str, Any]] = [] if self.instructions is None else [_message("system", self.instructions)]
        for i, item in enumerate(items):
            try:
                _add(made, item)
            except (KeyError, TypeError, ValueError) as error:
                why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise ApiError(400, f"input.{i}: {why}", param="input") from error
        if not made:
            raise wrong("input", "holds no message")
        return made

    def echoed(self) -> dict[str, object]:
        """The request's fields that an answer repeats; raises an `ApiError` for a field that cannot be written as
        JSON."""
        names = ["instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "tool_choice"]
        names += ["tools", "top_p", "truncation", "background", "top_logprobs"]
        values = {name: getattr(self, name) for name in names}
        form = self.text.format.model_dump(by_alias=True, exclude_none=True)
        form = form if form["type"] == "json_schema" else {"type": form["type"]}
        made = {**values, "text": {"format": form}, "reasoning": {"effort": self.reasoning.effort, "summary": None}}
        for name, value in made.items():
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except UnicodeError as error:
                raise wrong(name, HALF) from error
            except (ValueError, RecursionError) as error:
                raise wrong(name, "numbers are finite, and nothing is nested very deeply") from error
        return made


def _add(made: list[dict[str, Any]], item: Mapping[str, object]) -> None:
    """Add an item of the request's input to the conversation's messages. Calls belong to the assistant's message before
    them, and system messages at the beginning are one, since many templates read no more."""
    kind = item.get("type") or "message"
    last = made[-1] if made else {}
    if kind == "message":
        role = item["role"]
        role = "system" if role == "developer" else role
        new = _message(role, _text(item.get("content"), "content"))
        if role == "system" and len(made) == 1 and last["role"] == "system":
            last["content"] += "\n\n" + new["content"]
        else:
            made.append(new)
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item.get("arguments")}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if last.get("role") != "assistant":
            last = _message("assistant", "")
            made.append(last)
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        made.append({**_message("tool", _text(item.get("output"), "output")), "tool_call_id": item["call_id"]})
    elif kind == "item_reference":
        raise ValueError(STATELESS)
    elif kind != "reasoning":  # thoughts of earlier turns are left out
        raise ValueError(f"items of type {kind!r:.80} are not supported by this server")


def _message(role: object, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(given: object, name: str) -> str:
    """The text of a message or of a tool's output."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise TypeError(f"{name} must be a string or a list of text parts")
    made = []
    for part in given:
        at = TEXTS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if at is None or not isinstance(part.get(at), str):
            raise TypeError(f"{name} contains a part that is not text; this server reads no images, audio or files")
        made.append(part[at])
    return "".join(made)


def _tool(given: Mapping[str, object]) -> dict[str, object]:
    if given.get("type") != "function":
        kind = json.dumps(given.get("type"))
        raise wrong("tools", f"type {kind:.80} is not supported by this server; tools are functions of the client")
    function = {name: given[name] for name in ("name", "description", "parameters") if given.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(given: str | Mapping[str, object]) -> object:
    """`tool_choice` as chats have it."""
    if isinstance(given, str):
        return given
    if given.get("type") == "allowed_tools" and isinstance(tools := given.get("tools"), list):
        named = [_choice(one) if isinstance(one, dict) else one for one in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode", "auto"), "tools": named}}
    return {"type": given.get("type"), "function": {"name": given.get("name")}}


def _format(given: _Format) -> dict[str, object]:
    """`text.format` as chats have it."""
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise wrong("text", "a format of type json_schema needs a schema")
    return {"type": given.type, "json_schema": {"name": given.name, "schema": given.schema_, "strict": given.strict}}
