"""Numbers drawn for one training step: the same on every rank, and again after a resume."""

from __future__ import annotations

import hashlib


def draw(seed: int | None, step: int, what: str) -> int:
    """A number of 64 bits that depends on its arguments only."""
    return int.from_bytes(hashlib.blake2b(f"{seed or 0}/{step}/{what}".encode(), digest_size=8).digest(), "little")


def between(bounds: list[int], seed: int | None, step: int, what: str) -> int:
    """Uniform over least..most, both included."""
    least, most = bounds
    return least + draw(seed, step, what) % (most - least + 1)
