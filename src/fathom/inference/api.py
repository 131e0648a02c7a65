"""Request bodies and errors in OpenAI's format. Unsupported fields are rejected by name.

`Strict` in `api_structure.py` rejects unknown fields; `Body` lists those that are ignored because they change no text.
`server.py` checks `max_trips` (`Service.trips`), the model's name and the context length. `api_responses.py` reads
requests of the Responses API. `shape.py` names the field of a schema or grammar that cannot be followed. `gate.py`
refuses bodies that are too large, and `engine.py` requests that do not fit in memory or come when too many wait.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from fathom.errors import RequestError
from fathom.inference.api_structure import AllowedTools, NamedTool, ResponseFormat, Strict, StructuredOutputs, Tool
from fathom.inference.engine import WAITING
from fathom.inference.prompt import one_text

KINDS = {429: "rate_limit_error", 408: "timeout_error", 504: "timeout_error", 503: "server_error", 500: "server_error"}
STATUS = {"rate_limit_exceeded": 429, "shutting_down": 503, "failed": 500, "deadline_exceeded": 504}
STATUS |= dict.fromkeys(
    ("cache_memory_exceeded", "context_length_exceeded", "empty_prompt", "grammar_too_complex"), 400
)
"""By the code of an engine's error."""
ELSEWHERE = {
    **dict.fromkeys(("functions", "function_call"), "OpenAI replaced it by tools and tool_choice"),
    **{f"guided_{kind}": f"vLLM replaced it by structured_outputs.{kind}" for kind in ("json", "regex", "choice")},
    "guided_grammar": "vLLM replaced it by structured_outputs.grammar",
    "store": "this server stores no answers; only false is allowed",
}
"""Error messages for fields that other servers have, or had."""
TOOLS = 128
"""Most tools of a request."""
TURNS = 4096
"""Most messages of a conversation."""
BIASES = 1024
"""Most tokens of `logit_bias`."""
HALF = "a text holds half of a surrogate pair, which is no character"
STOP, SALT = 1024, 256
"""Most characters of a stop string, at each token compared with the end of the text; and of `cache_salt`."""
NO_LIMIT = -1
"""The `top_k` that draws from all tokens."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FieldRules = dict[str, tuple[bool, str]]
"""Whether a field's value is allowed, and which values are, by field."""


class ApiError(HTTPException):
    """An error that is sent to the client, in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    def body(self) -> dict[str, object]:
        """The error as JSON in OpenAI's format."""
        kind = KINDS.get(self.status_code, "invalid_request_error")
        message = str(self.detail).encode("utf-8", "replace").decode()  # a lone surrogate is JSON, but not UTF-8
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error with its field renamed, for a route whose fields have other names."""
        field = self.param or ""
        new = names.get(field, field)
        message = new + self.detail.removeprefix(field) if self.detail.startswith(f"{field}:") else self.detail
        return ApiError(self.status_code, message, self.code, new or None, self.headers)

    def response(self) -> JSONResponse:
        """The error as an HTTP answer."""
        return JSONResponse(self.body(), self.status_code, headers=self.headers)


def wrong(field: str, message: str) -> ApiError:
    """The error for a request field whose value is not supported."""
    return ApiError(400, f"{field}: {message}", param=field)


def told(error: Exception) -> ApiError:
    """Convert any exception to the `ApiError` that the client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(STATUS[error.code], str(error), None if error.code == "failed" else error.code)
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors()[0])
    if isinstance(error, HTTPException):
        code = "malformed_body" if error.status_code == 400 else None
        return ApiError(error.status_code, str(error.detail), code, headers=error.headers)  # the Allow header of a 405
    return ApiError(500, f"the server failed: {type(error).__name__}")


def _invalid(first: dict) -> ApiError:
    """The first error that pydantic found in a request, with the name of the field."""
    # Of a union, pydantic also names the kinds that it tried: literal['none'], dict[str,any], NamedTool.
    place = [str(part) for part in first["loc"][1:] if not re.search(r"[\[(]|^[A-Z]", str(part))]
    if not place or first["type"] == "json_invalid":
        return ApiError(400, "the body must be a JSON object, sent as application/json", "malformed_body")
    what = "not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
    if place[0] in ELSEWHERE:
        return wrong(place[0], ELSEWHERE[place[0]])
    return ApiError(400, f"{'.'.join(place)}: {what}", param=place[0])


class Message(BaseModel):
    """One message of a conversation. Unknown fields, such as `cache_control`, are ignored, since it is not `Strict`."""

    model_config = ConfigDict(strict=True)
    role: str
    content: str | None = None
    tool_calls: list[dict[str, object]] | None = Field(None, max_length=128)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """The reasoning of an earlier answer, for templates that write it."""

    @field_validator("content", mode="before")
    @classmethod
    def _one_text(cls, given: object) -> object:
        content = one_text(given)
        if not isinstance(content, str | None):
            raise PydanticCustomError("content", "a text or a list of text parts; images and audio are not read here")
        return content

    @field_validator("tool_calls")
    @classmethod
    def _as_templates_take_them(cls, given: list[dict[str, object]] | None) -> list[dict[str, object]] | None:
        """The tool calls of a message with their arguments as objects; clients send arguments as JSON text. A call that
        was cut off keeps its text."""
        return None if given is None else [_call(one) for one in given]

    def turn(self) -> dict[str, object]:
        """The message as chat templates expect it."""
        return self.model_dump(exclude_none=True)


def _call(given: dict[str, object]) -> dict[str, object]:
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PydanticCustomError("tool_call", "a call needs a function with a name")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except (ValueError, RecursionError):
            found = None
        arguments = found if isinstance(found, dict) else arguments
    elif not isinstance(arguments, dict):
        raise PydanticCustomError("tool_call", "arguments are a JSON object, or its text")
    return {**given, "function": {**function, "arguments": arguments}}


def with_objects(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the arguments of tool calls parsed as objects, for templates that read them by key;
    arguments that were cut off stay text, under the key `arguments`."""
    return [
        {**turn, "tool_calls": [_as_object(call) for call in turn["tool_calls"]]}
        if "tool_calls" in turn
        else dict(turn)
        for turn in turns
    ]


def _as_object(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    arguments = {"arguments": arguments} if isinstance(arguments, str) else arguments
    return {**call, "function": {**call["function"], "arguments": arguments}}


class _StreamOptions(Strict):
    include_usage: bool = False
    # Fields that clients send and that change nothing here: chunks hold no padding, and the last one the usage.
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class Body(Strict):
    """The fields of both routes."""

    model: str | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=NO_LIMIT)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[int, Field(strict=False, ge=0)], Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: int = Field(default_factory=partial(secrets.randbits, 63), ge=-(1 << 63), lt=1 << 63)
    stop: str | Annotated[list[str], Field(fail_fast=True)] = Field([], max_length=1024)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field([], max_length=1024)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=64)
    user: str | None = None
    max_trips: int | None = Field(None, ge=1)
    return_token_ids: bool = False
    return_trips: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Fields that clients send and that do not affect the text, and others at the only value that is built.
    store: Literal[False] = False
    metadata: dict[str, object] = {}
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, object] | None = None
    prompt_cache_retention: str | None = None
    cache_salt: str | None = Field(None, max_length=SALT)
    prediction: dict[str, object] | None = None
    priority: int = 0
    request_id: str | None = None
    safety_identifier: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: list[Literal["text"]] | None = None
    include_reasoning: bool = True
    include_stop_str_in_output: Literal[False] = False
    length_penalty: float = 1.0  # of beams
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True
    use_beam_search: Literal[False] = False

    @field_validator("top_k")
    @classmethod
    def _without_limit(cls, given: int | None) -> int | None:
        return 0 if given == NO_LIMIT else given

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few(cls, given: object) -> object:
        """Reject a `logit_bias` with too many entries, before each of its entries is validated."""
        if isinstance(given, dict) and len(given) > BIASES:
            raise PydanticCustomError("logit_bias", "1,024 tokens at most")
        return given

    @property
    def stops(self) -> list[str]:
        """Strings that end an answer."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop]

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer is allowed to call."""
        return []

    @property
    def effort(self) -> Effort | None:
        """How much of the model's depth the answer may use; None for the server's own."""
        return None

    @property
    def usage(self) -> bool:
        """Whether a streamed answer ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def rules(self, vocabulary: int) -> FieldRules:
        """Checks beyond types and ranges.

        Args:
            vocabulary: The model's number of token ids.
        """
        ids, most = self.stop_token_ids, self.max_tokens
        return {
            "stop": (all(len(stop) <= STOP for stop in self.stops), f"texts of {STOP} characters at most"),
            "stop_token_ids": (all(0 <= token < vocabulary for token in ids), f"token ids of 0 to {vocabulary - 1}"),
            "min_tokens": (most is None or self.min_tokens <= most, f"max_tokens ({most}) at most"),
            "logit_bias": (all(token < vocabulary for token in self.logit_bias), f"token ids up to {vocabulary - 1}"),
            "stream_options": (self.stream_options is None or self.stream, "only with stream=true"),
            "structured_outputs": (
                not (self.structured_outputs and (self.response_format or self.callable_tools)),
                "use only one of this, response_format and tools",
            ),
        }


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list:
        """The prompts of the request, one or several, each a text or a list of token ids."""
        one = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int)
        return [self.prompt] if one else list(self.prompt)

    @property
    def likeliest(self) -> int | None:
        """The number of most likely tokens to return with log-probabilities; None for no log-probabilities."""
        return self.logprobs

    def rules(self, vocabulary: int) -> FieldRules:
        """See `Body.rules`."""
        ids = [prompt for prompt in self.prompts if not isinstance(prompt, str)]
        known = bool(self.prompts) and all(one and 0 <= min(one) <= max(one) < vocabulary for one in ids)
        texts = len(self.prompts) * self.n
        return super().rules(vocabulary) | {
            "n": (texts <= WAITING, f"{texts} texts; a request may ask for {WAITING}, all prompts together"),
            "prompt": (known, f"a text, or one or more token ids of 0 to {vocabulary - 1}; or a list of these"),
            "best_of": (self.best_of in (None, self.n), "must equal n; this server does not rank answers"),
            "max_tokens": (self.max_tokens != 0 or self.echo, "0 needs echo=true"),
        }


class Rendering(Strict):
    """The request fields that say how a conversation becomes a prompt."""

    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(None, max_length=TURNS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    """Whether the answer continues the last message, which the assistant began."""
    chat_template_kwargs: dict[str, bool | int | str] = Field({}, max_length=64)

    @property
    def ending(self) -> dict[str, bool]:
        """The arguments of `apply_chat_template` that determine how the prompt ends."""
        if self.continue_final_message:
            return {"add_generation_prompt": False, "continue_final_message": True}
        return {"add_generation_prompt": self.add_generation_prompt is not False}

    def ending_rules(self) -> FieldRules:
        """The conditions under which `continue_final_message` is allowed."""
        last = self.messages[-1] if self.messages else None
        begun = last is not None and last.role == "assistant" and bool((last.content or "").strip())
        begun = begun and last is not None and not last.tool_calls
        once = "not together with continue_final_message"
        return {
            "continue_final_message": (
                begun or not self.continue_final_message,
                "the last message must be the assistant's, with a text and no tool calls",
            ),
            "add_generation_prompt": (not (self.continue_final_message and self.add_generation_prompt), once),
        }


class ChatBody(Rendering, Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=TURNS)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    reasoning_effort: Effort | None = None
    """Loop iterations, as `Service.trips` says, and a variable of chat templates that know it."""
    add_special_tokens: Literal[False] = False
    best_of: Literal[1] = 1
    tools: list[Tool] = Field([], max_length=TOOLS)
    functions: list[object] = Field([], max_length=0)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    function_call: Literal["none", "auto"] = "none"
    parallel_tool_calls: bool = True
    echo: ClassVar[bool] = False

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self

    @property
    def likeliest(self) -> int | None:
        """See `CompletionBody.likeliest`."""
        return self.top_logprobs if self.logprobs else None

    def rules(self, vocabulary: int) -> FieldRules:
        """See `Body.rules`."""
        alone = not self.top_logprobs or self.logprobs
        names = [tool.function.name for tool in self.tools]
        known = self._chosen <= set(names) if self._chosen else self.tool_choice != "required" or bool(names)
        return (
            super().rules(vocabulary)
            | self.ending_rules()
            | {
                "top_logprobs": (alone, "only with logprobs=true"),
                "tools": (len(set(names)) == len(names), "two tools have one name"),
                "tool_choice": (known, "no such tool in the request"),
            }
        )

    @property
    def effort(self) -> Effort | None:
        """See `Body.effort`."""
        return self.reasoning_effort

    @property
    def variables(self) -> dict[str, bool | int | str]:
        """Variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer is allowed to call."""
        if self._chosen:
            return [tool for tool in self.tools if tool.function.name in self._chosen]
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer must call a tool."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def _chosen(self) -> set[str]:
        """The names of the tools to which `tool_choice` limits the answer; empty if it names none."""
        if isinstance(self.tool_choice, AllowedTools):
            return {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return {self.tool_choice.function.name} if isinstance(self.tool_choice, NamedTool) else set()


class TextBody(Rendering):
    """The body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True


class TokensBody(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class PlaceBody(Strict):
    """`POST /lens/place`."""

    tokens: Annotated[list[int], Field(fail_fast=True)]
    """The tokens before the place."""
    said: int
    """The token that was said there."""
    max_trips: int | None = Field(None, ge=1)
