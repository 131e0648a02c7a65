"""`fathom serve`: OpenAI's routes over one model whose requests share running batches.

A request is checked (`api.py`), becomes one job for each of its texts (`engine.py`), and is answered as its tokens
come (`answers.py`). In front stands the gate (`gate.py`). Everything here is asyncio on one thread; the model runs on
another, so a slow client holds up no other.

Here are the routes (those of the lens are in `lens/live.py`), `--allow-origin`, `--deadline`, what `reasoning_effort`
means (`Service.trips`), and which answers have reasoning (`Service._text`). `launch.py` decides what happens at the
start, on SIGTERM and after a failure of the engine. `access_log.py` gives every answer its `x-request-id`.
`api_responses.py` reads requests of the Responses API, and `responses.py` writes their answers and streams. `prompt.py`
turns conversations into tokens, and `tokenising.py` has the threads for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from fathom.checkpoints.special_tokens import as_list, settle_generation, unknown_token
from fathom.errors import RequestError, SettingsError
from fathom.inference import responses
from fathom.inference.access_log import Access
from fathom.inference.answers import Envelope, written
from fathom.inference.api import (
    HALF,
    ApiError,
    ChatBody,
    CompletionBody,
    Effort,
    FieldRules,
    Message,
    TextBody,
    TokensBody,
    told,
    with_objects,
    wrong,
)
from fathom.inference.api_responses import NAMED, ResponsesBody
from fathom.inference.api_structure import Tool
from fathom.inference.batches import trips_of
from fathom.inference.cache_memory import default_memory
from fathom.inference.control import special_names
from fathom.inference.engine import Engine, Event, Job, deliver
from fathom.inference.gate import Gate, Keys
from fathom.inference.grammar_trial import LateError
from fathom.inference.metrics import exposition
from fathom.inference.packed_or_plain import Layout, lay_out
from fathom.inference.page import talk_page
from fathom.inference.prompt import encode, reserved_variables
from fathom.inference.sampling import Choice
from fathom.inference.settings import as_strings, refused
from fathom.inference.shape import Shape, Shapes
from fathom.inference.texts import AnswerWords, Text
from fathom.inference.thoughts import Thoughts, marks_of
from fathom.inference.tokenising import Tokenising, written_size
from fathom.iterations import most_trips
from fathom.kvcache.policy import Policy
from fathom.models import FathomForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKENS = 1024  # the default number of new tokens
MANY = 1 << 10
"""Log-probabilities from which on an answer is written on another thread."""
ENDLESS = 1 << 20  # the context length that is offered if a constant-size cache sets no limit
AddPages = Callable[[FastAPI, "Service"], None]
"""Adds routes to the server."""
Asked = CompletionBody | ChatBody
Parts = AsyncIterator[tuple[int, str]]
"""Which text of an answer has grown by what."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Begun:
    """A request whose texts are being generated."""

    prompts: list[list[int]]
    jobs: list[Job]
    texts: list[Text]
    queue: asyncio.Queue


class Service:
    """A model with its engine, and the operations behind the routes.

    Args:
        model: An open causal language model.
        tokenizer: Its tokenizer.
        name: What clients call it.
        memory: Bytes that keys and values may take; by default as `default_memory` says.
        policy: A cache of constant size for every text.
        max_trips: Trips per token at most, where a request does not say.
        speculate: Draft with so many first trips and check with the rest.
        lookup: Draft what followed the same tokens before.
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
        lookup: bool = False,
    ) -> None:
        settle_generation(model.generation_config, tokenizer)
        if (fault := refused(model.generation_config)) is not None:
            raise SettingsError(fault)
        self.model, self.tokenizer, self.name, self.max_trips = model, tokenizer, name, max_trips
        self.context = model.config.max_position_embeddings if policy is None else ENDLESS
        self.stops = frozenset(as_list(model.generation_config.eos_token_id))
        self.stop_strings = as_strings(model.generation_config.stop_strings)
        self.allow_control = False  # whether message texts may contain special tokens such as <|im_end|>
        self.deadline: float | None = None
        """Seconds that an answer may take once the engine has its request."""
        self.layout: Layout | None = None
        """How weights are stored, once `lay_out` was called."""
        self.tokenising = Tokenising()
        self.reserved = reserved_variables(tokenizer)
        self.thoughts = marks_of(tokenizer)
        self.shapes = Shapes(tokenizer, model.config.vocab_size, self.stops)
        self.loop: asyncio.AbstractEventLoop | None = None
        memory = memory or default_memory(model)
        self.engine = Engine(model, memory, policy, self._hand_over, draft_trips=speculate, lookup=lookup)
        known = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "fathom"}
        self.card = {**known, "max_model_len": self.context}

    def lay_out(self, wanted: str) -> Layout:
        """Pack the weights of linear layers if `wanted` says so, or if packed weights are faster.

        This runs on the engine's thread. On another thread, OpenMP would count the workers of both, which are more than
        there are cores, and let them sleep between two products.
        """
        self.layout = self.engine.call(partial(lay_out, self.model, wanted)).result()
        return self.layout

    def _hand_over(self, out: list[tuple[Job, Event]]) -> None:
        """Pass events from the engine's thread to the server's event loop."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(deliver, out)

    def known(self, asked: str | None) -> None:
        """Reject a request that names another model; adapters are not served by name."""
        if asked not in (None, self.name):
            raise ApiError(404, f"no model {asked!r:.120}; this server has {self.name!r}", "model_not_found", "model")

    def trips(self, asked: int | None, effort: Effort | None = None) -> int | None:
        """The maximum number of loop iterations per token: what a request asks for, else what its reasoning effort
        means. That is one for `low` and less, half of the server's maximum, rounded up, for `medium`, and the server's
        maximum for `high` and more, or without an effort. Thresholds at which tokens halt earlier stay as they are."""
        most = most_trips(self.model)
        if (asked or 1) > most:
            raise wrong("max_trips", f"{asked}; a token of this model makes {most} at most")
        if asked or most == 1 or effort is None or effort in ("high", "xhigh", "max"):
            return asked or self.max_trips
        return -(-trips_of(self.model, self.max_trips) // 2) if effort == "medium" else 1

    async def encoded(self, field: str, size: int, encoder: Callable[[], list[int]]) -> list[int]:
        """A field of `size` characters as token ids, encoded on another thread; errors become an `ApiError`."""
        try:
            ids = await self.tokenising.run(size, encoder)
        except RequestError as error:
            raise ApiError(400, str(error), error.code, field) from error
        except SettingsError as error:
            raise wrong(field, str(error)) from error
        except RecursionError as error:
            raise wrong(field, "nested too deeply") from error
        except UnicodeEncodeError as error:
            raise wrong(field, HALF) from error
        except (TypeError, ValueError) as error:
            if "TextEncodeInput" in str(error):  # what tokenizers says of a text that is no Unicode
                raise wrong(field, HALF) from error
            raise wrong(field, f"cannot be read: {' '.join(str(error).split()):.300}") from error
        if (fault := unknown_token(ids, self.model)) is not None:
            raise wrong(field, fault)
        return ids

    async def decoded(self, ids: Sequence[int]) -> str:
        """The text of token ids, decoded on another thread."""
        return str(await self.tokenising.run(len(ids), partial(self.tokenizer.decode, ids)))

    async def conversation(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        ending: Mapping[str, bool],
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """A conversation as token ids; `variables` are the template's, `ending` says how the prompt ends."""
        if not self.tokenizer.chat_template:
            message = "this model has no chat template; use /v1/completions"
            raise ApiError(400, message, "no_chat_template")
        # A client's own template, or padding to a length of its choice, would be more than variables.
        if own := variables.keys() & self.reserved:
            raise wrong("chat_template_kwargs", f"{min(own)} is not allowed")
        if tools:
            if "tools" not in str(self.tokenizer.chat_template):
                raise wrong("tools", "this model's chat template does not write tools")
            variables = {**variables, "tools": [tool.model_dump(exclude_none=True) for tool in tools]}
        variables = {**variables, **ending}
        if any(one.tool_calls for one in messages) and "tool_calls" not in str(self.tokenizer.chat_template):
            raise wrong("messages", "this model's chat template does not write tool calls")
        turns = [one.turn() for one in messages]
        encoder = partial(encode, self.tokenizer, variables=variables, context=self.context)
        encoder = partial(encoder, allow_control=self.allow_control)

        def read() -> list[int]:
            try:
                return encoder(turns)
            except SettingsError:
                if (objects := with_objects(turns)) == turns:
                    raise
                return encoder(objects)

        return await self.encoded("messages", written_size([turns, variables]), read)

    async def shape(self, body: Asked) -> Shape | None:
        """The constraints of a request on its texts; a new grammar is compiled on a thread for grammars."""
        if body.response_format is None and body.structured_outputs is None and not body.callable_tools:
            return None
        size = written_size(body.model_dump(include={"response_format", "structured_outputs", "tools"}))
        wanted = await self.tokenising.run(size, partial(self.shapes.wanted, body))
        if wanted is None:
            return None
        if (ready := self.shapes.ready(wanted)) is not None:
            return ready
        try:
            return await self.tokenising.compile(partial(self.shapes.compiled, wanted, quick=True))
        except LateError:
            return await self.tokenising.compile(partial(self.shapes.compiled, wanted), long=True)

    async def prompts(self, body: Asked) -> list[list[int]]:
        """The prompts of a request as token ids."""
        if isinstance(body, ChatBody):
            return [await self.conversation(body.messages, body.variables, body.ending, body.tools)]

        async def ids(prompt: str) -> list[int]:
            return await self.encoded("prompt", len(prompt), partial(encode, self.tokenizer, prompt, {}, self.context))

        return [await ids(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]

    def jobs(
        self, body: Asked, prompts: Sequence[list[int]], queue: asyncio.Queue, shape: Shape | None = None
    ) -> list[Job]:
        """One job for each prompt and each of its `n` texts."""
        trips = self.trips(body.max_trips, body.effort)
        scored, own = body.likeliest, self.model.generation_config
        wants_prompt = body.echo and scored is not None
        stops = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self.stops)
        job = partial(Job, stops=stops, logprobs=scored, score_prompt=wants_prompt, trips=trips)
        job = partial(job, tell_trips=body.return_trips, request=object(), salt=body.cache_salt)
        wanted = body.min_tokens if body.max_tokens is None and body.min_tokens > NEW_TOKENS else body.max_tokens
        rooms = [self._new_tokens(len(ids), wanted, trips) for ids in prompts]
        # With an explicit seed, a prompt's texts do not depend on the other prompts of the request.
        apart = 0 if "seed" in body.model_fields_set else body.n
        texts = [
            (ids, room, Choice.of(vars(body), own, which * apart + i, stops))
            for which, (ids, room) in enumerate(zip(prompts, rooms, strict=True))
            for i in range(body.n)
        ]
        if shape is not None:
            texts = [(ids, room, replace(choice, constraint=shape.constraint())) for ids, room, choice in texts]

        def put(index: int, event: Event) -> None:
            queue.put_nowait((index, event))

        return [job(*text, partial(put, i)) for i, text in enumerate(texts)]

    def _new_tokens(self, prompt: int, wanted: int | None, trips: int | None) -> int:
        room = self.context - prompt
        if room < (1 if wanted is None else wanted):
            asked = "" if wanted is None else f" and {wanted} more were asked for"
            message = f"this model's context is {self.context} tokens; the prompt has {prompt}{asked}"
            raise ApiError(400, message, "context_length_exceeded")
        held = self.engine.most_tokens(trips) - prompt
        return max(1, min(NEW_TOKENS, room, held)) if wanted is None else wanted

    async def answer(self, body: Asked) -> Response:
        """The answer, complete or as a stream."""
        begun = await self._begin(body)
        talk, prompts = isinstance(body, ChatBody), begun.prompts
        envelope = Envelope(self.name, talk, self.tokenizer, prompts, *_shown(body))
        envelope.first = begun.jobs[:: body.n]
        parts, texts = self._parts(begun), begun.texts
        if body.stream:
            return self._streamed(begun, _stream(parts, texts, envelope, body.usage, self._written))
        async for _ in parts:
            pass
        return await self._whole(partial(envelope.whole, texts), begun)

    async def respond(self, body: ResponsesBody) -> Response:
        """The answer in the form of the Responses API."""
        chat, echoed = body.chat(), body.echoed()
        try:
            begun = await self._begin(chat)
        except ApiError as error:
            raise error.renamed(NAMED) from error
        made = responses.Response(self.name, self.tokenizer, begun.jobs[0], begun.texts[0], echoed, *_shown(chat))
        if body.stream:
            return self._streamed(begun, made.events(self._parts(begun), self._written))
        await made.heard(self._parts(begun))
        return await self._whole(made.whole, begun)

    async def _whole(self, made: Callable[[], object], begun: _Begun) -> Response:
        """A complete answer."""
        return await self._written(partial(_json, made), sum(map(_scores, begun.jobs)))

    async def _written(self, work: Callable[[], T], scores: int) -> T:
        """The result of writing so many log-probabilities; of many, on another thread."""
        return await self.tokenising.write(work) if scores > MANY else work()

    def _streamed(self, begun: _Begun, events: AsyncIterator[str]) -> Response:
        return _Stream(events, partial(self.engine.cancel, begun.jobs))

    async def _begin(self, body: Asked) -> _Begun:
        """Check a request, and hand its jobs to the engine."""
        self.known(body.model)
        _check(body.rules(self.model.config.vocab_size))
        self.loop = asyncio.get_running_loop()
        shape, prompts = await self.shape(body), await self.prompts(body)
        queue: asyncio.Queue = asyncio.Queue()
        jobs = self.jobs(body, prompts, queue, shape)
        echoes = [""] * len(prompts)
        if isinstance(body, CompletionBody) and body.echo:
            echoes = [one if isinstance(one, str) else await self.decoded(one) for one in body.prompts]
        texts = [self._text(body, job, shape, echoes[i // body.n]) for i, job in enumerate(jobs)]
        self.engine.submit(jobs)
        return _Begun(prompts, jobs, texts, queue)

    def _text(self, body: Asked, job: Job, shape: Shape | None, echo: str) -> Text:
        """The object that turns a job's tokens into text."""
        after = () if isinstance(body, ChatBody) and not body.continue_final_message else job.prompt
        marks = None if isinstance(body, CompletionBody) or (shape is not None and shape.whole) else self.thoughts
        marked = (shape is not None and shape.special) or bool(marks and marks[0] in special_names(self.tokenizer))
        mute = job.stops | (self.stops if marked else frozenset())  # a client's may be ordinary tokens
        words = AnswerWords(self.tokenizer, marked, after, mute)
        stops = sorted({*body.stops, *self.stop_strings})
        begun = body.messages[-1].content if isinstance(body, ChatBody) and body.continue_final_message else None
        thoughts = None if marks is None else Thoughts.after(marks, self.tokenizer, job.prompt, begun or "")
        reader = None if shape is None else shape.reader()
        return Text(words, stops, echo, body.min_tokens, reader=reader, thoughts=thoughts)

    async def _parts(self, begun: _Begun) -> Parts:
        """Events until all jobs have ended; jobs are cancelled if the client disconnects."""
        jobs, texts = begun.jobs, begun.texts
        late = (
            None if self.deadline is None else asyncio.get_running_loop().call_later(self.deadline, self._late, begun)
        )
        try:
            while any(text.finish is None for text in texts):
                index, event = await begun.queue.get()
                if isinstance(event, Exception):
                    raise event
                text = texts[index]
                if text.finish is None:
                    new = text.hear(event)
                    if text.finish is not None:  # the end may be a stop string, which the engine does not know
                        self.engine.cancel([jobs[index]], "finished")
                    if new or text.new_thought or text.finish is not None or text.scores:
                        yield index, new
        finally:
            self.engine.cancel(jobs)
            if late is not None:
                late.cancel()

    def _late(self, begun: _Begun) -> None:
        """End the texts of a request whose deadline has passed."""
        message = f"the answer took longer than {self.deadline:g} seconds"
        begun.queue.put_nowait((0, RequestError(message, "deadline_exceeded")))


def _shown(body: Asked) -> tuple[bool, bool, bool]:
    """Whether an answer shows token ids, the loop iterations of each token, and reasoning."""
    return body.return_token_ids, body.return_trips, body.include_reasoning


def _check(rules: FieldRules) -> None:
    """Reject a request whose fields break a rule; the error names the first such field and what it allows."""
    for field, (allowed, message) in rules.items():
        if not allowed:
            raise wrong(field, message)


class _Stream(StreamingResponse):
    """A response of server-sent events; `end` is called even if the client leaves before the first event."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], object]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.end()


async def _stream(
    parts: Parts, texts: list[Text], envelope: Envelope, usage: bool, write: responses.Write
) -> AsyncIterator[str]:
    try:
        for i in range(len(texts) if envelope.chat else 0):
            yield _line(envelope.begin(i, texts[i]))
        async for index, new in parts:
            scores = sum(1 + len(one.top) for one, _ in texts[index].scores)  # of a whole prompt, where it is echoed
            work = partial(_chunk, envelope, index, texts[index], new)
            if line := await write(partial(work, scores > MANY), scores):
                yield line
        if usage:
            yield _line(envelope.last(texts))
    except RequestError as error:
        yield _line(told(error).body())
    yield "data: [DONE]\n\n"


def _scores(job: Job) -> int:
    """The number of log-probabilities that the answer reports for a job."""
    told = len(job.made) + (len(job.prompt) if job.score_prompt else 0)
    return 0 if job.logprobs is None else told * (1 + job.logprobs)


def _json(made: Callable[[], object]) -> Response:
    return Response(written(made()), media_type="application/json")


def _chunk(envelope: Envelope, index: int, text: Text, new: str, large: bool) -> str:
    """A server-sent event for a chunk of an answer; empty if there is nothing to send yet."""
    chunk = envelope.chunk(index, text, new)
    return "" if chunk is None else f"data: {written(chunk)}\n\n" if large else _line(chunk)


def _line(value: object) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def build_app(
    service: Service,
    api_key: str | Keys | None = None,
    lens: AddPages | None = None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
    log: Callable[[str], object] | None = None,
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        service: The model and its operations.
        api_key: The key that clients must send as `Authorization: Bearer KEY`, or several.
        lens: Adds further pages; `fathom.lens.live.add_lens` serves the lens at /lens.
        hosts: Host names that requests may have; None for any.
        origins: Origins whose pages may call the server from a browser; `*` for all.
        log: Receives the lines of the access log.
    """
    kinds = (HTTPException, RequestValidationError, RequestError, Exception)
    app = FastAPI(title="Fathom", openapi_url=None, exception_handlers=dict.fromkeys(kinds, _say_why))

    @app.post("/v1/completions")
    async def complete(body: CompletionBody) -> Response:
        return await service.answer(body)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        return await service.answer(body)

    @app.post("/v1/responses")
    async def respond(body: ResponsesBody) -> Response:
        return await service.respond(body)

    @app.post("/v1/embeddings")
    async def embed() -> Response:
        raise ApiError(404, "this server makes no embeddings; vLLM serves them", "not_supported")

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
            raise wrong("prompt", "use either this or messages")
        if body.messages is not None:
            _check(body.ending_rules())
            ids = await service.conversation(body.messages, body.chat_template_kwargs, body.ending)
        else:
            text, special = body.prompt or "", body.add_special_tokens
            whole = partial(service.tokenizer.encode, text, add_special_tokens=special, verbose=False)
            ids = await service.encoded("prompt", len(text), whole)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.context}

    @app.post("/detokenize")
    async def detokenize(body: TokensBody) -> dict[str, object]:
        service.known(body.model)
        if not all(0 <= token < service.model.config.vocab_size for token in body.tokens):
            raise wrong("tokens", f"must be 0 to {service.model.config.vocab_size - 1}")
        return {"prompt": await service.decoded(body.tokens)}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(exposition(service.engine), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        looks = None if not isinstance(service.model, FathomForCausalLM) else lens is not None
        talks, most = bool(service.tokenizer.chat_template), service.max_trips or most_trips(service.model)
        text, headers = talk_page(service.name, service.context, most, talks, looks)
        return HTMLResponse(text, headers=headers)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        chosen = service.layout
        told = {} if chosen is None else {"weights": chosen.name, "ratios": dict(chosen.ratios)}
        return _state("ok" if service.engine.alive else "the engine has failed", service.engine.alive, told)

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        return _state("ready" if service.engine.ready else "no new requests", service.engine.ready)

    if lens is not None:
        lens(app, service)
    # A character may be escaped as six bytes, and few tokens have more than ten characters.
    keys = Keys({api_key: "key"}) if isinstance(api_key, str) else api_key
    app.add_middleware(Gate, keys=keys, body_limit=max(1 << 20, 64 * service.context), hosts=hosts)
    # Outside the gate: a browser's preflight has no key, and a page can only read an error if the header allows it.
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    app.add_middleware(Access, write=log)
    return app


def _state(status: str, good: bool, more: Mapping[str, object] | None = None) -> JSONResponse:
    return JSONResponse({"status": status, **(more or {})}, 200 if good else 503)


async def _say_why(request: Request, error: Exception) -> JSONResponse:
    return told(error).response()
