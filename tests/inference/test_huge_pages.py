"""Memory moves into huge pages, where there are any, and holds what it held."""

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from fathom.inference import huge_pages
from fathom.inference.huge_pages import COLLAPSE, SIZE, anonymous, exchange

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's huge pages")


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = line.split(" ", 1)[0].split("-")
        if len(span) == 2 and not span[0].endswith(":"):
            inside = int(span[0], 16) <= address < int(span[1], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no mapping holds the address")


@pytest.fixture
def held() -> np.ndarray:
    """Four huge pages' worth of numbers, in small pages."""
    memory = mmap.mmap(-1, 5 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    numbers = np.frombuffer(memory, dtype=np.int64)
    numbers[:] = np.arange(len(numbers))
    return numbers


def test_pages_are_exchanged(held: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    address = held.ctypes.data
    first = -(-address // SIZE) * SIZE
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(SIZE), COLLAPSE):
        pytest.skip("this system offers no huge pages")
    assert huge_bytes(address) < 4 * SIZE
    mine = [(first, end) for first, end in anonymous() if first <= address < end]
    monkeypatch.setattr(huge_pages, "anonymous", lambda: iter(mine))  # not all that other tests have left
    exchange().join()
    assert huge_bytes(address) >= 4 * SIZE
    assert (held == np.arange(len(held))).all()


def test_holes_do_not_become_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory of which a page in 512 is in use the kernel would make all resident."""
    memory = mmap.mmap(-1, 9 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    bytes_of = np.frombuffer(memory, dtype=np.uint8)
    bytes_of[::SIZE] = 1
    address = bytes_of.ctypes.data
    mine = [(first, end) for first, end in anonymous() if first <= address < end]
    monkeypatch.setattr(huge_pages, "anonymous", lambda: iter(mine))
    exchange().join()
    assert huge_bytes(address) == 0


def test_freed_memory_and_other_systems_do_not_matter(held: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = max(end for _, end in anonymous()) + (1 << 40)
    monkeypatch.setattr(huge_pages, "anonymous", lambda: iter([(beyond, beyond + 4 * SIZE)]))
    huge_pages._exchange()
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_text", lambda self, **_: (_ for _ in ()).throw(FileNotFoundError(self)))
    huge_pages._exchange()
    assert (held == np.arange(len(held))).all()
