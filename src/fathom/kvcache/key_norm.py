"""Keep the keys of the smallest norm, to which attention tends to look (arXiv 2406.11430).

Keys that are RMS-normed before they are stored (Qwen3, Gemma 3, Fathom) differ little in norm, so expect less there.
"""

from __future__ import annotations

from torch import Tensor

from .method import Selection


class KeyNorm(Selection):
    """score = −‖k‖₂."""

    name = "key_norm"

    def scores(self, keys: Tensor, queries: Tensor | None) -> Tensor:
        """`[B, H_kv, N]`."""
        # To three digits: keys of equal words differ in norm by rounding only, which must not decide. Ties keep order.
        return -keys.norm(dim=-1).bfloat16()
