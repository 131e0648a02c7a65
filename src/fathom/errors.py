"""The one kind of error that the command line says in one line."""

from __future__ import annotations


class FathomError(Exception):
    """Something that the caller can put right; the message is one line that says what and how.

    Every other exception is a fault of the program and keeps its traceback.
    """

    exit_code = 2
    """What the command line ends with: 2 for what was asked wrongly, 1 for what failed."""
