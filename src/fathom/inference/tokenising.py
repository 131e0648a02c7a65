"""Threads that tokenise requests: short texts never wait behind long ones, and the queue is limited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fathom.inference.api import ApiError

SHORT = 1 << 15
"""Most characters of a short text."""
QUEUES = {"short": 256, "long": 32}
"""Most texts that are tokenised or wait for it, by kind."""
T = TypeVar("T")


class Tokenising:
    """Two queues with one thread each."""

    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(1, f"tokenise-{kind}") for kind in QUEUES}
        self._held = dict.fromkeys(QUEUES, 0)
        self._lock = threading.Lock()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, on the thread for texts of `size` characters; an `ApiError` if the queue is full."""
        kind = "short" if size <= SHORT else "long"
        with self._lock:
            if self._held[kind] >= QUEUES[kind]:
                message = f"{self._held[kind]} {kind} texts wait to be tokenised; try again later"
                raise ApiError(429, message, "rate_limit_exceeded")
            self._held[kind] += 1
        future = self._pools[kind].submit(work)
        future.add_done_callback(lambda _: self._release(kind))
        return await asyncio.wrap_future(future)

    def _release(self, kind: str) -> None:
        with self._lock:
            self._held[kind] -= 1
