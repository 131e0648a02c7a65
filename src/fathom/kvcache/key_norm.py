"""Keep the keys of the smallest norm, to which attention tends to look (arXiv 2406.11430).

Keys that are RMS-normed before they are stored (Qwen3, Gemma 3, Fathom) differ little in norm, so expect less there.
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
