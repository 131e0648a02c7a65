"""The base class of errors that the command line reports in one line."""

from __future__ import annotations


class FathomError(Exception):
    """An error of the caller's: the message is one line that says what is wrong and what would be right.

    Every other exception is a bug and keeps its traceback.
    """

    exit_code = 2
    """Exit code of the command line: 2 for a wrong request, 1 for a failure."""


def to_install(extra: str) -> str:
    """The command that installs an optional extra. Fathom is not on PyPI, so the command needs a checkout."""
    return f"pip install '.[{extra}]' in a checkout of Fathom"
