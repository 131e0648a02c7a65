"""Memory of a server in huge pages, where Linux offers them.

Each token reads all weights. In pages of 4 KiB the processor must look up an address every 4 KiB, and its prefetcher
stops there; in pages of 2 MiB a token takes several hundredths less time. An allocator asks for huge pages only if a
variable was set before the process started, so the pages of weights are exchanged afterwards.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

SIZE = 2 << 20
"""Bytes of a huge page."""
COLLAPSE = 25
"""Linux's number of MADV_COLLAPSE, which does at once what the kernel does by and by where it is told to."""


def exchange() -> threading.Thread:
    """Exchange the pages of what the process holds now, on a thread, since a gigabyte takes a second or two."""
    thread = threading.Thread(target=_exchange, name="huge pages", daemon=True)
    thread.start()
    return thread


def _exchange() -> None:
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    for first, end in anonymous():
        for at in range(-(-first // SIZE) * SIZE, end - SIZE + 1, SIZE):  # one by one: each holds up page faults
            # A wish: where the kernel cannot fulfil it, or the memory was freed meanwhile, nothing happens.
            madvise(ctypes.c_void_p(at), ctypes.c_size_t(SIZE), COLLAPSE)


def anonymous() -> Iterator[tuple[int, int]]:
    """Addresses, first and end, of this process's private writable memory without a file that fits a huge page."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        span, access, _, _, file, *name = line.split()
        first, end = (int(address, 16) for address in span.split("-"))
        if access == "rw-p" and file == "0" and name in ([], ["[heap]"]) and end - first >= SIZE:
            yield first, end
