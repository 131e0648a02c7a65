"""Files that other processes may use at the same time: locks, atomic replacement, digests."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from fathom.errors import FathomError, HeldError

LOCK = ".lock"
# Errors of file systems without locks, such as FUSE or a network drive whose lock service is down.
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


@dataclass(frozen=True)
class Digest:
    """Size and checksum of a file."""

    bytes: int
    sha256: str


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock file; the system releases it when the process ends. A file system without locks gets a marker file
    instead, which a killed process leaves behind. The lock file is deleted afterwards. If another process holds the
    lock it raises `HeldError`; if the path cannot be written, an `OSError`.
    """
    taken = _native(path) or _marker(path)
    try:
        yield
    finally:
        if not isinstance(taken, SoftFileLock):
            # Removed while held: a process that had opened it notices that the name was deleted, and tries again.
            with suppress(OSError):
                path.unlink()
        taken.release()


@contextmanager
def claimed(directory: Path, busy: str, kind: type[FathomError]) -> Iterator[None]:
    """Create a directory and lock it for this process; the system releases the lock when the process ends. A new
    directory that stayed empty is removed.

    Args:
        directory: The directory.
        busy: The error if another process holds it.
        kind: The class of errors.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        with ExitStack() as stack:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock(directory / LOCK))
            except HeldError as held:
                raise kind(f"{directory}{busy}{held.advice}") from None
            except OSError as error:
                raise kind(f"{directory}: {error.strerror or error}") from None
            yield
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()


def require_directory(directory: Path, kind: type[FathomError]) -> None:
    """Refuse a directory that cannot be created or written; a directory that is created for this check is removed
    again."""
    with claimed(directory, ": another process is using it", kind):
        pass


def _native(path: Path) -> BaseFileLock | None:
    """Take the operating system's lock on a file; None if the file system has no locks."""
    taken = FileLock(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # filelock itself falls back to a marker if flock is not implemented
            taken.acquire(blocking=False)
    except Timeout:
        raise HeldError(path if isinstance(taken, SoftFileLock) else None) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        with suppress(OSError):
            path.unlink()
        return None
    return taken


def _marker(path: Path) -> BaseFileLock:
    marker = path.with_name(f"{path.name}.held")
    taken = SoftFileLock(marker)
    try:
        taken.acquire(blocking=False)
    except Timeout:
        raise HeldError(marker) from None
    return taken


def write_durably(path: Path, text: str) -> None:
    """Write a file and fsync it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: a reader, also after a crash, finds either the old or the new text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")  # other processes may write the same file
    try:
        write_durably(temporary, text)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # name the target, not the temporary file
    sync_directory(path.parent)


def as_usual(path: Path) -> None:
    """Give a file the permissions that the umask gives any new file in its directory, because safetensors makes files
    readable by their owner only."""
    usual = path.with_name(f".{path.name}.{os.getpid()}.mode")
    usual.touch()
    try:
        path.chmod(usual.stat().st_mode)
    finally:
        usual.unlink()


def write_json(path: Path, value: object) -> None:
    """Write a result dataclass, or a container of them, to a JSON file atomically; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(value), indent=1, ensure_ascii=False) + "\n"
    named = re.search("[\ud800-\udfff]", text)  # by a file whose name is not UTF-8
    write_atomically(path, json.dumps(asdict(value), indent=1) + "\n" if named else text)


def read_json(path: Path) -> Any:
    """A JSON object from a file; a `ValueError` for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path} is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def asdict(value: object) -> Any:
    """Convert a result dataclass, or a container of such results, to plain JSON values."""
    if dataclasses.is_dataclass(value):
        value = {key_of(field): getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: asdict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [asdict(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy":
        value = value.item()  # type: ignore[attr-defined]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def key_of(field: dataclasses.Field[Any]) -> str:
    """The JSON key of a dataclass field of a result. A field named after a Python keyword, such as `from_`, loses its
    underscore."""
    return field.name.rstrip("_")


def sync_directory(path: Path) -> None:
    """Fsync a directory."""
    if os.name == "nt":  # Windows cannot open directories; NTFS keeps renames in order by itself
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> Digest:
    """Size and SHA-256 of a file, read in pieces."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
            size += len(piece)
    return Digest(size, found.hexdigest())
