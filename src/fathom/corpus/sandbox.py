"""A separate process for reading files that may crash it, hang, or use too much memory.

Requests and replies are JSON lines. The process ends with its parent, and at the limit of time or memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from fathom.corpus import html, pdf, tei
from fathom.corpus.extraction import Extracted, Extractor, IngestValues
from fathom.errors import DataError, to_install

EXTRACTORS: dict[str, Extractor] = {"pdf": pdf.extract, "html": html.extract, "tei": tei.extract}
# As for workers, modules must not be imported from the working directory.
CHILD = "import sys; sys.path[:] = filter(None, sys.path); from fathom.corpus.sandbox import serve; serve()"


class Sandbox:
    """Extracts text in another process; any failure there becomes a status."""

    def __init__(self, settings: IngestValues) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None

    def extract(self, kind: str, path: Path) -> Extracted:
        """The result for one file."""
        size = path.stat().st_size
        if size > self._settings["max_file_bytes"]:
            return Extracted("too_large", detail=f"{size:,} bytes")
        process = self._process or self._start()
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._settings["max_seconds"], stop)
        timer.start()
        try:
            reply = self._ask(process, {"kind": kind, "path": str(path.absolute()), "settings": self._settings})
        finally:
            timer.cancel()
        if reply is None:
            self.close()
            if late.is_set():
                return Extracted("too_slow", detail=f"over {self._settings['max_seconds']:g} seconds")
            return Extracted("parse_error", detail="its reader died")
        if "missing" in reply:
            raise DataError(f"reading {kind}: {reply['missing']}: {to_install('corpus')}")
        extracted = Extracted(**reply)
        if extracted.detail == "out of memory":
            self.close()  # the process may be in a bad state
        return extracted

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries print warnings there; the status is enough
            text=True,
            encoding="utf-8",
            env=environment,
        )
        return self._process

    def _ask(self, process: subprocess.Popen[str], request: dict[str, object]) -> dict[str, Any] | None:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            return None
        reply: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return reply


def serve() -> None:
    """Answer requests until standard input closes."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    limited = False
    for line in sys.stdin:
        request = json.loads(line)
        extractor = EXTRACTORS[request["kind"]]
        if not limited:
            _limit(request["settings"]["max_memory"])
            limited = True
        try:
            found = extractor(Path(request["path"]), request["settings"])
            if len(found.text.encode("utf-8", "replace")) > request["settings"]["max_document_bytes"]:
                found = Extracted(
                    "too_large", detail=f"over {request['settings']['max_document_bytes']:,} bytes of text"
                )
            # JSON and PDF may contain a lone surrogate, which UTF-8 cannot encode.
            found.text = found.text.encode("utf-8", "replace").decode("utf-8")
        except ImportError as error:
            replies.write(json.dumps({"missing": " ".join(str(error).split())}) + "\n")
            replies.flush()
            continue
        except MemoryError:
            found = Extracted("parse_error", detail="out of memory")
        except Exception as error:  # a library raised on an unreadable file; the run continues and lists the file
            said = " ".join(str(error).split())
            found = Extracted("parse_error", detail=f"{type(error).__name__}: {said}"[:300])
        replies.write(json.dumps(found.to_dict()) + "\n")
        replies.flush()


def _limit(max_memory: int) -> None:
    """Limit this process to `max_memory` bytes more than it uses now, if the system supports such limits."""
    try:
        import resource
    except ImportError:
        return
    pages = Path("/proc/self/statm")
    now = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (now + max_memory, resource.RLIM_INFINITY))
