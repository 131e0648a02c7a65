"""Which prompt is read next, and how much of it: the one with the fewest tokens left, but no prompt waits for ever.

A prompt that others have overtaken counts as shorter, so it is overtaken by at most `PATIENCE` times its own tokens.
Everything is counted in tokens, not in seconds; only the size of a chunk follows from the time that a token takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

BOUND = 0.2
"""Seconds that reading prompts may take between two tokens of the texts that run."""
LEAST, FIRST, READ = 16, 32, 512
"""Tokens of a chunk: at least, before the time of a token is known, and at most."""
PATIENCE = 4
"""By how many tokens others may overtake a prompt, for each token that it has left."""
SMALLER = 2
"""How many times shorter a prompt must be to interrupt another."""


class Pending(Protocol):
    """A prompt that is not read to its end."""

    @property
    def left(self) -> int:
        """Tokens that are not read yet."""

    @property
    def passed(self) -> int:
        """Tokens of other prompts that were read since it was submitted."""


P = TypeVar("P", bound=Pending)


def rank(prompt: Pending) -> float:
    """A prompt's place: the lowest is read next. Below 0 no other prompt may overtake it any more."""
    return prompt.left - prompt.passed / PATIENCE


def in_order(prompts: Iterable[P]) -> list[P]:
    """Prompts in the order in which they are read; equal ones as they came."""
    return sorted(prompts, key=rank)


def interrupts(new: Pending, reading: Pending) -> bool:
    """Whether a prompt is so much shorter than the one that is being read that it goes first."""
    return SMALLER * new.left <= rank(reading)


def chunk(seconds: float | None) -> int:
    """Tokens to read between two tokens of the texts that run: a power of two, so that few shapes occur.

    Args:
        seconds: The time of a token; None if it is not known yet.
    """
    if seconds is None:
        return FIRST
    tokens = LEAST
    while tokens < READ and 2 * tokens * seconds <= BOUND:
        tokens *= 2
    return tokens
