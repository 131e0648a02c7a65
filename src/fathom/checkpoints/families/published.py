"""The base of readers of released checkpoints that have a depth mechanism, such as a loop or depth attention.

`lumia.py` recognises and reads Depth-Attention, DenseFormer, attention residuals and mHC, and their variants,
`nanbeige.py` and `ouro.py` looped models. `registry.py` asks each of these readers whether a `config.json` is its own,
and `keys.py` refuses keys that none of them reads. PonderLM and PonderLM-2 are read by the files of their base families
and `ponderlm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fathom.checkpoints.families.family import Values
from fathom.checkpoints.families.tensor_names import Piece, Rule, read_tensors
from fathom.models import FathomConfig


@dataclass(frozen=True)
class Published:
    """The reader of one project's released checkpoints with a depth mechanism."""

    kind: str
    """Its `model_type`."""
    configuration: Callable[[Values], Values]
    """The values of Fathom's configuration."""
    rules: tuple[Rule, ...] = ()
    """How its tensors become Fathom's; a tensor without a rule keeps its name."""
    opens: str = ""
    """Which models they are, for the table of families in the documentation; empty where a page lists them itself."""
    note: str = ""
    """The table's exceptions."""

    def owns(self, config: Values) -> bool:
        """Whether a `config.json` belongs to this project's checkpoints."""
        return config.get("model_type") == self.kind

    def tensors(self, directory: Path, config: FathomConfig) -> dict[str, Piece]:
        """The tensors under Fathom's names."""
        return read_tensors(directory, self.rules, (), config)
