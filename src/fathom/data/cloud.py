"""Files in object stores and other places that fsspec opens: `s3://`, `gs://`, `hf://`, `memory://` and others.

An input there is listed with its size and the stamp of its contents. The task that reads it copies it to the local
disk, and removes the copy when it is done.

Credentials and endpoints are left to each store's fsspec package. `upload` carries out `--upload`.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fathom.data.shards import first_line
from fathom.errors import DataError, to_install

URL = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+://")
STAMPS = ("ETag", "etag", "md5Hash", "crc32c", "sha256", "checksum", "LastModified", "updated", "mtime", "created")
"""Fields in which a store identifies a file's contents or their time; the first that it has is taken."""
WEB = ("http:", "https:")
"""Addresses of single files, in which ? begins a query."""
COPIED = ".input"
"""The folder of a task's local copies."""
LAST = ("index.json", "card.md", "run.json")
"""Copied after everything else, in this order: who reads an index finds the files that it names."""


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file in a store."""

    url: str
    size: int = 0
    stamp: str = ""

    def __str__(self) -> str:
        return self.url

    @property
    def path(self) -> PurePosixPath:
        """The file's name and folders, taken from its URL without the scheme."""
        place = self.url.partition("?")[0] if self.url.startswith(WEB) else self.url
        return PurePosixPath(place.partition("://")[2].lstrip("/"))

    def identity(self) -> str:
        """A digest of the file's URL, size and stamp, which changes when the file's contents change."""
        return hashlib.sha256(f"{self.url}\n{self.size}\n{self.stamp}".encode()).hexdigest()

    def begins(self, count: int) -> bytes:
        """Its first bytes."""
        with _told(self.url):
            store, path = _store(self.url)
            return bytes(store.cat_file(path, 0, min(count, self.size) if self.size else count))


def is_url(name: str) -> bool:
    """Whether a name is a URL, which fsspec opens."""
    return bool(URL.match(name))


def find_remote(url: str, is_known: Callable[[PurePosixPath], bool], known_words: str) -> list[RemoteFile]:
    """The files that a URL, a folder's URL or a glob means, sorted.

    Args:
        url: As the user wrote it.
        is_known: Whether a file of a folder is to be read.
        known_words: The names of such files, for the error if there is none.
    """
    with _told(url):
        store, path = _store(url)
        if url.startswith(WEB):
            found = {path: store.info(path)}
        elif glob.has_magic(path):
            found = store.glob(path, detail=True)
        elif store.isdir(path):
            found = {
                name: facts for name, facts in store.find(path, detail=True).items() if _is_read(name, path, is_known)
            }
        else:
            found = {path: store.info(path)}
        files = [_file(store, name, facts) for name, facts in found.items() if facts.get("type") != "directory"]
    if not files:
        raise DataError(
            f"{url}: no file matches" if glob.has_magic(path) else f"{url}: no readable file ({known_words})"
        )
    return sorted(files)


def _is_read(name: str, folder: str, is_known: Callable[[PurePosixPath], bool]) -> bool:
    parts = PurePosixPath(name[len(folder) :].lstrip("/")).parts
    return not any(part.startswith(".") for part in parts) and is_known(PurePosixPath(name))


def _file(store: Any, name: str, facts: dict[str, Any]) -> RemoteFile:
    stamp = next((str(facts[key]) for key in STAMPS if facts.get(key)), "")
    return RemoteFile(store.unstrip_protocol(name), int(facts.get("size") or 0), stamp)


@contextmanager
def local(place: str, folder: Path, size: int = 0) -> Iterator[Path]:
    """The path of a file on this machine: its own path, or for a URL that of a copy below `folder`, which is removed
    afterwards.

    Args:
        place: A path or a URL.
        folder: Where a copy may stand.
        size: The bytes that the file should have; another number is an error.
    """
    if not is_url(place):
        yield Path(place)
        return
    copy = folder / COPIED / RemoteFile(place).path.name
    copy.parent.mkdir(exist_ok=True)
    try:
        with _told(place):
            store, path = _store(place)
            store.get_file(path, str(copy))
        if size and copy.stat().st_size != size:
            raise DataError(f"{place} changed since the run began; run the same command to resume", 1)
        yield copy
    finally:
        copy.unlink(missing_ok=True)
        copy.parent.rmdir()


def upload(folder: Path, url: str, left_out: tuple[str, ...] = ()) -> int:
    """Copy a folder's files to a URL, index files last; returns the number of copied files.

    Args:
        folder: The folder; names that begin with a dot are not copied.
        url: Where its contents go.
        left_out: Names in the folder that are not copied.
    """
    names = sorted(one.relative_to(folder) for one in folder.rglob("*") if one.is_file())
    names = [
        one for one in names if one.parts[0] not in left_out and not any(part.startswith(".") for part in one.parts)
    ]
    names.sort(key=lambda one: LAST.index(one.name) if one.name in LAST else -1)
    with _told(url):
        store, path = _store(url)
        for name in names:
            target = f"{path.rstrip('/')}/{name.as_posix()}"
            store.makedirs(store._parent(target), exist_ok=True)
            store.put_file(str(folder / name), target)
    return len(names)


def check_upload(url: str) -> None:
    """Check an upload target before any work: it must be a URL whose store fsspec knows and whose package is
    installed."""
    if not is_url(url):
        raise DataError(f"`upload={url}`: not a URL, such as s3://BUCKET/DIR")
    with _told(url):
        _store(url)


def _store(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, without cached listings, and the path in this file system."""
    from fsspec.core import url_to_fs

    store, path = url_to_fs(url, use_listings_cache=False)
    return store, str(path)


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn any exception of a file store into an error of one line."""
    try:
        yield
    except DataError:
        raise
    except ImportError as error:
        raise DataError(f"{url}: {first_line(error)}: {to_install('cloud')}") from None
    except FileNotFoundError:
        raise DataError(f"{url}: no such file or folder") from None
    except Exception as error:
        raise DataError(f"{url}: {type(error).__name__}: {first_line(error)}") from None
