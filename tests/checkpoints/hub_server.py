"""A small Hub on this machine: what a download and a reader of byte ranges ask for, and faults to switch on."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Hub(ThreadingHTTPServer):
    """`ROOT/org/name/revision/` as repositories."""

    def __init__(self, root: Path) -> None:
        self.root, self.files = root, list[str]()
        """Files that were sent, by name."""
        self.log, self.sent = list[tuple[str, dict[str, str]]](), 0
        """Paths and headers of requests, and the bytes that were sent."""
        self.fail, self.ranges, self.redirect, self.gate = 0, True, False, ""
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def running(root: Path) -> Iterator[Hub]:
    """A Hub that answers."""
    with Hub(root) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, blobs = self.server, self.path.startswith("/blobs")
        hub.log.append((self.path, dict(self.headers)))
        if hub.fail:
            hub.fail -= 1
            return self.send_error(503)
        if hub.gate and not blobs and self.headers.get("Authorization") != hub.gate:
            return self.send_error(401)
        if hub.redirect and not blobs:
            self.send_response(302)
            self.send_header("Location", "/blobs" + self.path)
            return self.end_headers()
        parts = unquote(self.path.partition("?")[0]).removeprefix("/blobs").strip("/").split("/")
        if len(parts) < 4:
            return self._missing("EntryNotFound")
        listed = parts[:2] == ["api", "models"]
        repo, rest = "/".join(parts[2:4] if listed else parts[:2]), parts[4:] if listed else parts[2:]
        revision = next((path.name for path in (hub.root / repo).glob("*") if commit(path.name) in rest), None)
        folder = hub.root / repo / (revision or (*rest[1:2], "main")[0])
        if not folder.is_dir():
            return self._missing("RevisionNotFound" if (hub.root / repo).is_dir() else "RepoNotFound")
        if listed:
            names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
            tree = [{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": commit(n)} for n in names]
            told = {"id": repo, "sha": commit(folder.name), "siblings": [{"rfilename": name} for name in names]}
            return self._send(json.dumps(tree if rest[:1] == ["tree"] else told).encode(), folder)
        file = folder / "/".join(rest[2:])
        if not file.is_file():
            return self._missing("EntryNotFound")
        if self.command == "GET":
            hub.files.append(file.name)
        return self._send(file.read_bytes(), folder)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes, folder: Path) -> None:
        part, whole = RANGE.fullmatch(self.headers.get("Range") or "") if self.server.ranges else None, len(body)
        if part is not None:
            first, last = (int(text) for text in part.groups())
            body = body[first : last + 1]
        self.send_response(200 if part is None else 206)
        if part is not None:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{whole}")
        self.send_header("X-Repo-Commit", commit(folder.name))
        self.send_header("ETag", f'"{sha1(body, usedforsecurity=False).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.server.sent += len(body)
            with contextlib.suppress(ConnectionError):  # a client may refuse and hang up
                self.wfile.write(body)


def commit(name: str) -> str:
    """The commit of a revision."""
    return sha1(name.encode(), usedforsecurity=False).hexdigest()
