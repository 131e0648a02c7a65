"""Child Python processes that Fathom starts; they answer requests, each of which is one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any


def started(program: str, stderr: int | None = None) -> subprocess.Popen[str]:
    """Start a Python process that runs a program; it imports modules from the same paths as the current process."""
    # Python started with -c looks for modules in the working directory first: a user's file could shadow one of ours.
    program = f"import sys; sys.path[:] = filter(None, sys.path)\n{program}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        env=environment,
    )


def ask(process: subprocess.Popen[str], request: object) -> dict[str, Any] | None:
    """Send a request and read the answer; None if the process died."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        return None
    answer: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
    return answer


def answering() -> Callable[[object], None]:
    """Returns the function that writes an answer to standard output, and redirects all other output of this process to
    standard error."""
    replies: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: object) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    return answer
