"""Keeps the keys with the smallest norm, which tend to receive the most attention (arXiv 2406.11430).

Keys that are RMS-normed before storage (Qwen3, Gemma 3, Fathom) differ little in norm, so expect weaker results there.
"""

from __future__ import annotations

from torch import Tensor

from .method import Held, Selection


class KeyNorm(Selection):
    """score = −‖k‖₂."""

    name = "key_norm"

    def scores(self, held: Held) -> Tensor:
        """`[B, H_kv, N]`."""
        return -held.keys.norm(dim=-1)
