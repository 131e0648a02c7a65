"""The server's outermost layer: API key, host names, limits on size and time of requests, and disconnects.

`launch.py` decides which host names are allowed, and warns if a server without a key is reachable from other machines.
`server.py` sets the limit of a body (`build_app`), has `--allow-origin` (CORS) and `--deadline`, and cancels the
sequences of clients that leave. `access_log.py` writes the log, `cli/serve.py` reads `FATHOM_API_KEY`, and
`tokenising.py` and `engine.py` refuse requests when too many wait.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fathom.errors import SettingsError
from fathom.inference.api import ApiError

BODIES = 1 << 28
"""Most bytes of the bodies of all requests together."""
LARGE, MANY = 1 << 16, 2000
"""A body of more bytes, or of more values, waits for its turn: one is parsed at a time, since that holds up the event
loop. An ordinary request never waits behind such bodies."""
VALUE = 80
"""Bytes of a value once it is parsed, beside those of its text: an empty list has three there."""
PAUSE = 2.0
"""Seconds that the loop has for others after a large body, for each second that parsing it took."""
PATIENCE = 20.0
"""Seconds for the head of a request, and again for its body."""
STALLED = 60.0
"""Seconds in which a client must read some of what waits for it, or its connection is closed."""
PIECE = 1 << 14
"""Most bytes that are read from a connection at a time: chunks of a byte each take 20 µs for every six bytes."""
INCOMPLETE = 512
"""Most connections from which no whole request has come; of more, the oldest is closed. A process may open so many."""
OPEN = {"/health", "/ready"}
"""Routes that need no key."""
CLIENT = "fathom.client"
"""Where a request's scope holds the name of its key."""
CLOSING = {401, 403, 408, 413}
"""Refusals after which the connection is closed: the client may still be sending."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)\.?(?::[0-9]{0,5})?")
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]


class Keys:
    """The API keys that clients may send, and the number of requests that each key has running.

    Args:
        names: By key: its name, for the access log.
        most: Most requests of one key at a time; None for any number.
    """

    def __init__(self, names: Mapping[str, str], most: int | None = None) -> None:
        self.names, self.most = {key.encode(): name for key, name in names.items()}, most
        self.busy = Counter[str]()

    def name(self, sent: bytes) -> str | None:
        """The name of an API key; None if the key is unknown. All are compared, each in constant time."""
        found = [name for key, name in self.names.items() if hmac.compare_digest(sent, key)]
        return found[0] if found else None

    def full(self, name: str) -> bool:
        """Whether an API key has as many requests running as it may."""
        return self.most is not None and self.busy[name] >= self.most


def read_keys(path: str | Path) -> dict[str, str]:
    """Read a file of API keys, each line a name and a key; blank lines and lines that begin with # are skipped. Returns
    names by key."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"api_keys={path}: cannot be read: {error}") from error
    keys: dict[str, str] = {}
    for i, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[1] in keys:
            raise SettingsError(f"api_keys={path}: line {i}: expected a name and a key that no other line has")
        keys[words[1]] = words[0]
    if not keys:
        raise SettingsError(f"api_keys={path}: the file holds no key")
    return keys


class Gate:
    """An ASGI layer.

    Args:
        app: The application behind it.
        keys: What clients must send, one of them, as `Authorization: Bearer KEY`.
        body_limit: Bytes of one body.
        hosts: Host names that requests may have; None for any. Without this check a web page whose own name resolves to
            this machine could send requests from a visitor's browser (DNS rebinding).
    """

    def __init__(self, app: App, keys: Keys | None, body_limit: int, hosts: Collection[str] | None = None) -> None:
        self.app, self.keys, self.body_limit, self.hosts, self.held = app, keys, body_limit, hosts, 0
        self.turn = asyncio.Lock()

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        chunks, more = list[bytes](), 0
        fault, busy = self._fault(scope), Counter[str]() if self.keys is None else self.keys.busy
        client = scope.get(CLIENT) if fault is None else None
        busy.update([client] if client is not None else [])
        try:
            whole = await asyncio.wait_for(self._read(receive, chunks, fault), PATIENCE)
            more = self._hold(chunks)
        except (ApiError, asyncio.TimeoutError) as error:
            late = f"the body did not arrive within {PATIENCE:.0f} seconds"
            refusal = error if isinstance(error, ApiError) else ApiError(408, late, "timeout")
            if refusal.status_code in CLOSING:
                refusal.headers = {**(refusal.headers or {}), "Connection": "close"}
            await refusal.response()(scope, receive, send)
        else:
            if whole:
                await self._answer(chunks[0], scope, receive, send)
        finally:
            busy.subtract([client] if client is not None else [])
            self.held -= sum(map(len, chunks)) + more

    async def _answer(self, body: bytes, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """The application's answer, cancelled if the client disconnects."""
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> AsgiMessage:
            if not unread:
                return await asyncio.shield(gone)
            if len(body) > LARGE or _values((body,)) > MANY:
                await self._take_turn()
            return unread.pop()

        gone = asyncio.create_task(_hang_up(receive))
        answer = asyncio.ensure_future(self.app(scope, again, send))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _take_turn(self) -> None:
        """Wait until a large body may be parsed, which happens before the loop's next round; the pause follows it."""
        await self.turn.acquire()
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        loop.call_soon(lambda: loop.call_later(PAUSE * (time.perf_counter() - began), self.turn.release))

    def _fault(self, scope: AsgiMessage) -> ApiError | None:
        """The reason to refuse a request, judging by its headers alone; None if there is no reason."""
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:  # where the body ends is open to dispute
            message = "a request has Content-Length or Transfer-Encoding, not both"
            return ApiError(400, message, "malformed_body", headers={"Connection": "close"})
        if self.hosts is not None:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if host_name(host) not in self.hosts:
                return ApiError(403, f"this server does not answer to the name {host!r:.80}", "wrong_host")
        if self.keys is None or scope["path"] in OPEN:
            return None
        scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"basic":  # a browser's login for the pages: any user name, and the key as the password
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except ValueError:
                value = b""
        elif scheme.lower() != b"bearer":
            value = b""
        if (client := self.keys.name(value.strip())) is not None:
            scope[CLIENT] = client
            message = f"{self.keys.most} requests with this key are running; try again later"
            return ApiError(429, message, "rate_limit_exceeded") if self.keys.full(client) else None
        asked = {"WWW-Authenticate": "Basic" if scope["path"] == "/" or scope["path"].startswith("/lens") else "Bearer"}
        return ApiError(401, "wrong or missing API key", "invalid_api_key", headers=asked)

    async def _read(self, receive: Receive, chunks: list[bytes], error: ApiError | None) -> bool:
        """Collect the body in `chunks`, joined at the end; False if the client disconnected before.

        The body of a refused request is read to its end and dropped, because a client that is still sending does not
        read the answer.
        """
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            body, more = message.get("body", b""), message.get("more_body", False)
            chunks.append(body)
            size += len(body)
            self.held += len(body)
            if error is None and size > self.body_limit:
                error = ApiError(413, f"the body has more than {self.body_limit:,} bytes", "body_too_large")
            elif error is None and self.held > max(BODIES, self.body_limit):
                error = _full()
            if error is not None:
                self.held -= sum(map(len, chunks))
                chunks.clear()
        if error is not None:
            raise error
        chunks[:] = [b"".join(chunks)]
        return True

    def _hold(self, chunks: Sequence[bytes]) -> int:
        """Reserve memory for the parsed values of a request body until its request ends; returns the number of
        bytes."""
        more = VALUE * _values(chunks)
        if more and self.held + more > max(BODIES, self.body_limit):
            raise _full()
        self.held += more
        return more


def _values(chunks: Sequence[bytes]) -> int:
    """Roughly how many JSON values a request body contains, at most."""
    return sum(body.count(mark) for body in chunks for mark in (b",", b"[", b"{"))


def _full() -> ApiError:
    return ApiError(429, "running requests fill the memory; try again later", "rate_limit_exceeded")


def host_name(host: str) -> str | None:
    """The name in a Host header in lower case, without port and final dot; None if the header is malformed."""
    found = _HOST.fullmatch(host)
    return found[1] if found else None


async def _hang_up(receive: Receive) -> AsgiMessage:
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message


class Timed(H11Protocol):
    """uvicorn's HTTP protocol with time limits for receiving a request's headers, and for clients that do not read the
    answer."""

    late: asyncio.TimerHandle | None = None
    stalled: asyncio.TimerHandle | None = None
    incomplete: ClassVar[dict[Timed, None]] = {}
    """Connections without a whole request, the oldest first."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time limit for the headers when a connection opens."""
        super().connection_made(cast(asyncio.Transport, transport))
        with contextlib.suppress(AttributeError):  # asyncio's own transports alone have it
            cast(Any, transport).max_size = PIECE
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Stop the time limit once the headers are complete, and start it again when another request begins."""
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all time limits when the connection closes."""
        super().connection_lost(exc)
        self._read_on()
        self._expect(over=True)

    def pause_writing(self) -> None:
        """Start the time limit when a client stops reading: asyncio's buffer is full, and the answer waits."""
        super().pause_writing()
        self._wait_for_reading()

    def resume_writing(self) -> None:
        """Stop the time limit when the client reads again."""
        super().resume_writing()
        self._read_on()

    def _wait_for_reading(self) -> None:
        left = self.transport.get_write_buffer_size()
        self.stalled = self.loop.call_later(STALLED, self._look, left)

    def _look(self, before: int) -> None:
        """Abort the connection if the client has read nothing since the last look."""
        if self.transport.get_write_buffer_size() < before:
            self._wait_for_reading()
        else:
            self.transport.abort()

    def _read_on(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None

    def on_response_complete(self) -> None:
        """Wait for another request."""
        super().on_response_complete()
        self._count()

    def _count(self, over: bool = False) -> None:
        """Record whether a connection's request is incomplete, and close the oldest such connection if there are too
        many."""
        every = Timed.incomplete
        every.pop(self, None)
        if over or self.transport.is_closing() or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            return
        every[self] = None
        if len(every) > INCOMPLETE:
            oldest = next(iter(every))
            del every[oldest]
            oldest.transport.close()

    def _expect(self, over: bool = False) -> None:
        self._count(over)
        idle = self.conn.their_state is h11.IDLE and not over
        if idle and self.late is None:
            self.late = self.loop.call_later(PATIENCE, self.transport.close)
        elif not idle and self.late is not None:
            self.late.cancel()
            self.late = None
