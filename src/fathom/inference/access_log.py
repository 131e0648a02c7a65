"""The access log: one line of JSON for each request, and `x-request-id` in every answer.

No text of a client is written but the path, as JSON.

`gate.py` reads the file of `--api-keys` and checks each request's key, whose name this log shows.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from collections.abc import Callable

from fathom.inference.gate import CLIENT, App, AsgiMessage, Receive, Send

_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
"""A client's own id, if it is taken over."""
LEFT = 499
"""The status of a request whose client left before its answer began, as nginx logs it."""
PATH = 200
"""Most characters of a path."""


class Access:
    """An ASGI middleware outside all others, which writes the access log.

    Args:
        app: The application behind it.
        write: Receives the lines; None for no log.
    """

    def __init__(self, app: App, write: Callable[[str], object] | None = None) -> None:
        self.app, self.write = app, write

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given if _ID.fullmatch(given) else secrets.token_hex(16).encode()
        began, status, size = time.perf_counter(), 0, 0

        async def sent(message: AsgiMessage) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name)]
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except Exception:
            status = status or 500
            raise
        finally:
            if self.write is not None:
                line: dict[str, object] = {"time": time.time(), "request_id": name.decode(), "method": scope["method"]}
                line |= {"path": scope["path"][:PATH], "status": status or LEFT, "bytes": size}
                line |= {"seconds": time.perf_counter() - began, "client": scope.get(CLIENT)}
                self.write(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in line.items()}))


def to_stderr(line: str) -> None:
    """Write a line of the access log to standard error."""
    print(line, file=sys.stderr, flush=True)
