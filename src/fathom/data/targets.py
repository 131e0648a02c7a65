"""Which tokens of a shard are learnt: one bit for each, in a file beside the tokens.

Bit n is token n's own: a model is to predict it. The first token of byte 0 is its lowest bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fathom.data.shards import DataError


def targets_file(token_file: Path) -> Path:
    """Where the bits of a shard's token file are."""
    return token_file.with_suffix(".targets")


def write_targets(token_file: Path, targets: NDArray[np.bool_]) -> None:
    """Write the bits of a whole shard."""
    targets_file(token_file).write_bytes(np.packbits(targets, bitorder="little").tobytes())


def read_targets(token_file: Path, tokens: int) -> NDArray[np.bool_]:
    """The bits of a shard of so many tokens."""
    path = targets_file(token_file)
    packed = np.fromfile(path, np.uint8)
    if len(packed) != -(-tokens // 8):
        raise DataError(f"{path} holds bits for {8 * len(packed)} tokens, not for {tokens}")
    return np.unpackbits(packed, count=tokens, bitorder="little").astype(np.bool_)
