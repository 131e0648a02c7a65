"""Request bodies and errors in OpenAI's format. Fields that are not supported are refused by name."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from fathom.inference.sampling import Choice

if TYPE_CHECKING:
    from transformers import GenerationConfig

KINDS = {429: "rate_limit_error", 408: "timeout_error", 503: "server_error", 500: "server_error"}
ELSEWHERE = {
    "tools": "tool calls are not made here; vLLM serves them",
    "tool_choice": "tool calls are not made here; vLLM serves them",
    "functions": "tool calls are not made here; vLLM serves them",
    "response_format": "only text; vLLM serves JSON schemas",
}
"""Error messages for fields that other servers have."""
Bias = Annotated[float, Field(ge=-100, le=100)]


class ApiError(HTTPException):
    """An error that is sent to the client, in OpenAI's format."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code, self.param = code, param

    def body(self) -> dict[str, object]:
        """The JSON that OpenAI's clients understand."""
        kind = KINDS.get(self.status_code, "invalid_request_error")
        message = str(self.detail).encode("utf-8", "replace").decode()  # a lone surrogate is JSON, but not UTF-8
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as an HTTP answer."""
        return JSONResponse(self.body(), self.status_code, headers=self.headers)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Part(_Strict):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True)
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[dict[str, object]] | None = Field(None, max_length=0)


class _StreamOptions(_Strict):
    include_usage: bool | None = None


class Body(_Strict):
    """The fields that both routes take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: str | list[str] | None = Field(None, max_length=1024)
    n: int | None = Field(None, ge=1, le=64)
    user: str | None = None
    max_trips: int | None = Field(None, ge=1)

    @property
    def stops(self) -> list[str]:
        """Strings that end an answer."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]

    @property
    def usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def most_tokens(self) -> int | None:
        """Most new tokens; None if the request does not say."""
        return self.max_tokens

    def scored(self) -> int | None:
        """Number of likeliest tokens to send with the log-probabilities; None for no log-probabilities."""
        return None

    def check(self, vocabulary: int) -> None:
        """Checks beyond types and ranges.

        Args:
            vocabulary: The model's number of token ids.
        """
        for token in self.logit_bias or ():
            if not (token.isascii() and token.isdigit() and int(token) < vocabulary):
                raise ApiError(400, f"logit_bias: {token!r:.40} is not a token id of this model", param="logit_bias")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream=true", param="stream_options")

    def choice(self, own: GenerationConfig, index: int, seed: int) -> Choice:
        """The sampling settings of one text; those not given come from the model's generation configuration `own`."""
        asked = (self.temperature, self.top_p, self.top_k, self.min_p)
        sampled = own.do_sample if all(value is None for value in asked) else self.temperature != 0
        temperature = 0.0
        if sampled:
            temperature = own.temperature or 1.0 if self.temperature is None else self.temperature
        repetition = self.repetition_penalty
        return Choice(
            temperature=temperature,
            top_k=(own.top_k or 0) if self.top_k is None else self.top_k,
            top_p=(own.top_p or 1.0) if self.top_p is None else self.top_p,
            min_p=(own.min_p or 0.0) if self.min_p is None else self.min_p,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            repetition_penalty=(own.repetition_penalty or 1.0) if repetition is None else repetition,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=seed,
            index=index,
        )


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, as text or token ids."""
        given: Any = self.prompt
        one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if one else list(given)

    def scored(self) -> int | None:
        """As `Body.scored`."""
        return self.logprobs

    def check(self, vocabulary: int) -> None:
        """As `Body.check`."""
        super().check(vocabulary)
        if not self.prompts():
            raise ApiError(400, "prompt: an empty list; an empty text starts a document", param="prompt")
        if self.best_of not in (None, self.n or 1):
            raise ApiError(400, "best_of: must be n; texts are not ranked here", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: 0 makes nothing, unless echo=true", param="max_tokens")
        for ids in self.prompts():
            if not isinstance(ids, str) and not (ids and all(0 <= token < vocabulary for token in ids)):
                raise ApiError(400, f"prompt: token ids must be 0 to {vocabulary - 1}, one or more", param="prompt")


class _Text(BaseModel):
    type: Literal["text"]


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: _Text | None = None
    chat_template_kwargs: dict[str, bool | int | str] | None = None

    def most_tokens(self) -> int | None:
        """As `Body.most_tokens`."""
        return self.max_completion_tokens or self.max_tokens

    def scored(self) -> int | None:
        """As `Body.scored`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, vocabulary: int) -> None:
        """As `Body.check`."""
        super().check(vocabulary)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs=true", param="top_logprobs")


class TextBody(_Strict):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class TokensBody(_Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=BaseModel)


def parsed(kind: type[B], given: dict[str, object]) -> B:
    """A body, or an error that names the field."""
    try:
        return kind.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where, field = ".".join(str(part) for part in first["loc"]), str(first["loc"][0])
        what = "not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
        raise ApiError(400, f"{where}: {ELSEWHERE.get(field, what)}", param=field) from None


def seed_of(body: Body) -> int:
    """The request's seed, or a random one."""
    return secrets.randbits(63) if body.seed is None else body.seed
