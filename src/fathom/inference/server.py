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

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from transformers.utils import logging

from fathom.checkpoints.open import Opening
from fathom.checkpoints.special_tokens import as_list, settle_generation
from fathom.evaluation.budgets import check_trips, most_trips
from fathom.inference.answers import Envelope
from fathom.inference.api import ApiError, ChatBody, CompletionBody, FieldError, Message, TextBody, TokensBody, told
from fathom.inference.batches import ServeError
from fathom.inference.cache import NO_WISHES, Policy, choose
from fathom.inference.engine import Engine, EngineError, Event, Job, compiled_steps, deliver
from fathom.inference.gate import Gate, Timed
from fathom.inference.generate import GenerateError, check_drafts, encode
from fathom.inference.memory import default_memory
from fathom.inference.packed import pack
from fathom.inference.sampling import Choice
from fathom.inference.texts import AnswerWords, Text
from fathom.recipe import CacheWishes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKENS = 1024  # where a request names no number
ENDLESS = 1 << 20  # tokens of context that are offered where a cache of constant size sets no limit
# As browsers write it: lower case, ASCII, no path, and no port that is the scheme's own.
ORIGIN = re.compile(
    r"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?"
)
AddPages = Callable[[FastAPI, "PreTrainedModel", "PreTrainedTokenizerBase", str, Engine], None]
"""Adds routes to the server: from the application, model, tokenizer, name and the engine."""
Asked = CompletionBody | ChatBody
Parts = AsyncIterator[tuple[int, str]]
"""Which text of an answer has grown by what."""


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
        settle_generation(model.generation_config, tokenizer)
        self.model, self.tokenizer, self.name, self.max_trips = model, tokenizer, name, max_trips
        self.context = compiled or (model.config.max_position_embeddings if policy is None else ENDLESS)
        self.stops = frozenset(as_list(model.generation_config.eos_token_id))
        self.loop: asyncio.AbstractEventLoop | None = None
        memory = memory or default_memory(model)
        steps = None if compiled is None else compiled_steps(model, memory, compiled, max_trips)
        self.engine = Engine(model, memory, policy, self._hand_over, draft_trips=speculate, compiled=steps)
        if steps is not None:
            self.engine.call(partial(self.engine.compile, max_trips, _report)).result()
        known = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "fathom"}
        self.card = {**known, "max_model_len": self.context}

    def pack(self) -> None:
        """Pack the weights that can be.

        The thread that multiplies does it. If another did, OpenMP would count the workers of both, more than there are
        cores, and let them sleep between two products.
        """
        self.engine.call(partial(pack, self.model)).result()

    def _hand_over(self, out: list[tuple[Job, Event]]) -> None:
        """From the engine's thread to this one."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(deliver, out)

    def known(self, asked: str | None) -> None:
        """Refuse another model's name."""
        if asked not in (None, self.name):
            raise ApiError(404, f"no model {asked!r:.120}; this server has {self.name!r}", "model_not_found", "model")

    async def encoded(
        self, field: str, encoder: Callable[..., list[int]], /, *given: object, **more: object
    ) -> list[int]:
        """A field of a request as token ids, made beside this thread; what the tokenizer does not take is an error."""
        try:
            return await asyncio.to_thread(encoder, *given, **more)
        except GenerateError as error:
            raise FieldError(field, str(error)) from error
        except (TypeError, ValueError) as error:
            raise FieldError(field, f"cannot be read: {' '.join(str(error).split()):.300}") from error

    async def conversation(self, messages: Sequence[Message], variables: Mapping[str, object]) -> list[int]:
        """A conversation as token ids; `variables` are the template's."""
        if not self.tokenizer.chat_template:
            message = "this model has no chat template, so it was not trained to converse; use /v1/completions"
            raise ApiError(400, message, "no_chat_template")
        # A template of the client's, or padding to a length of its choice, would be more than variables.
        if own := variables.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters:
            raise FieldError("chat_template_kwargs", f"{min(own)} is not allowed")
        return await self.encoded("messages", encode, self.tokenizer, [one.turn() for one in messages], **variables)

    async def prompts(self, body: Asked) -> list[list[int]]:
        """The prompts of a request as token ids."""
        if isinstance(body, ChatBody):
            return [await self.conversation(body.messages, body.chat_template_kwargs)]
        read = partial(self.encoded, "prompt", encode, self.tokenizer)
        return [await read(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]

    def jobs(self, body: Asked, prompts: Sequence[list[int]], queue: asyncio.Queue) -> list[Job]:
        """One for each prompt and each of the `n` texts that are asked for."""
        most, trips = most_trips(self.model), body.max_trips or self.max_trips
        if (body.max_trips or 1) > most:
            raise FieldError("max_trips", f"{body.max_trips}; a token of this model makes {most} at most")
        if self.engine.compiled is not None and trips != self.max_trips:
            raise FieldError("max_trips", "this server has compiled one number of trips")
        scored, own = body.likeliest, self.model.generation_config
        wants_prompt = body.echo and scored is not None
        job = partial(Job, stops=self.stops, logprobs=scored, score_prompt=wants_prompt, trips=trips)
        rooms = [self._new_tokens(len(ids), body.max_tokens, trips) for ids in prompts]
        choices = [Choice.of(vars(body), own, i) for i in range(body.n)]
        texts = [(ids, room, choice) for ids, room in zip(prompts, rooms, strict=True) for choice in choices]
        return [job(*text, partial(_put, queue, i)) for i, text in enumerate(texts)]

    def _new_tokens(self, prompt: int, wanted: int | None, trips: int | None) -> int:
        room = self.context - prompt
        if room < (1 if wanted is None else wanted):
            asked = "" if wanted is None else f" and {wanted} more were asked for"
            message = f"this model's context is {self.context} tokens; the prompt has {prompt}{asked}"
            raise ApiError(400, message, "context_length_exceeded")
        held = self.engine.most_tokens(trips) - prompt
        return max(1, min(NEW_TOKENS, room, held)) if wanted is None else wanted

    async def answer(self, body: Asked) -> Response:
        """Whole, or as a stream."""
        self.known(body.model)
        for field, (allowed, message) in body.rules(self.model.config.vocab_size).items():
            if not allowed:
                raise FieldError(field, message)
        self.loop = asyncio.get_running_loop()
        prompts = await self.prompts(body)
        queue: asyncio.Queue = asyncio.Queue()
        jobs = self.jobs(body, prompts, queue)
        self.engine.submit(jobs)
        texts = [Text(AnswerWords(self.tokenizer), body.stops, self._echo(body, i // body.n)) for i in range(len(jobs))]
        envelope = Envelope(self.name, isinstance(body, ChatBody), self.tokenizer, sum(map(len, prompts)))
        parts = self._parts(jobs, texts, queue)
        if body.stream:
            return StreamingResponse(_stream(parts, texts, envelope, body.usage), media_type="text/event-stream")
        async for _ in parts:
            pass
        return JSONResponse(envelope.whole(texts))

    def _echo(self, body: Asked, which: int) -> str:
        """A prompt as text, if its answer begins with it."""
        prompt = body.prompts[which] if isinstance(body, CompletionBody) and body.echo else ""
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt))

    async def _parts(self, jobs: list[Job], texts: list[Text], queue: asyncio.Queue) -> Parts:
        """Until all have ended; a client that leaves takes its jobs along."""
        try:
            while any(text.finish is None for text in texts):
                index, event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                text = texts[index]
                if text.finish is None:
                    new = text.hear(event)
                    if text.finish is not None:  # perhaps by a stop string, of which the engine knows nothing
                        self.engine.cancel([jobs[index]])
                    if new or text.finish is not None or text.scores:
                        yield index, new
        finally:
            self.engine.cancel(jobs)

    def metrics(self) -> str:
        """Counters in the format of Prometheus."""
        engine, counts = self.engine, self.engine.counts
        counters = {
            "prompt_tokens_total": counts["prompt_tokens"],
            "generation_tokens_total": counts["tokens"],
            "steps_total": counts["steps"],
            **{f"texts_{how}_total": counts[how] for how in ("finished", "cancelled", "failed")},
            **{f"{which}_tokens_total": counts[which] for which in ("drafted", "accepted")},
            "requests_refused_total": counts["refused"],
            "first_token_seconds_sum": round(engine.first_seconds, 6),
            "first_token_seconds_count": counts["first_tokens"],
        }
        gauges = {
            "texts_running": engine.running,
            "texts_waiting": len(engine.waiting),
            "cache_bytes": engine.cache_bytes,
            "cache_budget_bytes": engine.budget,
        }
        kinds = (("counter", counters), ("gauge", gauges))
        return "".join(f"# TYPE fathom_{k} {kind}\nfathom_{k} {v}\n" for kind, these in kinds for k, v in these.items())


async def _stream(parts: Parts, texts: list[Text], envelope: Envelope, usage: bool) -> AsyncIterator[str]:
    try:
        for i in range(len(texts) if envelope.chat else 0):
            yield _line(envelope.begin(i, texts[i]))
        async for index, new in parts:
            yield _line(envelope.chunk(index, texts[index], new))
        if usage:
            yield _line(envelope.last(texts))
    except EngineError as error:
        yield _line(told(error).body())
    yield "data: [DONE]\n\n"


def _line(value: object) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _report(words: str) -> None:
    print(f"fathom: {words}", file=sys.stderr, flush=True)


def _put(queue: asyncio.Queue, index: int, event: Event) -> None:
    queue.put_nowait((index, event))


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
    kinds = (HTTPException, RequestValidationError, EngineError, Exception)
    app = FastAPI(title="Fathom", openapi_url=None, exception_handlers=dict.fromkeys(kinds, _say_why))
    app.state.service, app.state.engine = service, service.engine

    @app.post("/v1/completions")
    async def complete(body: CompletionBody) -> Response:
        return await service.answer(body)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        return await service.answer(body)

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
    async def tokenize(body: TextBody) -> dict[str, object]:
        service.known(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("prompt", "give this or messages")
        if body.messages is not None:
            ids = await service.conversation(body.messages, {})
        else:
            whole, more = service.tokenizer.encode, {"add_special_tokens": body.add_special_tokens, "verbose": False}
            ids = await service.encoded("prompt", whole, body.prompt, **more)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.context}

    @app.post("/detokenize")
    async def detokenize(body: TokensBody) -> dict[str, object]:
        service.known(body.model)
        if not all(0 <= token < service.model.config.vocab_size for token in body.tokens):
            raise FieldError("tokens", f"must be 0 to {service.model.config.vocab_size - 1}")
        return {"prompt": service.tokenizer.decode(body.tokens)}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    if lens is not None:
        lens(app, service.model, service.tokenizer, service.name, service.engine)
    # Every character may be escaped into six bytes, and few tokens have more than ten characters.
    app.add_middleware(Gate, api_key=api_key, body_limit=max(1 << 20, 64 * service.context), hosts=hosts)
    # Outside the gate: a browser's preflight has no key, and a page may read an error only if the header allows it.
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return app


async def _say_why(request: Request, error: Exception) -> JSONResponse:
    return told(error).response()


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
    pack: bool = True
    """On a CPU, pack the weights of a float32 model; compiled decoding reads them as they are."""
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
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
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
    if options.pack and options.compile is None:
        service.pack()
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
