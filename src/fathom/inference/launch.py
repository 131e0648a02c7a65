"""`fathom serve` from start to end: bind a port, open the model, and serve until told to stop.

This file decides which host names the server answers to, warns of a server without a key, gives running requests
`--grace` seconds after SIGTERM, and ends with exit code 1 if the engine fails. `server.py` has the routes, `/health`
among them, and `gate.py` the checks of keys and hosts; `engine.py` decides which failures end only their own requests.
`checkpoints/open.py` opens the model.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import re
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from transformers.utils import logging

from fathom.checkpoints.open import Opening
from fathom.errors import FathomError, SettingsError
from fathom.inference.access_log import to_stderr
from fathom.inference.cache_memory import default_memory
from fathom.inference.engine import Engine
from fathom.inference.gate import Keys, Timed, read_keys
from fathom.inference.generate import check_drafts
from fathom.inference.huge_pages import exchange
from fathom.inference.packed_or_plain import LAYOUTS
from fathom.inference.sampling import Choice
from fathom.inference.server import AddPages, Service, build_app
from fathom.iterations import check_trips
from fathom.kvcache.policy import PLAIN, CacheOptions, choose

UNSENT = 1 << 16
"""Most bytes of a connection that the system holds before they are sent."""
# Origins as browsers write them: lower case, ASCII, no path, no default port.
ORIGIN = re.compile(
    r"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?"
)

PATIENCE = 2.0
"""Seconds after which a model that is still being opened is named; what is refused is refused before."""


class _Server(uvicorn.Server):
    """A uvicorn server that prints its address, stops with its engine, and ends generations that outlive the grace
    period."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float, ready: str) -> None:
        super().__init__(config)
        self.engine, self.grace, self.ready = engine, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then print the address."""
        await super().startup(sockets)
        print(self.ready, flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop: when told to, or when the engine has failed."""
        return await super().on_tick(counter) or self.engine.fault is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish, up to the grace period."""
        if self.server_state.tasks:
            words = f"stopping: running answers have {self.grace:g} s, and a second Ctrl-C ends them at once"
            print(f"fathom: {words}", file=sys.stderr, flush=True)
        late = asyncio.get_running_loop().call_later(self.grace, self.engine.close)
        await super().shutdown(sockets)
        late.cancel()
        self.engine.close()


def _bind(host: str, port: int) -> socket.socket:
    """Bind the port before the model is opened, so that a port in use fails at once. Connections are not accepted
    yet."""
    if not 0 <= port < 1 << 16:
        raise SettingsError(f"port={port}: allowed: 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # inherited; else megabytes hide how slowly one reads
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"cannot listen on {host} port {port}: {error}") from error
    return listener


@dataclass(frozen=True)
class ServeOptions(Opening):
    """How a model is opened and served."""

    name: str | None = None
    """The model name for clients; by default the directory's name."""
    kvcache: str | None = None
    """How a request's cache is compressed; by default it is not."""
    cache: CacheOptions = PLAIN
    """The compression's schedule; by default the one that the checkpoint was tuned for."""
    cache_memory: int | None = None
    """Bytes for the keys and values of all requests."""
    prefix_memory: int | None = None
    """Bytes of the prefix cache, for prompts with the same beginning; by default a quarter of `cache_memory`."""
    max_trips: int | None = None
    """Maximum trips per token, unless a request sets it."""
    speculate: int | None = None
    """Draft with this many first trips and verify with the rest where that is faster: the output is the same."""
    lookup: bool = False
    """Draft what followed the same tokens earlier in a text where that is faster: the output is the same."""
    layout: str = "auto"
    """On a CPU: `packed` or `plain` float32 weights, or `auto`, which times both and refuses slow eight-bit ones."""
    api_key: str | None = None
    """The key that clients must send as `Authorization: Bearer KEY`."""
    api_keys: Path | None = None
    """A file of keys, on each line a name and a key; besides `api_key`."""
    requests_per_key: int | None = None
    """Most requests of one key at a time."""
    deadline: float | None = None
    """Seconds that an answer may take."""
    access_log: bool = False
    """Write a line of JSON to stderr for each request."""
    allow_origin: Sequence[str] = ()
    """Origins whose pages may call the server from a browser, such as `https://app.example`; `*` for all."""
    allow_control_tokens: bool = False
    """Let message texts contain the chat template's control tokens, such as `<|im_end|>`."""
    grace: float = 20.0
    """Seconds for running requests to finish after the server is told to stop."""


def serve(
    path: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    lens: AddPages | None = None,
    options: ServeOptions | None = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C. If its engine fails, that is an error with exit code 1.

    Args:
        path: An exported directory, any Hugging Face directory, a run, or a comparison (its best arm).
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        lens: Adds pages of its own; `fathom.lens.live.add_lens` offers the lens at /lens.
        options: Everything else.
    """
    chosen = options or ServeOptions()
    if chosen.api_key is not None and not chosen.api_key.strip():
        raise SettingsError("the API key is empty (`api_key` or FATHOM_API_KEY)")
    for origin in chosen.allow_origin:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise SettingsError(
                f"allow_origin={origin}: allowed: * or a scheme and a host, as https://app.example:8443, the way "
                "browsers write them: lower case, xn-- for other letters, no :443 for https and no :80 for http"
            )
    keys = _keys(chosen)
    if (chosen.speculate is not None or chosen.lookup) and chosen.kvcache not in (None, "full"):
        named = "lookup" if chosen.speculate is None else "speculate"
        raise SettingsError(f"`{named}` needs a cache that can drop tokens: leave out `kvcache`")
    if chosen.layout not in LAYOUTS:
        raise SettingsError(f"layout={chosen.layout}: allowed: {', '.join(LAYOUTS)}")
    listener = _bind(host, port)
    # uvicorn restores this handler and repeats the signal after it has stopped, which ends the process with code 0.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _run(path, listener, (keys, _names(host, listener, keys)), lens, chosen)
    finally:
        listener.close()
        signal.signal(signal.SIGTERM, before)


def _keys(options: ServeOptions) -> Keys | None:
    """The API keys that clients may send; None if clients need no key."""
    for name, value in (("requests_per_key", options.requests_per_key), ("deadline", options.deadline)):
        if value is not None and not value > 0:  # nor NaN
            raise SettingsError(f"{name}={value}: expected a number above 0")
    names = {} if options.api_key is None else {options.api_key: "key"}
    names |= {} if options.api_keys is None else read_keys(options.api_keys)
    if options.requests_per_key is not None and not names:
        raise SettingsError("requests_per_key needs api_key or api_keys")
    return Keys(names, options.requests_per_key) if names else None


def _names(host: str, listener: socket.socket, keys: Keys | None) -> set[str] | None:
    """Host names that the server accepts, None for any; warns if other machines can reach a server without a key."""
    address = ipaddress.ip_address(listener.getsockname()[0])
    if keys is not None:
        return None
    if address.is_loopback:
        return {"localhost", "127.0.0.1", "[::1]", host.lower()}
    warnings.warn(
        f"{address} is not a loopback address and there is no API key: any client that reaches this machine can use "
        "the model (`api_key` or FATHOM_API_KEY sets one)",
        stacklevel=2,
    )
    return None


def _run(
    path: str | Path,
    listener: socket.socket,
    admitted: tuple[Keys | None, set[str] | None],
    lens: AddPages | None,
    options: ServeOptions,
) -> None:
    """Open the model and serve it on the bound socket, to requests with the given API keys and host names."""
    waiting = threading.Timer(PATIENCE, print, [f"fathom: opening {path}"], {"file": sys.stderr, "flush": True})
    waiting.start()
    try:
        model, tokenizer = options.open(path)
    finally:
        waiting.cancel()
    name = options.name or Path(path).resolve().name
    check_trips(model, options.max_trips)
    check_drafts(model, options.speculate, options.max_trips)
    policy = choose(model, options.kvcache, options.cache)
    memory = options.cache_memory or default_memory(model)
    service = Service(model, tokenizer, name, memory, policy, options.max_trips, options.speculate, options.lookup)
    service.engine.prefixes.budget = memory // 4 if options.prefix_memory is None else options.prefix_memory
    service.deadline = options.deadline
    service.allow_control = options.allow_control_tokens
    if others := Choice.left_out(model.generation_config):
        words = "is not supported: output differs from `fathom generate`"
        print(f"fathom: warning: generation_config.json: {', '.join(others)} {words}", file=sys.stderr)
    if model.device.type == "cpu":
        print(f"fathom: {service.lay_out(options.layout)}", file=sys.stderr)
    if model.device.type == "cpu":
        exchange()
    service.shapes.prepare()
    log = to_stderr if options.access_log else None
    app = build_app(service, admitted[0], lens, admitted[1], options.allow_origin, log)
    address, port = listener.getsockname()[:2]
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    ready = f"{name} at {url}/v1, page at {url}/" + (f", lens at {url}/lens" if lens else "")
    # Generations end after the grace period; this limit is for connections that still hang then.
    limit = int(options.grace) + 5
    config = uvicorn.Config(app, log_level="warning", http=Timed, timeout_graceful_shutdown=limit)
    logging.get_logger("transformers").setLevel(logging.ERROR)  # it warns on every request
    # Loaded objects are not garbage. Freezing them keeps full collections short, so that they run often enough for the
    # reference cycles that a request leaves when its client disconnects.
    gc.collect()
    gc.freeze()
    try:
        _Server(config, service.engine, options.grace, ready).run(sockets=[listener])
    finally:
        service.engine.join(10.0)
    if service.engine.fault is not None:
        raise FathomError(service.engine.fault, exit_code=1)
