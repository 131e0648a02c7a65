"""Claims record which worker runs which task, for workers that share only a directory. A task's claims are files
numbered 0, 1, 2, …; the highest number is valid. Claiming creates the next number with `link`, which fails if another
worker was faster, also on network file systems. Nothing is ever deleted, so no two processes can disagree about the
next number. A holder touches its file while it runs. If its process has ended, or the file was not touched for a while,
another worker may take over.

`scheduler.py` takes the claims.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathom.errors import TrainingError
from fathom.report.files import read_json, write_durably

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0


@dataclass
class Claims:
    """The claims in one directory, with what this process has seen of their heartbeats."""

    directory: Path
    stale_seconds: float = STALE_SECONDS
    _seen: dict[Path, tuple[int, float]] = field(default_factory=dict)
    """When each claim's heartbeat last changed, by this machine's clock, because clocks differ."""

    def take(self, task: str) -> Claim | None:
        """Claim a task; None if another worker holds it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        number = self._newest(task)
        if number is not None and not self._free(self._path(task, number)):
            return None
        path = self._path(task, 0 if number is None else number + 1)
        draft = self.directory / f".{uuid.uuid4().hex}"
        write_durably(draft, json.dumps({"pid": os.getpid(), "machine": machine(), "host": platform.node()}))
        try:
            os.link(draft, path)
        except FileExistsError:
            return None
        finally:
            draft.unlink()
        return Claim(path, self._path(task, int(path.suffix[1:]) + 1))

    def _path(self, task: str, number: int) -> Path:
        return self.directory / f"{task}.{number}"

    def _newest(self, task: str) -> int | None:
        numbers = (path.suffix[1:] for path in self.directory.glob(f"{task}.*") if path.stem == task)
        return max((int(number) for number in numbers if number.isdigit()), default=None)

    def _free(self, path: Path) -> bool:
        holder = _holder(path)
        if holder.get("released"):
            return True
        if holder.get("machine") == machine() and not _alive(holder["pid"]):
            return True
        beat, now = path.stat().st_mtime_ns, time.monotonic()
        if path not in self._seen or self._seen[path][0] != beat:
            self._seen[path] = (beat, now)
        return now - self._seen[path][1] > self.stale_seconds


class Claim:
    """A task that this process holds until the `with` block ends, or until another worker considers it dead."""

    def __init__(self, path: Path, successor: Path) -> None:
        self.path, self.successor = path, successor
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    @property
    def lost(self) -> bool:
        """Whether another worker has taken over this claim."""
        return self.successor.exists()

    def require(self) -> None:
        """Raise an error if another worker holds the task."""
        if self.lost:
            raise TrainingError(
                f"{self.path.stem}: this process did not respond for too long, and another one took over"
            )

    def __enter__(self) -> Claim:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        released = self.path.with_name(f".{uuid.uuid4().hex}")
        write_durably(released, json.dumps({"released": True}))
        os.replace(released, self.path)

    def _beat(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self.path)
            except OSError:  # the disk may be unavailable for a moment; after a longer time another worker takes over
                continue


def _holder(path: Path) -> dict[str, Any]:
    """The process that holds a claim; empty if the file is unreadable, as after a power cut (such a claim expires)."""
    try:
        found: dict[str, Any] = read_json(path)
    except ValueError:
        return {}
    return found


def machine() -> str:
    """A text that identifies this machine's boot and container, because a process id is unique only within both."""
    parts = [platform.node()]
    try:
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        parts.append(str(uuid.getnode()))
    return " ".join(parts)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # A zombie is dead, but not reaped yet.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
