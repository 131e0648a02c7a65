"""Threads that prepare requests: short texts wait neither behind long ones nor behind grammars, and queues are
limited.

`server.py` decides which answers are written on the thread for answers: those of more than `MANY` log-probabilities.
`grammar_trial.py` limits the time of a grammar.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fathom.inference.api import ApiError

SHORT = 1 << 15
"""Most characters of a short text."""
QUEUES = {"short": 256, "long": 32, "grammar": 32, "long grammar": 8, "answer": 1 << 10}
"""Most short texts, long texts, grammars and grammars that take long, that are prepared or wait for it; and most large
answers, of which an engine makes fewer."""
T = TypeVar("T")


def written_size(value: object) -> int:
    """Roughly the number of characters that a template or grammar writes for a value; `sys.maxsize` for a value that is
    nested too deeply."""
    try:
        return len(json.dumps(value))
    except RecursionError:
        return sys.maxsize


class Tokenising:
    """Work queues with one thread each: for short texts, long texts, grammars, slow grammars, and large answers."""

    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(1, f"prepare-{kind}") for kind in QUEUES}
        self._held = dict.fromkeys(QUEUES, 0)
        self._lock = threading.Lock()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, on the thread for texts of `size` characters; an `ApiError` if the queue is full."""
        kind, what = ("short", "short texts") if size <= SHORT else ("long", "long texts")
        return await self._on(kind, f"{what} wait to be tokenised", work)

    async def compile(self, work: Callable[[], T], long: bool = False) -> T:
        """The result of `work`, on a thread for grammars; an `ApiError` if the queue is full."""
        return await self._on("long grammar" if long else "grammar", "grammars wait to be compiled", work)

    async def write(self, work: Callable[[], T]) -> T:
        """The result of `work`, on the thread for answers."""
        return await self._on("answer", "answers wait to be written", work)

    async def _on(self, kind: str, waiting: str, work: Callable[[], T]) -> T:
        with self._lock:
            if self._held[kind] >= QUEUES[kind]:
                raise ApiError(429, f"{self._held[kind]} {waiting}; try again later", "rate_limit_exceeded")
            self._held[kind] += 1
        future = self._pools[kind].submit(work)
        future.add_done_callback(lambda _: self._release(kind))
        return await asyncio.wrap_future(future)

    def _release(self, kind: str) -> None:
        with self._lock:
            self._held[kind] -= 1
