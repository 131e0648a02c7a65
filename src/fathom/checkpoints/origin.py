"""Sources of bytes: a local path, or a Hugging Face repository read by HTTP range requests.

An origin reads byte ranges of named files and records them in a ledger. It reads only what is requested, so a
comparison of two remote models downloads only the tensors that it uses.

`hub.py` downloads whole models. Whether a name is a path or a repository is decided in `open_origin` for
`fathom lineage`, and in `hub.py` (`repository`) for other commands.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, TypeAlias

from huggingface_hub import get_token

from fathom.errors import Absent, ModelError

DEFAULT_ENDPOINT = "https://huggingface.co"
JSON_LIMIT = 128 << 20  # the largest tokenizers are about 30 MB
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION = re.compile(r"[\w./-]{1,128}")


def safe_name(name: object) -> str:
    """Return a file name if it is relative and stays inside its directory; raise a `ModelError` otherwise."""
    if not isinstance(name, str) or not name or len(name) > 255:
        raise ModelError(f"not a file name: {name!r:.80}")
    parts = PurePosixPath(name).parts
    if name.startswith("/") or "\\" in name or ":" in name or ".." in parts or any(ord(c) < 32 for c in name):
        raise ModelError(f"file name {name!r:.80} points outside its directory")
    return name


class Shelf:
    """A cache of bytes by file and position, so that no byte is read twice.

    The bytes are in memory, or with `spill` in temporary files, which take the same space on disk.
    """

    def __init__(self, spill: bool = False) -> None:
        self._spill = spill
        self._places: dict[str, tuple[list[int], list[int]]] = {}  # start and end of the blocks
        self._blocks: dict[tuple[str, int], bytearray] = {}
        self._files: dict[str, IO[bytes]] = {}

    def read(self, path: str, start: int, stop: int, fetch: Callable[[str, int, int], bytearray]) -> bytearray:
        """The bytes [start, stop) of a file; only bytes that are not cached are fetched."""
        starts, stops = self._places.setdefault(path, ([], []))
        out = bytearray(stop - start)
        place = start
        while place < stop:
            at = bisect_right(starts, place) - 1
            if at >= 0 and place < stops[at]:
                end = min(stop, stops[at])
                out[place - start : end - start] = self._kept(path, starts[at], place, end)
            else:
                end = min(stop, starts[at + 1]) if at + 1 < len(starts) else stop
                block = fetch(path, place, end)
                out[place - start : end - start] = block
                self._keep(path, place, block)
                starts.insert(at + 1, place)
                stops.insert(at + 1, end)
            place = end
        return out

    def _keep(self, path: str, start: int, block: bytearray) -> None:
        if self._spill:
            if path not in self._files:
                self._files[path] = tempfile.TemporaryFile()  # noqa: SIM115
            self._files[path].seek(start)
            self._files[path].write(block)
        else:
            self._blocks[path, start] = block

    def _kept(self, path: str, block: int, start: int, stop: int) -> bytes | memoryview:
        """The bytes [start, stop) from the cached block that begins at position `block`."""
        if self._spill:
            self._files[path].seek(start)
            return self._files[path].read(stop - start)
        return memoryview(self._blocks[path, block])[start - block : stop - block]


class LocalOrigin:
    """A directory of files. Reads are positioned and nothing is mapped, so memory holds only requested bytes."""

    revision: str | None = None
    gap_bytes = 0
    """Two ranges this close are read as one, because another request would cost more."""
    shelf: Shelf | None = None
    """If set, it caches all reads."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.name = str(directory)
        self.bytes_read = 0

    def at(self, path: str) -> Path:
        """Where a file lies; its name may come from another file, so it must not point outside."""
        return self.directory / safe_name(path)

    def exists(self, path: str) -> bool:
        """Whether the file is there."""
        return self.at(path).is_file()

    def size(self, path: str) -> int:
        """Length of a file in bytes."""
        try:
            return self.at(path).stat().st_size
        except FileNotFoundError:
            raise Absent(f"{path}: no such file") from None

    def read(self, path: str, start: int, stop: int) -> bytearray:
        """Exactly the bytes [start, stop) of a file."""
        return self.shelf.read(path, start, stop, self._read) if self.shelf else self._read(path, start, stop)

    def _read(self, path: str, start: int, stop: int) -> bytearray:
        buffer = bytearray(stop - start)
        view, done = memoryview(buffer), 0
        with open(self.at(path), "rb", buffering=0) as file:
            file.seek(start)
            while done < len(buffer):
                got = file.readinto(view[done : done + (1 << 30)])  # the system reads at most 2 GiB at once
                if not got:
                    raise ModelError(f"{path}: truncated, bytes {start}–{stop} asked for, file ends at {start + done}")
                done += got
        self.bytes_read += len(buffer)
        return buffer

    def names(self) -> list[str]:
        """Names of the files in the directory."""
        return sorted(entry.name for entry in self.directory.iterdir() if entry.is_file())


class RemoteOrigin:
    """`org/name@revision` on the Hugging Face endpoint that HF_ENDPOINT names, read by HTTP range requests."""

    gap_bytes = 1 << 17
    shelf: Shelf | None = None

    def __init__(self, repo: str, revision: str = "main", endpoint: str | None = None):
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        if urllib.parse.urlsplit(self.endpoint).scheme not in {"http", "https"}:
            raise ModelError(f"HF_ENDPOINT must be an http(s) address, not {self.endpoint!r}")
        self.repo, self.revision = repo, revision
        self.name = f"{repo}@{revision}"
        self.bytes_read = 0
        self._sizes: dict[str, int | None] = {}
        self._token = get_token()  # HF_TOKEN, or the token of `hf auth login`

    def exists(self, path: str) -> bool:
        """Whether the file exists; the first call for a file requests one byte of it."""
        if path not in self._sizes:
            try:
                self._fetch(path, 0, 1)
            except Absent:
                self._sizes[path] = None
        return self._sizes[path] is not None

    def size(self, path: str) -> int:
        """Length of a file in bytes."""
        size = self._sizes[path] if self.exists(path) else None
        if size is None:
            raise Absent(f"{self.name}: no file {path}")
        return size

    def read(self, path: str, start: int, stop: int) -> bytearray:
        """Exactly the bytes [start, stop) of a file."""
        if start == stop:
            return bytearray()
        return self.shelf.read(path, start, stop, self._fetch) if self.shelf else self._fetch(path, start, stop)

    def names(self) -> list[str]:
        """An empty list: the files of a remote repository are not listed, since its index names the shards."""
        return []

    def _fetch(self, path: str, start: int, stop: int) -> bytearray:
        url = f"{self.endpoint}/{self.repo}/resolve/{self.revision}/{urllib.parse.quote(safe_name(path))}"
        for attempt in range(4):
            try:
                return self._request(url, path, start, stop)
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    raise Absent(f"{self.name}: no file {path}") from None
                if error.code < 500 or attempt == 3:
                    hint = "; is it gated? `hf auth login`, or HF_TOKEN" if error.code in (401, 403) else ""
                    raise ModelError(
                        f"{self.name}/{path}: the endpoint answers {error.code} {error.reason}{hint}"
                    ) from None
            except (TimeoutError, ConnectionError, urllib.error.URLError) as error:
                if attempt == 3:
                    raise ModelError(f"{self.name}/{path}: {error}") from None
            time.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")

    def _request(self, url: str, path: str, start: int, stop: int) -> bytearray:
        request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{stop - 1}"})
        if self._token:
            # not sent to the storage host that the endpoint redirects to
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=60) as response:
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range") or "")
            if response.status != 206 or not found:
                raise ModelError(f"{self.name}/{path}: the endpoint ignores range requests; download the model instead")
            first, last, size = (int(text) for text in found.groups())
            if first != start or last >= stop:
                raise ModelError(f"{self.name}/{path}: asked for bytes {start}–{stop}, was sent {first}–{last + 1}")
            if self._sizes.setdefault(path, size) != size:
                raise ModelError(f"{self.name}/{path}: the file changed while it was read")
            body = bytearray(stop - start)
            view, done = memoryview(body), 0
            while done < len(body) and (got := response.readinto(view[done:])):
                done += got
            # later reads use the commit that answered the first one
            commit = response.headers.get("X-Repo-Commit")
        self.bytes_read += done
        if done < min(stop, size) - start:
            raise ConnectionError("the connection closed early")
        if done < len(body):
            raise ModelError(f"{self.name}/{path}: truncated, bytes {start}–{stop} asked for, file ends at {size}")
        if commit and re.fullmatch(r"[0-9a-f]{40}", commit):
            self.revision, self.name = commit, f"{self.repo}@{commit}"
        return body


Origin: TypeAlias = LocalOrigin | RemoteOrigin


def repository_of(where: str) -> tuple[str, str] | None:
    """`org/name` or `org/name@revision` as repository and revision; None for anything else."""
    repo, _, revision = where.partition("@")
    named = _REPO.fullmatch(repo) and _REVISION.fullmatch(revision or "main") and ".." not in revision
    return (repo, revision or "main") if named else None


def open_origin(where: str) -> tuple[Origin, str | None]:
    """The origin (source of bytes) for a directory, a file or `org/name@revision`, and the file's name if a file was
    given."""
    path = Path(where)
    if path.is_dir():
        return LocalOrigin(path), None
    if path.is_file():
        return LocalOrigin(path.parent), path.name
    if (named := repository_of(where)) is not None:
        return RemoteOrigin(*named), None
    raise ModelError(f"{where}: no such directory or file, and not a repository (org/name or org/name@revision)")


def read_whole(origin: Origin, path: str, limit: int = JSON_LIMIT) -> bytes:
    """The contents of a small file; raises a `ModelError` if the file is larger than the limit."""
    size = origin.size(path)
    if size > limit:
        raise ModelError(f"{path} has {size:,} bytes; at most {limit:,} are allowed for this kind of file")
    return bytes(origin.read(path, 0, size))


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ModelError("a key is given twice")
    return table


def parse_json(raw: bytes, what: str, unique: bool = False) -> dict[str, object]:
    """Parse untrusted bytes as a JSON object; raises a `ModelError` with the reason for anything else."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except UnicodeDecodeError:
        raise ModelError(f"{what}: not UTF-8") from None
    except RecursionError:
        raise ModelError(f"{what}: nested too deep") from None
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from None
    except ValueError as error:
        raise ModelError(f"{what}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{what}: not a JSON object")
    return value


def read_json(origin: Origin, path: str) -> dict[str, object]:
    """A JSON object in a file."""
    return parse_json(read_whole(origin, path), path)
