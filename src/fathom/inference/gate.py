"""The outermost layer of the server: API key and host names, size and time limits of requests, and disconnects."""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fathom.inference.api import ApiError

BODIES = 1 << 28
"""Most bytes of the bodies of all requests together."""
PATIENCE = 20.0
"""Seconds for the head of a request, and again for its body."""
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]


class Gate:
    """An ASGI layer.

    Args:
        app: The application behind it.
        api_key: What clients must send, as `Authorization: Bearer KEY`.
        body_limit: Bytes of one body.
        hosts: Host names that requests may have; None for any. Without this check a web page whose own name resolves to
            this machine could send requests from a visitor's browser (DNS rebinding).
    """

    def __init__(self, app: App, api_key: str | None, body_limit: int, hosts: Collection[str] | None = None) -> None:
        self.app, self.body_limit, self.hosts, self.held = app, body_limit, hosts, 0
        self.key = api_key.encode() if api_key is not None else None

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        chunks: list[bytes] = []
        try:
            self._authorise(scope)
            whole = await self._read_in_time(receive, chunks)
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            if whole:
                await self._answer(chunks[0], scope, receive, send)
        finally:
            self.held -= sum(map(len, chunks))

    async def _answer(self, body: bytes, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """The application's answer, until the client hangs up."""
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> AsgiMessage:
            return unread.pop() if unread else await asyncio.shield(gone)

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

    def _authorise(self, scope: AsgiMessage) -> None:
        headers = dict(scope["headers"])
        if self.hosts is not None:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
            if name not in self.hosts:
                raise ApiError(403, f"this server is not called {name!r:.80}", "wrong_host")
        if self.key is None or scope["path"] == "/health":
            return
        scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"basic":  # a browser, for the lens: any name, with the key as password
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

    async def _read_in_time(self, receive: Receive, chunks: list[bytes]) -> bool:
        try:
            return await asyncio.wait_for(self._read(receive, chunks), PATIENCE)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not come within {PATIENCE:.0f} seconds", "timeout") from None

    async def _read(self, receive: Receive, chunks: list[bytes]) -> bool:
        """Gather the body in `chunks`, joined to one at the end; False if the client disconnected before."""
        size, more, error = 0, True, None
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            body, more = message.get("body", b""), message.get("more_body", False)
            chunks.append(body)
            size += len(body)
            self.held += len(body)
            if size > self.body_limit:
                error = ApiError(413, f"the body has more than {self.body_limit:,} bytes", "body_too_large")
            elif self.held > max(BODIES, self.body_limit):
                error = ApiError(429, "the requests under way fill the memory; try again later", "rate_limit_exceeded")
            if error is not None:  # the rest is read and dropped: a client that still sends does not read the answer
                self.held -= sum(map(len, chunks))
                chunks.clear()
        if error is not None:
            raise error
        chunks[:] = [b"".join(chunks)]
        return True


async def _hang_up(receive: Receive) -> AsgiMessage:
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message


class Timed(H11Protocol):
    """uvicorn's HTTP protocol with a time limit for the head of a request."""

    late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection is open: start the clock."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Data have come: stop the clock once a head is complete, start it where another begins."""
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: stop the clock."""
        super().connection_lost(exc)
        self._expect(over=True)

    def _expect(self, over: bool = False) -> None:
        idle = self.conn.their_state is h11.IDLE and not over
        if idle and self.late is None:
            self.late = self.loop.call_later(PATIENCE, self.transport.close)
        elif not idle and self.late is not None:
            self.late.cancel()
            self.late = None
