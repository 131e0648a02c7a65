"""Runs long work on the model in slices: the engine generates tokens between two slices, and the work can be abandoned.

The work runs on a thread of its own, which computes only while the engine's thread waits for it, so the two never
compete for cores.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fathom.inference.engine import Engine

T = TypeVar("T")
Breathe = Callable[[], None]
"""Called by the work between two slices; it returns when the engine has had a turn."""


class GivenUp(BaseException):
    """Raised in work whose client has left, to end it; a `BaseException`, so that no `except Exception` of the work
    catches it."""


class Background:
    """Runs one piece of long work at a time, alternating with the engine.

    Args:
        engine: The engine that it alternates with.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self._turn = engine, asyncio.Lock()

    async def run(self, work: Callable[[Breathe], T]) -> T:
        """The result of `work`; if this is cancelled, the work ends at its next slice."""
        async with self._turn:
            one = _Work(self.engine, work)
            try:
                return await asyncio.wrap_future(one.result)
            finally:
                one.given_up = True


class _Work:
    def __init__(self, engine: Engine, work: Callable[[Breathe], Any]) -> None:
        self.engine, self.work, self.given_up = engine, work, False
        self.result: Future[Any] = Future()
        self.result.set_running_or_notify_cancel()  # to give it up is the work's part
        self._rest = threading.Event()
        threading.Thread(target=self._run, name="background", daemon=True).start()

    def _run(self) -> None:
        try:
            self._wait()
            made = self.work(self._breathe)
        except BaseException as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(made)
        finally:
            self._rest.set()

    def _breathe(self) -> None:
        self._rest.set()
        self._wait()

    def _wait(self) -> None:
        """Queue the next slice of work, and wait until the engine's thread pauses for it."""
        go, rest = threading.Event(), threading.Event()
        self._rest = rest

        def give_turn() -> None:
            go.set()
            rest.wait()

        ended = self.engine.call(give_turn)
        ended.add_done_callback(lambda _: go.set())  # an engine that has ended gives no more turns
        go.wait()
        if ended.done() and (error := ended.exception()) is not None:
            raise error
        if self.given_up:
            raise GivenUp
