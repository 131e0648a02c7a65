"""Fathom's own errors, which the command line reports in one line.

`cli/main.py` prints them and ends with their exit code; it also reports errors of the system, such as a full disk. Any
other exception is a bug and keeps its traceback. The message about a missing package is in the module that needs the
package; it names the extra by `to_install`.
"""

from __future__ import annotations

from pathlib import Path


class FathomError(Exception):
    """An error that the caller can correct. The message is one line: what is wrong, and what is allowed. Every other
    exception is a bug and keeps its traceback.
    """

    exit_code = 2
    """Exit code of the command line: 2 for a wrong request, 1 for a failure."""

    def __init__(self, message: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class SettingsError(FathomError, ValueError):
    """Raised for a recipe key, an option or an argument with an impossible value."""


class DataError(FathomError, ValueError):
    """Raised for unusable documents, shards, benchmarks or conversations."""


class ModelError(FathomError, ValueError):
    """Raised for a model or model file that cannot be opened, compared or written."""


class Absent(ModelError, FileNotFoundError):
    """Raised for a file that a model's repository or directory does not have."""


class TrainingError(FathomError, RuntimeError):
    """A run that cannot continue."""

    exit_code = 1

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        """The step at which the run diverged; None if something else stopped it."""


class HeldError(FathomError):
    """Another process holds a lock."""

    def __init__(self, marker: Path | None = None) -> None:
        self.advice = "" if marker is None else f"; if that process has ended, delete {marker}"
        """The end of an error message: how to remove a stale marker. Empty if the system frees the locks of dead
        processes."""
        super().__init__(f"another process holds it{self.advice}")


class RequestError(FathomError, ValueError):
    """Raised for a prompt that cannot be answered, or not now, as by a server that is full or shutting down."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
        """OpenAI's name of the error, or Fathom's: `context_length_exceeded`, `failed` and others."""


def to_install(extra: str) -> str:
    """The command that installs an optional extra. Fathom is not on PyPI, so the command needs a checkout."""
    return f"pip install '.[{extra}]' in a checkout of Fathom"
