"""`fathom serve`: transformers' OpenAI-compatible server around one checked model.

transformers brings the routes, chat templates, token streams and the shape of every answer. Its own command loads any
model that a request names, and no class of ours; here it is handed one open model, and every route that could load or
drop another is taken away. What a server that meets strangers needs is added: requests are checked before they are
read by anyone else, errors have OpenAI's form, an API key may be asked for, work for a client that hung up stops, and
SIGTERM lets the requests under way end.

Generations run one after another on one thread, so an answer never depends on who else is asking.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import inspect
import ipaddress
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, GenerationState
from transformers.utils import logging

from fathom.checkpoints.open import open_checkpoint
from fathom.checkpoints.special_tokens import settle_generation
from fathom.errors import FathomError
from fathom.evaluation.budgets import check_trips, most_trips
from fathom.inference.cache import Policy, choose

logger = logging.get_logger(__name__)

ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"}
NEW_TOKENS = 1024  # where a request names no number, as in transformers
ENDLESS = 1 << 20  # tokens of context that are offered where a cache of constant size sets no limit
WAITING = 256  # requests at a time; each holds its tokens and a socket
BODIES = 1 << 28  # bytes of all requests at a time
AddPages = Callable[[FastAPI, Any, Any, str, GenerateManager], None]
"""Adds routes to the server: from the application, model, tokenizer, name and the thread that runs models."""


class ServeError(FathomError, ValueError):
    """Something that cannot be served as asked; the message is one line."""


class ApiError(HTTPException):
    """An error that a client is told about, in OpenAI's words."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        """The JSON that OpenAI's clients understand."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        message = str(self.detail).encode("utf-8", "replace").decode()  # a lone surrogate is JSON, but not UTF-8
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status_code, headers=self.headers)


# What a request may say. transformers ignores much that it does not know; here what cannot be done is refused.


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: str | list[str] | None = Field(None, max_length=1024)
    frequency_penalty: float | None = Field(None, ge=0, le=2)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    n: int | None = Field(None, ge=1, le=1)
    user: str | None = None
    max_trips: int | None = Field(None, ge=1)


class _CompletionBody(_Body):
    prompt: str
    best_of: int | None = Field(None, ge=1, le=1)
    echo: Literal[False] | None = None


class _Format(BaseModel):
    type: Literal["text"]


class _ChatBody(_Body):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    response_format: _Format | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto"] | None = None
    chat_template_kwargs: dict[str, bool | int | str] | None = None


class _Call:
    """One request: what it asked for, and its generation once there is one."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = {}
        self.streamer: _Streamer | None = None


# The manager that transformers hands a request to sees tensors only; this carries the rest of the request there.
_CALL: ContextVar[_Call] = ContextVar("call")


class _Tokens(asyncio.Queue):
    """Text as it comes; an exception that was put is raised by whoever gets it."""

    def _get(self) -> Any:
        item = super()._get()
        if isinstance(item, Exception):
            raise item
        return item


class _Finished(Exception):
    """Ends a generation whose answer is complete."""


class _Streamer(DirectStreamer):
    """transformers' streamer that also ends at a stop string, which it leaves out, and can be told to give up."""

    def __init__(self, tokenizer: Any, queue: _Tokens, stops: list[str], parser: Any) -> None:
        super().__init__(tokenizer._tokenizer, asyncio.get_running_loop(), queue, response_parser=parser)
        self.ids: list[int] = []
        self._decode = tokenizer.decode
        self._stops, self._said, self._held = stops, "", ""
        self._halt: Exception | None = None

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with each new token."""
        self.heed()
        if not self._first:
            self.ids += value.tolist()
        super().put(value)
        self.heed()

    def heed(self) -> None:
        """Raise what `cancel` left."""
        if self._halt is not None:
            raise self._halt

    def end(self) -> None:
        """Say what was held back, a stop string or a character that may have begun, and end."""
        if self._parser is None and self._halt is None:
            whole = self._decode(self.ids, skip_special_tokens=True)
            rest = whole[len(self._said) :] if whole.startswith(self._said) else self._held
            if rest:
                super()._enqueue(rest)
        super().end()

    def cancel(self, reason: Exception | None = None) -> None:
        """Give up at the next token, or the next chunk of the prompt."""
        self._halt = self._halt or reason or ApiError(503, "the request was cancelled")

    def fail(self, error: Exception) -> None:
        """End the answer with an error."""
        super()._enqueue(error)

    def _enqueue(self, item: Any) -> None:
        if self._stops and type(item) is str and self._halt is None:
            item, rest = before_stop(self._held + item, self._stops)
            self._held = rest or ""
            if rest is None:
                self._halt = _Finished()
            if not item:
                return
        if type(item) is str:
            self._said += item
        super()._enqueue(item)


def before_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text that surely comes before any stop string, and what may begin one; None once one was found."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)], None
    held = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
    return text[: len(text) - held], text[len(text) - held :]


class _Generation(GenerateManager):
    """One generation after another on one thread, each of which can be given up."""

    def __init__(self, context: int, memory: Policy | None = None, max_trips: int | None = None) -> None:
        super().__init__()
        self.context, self.memory, self.max_trips = context, memory, max_trips
        self._under_way: set[_Streamer] = set()
        self._closed = False

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, DirectStreamer]:
        """Start, and hand back the text as it comes."""
        queue = _Tokens()
        return queue, self._start(model, processor, inputs, gen_config, queue, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Run to the end: text, length of the prompt, new tokens."""
        queue = _Tokens()
        streamer = self._start(model, processor, inputs, gen_config, queue, None)
        while await queue.get() is not None:
            pass
        text = processor.decode(streamer.ids, skip_special_tokens=True)
        return before_stop(text, _stops())[0] if streamer._halt else text, inputs["input_ids"].shape[-1], streamer.ids

    def _start(self, model: Any, tokenizer: Any, inputs: Any, config: Any, queue: _Tokens, parser: Any) -> _Streamer:
        if self._closed:
            raise ApiError(503, "the server is shutting down")
        if len(self._under_way) >= WAITING:
            raise ApiError(429, f"{WAITING} requests are waiting already; try again later", "rate_limit_exceeded")
        prompt, wanted = inputs["input_ids"].shape[-1], config.max_new_tokens
        room = self.context - prompt
        if room < (wanted or 1):
            asked = f" and {wanted} more were asked for" if wanted else ""
            raise ApiError(
                400,
                f"this model's context is {self.context} tokens; the prompt has {prompt}{asked}",
                "context_length_exceeded",
            )
        config.max_new_tokens = wanted or min(NEW_TOKENS, room)

        call = _CALL.get()
        seed, most = call.body.get("seed"), call.body.get("max_trips", self.max_trips)
        budget = {} if most is None else {"max_trips": most}
        streamer = call.streamer = _Streamer(tokenizer, queue, _stops(), parser)
        self._under_way.add(streamer)

        def run() -> None:
            try:
                streamer.heed()  # it may have waited in vain
                if seed is not None:  # here, not where the request came in: others may run in between
                    torch.manual_seed(seed)
                ids = inputs["input_ids"]
                cache = self.memory.read(model, ids, after_chunk=streamer.heed) if self.memory else {}
                model.generate(**inputs, **cache, **budget, generation_config=config, streamer=streamer)
            except _Finished:
                streamer.end()
            except ApiError as error:
                streamer.fail(error)
            except Exception as error:
                logger.exception("generation failed")
                streamer.fail(ApiError(500, f"generation failed: {type(error).__name__}"))
            finally:
                self._under_way.discard(streamer)

        self.submit(run)
        return streamer

    def close(self) -> None:
        """Take nothing more on, and end what is under way with an error that says why."""
        self._closed = True
        for streamer in list(self._under_way):
            streamer.cancel(ApiError(503, "the server is shutting down"))

    def join(self, seconds: float) -> None:
        """Wait until the thread is idle."""
        idle = threading.Event()
        self.submit(idle.set)
        idle.wait(seconds)


def _stops() -> list[str]:
    stop = _CALL.get().body.get("stop") or []
    return [s for s in ([stop] if isinstance(stop, str) else stop) if s]


class _OneWorker(GenerationState):
    """Every request goes to the same worker."""

    def __init__(self, worker: _Generation) -> None:
        super().__init__()
        self.worker = worker

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """The worker."""
        return self.worker


class _OneModel(ModelManager):
    """The model that is served, and no way to another."""

    def __init__(self, model: Any, tokenizer: Any, name: str, context: int) -> None:
        super().__init__(device=str(model.device), model_timeout=-1)
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "fathom",
            "max_model_len": context,
        }

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What was opened before the server started."""
        return self.model, self.tokenizer

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:
        """The one model, not what happens to lie in this machine's cache."""
        return [self.card]


class _Checked:
    """Before either of transformers' handlers: the request is checked; after it: a stream ends as OpenAI's do."""

    body_type: type[_Body]
    model_manager: _OneModel

    def _validate_request(self, body: dict) -> None:
        for key in [key for key, value in body.items() if value is None]:
            del body[key]
        try:
            self.body_type.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            what = "not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
            raise ApiError(400, f"{where}: {what}", param=str(first["loc"][0])) from None
        most = most_trips(self.model_manager.model)
        if (asked := body.get("max_trips", 1)) > most:
            raise ApiError(400, f"max_trips: {asked}; a token of this model makes {most} at most", param="max_trips")
        _CALL.get().body = body

    def _resolve_model(self, body: dict) -> tuple[str, Any, Any]:
        served = self.model_manager
        if (asked := body.get("model", served.name)) != served.name:
            raise ApiError(404, f"no model {asked!r:.120}; this server has {served.name!r}", "model_not_found", "model")
        return served.name, served.model, served.tokenizer

    def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False) -> Any:
        asked = {
            key: value for key, value in body.items() if key not in ("seed", "stop", "max_trips")
        }  # the worker sees to these
        config = super()._build_generation_config(asked, model_generation_config, use_cb)  # type: ignore[misc]
        if "max_tokens" not in body and "max_completion_tokens" not in body:
            config.max_new_tokens = None  # as much as there is room for
        if body.get("temperature") == 0:
            config.do_sample, config.temperature = False, None
        elif "temperature" in body or "top_p" in body:
            config.do_sample = True
            if model_generation_config.top_k is None:
                config.top_k = 0  # transformers would draw from the 50 likeliest tokens
        return config

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """As transformers does."""
        try:
            response = await super().handle_request(body, request_id)  # type: ignore[misc]
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError) as error:
            raise ApiError(400, f"this request cannot be read: {' '.join(str(error).split()):.300}") from error
        if isinstance(response, StreamingResponse):
            response.body_iterator = _to_the_end(response.body_iterator)
        return response


async def _to_the_end(chunks: Any) -> AsyncIterator[Any]:
    try:
        async for chunk in chunks:
            yield chunk
    except ApiError as error:
        yield f"data: {json.dumps(error.body())}\n\n"
    yield "data: [DONE]\n\n"


class _Chat(_Checked, ChatCompletionHandler):
    body_type = _ChatBody

    def _validate_request(self, body: dict) -> None:
        super()._validate_request(body)
        tokenizer = self.model_manager.tokenizer
        if not tokenizer.chat_template:
            raise ApiError(
                400,
                "this model has no chat template, so it was not trained to converse; use /v1/completions",
                "no_chat_template",
            )
        # A template of the client's, or padding to a length of its choice, would be more than variables.
        reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        for key in body.get("chat_template_kwargs", {}):
            if key in reserved:
                raise ApiError(400, f"chat_template_kwargs.{key}: not allowed", param="chat_template_kwargs")


class _Completion(_Checked, CompletionHandler):
    body_type = _CompletionBody

    def _validate_request(self, body: dict) -> None:
        super()._validate_request(body)
        tokenizer = self.model_manager.tokenizer
        if not body["prompt"]:  # starts a new document
            body["prompt"] = tokenizer.bos_token or tokenizer.eos_token or ""


class _Gate:
    """The outermost layer: key and size of a request, and an end to the work of one whose client hung up."""

    def __init__(self, app: Any, api_key: str | None, body_limit: int) -> None:
        self.app, self.body_limit, self.held = app, body_limit, 0
        self.key = api_key.encode() if api_key is not None else None

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        chunks: list[bytes] = []
        try:
            self._authorise(scope)
            whole = await self._read(receive, chunks)
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            if whole:
                await self._answer(chunks[0], scope, receive, send)
        finally:
            self.held -= sum(map(len, chunks))

    async def _answer(self, body: bytes, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.create_task(_hang_up(receive))

        async def again() -> Any:
            if unread:
                return unread.pop()
            await asyncio.wait({gone})
            return {"type": "http.disconnect"}

        call = _Call()
        _CALL.set(call)
        answer = asyncio.create_task(self.app(scope, again, send))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            if call.streamer is not None:
                call.streamer.cancel()
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    def _authorise(self, scope: Any) -> None:
        if self.key is None or scope["path"] == "/health":
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, value = given.partition(b" ")
        if scheme.lower() == b"basic":  # what a browser sends for the lens: any name, the key as password
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except ValueError:
                value = b""
        elif scheme.lower() != b"bearer":
            value = b""
        if not hmac.compare_digest(value.strip(), self.key):
            error = ApiError(401, "wrong or missing API key", "invalid_api_key")
            error.headers = {"WWW-Authenticate": "Basic" if scope["path"].startswith("/lens") else "Bearer"}
            raise error

    async def _read(self, receive: Callable[[], Awaitable[Any]], chunks: list[bytes]) -> bool:
        """Gather the body in `chunks`, in one piece at last; False where the client left before its end."""
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            self.held += len(chunks[-1])
            if size > self.body_limit:
                raise ApiError(413, f"the body has more than {self.body_limit:,} bytes", "body_too_large")
            if self.held > max(BODIES, self.body_limit):
                raise ApiError(429, "the requests under way fill the memory; try again later", "rate_limit_exceeded")
            more = message.get("more_body", False)
        chunks[:] = [b"".join(chunks)]
        return True


async def _hang_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def build_app(
    model: Any,
    tokenizer: Any,
    name: str,
    api_key: str | None = None,
    lens: AddPages | None = None,
    memory: Policy | None = None,
    max_trips: int | None = None,
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        model: An open causal language model.
        tokenizer: Its tokenizer.
        name: What clients call it.
        api_key: What clients must send as `Authorization: Bearer KEY`.
        lens: Adds pages of its own; `fathom.lens.live.add_lens` offers the lens at /lens.
        memory: A cache of constant size for every request, in place of one that holds all of its text.
        max_trips: Trips per token at most, where a request does not say.
    """
    settle_generation(model.generation_config, tokenizer)
    context = model.config.max_position_embeddings if memory is None else ENDLESS
    worker, manager = _Generation(context, memory, max_trips), _OneModel(model, tokenizer, name, context)
    state = _OneWorker(worker)
    # Handlers of routes that are not kept: their number differs between versions of transformers.
    handlers: dict[str, Any] = {h: None for h in inspect.signature(build_server).parameters if h.endswith("_handler")}
    handlers["chat_handler"] = _Chat(manager, state)
    handlers["completion_handler"] = _Completion(manager, state)
    app = build_server(manager, generation_state=state, **handlers)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    app.state.worker = worker

    @app.get("/v1/models/{model:path}")
    def show_model(model: str) -> dict[str, Any]:
        if model != name:
            raise ApiError(404, f"no model {model!r:.120}; this server has {name!r}", "model_not_found", "model")
        return manager.card

    if lens is not None:
        lens(app, model, tokenizer, name, worker)

    @app.exception_handler(HTTPException)
    async def say_why(request: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, ApiError):
            error = ApiError(
                error.status_code, str(error.detail), "malformed_body" if error.status_code == 400 else None
            )
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def say_malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        return ApiError(400, "the body must be a JSON object, sent as application/json", "malformed_body").response()

    @app.exception_handler(Exception)
    async def say_failed(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"the server failed: {type(error).__name__}").response()

    # Every character may be escaped into six bytes, and few tokens have more than ten characters.
    app.add_middleware(_Gate, api_key=api_key, body_limit=max(1 << 20, 64 * context))
    return app


class _Server(uvicorn.Server):
    """uvicorn that says where it is, and ends generations that outlive the grace period."""

    def __init__(self, config: uvicorn.Config, worker: _Generation, grace: float, ready: str) -> None:
        super().__init__(config)
        self.worker, self.grace, self.ready = worker, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        print(self.ready, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests under way finish, for so long."""
        late = asyncio.get_running_loop().call_later(self.grace, self.worker.close)
        await super().shutdown(sockets)
        late.cancel()
        self.worker.close()


def _bind(host: str, port: int) -> socket.socket:
    """Before the model is opened, so that a port that is taken costs no wait. Nobody is let in yet."""
    if not 0 <= port < 1 << 16:
        raise ServeError(f"--port {port}: allowed: 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise ServeError(f"cannot listen on {host} port {port}: {error}") from error
    return listener


def _stop(signum: int, frame: Any) -> None:
    raise SystemExit(0)


def serve(
    path: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    lens: AddPages | None = None,
    grace: float = 20.0,
    trust_remote_code: bool = False,
    kvcache: str | None = None,
    kvcache_window: int | None = None,
    kvcache_sinks: int | None = None,
    kvcache_ratio: float | None = None,
    max_trips: int | None = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        path: An exported directory, any Hugging Face directory, a run, or a comparison (its best arm).
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        name: What clients call the model; by default the directory's name.
        api_key: What clients must send as `Authorization: Bearer KEY`.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        device: `cpu`, `cuda`, ...; by default cuda where there is one.
        lens: Adds pages of its own; `fathom.lens.live.add_lens` offers the lens at /lens.
        grace: Seconds that requests under way may take to finish once the server was told to stop.
        trust_remote_code: Run Python files of the directory, for architectures that nobody here knows.
        kvcache: How a request's cache is compressed; by default it holds everything.
        kvcache_window: Entries that a cache may hold.
        kvcache_sinks: First entries that are never compressed.
        kvcache_ratio: Share that a compression leaves.
        max_trips: Trips per token at most, where a request does not say.
    """
    if api_key is not None and not api_key.strip():
        raise ServeError("the API key is empty (--api-key or FATHOM_API_KEY)")
    listener = _bind(host, port)
    address, port = listener.getsockname()[:2]
    if api_key is None and not ipaddress.ip_address(address).is_loopback:
        print(
            f"fathom: warning: {address} is not a loopback address and there is no API key: whoever can reach this "
            "machine can use the model (--api-key or FATHOM_API_KEY asks for one)",
            file=sys.stderr,
        )
    # uvicorn puts this back and repeats the signal once it has stopped, so that it ends this process with 0.
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        model, tokenizer = open_checkpoint(path, device, dtype, trust_remote_code, into_fathom=lens is not None)
        name = name or Path(path).resolve().name
        check_trips(model, max_trips)
        memory = choose(model, kvcache, kvcache_window, kvcache_sinks, kvcache_ratio)
        app = build_app(model, tokenizer, name, api_key, lens, memory, max_trips)
        worker: _Generation = app.state.worker
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        ready = f"{name} at {url}/v1" + (f", lens at {url}/lens" if lens else "")
        # Generations end themselves after the grace period; this limit is for connections that then still hang.
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(grace) + 5)
        logging.get_logger("transformers").setLevel(logging.ERROR)  # it warns of every request
        try:
            _Server(config, worker, grace, ready).run(sockets=[listener])
        finally:
            worker.join(10.0)
    finally:
        listener.close()
        signal.signal(signal.SIGTERM, before)
