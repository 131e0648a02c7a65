"""The declaration of a reader for checkpoints with a depth mechanism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom.checkpoints.families.family import Values
from fathom.models import FathomConfig


@dataclass(frozen=True)
class Published:
    """One project's checkpoints that hold a mechanism."""

    kinds: tuple[str, ...]
    """Its `model_type`s."""
    owns: Callable[[Values], bool]
    """Whether a `config.json` is the project's."""
    configuration: Callable[[Values], Values]
    """The values of Fathom's configuration."""
    tensors: Callable[[Path, FathomConfig], Mapping[str, Any] | None]
    """The tensors under Fathom's names; None if the names are equal."""
