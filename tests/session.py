"""Fresh Python sessions without the second that torch and transformers take: each is forked from a process that has
imported these two and nothing of Fathom, so that a program which lives on the imports of another is seen to fail."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRELOADED = ("numpy", "torch", "transformers.modeling_utils", "transformers.models.qwen3.modeling_qwen3")
KEY = b"session"


class Sessions:
    """The process that forks a session whenever one is asked for."""

    def __init__(self) -> None:
        paths = [str(ROOT), *filter(None, sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.session"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    def start(self, folder: Path, environment: Mapping[str, str]) -> Session:
        """A new session in a folder."""
        connection = Client(("127.0.0.1", self._port), authkey=KEY)
        connection.send((str(folder), dict(environment)))
        return Session(connection)

    def stop(self) -> None:
        """End the process; sessions that still run end with their own connections."""
        self._process.kill()
        self._process.wait()


class Session:
    """A Python session, which keeps its names from one program to the next."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, source: str, name: str = "<session>") -> str:
        """Run a program and return what it printed; what it raises is raised here in words."""
        self._connection.send((source, name))
        failure, printed = self._connection.recv()
        if failure:
            raise RuntimeError(failure)
        return printed

    def close(self) -> None:
        """End the session."""
        self._connection.close()


def _serve() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        print(listener.address[1], flush=True)
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                _session(connection)
            connection.close()


def _session(connection: Connection) -> None:
    folder, environment = connection.recv()
    assert "fathom" not in sys.modules
    os.chdir(folder)
    os.environ.update(environment)
    sys.path.insert(0, folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    names = {"__name__": "__main__"}
    while True:
        try:
            source, name = connection.recv()
        except EOFError:
            os._exit(0)
        failure, printed = "", io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(source, name, "exec"), names)
        except BaseException:
            failure = traceback.format_exc()
        connection.send((failure, printed.getvalue()))


if __name__ == "__main__":
    _serve()
