"""Puts the memory of a server into huge pages, where Linux offers them.

Each token reads all weights. In pages of 4 KiB the processor must look up an address every 4 KiB, and its prefetcher
stops there; in pages of 2 MiB a token takes several hundredths less time. An allocator asks for huge pages only if a
variable was set before the process started, so the pages are exchanged afterwards: those of packed and 8-bit weights,
which are the process's own memory. Other weights stay in the pages of their file.

`launch.py` calls `exchange` on a CPU, after `packed_or_plain.py` has chosen how weights are stored.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

SIZE = 2 << 20
"""Bytes of a huge page."""
FULL = 0.9
"""Least share of small pages in use of what becomes a huge page."""
COLLAPSE = 25
"""Linux's number of MADV_COLLAPSE, which does at once what the kernel does by and by where it is told to."""


def exchange() -> threading.Thread:
    """Move the memory that the process holds now to huge pages, on a thread, since a gigabyte takes a second or two."""
    thread = threading.Thread(target=_exchange, name="huge pages", daemon=True)
    thread.start()
    return thread


def _exchange() -> None:
    spans = list(anonymous())
    libc = ctypes.CDLL(None) if spans else None
    for first, end in spans:
        for at in range(-(-first // SIZE) * SIZE, end - SIZE + 1, SIZE):  # one by one: each holds up page faults
            # A wish: where the kernel cannot fulfil it, or the memory was freed meanwhile, nothing happens.
            if libc is not None and _filled(libc, at) >= FULL:
                libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(SIZE), COLLAPSE)


def _filled(libc: ctypes.CDLL, address: int) -> float:
    """The share of a huge page's small pages that are in memory, so that unused holes in a heap are not filled."""
    pages = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), pages):
        return 0.0
    return sum(page & 1 for page in pages) / len(pages)


def anonymous() -> Iterator[tuple[int, int]]:
    """Start addresses and ends of this process's memory regions that are private, writable, not backed by a file, and
    at least a huge page long."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        span, access, _, _, file, *name = line.split()
        first, end = (int(address, 16) for address in span.split("-"))
        if access == "rw-p" and file == "0" and name in ([], ["[heap]"]) and end - first >= SIZE:
            yield first, end
