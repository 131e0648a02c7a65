"""`fathom serve`: OpenAI's routes over one model whose requests share running batches.

A request is checked (`api.py`), becomes one job for each of its texts (`engine.py`), and is answered as its tokens
come (`answers.py`). In front stands the gate (`gate.py`). Everything here is asyncio on one thread; the model runs on
another, so a slow client holds up no other.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import ipaddress
import json
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from transformers.utils import logging

from fathom.checkpoints.open import Opening
from fathom.checkpoints.special_tokens import as_list, settle_generation
from fathom.errors import FathomError
from fathom.evaluation.budgets import check_trips, most_trips
from fathom.inference.answers import AnswerWords, Envelope, Text
from fathom.inference.api import ApiError, Body, ChatBody, CompletionBody, TextBody, TokensBody, parsed, seed_of
from fathom.inference.batches import Compiled, compiles, token_bytes
from fathom.inference.cache import NO_WISHES, Policy, choose
from fathom.inference.engine import ROWS, Engine, EngineError, Event, Job, Scored, deliver
from fathom.inference.gate import Gate, Timed
from fathom.inference.generate import GenerateError, check_drafts, written
from fathom.recipe import CacheWishes

if TYPE_CHECKING:
    from types import FrameType

    from pydantic import BaseModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKENS = 1024  # where a request names no number
ENDLESS = 1 << 20  # tokens of context that are offered where a cache of constant size sets no limit
FREE = 1 << 32  # bytes, where a system does not say
STATUS = {"rate_limit_exceeded": 429, "shutting_down": 503, "cache_memory_exceeded": 400, "failed": 500}
# As browsers write it: lower case, ASCII, no path, and no port that is the scheme's own.
ORIGIN = re.compile(
    r"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?"
)
AddPages = Callable[[FastAPI, "PreTrainedModel", "PreTrainedTokenizerBase", str, Engine], None]
"""Adds routes to the server: from the application, model, tokenizer, name and the engine."""


class ServeError(FathomError, ValueError):
    """Something that cannot be served as asked; the message is one line."""


def refuse_longrope(model: PreTrainedModel) -> None:
    """Refuse angles that depend on the longest row of a call: a text would change with its company."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # a part for each kind of layer, or one
    if any(part.get("rope_type") == "longrope" for part in parts):
        raise ServeError("rope_type longrope: its angles depend on the longest text of a batch; serve this with vLLM")


class Service:
    """One model with its engine, and what the routes do with them.

    Args:
        model: An open causal language model.
        tokenizer: Its tokenizer.
        name: What clients call it.
        memory: Bytes that keys and values may take; by default as `default_memory` says.
        policy: A cache of constant size for every text.
        max_trips: Trips per token at most, where a request does not say.
        speculate: Draft with so many first trips and check with the rest.
        compiled: Compile decoding, of texts of so many tokens at most.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        memory: int | None = None,
        policy: Policy | None = None,
        max_trips: int | None = None,
        speculate: int | None = None,
        compiled: int | None = None,
    ) -> None:
        refuse_longrope(model)
        settle_generation(model.generation_config, tokenizer)
        self.model, self.tokenizer, self.name, self.max_trips = model, tokenizer, name, max_trips
        self.context = model.config.max_position_embeddings if policy is None else ENDLESS
        self.stops = frozenset(as_list(model.generation_config.eos_token_id))
        self.loop: asyncio.AbstractEventLoop | None = None
        memory, steps = memory or default_memory(model), None
        if compiled is not None:
            self.context, steps = compiled, compiled_steps(model, memory, compiled, max_trips)
        self.engine = Engine(model, memory, policy, self._hand_over, draft_trips=speculate, compiled=steps)
        if steps is not None:
            self._compile()
        self.first_tokens, self.first_seconds, self.refused = 0, 0.0, 0
        self.card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "fathom",
            "max_model_len": self.context,
        }

    def _compile(self) -> None:
        """Compile before the first request."""
        from torch._dynamo.exc import BackendCompilerFailed  # slow to import
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            self.engine.call(partial(self.engine.compile, self.max_trips)).result()
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, InvalidCxxCompiler):
                raise ServeError("--compile: no C++ compiler is found; install one, or let CXX name it") from error
            raise

    def _hand_over(self, out: list[tuple[Job, Event]]) -> None:
        """From the engine's thread to this one."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(deliver, out)

    def known(self, asked: str | None) -> None:
        """Refuse another model's name."""
        if asked not in (None, self.name):
            raise ApiError(404, f"no model {asked!r:.120}; this server has {self.name!r}", "model_not_found", "model")

    async def encode(self, body: Body) -> list[tuple[str, list[int]]]:
        """The prompts as text and ids."""
        if isinstance(body, ChatBody):
            variables = body.chat_template_kwargs or {}
            # A template of the client's, or padding to a length of its choice, would be more than variables.
            reserved = set(inspect.signature(self.tokenizer.apply_chat_template).parameters)
            for key in variables:
                if key in reserved:
                    raise ApiError(400, f"chat_template_kwargs.{key}: not allowed", param="chat_template_kwargs")
            return [await asyncio.to_thread(self._conversation, body.messages, variables)]
        assert isinstance(body, CompletionBody)
        return [await asyncio.to_thread(self._prompt, prompt) for prompt in body.prompts()]

    def _prompt(self, prompt: str | list[int]) -> tuple[str, list[int]]:
        if not isinstance(prompt, str):
            return self.tokenizer.decode(prompt), prompt
        if not prompt:  # starts a new document
            begin = self.tokenizer.bos_token_id
            return "", [self.tokenizer.eos_token_id if begin is None else begin]
        return prompt, self._ids(prompt)

    def _ids(self, text: str, special: bool = True) -> list[int]:
        try:
            # A length beyond the context is our own error.
            return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        except (UnicodeError, TypeError, ValueError) as error:
            raise ApiError(400, f"this text cannot be read: {_one_line(error)}", param="prompt") from error

    def _conversation(
        self, messages: Sequence[BaseModel] | None, variables: Mapping[str, object]
    ) -> tuple[str, list[int]]:
        if not self.tokenizer.chat_template:
            raise ApiError(
                400,
                "this model has no chat template, so it was not trained to converse; use /v1/completions",
                "no_chat_template",
            )
        turns = [message.model_dump(exclude_none=True) for message in messages or ()]
        for turn in turns:
            if isinstance(turn.get("content"), list):
                turn["content"] = "".join(part["text"] for part in turn["content"])
        try:
            text = written(self.tokenizer, turns, **variables)
        except GenerateError as error:
            raise ApiError(400, str(error), param="messages") from error
        return text, self._ids(text, special=False)

    def jobs(self, body: Body, prompts: list[tuple[str, list[int]]], queue: asyncio.Queue) -> list[Job]:
        """One for each prompt and each of the `n` texts that are asked for."""
        most = most_trips(self.model)
        if body.max_trips is not None and body.max_trips > most:
            message = f"max_trips: {body.max_trips}; a token of this model makes {most} at most"
            raise ApiError(400, message, param="max_trips")
        if self.engine.compiled is not None and body.max_trips not in (None, self.max_trips):
            raise ApiError(400, "max_trips: this server has compiled one number of trips", param="max_trips")
        made: list[Job] = []
        seed, trips = seed_of(body), body.max_trips or self.max_trips
        for _, ids in prompts:
            wanted = self._new_tokens(len(ids), body.most_tokens(), trips)
            for i in range(body.n or 1):
                job = Job(
                    ids,
                    wanted,
                    body.choice(self.model.generation_config, i, seed),
                    deliver=partial(_put, queue, len(made)),
                    stops=self.stops,
                    logprobs=body.scored(),
                    score_prompt=isinstance(body, CompletionBody) and bool(body.echo) and body.scored() is not None,
                    trips=trips,
                )
                made.append(job)
        return made

    def _new_tokens(self, prompt: int, wanted: int | None, trips: int | None) -> int:
        room = self.context - prompt
        if room < (1 if wanted is None else wanted):
            asked = "" if wanted is None else f" and {wanted} more were asked for"
            raise ApiError(
                400,
                f"this model's context is {self.context} tokens; the prompt has {prompt}{asked}",
                "context_length_exceeded",
            )
        held = self.engine.most_tokens(trips) - prompt
        return max(1, min(NEW_TOKENS, room, held)) if wanted is None else wanted

    async def answer(self, body: Body) -> Response:
        """Whole, or as a stream."""
        self.known(body.model)
        body.check(self.model.config.vocab_size)
        self.loop = asyncio.get_running_loop()
        prompts = await self.encode(body)
        queue: asyncio.Queue = asyncio.Queue()
        jobs, began = self.jobs(body, prompts, queue), time.perf_counter()
        try:
            self.engine.submit(jobs)
        except EngineError as error:
            self.refused += 1
            raise _told(error) from error
        echoed = isinstance(body, CompletionBody) and bool(body.echo)
        texts = [Text(AnswerWords(self.tokenizer), body.stops, body.scored() is not None) for _ in jobs]
        envelope = Envelope(self.name, isinstance(body, ChatBody), self.tokenizer)
        length = sum(len(ids) for _, ids in prompts)
        n = body.n or 1
        parts = self._parts(
            jobs, texts, queue, [prompts[i // n][0] if echoed else None for i in range(len(jobs))], began
        )
        if body.stream:
            return StreamingResponse(_stream(parts, texts, envelope, body, length), media_type="text/event-stream")
        async for _ in parts:
            pass
        return JSONResponse(envelope.whole(texts, length))

    async def _parts(
        self, jobs: list[Job], texts: list[Text], queue: asyncio.Queue, echoes: list[str | None], began: float
    ) -> AsyncIterator[tuple[int, str]]:
        """Which text has grown by what, until all have ended; a client that leaves takes its jobs along."""
        open_texts = set(range(len(jobs)))
        try:
            while open_texts:
                index, event = await queue.get()
                text, new = texts[index], ""
                if isinstance(event, Exception):
                    raise _told(event)
                if index not in open_texts:
                    continue
                if (echo := echoes[index]) is not None:  # before the first of its own
                    new, echoes[index] = text.echo(echo, event if isinstance(event, list) else []), None
                if isinstance(event, Scored):
                    if not text.tokens:
                        self.first_tokens += 1
                        self.first_seconds += time.perf_counter() - began
                    new += text.add(event)
                elif isinstance(event, str):
                    new += text.end(event)
                if text.finish is not None:
                    open_texts.discard(index)
                    if not isinstance(event, str):  # a stop string, of which the engine knows nothing
                        self.engine.cancel([jobs[index]])
                if new or text.finish is not None or text.scores:
                    yield index, new
        finally:
            if open_texts:
                self.engine.cancel([jobs[i] for i in open_texts])

    def metrics(self) -> str:
        """Counters in the format of Prometheus."""
        engine, counts = self.engine, self.engine.counts
        values = {
            "prompt_tokens_total": ("counter", counts["prompt_tokens"]),
            "generation_tokens_total": ("counter", counts["tokens"]),
            "steps_total": ("counter", counts["steps"]),
            "texts_finished_total": ("counter", counts["finished"]),
            "texts_cancelled_total": ("counter", counts["cancelled"]),
            "texts_failed_total": ("counter", counts["failed"]),
            "drafted_tokens_total": ("counter", counts["drafted"]),
            "accepted_tokens_total": ("counter", counts["accepted"]),
            "requests_refused_total": ("counter", self.refused),
            "first_token_seconds_sum": ("counter", round(self.first_seconds, 6)),
            "first_token_seconds_count": ("counter", self.first_tokens),
            "texts_running": ("gauge", engine.running),
            "texts_waiting": ("gauge", len(engine.waiting)),
            "cache_bytes": ("gauge", engine.cache_bytes),
            "cache_budget_bytes": ("gauge", engine.budget),
        }
        return "".join(f"# TYPE fathom_{k} {kind}\nfathom_{k} {value}\n" for k, (kind, value) in values.items())


async def _stream(
    parts: AsyncIterator[tuple[int, str]], texts: list[Text], envelope: Envelope, body: Body, prompt_tokens: int
) -> AsyncIterator[str]:
    try:
        for i in range(len(texts) if envelope.chat else 0):
            yield _line(envelope.begin(i))
        async for index, new in parts:
            yield _line(envelope.chunk(index, texts[index], new))
        if body.usage:
            yield _line(envelope.last(texts, prompt_tokens))
    except ApiError as error:
        yield _line(error.body())
    yield "data: [DONE]\n\n"


def _line(value: object) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _put(queue: asyncio.Queue, index: int, event: Event) -> None:
    queue.put_nowait((index, event))


def _told(error: Exception) -> ApiError:
    if not isinstance(error, EngineError):
        return ApiError(500, f"generation failed: {type(error).__name__}")
    return ApiError(STATUS[error.code], str(error), None if error.code == "failed" else error.code)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def compiled_steps(model: PreTrainedModel, memory: int, tokens: int, trips: int | None) -> Compiled:
    """What compiles a model's decoding, for as many rows of `tokens` tokens as `memory` holds; or a `ServeError`."""
    if not compiles(model):
        raise ServeError(f"--compile: texts of a {model.config.model_type} model have a cache each, which grows")
    if not 1 < tokens <= model.config.max_position_embeddings:
        raise ServeError(
            f"--compile {tokens}: allowed: 2 to {model.config.max_position_embeddings}, the model's context"
        )
    rows = min(ROWS, memory // (token_bytes(model, trips) * tokens))
    if not rows:
        raise ServeError(f"--compile {tokens}: --cache-memory has no room for one text of so many tokens")
    return Compiled(model, rows, tokens)


def default_memory(model: PreTrainedModel) -> int:
    """Default bytes for keys and values: most of what a GPU has left, a quarter of what a machine has."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0] * 0.8)
    return free_memory() // 4


def free_memory() -> int:
    """Free bytes of this machine, or of the container that this runs in, if that is less."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):  # not Linux
        return FREE
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        return max(0, min(free, limit - used))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def build_app(
    service: Service,
    api_key: str | None = None,
    lens: AddPages | None = None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        service: The model and what is done with it.
        api_key: What clients must send as `Authorization: Bearer KEY`.
        lens: Adds pages of its own; `fathom.lens.live.add_lens` offers the lens at /lens.
        hosts: Names by which clients may call the server; None for any.
        origins: Sites whose pages may call it from a browser; `*` for all.
    """
    app = FastAPI(title="Fathom", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service, app.state.engine = service, service.engine

    @app.post("/v1/completions")
    async def complete(body: dict[str, object]) -> Response:
        return await service.answer(parsed(CompletionBody, body))

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, object]) -> Response:
        return await service.answer(parsed(ChatBody, body))

    @app.post("/v1/embeddings")
    async def embed() -> Response:
        raise ApiError(404, "embeddings are not made here; vLLM serves them", "not_supported")

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{model:path}")
    async def show_model(model: str) -> dict[str, object]:
        service.known(model)
        return service.card

    @app.post("/tokenize")
    async def tokenize(body: dict[str, object]) -> dict[str, object]:
        asked = parsed(TextBody, body)
        service.known(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give prompt or messages", param="prompt")
        if asked.prompt is None:
            _, ids = await asyncio.to_thread(service._conversation, asked.messages, {})
        else:
            ids = await asyncio.to_thread(service._ids, asked.prompt, asked.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.context}

    @app.post("/detokenize")
    async def detokenize(body: dict[str, object]) -> dict[str, object]:
        asked = parsed(TokensBody, body)
        service.known(asked.model)
        if not all(0 <= token < service.model.config.vocab_size for token in asked.tokens):
            raise ApiError(400, f"tokens: must be 0 to {service.model.config.vocab_size - 1}", param="tokens")
        return {"prompt": service.tokenizer.decode(asked.tokens)}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    if lens is not None:
        lens(app, service.model, service.tokenizer, service.name, service.engine)
    _say_errors(app)
    # Every character may be escaped into six bytes, and few tokens have more than ten characters.
    app.add_middleware(Gate, api_key=api_key, body_limit=max(1 << 20, 64 * service.context), hosts=hosts)
    # Outside the gate: a browser's preflight has no key, and a page may read an error only if the header allows it.
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return app


def _say_errors(app: FastAPI) -> None:
    """Every error in OpenAI's form."""

    @app.exception_handler(HTTPException)
    async def say_why(request: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, ApiError):
            malformed = "malformed_body" if error.status_code == 400 else None
            error = ApiError(error.status_code, str(error.detail), malformed)
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def say_malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        return ApiError(400, "the body must be a JSON object, sent as application/json", "malformed_body").response()

    @app.exception_handler(Exception)
    async def say_failed(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"the server failed: {type(error).__name__}").response()


class _Server(uvicorn.Server):
    """uvicorn that says where it is, and ends generations that outlive the grace period."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float, ready: str) -> None:
        super().__init__(config)
        self.engine, self.grace, self.ready = engine, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        print(self.ready, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests under way finish, up to the grace period."""
        late = asyncio.get_running_loop().call_later(self.grace, self.engine.close)
        await super().shutdown(sockets)
        late.cancel()
        self.engine.close()


def _bind(host: str, port: int) -> socket.socket:
    """Before the model is opened, so that a port that is taken costs no wait. Connections are not accepted yet."""
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


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


@dataclass(frozen=True)
class ServeOptions(Opening):
    """How a model is opened and served."""

    name: str | None = None
    """What clients call the model; by default the directory's name."""
    kvcache: str | None = None
    """How a request's cache is compressed; by default it holds everything."""
    wishes: CacheWishes = NO_WISHES
    """The schedule of that; by default what the checkpoint was tuned for."""
    cache_memory: int | None = None
    """Bytes that the keys and values of all requests may take."""
    max_trips: int | None = None
    """Trips per token at most, where a request does not say."""
    speculate: int | None = None
    """Draft with this many first trips and check with the rest: the same texts, faster if drafts are good."""
    compile: int | None = None
    """Compile decoding, of texts of so many tokens at most, prompt included."""
    api_key: str | None = None
    """What clients must send as `Authorization: Bearer KEY`."""
    allow_origin: Sequence[str] = ()
    """Sites whose pages may call the server from a browser, as `https://app.example`; `*` for all."""
    grace: float = 20.0
    """Seconds that requests under way may take to finish once the server was told to stop."""


def serve(
    path: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    lens: AddPages | None = None,
    options: ServeOptions | None = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        path: An exported directory, any Hugging Face directory, a run, or a comparison (its best arm).
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        lens: Adds pages of its own; `fathom.lens.live.add_lens` offers the lens at /lens.
        options: Everything else.
    """
    chosen = options or ServeOptions()
    if chosen.api_key is not None and not chosen.api_key.strip():
        raise ServeError("the API key is empty (--api-key or FATHOM_API_KEY)")
    for origin in chosen.allow_origin:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ServeError(
                f"--allow-origin {origin}: allowed: * or a scheme and a host, as https://app.example:8443, the way "
                "browsers write them: lower case, xn-- for other letters, no :443 for https and no :80 for http"
            )
    if chosen.speculate is not None and chosen.kvcache not in (None, "full"):
        raise ServeError("--speculate takes back what it wrote: leave out --kvcache")
    if chosen.compile is not None and (chosen.speculate is not None or chosen.kvcache not in (None, "full")):
        raise ServeError("--compile needs a cache of a fixed shape: leave out --speculate and --kvcache")
    listener = _bind(host, port)
    # uvicorn puts this back and repeats the signal once it has stopped, so that it ends this process with 0.
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        _run(path, listener, _names(host, listener, chosen.api_key), lens, chosen)
    finally:
        listener.close()
        signal.signal(signal.SIGTERM, before)


def _names(host: str, listener: socket.socket, api_key: str | None) -> set[str] | None:
    """Names by which the server may be called, None for any; without a key a warning where others can reach it."""
    address = ipaddress.ip_address(listener.getsockname()[0])
    if api_key is not None:
        return None
    if address.is_loopback:
        return {"localhost", "127.0.0.1", "[::1]", host.lower()}
    print(
        f"fathom: warning: {address} is not a loopback address and there is no API key: any client that reaches this "
        "machine can use the model (--api-key or FATHOM_API_KEY asks for one)",
        file=sys.stderr,
    )
    return None


def _run(
    path: str | Path, listener: socket.socket, hosts: set[str] | None, lens: AddPages | None, options: ServeOptions
) -> None:
    """Open the model and serve it on a socket that is bound."""
    model, tokenizer = options.open(path, into_fathom=lens is not None)
    name = options.name or Path(path).resolve().name
    check_trips(model, options.max_trips)
    check_drafts(model, options.speculate, options.max_trips)
    policy = choose(model, options.kvcache, options.wishes)
    limits = options.cache_memory, policy, options.max_trips
    service = Service(model, tokenizer, name, *limits, options.speculate, options.compile)
    app = build_app(service, options.api_key, lens, hosts, options.allow_origin)
    address, port = listener.getsockname()[:2]
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    ready = f"{name} at {url}/v1" + (f", lens at {url}/lens" if lens else "")
    # Generations end themselves after the grace period; this limit is for connections that then still hang.
    limit = int(options.grace) + 5
    config = uvicorn.Config(app, log_level="warning", http=Timed, timeout_graceful_shutdown=limit)
    logging.get_logger("transformers").setLevel(logging.ERROR)  # it warns of every request
    # What is loaded is not garbage. With it out of the count, full collections come in time for the cycles that a
    # request leaves behind when its client hangs up.
    gc.collect()
    gc.freeze()
    try:
        _Server(config, service.engine, options.grace, ready).run(sockets=[listener])
    finally:
        service.engine.join(10.0)
