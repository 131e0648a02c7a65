"""Decides which prompt is read next, and how much of it: the prompt with the fewest tokens left, but no prompt waits
for ever.

A prompt that others have overtaken counts as shorter, so it is overtaken by at most `PATIENCE` times its own tokens.
Then a prompt interrupts it only if it has read as many tokens in a row. A prompt of a few tokens is read first between
two steps, however long others have waited; they have the rest of that turn. So it waits for one chunk and one step. The
further texts of a request let other requests go first. Everything is counted in tokens, not in seconds; only the size
of a chunk, and how many texts of one request run at a time, follow from the time that the latest ones took.

`engine.py` decides whether there is room for a prompt, how many sequences run at a time in all, and which short prompts
are read together. `may_chunk` in `batches.py` decides which models read a whole prompt at once, and `tokenising.py`
which texts are tokenised first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

BOUND = 0.15
"""Seconds that a step may take for the texts of one request."""
CHUNK = 0.15
"""Seconds of a chunk: who comes meanwhile waits for its end, for a step, and for the reading of its own prompt."""
LEAST, FIRST, READ = 16, 32, 512
"""Tokens of a chunk: at least, before the time of one is known, and at most."""
PASS = 16
"""A forward pass takes about as long as so many of its tokens, beside these: it reads all weights."""
FIRST_PART = 0.5
"""The part of a turn that short prompts take at most before those that have waited are read."""
RECENT = 0.5
"""Weight of the last chunk in what is known of their time."""
PATIENCE = 4
"""The tokens by which others may overtake a prompt, for each token that it has left."""
SMALLER = 2
"""How many times shorter a prompt must be to interrupt another."""
YIELDED = 2048
"""Tokens of other prompts for which the further texts of a request let other requests go first."""
FEW = 8
"""Rows that a step may have however long it takes: so few take little more time than one."""


class Pending(Protocol):
    """A prompt that is not read completely."""

    @property
    def left(self) -> int:
        """The number of the prompt's tokens that are not read yet."""

    @property
    def passed(self) -> int:
        """The number of other prompts' tokens that were read since this prompt was submitted."""

    @property
    def further(self) -> bool:
        """Whether the prompt belongs to a further text of its request, not to the first."""

    @property
    def in_a_row(self) -> int:
        """The number of prompt tokens that were read since reading began or was last resumed."""


P = TypeVar("P", bound=Pending)


def rank(prompt: Pending) -> float:
    """A prompt's priority: the prompt with the lowest number is read next. Below 0 it has been overtaken enough."""
    return prompt.left - prompt.passed / PATIENCE


def yields(prompt: Pending) -> bool:
    """Whether a prompt lets other requests go first."""
    return prompt.further and prompt.passed < YIELDED


def in_order(prompts: Iterable[P], first: bool = False) -> list[P]:
    """The prompts in the order in which they are read; prompts of equal rank are in order of arrival.

    Args:
        prompts: Prompts that wait.
        first: Whether nothing was read since the last step: one of a few tokens goes before those that have waited.
    """
    return sorted(prompts, key=lambda one: (yields(one), not (first and one.left <= LEAST), rank(one)))


def interrupts(new: Pending, reading: Pending, first: bool = False) -> bool:
    """Whether a new prompt is so much shorter than the one being read that it interrupts it."""
    if yields(new) and not yields(reading):
        return False
    in_a_row = max(rank(reading), min(reading.left, SMALLER * reading.in_a_row))
    return SMALLER * new.left <= (reading.left if first and new.left <= LEAST else in_a_row)


def taken(tokens: int, share: int) -> float:
    """The share of a turn that a forward pass of `tokens` tokens takes, if `share` tokens take a whole turn."""
    return (PASS + tokens) / (PASS + share)


def rest(spent: float, share: int) -> int:
    """The number of prompt tokens that fit into the rest of a turn; at least `LEAST`, since a forward pass has a fixed
    cost anyway."""
    return max(LEAST, int((1 - spent) * (PASS + share)) - PASS)


def piece(left: int, room: int) -> int:
    """The number of a prompt's remaining tokens to read now: all of them, if otherwise only a few would be left for
    another pass."""
    return left if left - room < PASS // 2 else room


def chunk(fitting: float | None) -> int:
    """The number of prompt tokens to read between two decoding steps of the running texts, in multiples of `LEAST`, so
    that few shapes occur.

    Args:
        fitting: How many take `CHUNK` seconds; None if that is not known yet.
    """
    return FIRST if fitting is None else min(READ, max(LEAST, int(fitting) // LEAST * LEAST))


def learned(fitting: float | None, tokens: int, seconds: float) -> float:
    """The number of tokens that can be read in `CHUNK` seconds, updated after another chunk was timed.

    Part of a chunk's time does not depend on its size, so in proportion a smaller one only says that so many fit.
    Chunks of as many as fit come to take `CHUNK`.

    Args:
        fitting: What was known before.
        tokens: Tokens of the chunk.
        seconds: How long it took.
    """
    now = min(READ + LEAST, tokens * CHUNK / max(seconds, 1e-9))
    if fitting is None:
        return now
    told = tokens >= chunk(fitting) or now > fitting or (tokens >= LEAST and seconds > CHUNK)
    return fitting + RECENT * (now - fitting) if told else fitting


def most_rows(step: tuple[int, float] | None) -> int:
    """The batch size beyond which no further text of the same request joins, so that a long decoding step does not
    delay other requests.

    Args:
        step: Rows of the latest step, and its seconds; None if there was none yet.
    """
    return FEW if step is None else max(FEW, int(step[0] * BOUND / max(step[1], 1e-6)))
