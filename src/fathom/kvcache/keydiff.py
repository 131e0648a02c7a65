"""KeyDiff (arXiv 2504.15364): keep the keys that are least similar to the mean key. The score is:

score = −cos(k, mean of k/‖k‖)         the mean over all N entries
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .method import Held, Selection


class KeyDiff(Selection):
    """The most distinctive keys."""

    name = "keydiff"

    def scores(self, held: Held) -> Tensor:
        """`[B, H_kv, N]`."""
        anchor = F.normalize(held.keys, dim=-1).mean(dim=2, keepdim=True)
        return -F.cosine_similarity(held.keys, anchor, dim=-1)
