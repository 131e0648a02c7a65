"""Tries a grammar in a process of its own, because llguidance's compilation cannot be stopped.

A helper process holds the vocabulary. It forks for each grammar, and the fork has a limit of processor time and of
memory: sixty short patterns in one `allOf` would otherwise keep a core busy for minutes.

Where the system has no forks (Windows), neither time nor memory is limited: see `possible`. `structure.py` limits the
time of following a grammar, and `shape.py` names the request's field of one that is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from fathom.errors import SettingsError
from fathom.inference.grammar import Vocabulary, lark_grammar, matcher_of

SECONDS, QUICK = 1.0, 0.1
"""Most processor time of a grammar's compilation, and of the first attempt, behind which others wait."""
MEMORY = 1 << 27
"""Most bytes that a grammar's compilation may add."""
GUESSED = 256
"""Bytes of a compiled grammar for each byte of its text, where they cannot be measured."""
NICE = 5
"""The niceness by which the helper process yields to the one that generates."""
STOPPED = {int(signal.SIGPROF): f"compiling it takes more than {SECONDS:.0f} s"} if hasattr(signal, "SIGPROF") else {}
"""The reason for which a fork that a signal ended refuses the grammar, by signal."""


class GrammarError(SettingsError):
    """Raised for a grammar that is invalid or too complex; `part` is the index of the part to blame, if one is."""

    def __init__(self, message: str, part: int | None = None) -> None:
        super().__init__(message)
        self.part = part


class LateError(GrammarError):
    """Raised for a grammar whose compilation takes longer than its limit."""


@dataclass(frozen=True)
class Tried:
    """The result of a trial: a grammar that compiles within the limits."""

    grammar: str
    """In Lark's notation."""
    bytes: int
    """The memory that its compilation added."""


def attempt(words: object, grammar: str, parts: Sequence[str] = ()) -> str:
    """Compile a grammar on trial and return it in Lark's notation; a `GrammarError` names the first of its parts that
    does not compile."""
    try:
        text = lark_grammar(grammar)
        matcher_of(words, text)
    except SettingsError as error:
        for i, part in enumerate(parts):
            try:
                matcher_of(words, lark_grammar(part))
            except SettingsError as own:
                raise GrammarError(str(own), i) from None
        raise GrammarError(str(error)) from error
    return text


class GrammarTrial:
    """A helper process that compiles grammars on trial; it starts with the first grammar and ends with this object or
    this process.

    Args:
        vocabulary: The model's tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def run(self, grammar: str, parts: Sequence[str] = (), seconds: float = SECONDS) -> Tried:
        """Try a grammar; see `attempt`. One that takes longer is a `LateError`."""
        with self._lock:
            try:
                answer = self._ask({"grammar": grammar, "parts": list(parts), "seconds": seconds})
            except (OSError, ValueError):  # it was killed, perhaps for want of memory: the next grammar starts another
                self._process = None
                raise GrammarError("it could not be compiled") from None
        if "late" in answer:
            raise LateError(str(answer["late"]))
        if "fault" in answer:
            raise GrammarError(str(answer["fault"]), answer.get("part"))  # type: ignore[arg-type]
        return Tried(**answer)  # type: ignore[arg-type]

    def _ask(self, asked: Mapping[str, object]) -> dict[str, object]:
        if self._process is None:
            self._process = self._start()
        pipes = self._process
        assert pipes.stdin is not None and pipes.stdout is not None
        pipes.stdin.write(json.dumps(asked) + "\n")
        pipes.stdin.flush()
        found: dict[str, object] = json.loads(pipes.stdout.readline())
        return found

    def _start(self) -> subprocess.Popen[str]:
        paths = os.pathsep.join(path for path in sys.path if path)
        made = subprocess.Popen(
            [sys.executable, "-m", "fathom.inference.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # llguidance reports its panics there
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is the server's
        )
        weakref.finalize(self, _end, made)
        assert made.stdin is not None
        made.stdin.write(json.dumps(asdict(self.vocabulary)) + "\n")
        return made


def possible() -> bool:
    """Whether this system forks."""
    return hasattr(os, "fork") and bool(STOPPED)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()


def main() -> None:
    """The helper process's main function: it reads a vocabulary, then grammars, each a line of JSON, and answers each
    grammar with a line of JSON."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    words = Vocabulary(**json.loads(sys.stdin.readline())).words()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _answer(words, json.loads(line))
        _, status = os.waitpid(child, 0)
        if status:
            ended = os.waitstatus_to_exitcode(status)
            large = {"fault": f"compiling it takes more than {MEMORY >> 20} MiB of memory"}
            _write({"late": STOPPED[-ended]} if -ended in STOPPED else large)


def _answer(words: object, asked: Mapping[str, object]) -> None:
    """In the forked process: compile a grammar under the limits, print the answer, and exit."""
    before = _limited(float(asked["seconds"]))  # type: ignore[arg-type]
    try:
        answer: dict[str, object] = {"grammar": attempt(words, asked["grammar"], asked["parts"])}  # type: ignore[arg-type]
        answer["bytes"] = max(_peak() - before, len(str(answer["grammar"])))
    except GrammarError as error:
        answer = {"fault": str(error), "part": error.part}
    except MemoryError:
        os._exit(1)
    signal.setitimer(signal.ITIMER_PROF, 0)  # the answer is written as a whole
    _write(answer)
    os._exit(0)


def _limited(seconds: float) -> int:
    """Limit this process's memory and processor time; returns its peak memory in bytes."""
    import resource

    with contextlib.suppress(OSError, ValueError):  # where the system does not say or does not limit
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    return _peak()


def _peak() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _write(answer: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
