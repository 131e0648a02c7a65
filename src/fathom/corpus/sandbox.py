"""A separate process for reading files that may crash it, hang, or use too much memory.

Requests and replies are JSON lines. The process ends with its parent, and at the limit of time (`ingest.max_seconds`)
or memory (`ingest.max_memory`). `ingest.py` lists files that it could not read in `failed.jsonl`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fathom.corpus import epub, html, jats, papers, pdf, tei
from fathom.corpus.children import answering, ask, started
from fathom.corpus.extraction import Extracted, Extractor, IngestValues
from fathom.corpus.fidelity import Fidelity, compared
from fathom.errors import DataError, to_install

EXTRACTORS: dict[str, Extractor] = {"pdf": pdf.extract, "html": html.extract, "tei": tei.extract}
EXTRACTORS |= {"epub": epub.extract, "jats": jats.extract, "paper": papers.extract}
CHECKED = ("html", "tei", "epub", "jats")
"""Kinds whose numbers can be compared with the text."""
CHILD = "from fathom.corpus.sandbox import serve; serve()"


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
        reply, late = self._ask({"kind": kind, "path": str(path.absolute())})
        if reply is None:
            if late:
                return Extracted("too_slow", detail=f"over {self._settings['max_seconds']:g} seconds")
            return Extracted("parse_error", detail="its reader died")
        if "missing" in reply:
            raise DataError(f"reading {kind}: {reply['missing']}: {to_install('corpus')}")
        extracted = Extracted(**reply)
        if extracted.detail == "out of memory":
            self.close()  # the process may be in a bad state
        return extracted

    def compare(self, kind: str, path: Path, text: str) -> Fidelity | None:
        """Compare the numbers in a file with those in the text extracted from it; None if they cannot be compared."""
        reply, _ = self._ask({"kind": kind, "path": str(path.absolute()), "text": text})
        return Fidelity(**reply) if reply and "numbers" in reply else None

    def _ask(self, request: dict[str, str]) -> tuple[dict[str, Any] | None, bool]:
        """The answer of the process (None if it died), and whether it was killed at the time limit."""
        # Libraries print warnings on standard error; the status is enough.
        process = self._process = self._process or started(CHILD, stderr=subprocess.DEVNULL)
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._settings["max_seconds"], stop)
        timer.start()
        try:
            reply = ask(process, {**request, "settings": self._settings})
        finally:
            timer.cancel()
        if reply is None:
            self.close()
        return reply, late.is_set()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def serve() -> None:
    """Answer requests until standard input closes."""
    answer = answering()
    limited = False
    for line in sys.stdin:
        request = json.loads(line)
        if not limited:
            _limit(request["settings"]["max_memory"])
            limited = True
        try:
            answer(vars(_answered(request["kind"], Path(request["path"]), request)))
        except ImportError as error:
            answer({"missing": " ".join(str(error).split())})


def _answered(kind: str, path: Path, request: Mapping[str, Any]) -> Extracted | Fidelity:
    if "text" not in request:
        return _extracted(kind, path, request["settings"])
    try:
        return compared(page_texts(kind, path), request["text"])
    except Exception as error:  # hostile markup; nothing depends on it
        return Extracted("parse_error", detail=type(error).__name__)


def _extracted(kind: str, path: Path, settings: IngestValues) -> Extracted:
    """The result of reading a file; if a library raises an exception other than ImportError, the result is a failure
    status, and the run continues."""
    try:
        found = EXTRACTORS[kind](path, settings)
        if len(found.text.encode("utf-8", "replace")) > settings["max_document_bytes"]:
            found = Extracted("too_large", detail=f"over {settings['max_document_bytes']:,} bytes of text")
        # JSON and PDF may contain a lone surrogate, which UTF-8 cannot encode.
        found.text = found.text.encode("utf-8", "replace").decode("utf-8")
        return found
    except ImportError:
        raise
    except MemoryError:
        return Extracted("parse_error", detail="out of memory")
    except Exception as error:
        said = " ".join(str(error).split())
        return Extracted("parse_error", detail=f"{type(error).__name__}: {said}"[:300])


def page_texts(kind: str, path: Path) -> list[str]:
    """The markup (HTML, TEI or JATS) of each page of a file that a reader has read."""
    return epub.sources(path) if kind == "epub" else [html.decode(path.read_bytes())]


def _limit(max_memory: int) -> None:
    """Limit this process to `max_memory` bytes more than it uses now, if the system supports such limits."""
    try:
        import resource
    except ImportError:
        return
    pages = Path("/proc/self/statm")
    now = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (now + max_memory, resource.RLIM_INFINITY))
