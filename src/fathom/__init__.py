"""Fathom: decoder language models whose depth does more work.

Importing it registers `FathomConfig` and the models with transformers' Auto classes. The command line imports them when
a command needs a model, so that `fathom --help` does not wait for torch.
"""

import sys
from pathlib import Path

from fathom._version import __version__

__all__ = ["__version__", "register"]


def register() -> None:
    """Tell transformers' Auto classes what a `fathom` model is: what importing `fathom.models` does."""
    import fathom.models  # noqa: F401


if Path((getattr(sys, "argv", None) or [""])[0]).name not in ("fathom", "fathom.exe"):
    register()
