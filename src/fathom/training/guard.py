"""Skips bad steps on the device, without a host synchronisation.

`loop.py` stops a run after too many skipped steps in a row, and `first_steps.py` stops a run whose loss rises after a
start. In comparisons and ladders, `experiments/scheduler.py` writes `failed.json` for a run that diverged.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Spikes are detected after this many norms, because norms of the first steps differ by orders of magnitude.
SETTLED = 50
MEMORY = 0.98  # decay of the running mean of gradient norms


class Guard:
    """Rejects steps with a non-finite loss or gradient, or with a gradient norm far above its running mean.

    Args:
        spike: A norm above this many times the running mean is rejected; None rejects only non-finite values.
        device: Where norms are.
        clip: The clipping norm. If the running mean is below it, spikes are measured from this value: on a solved
            puzzle, gradients vanish, and one mistake is hundreds of times their mean.
    """

    def __init__(self, spike: float | None, device: torch.device, clip: float = 0.0) -> None:
        self.spike, self.clip = spike, clip
        self.accepted = torch.zeros((), device=device)
        self.mean_norm = torch.zeros((), device=device)
        self.refused_in_a_row = torch.zeros((), device=device)

    def refuse(self, loss: Tensor, norm: Tensor) -> Tensor:
        """1.0 if the step must be skipped, else 0.0, as a tensor; updates the running mean."""
        broken = ~(torch.isfinite(loss) & torch.isfinite(norm))
        bad, counted = broken, norm
        if self.spike is not None:
            limit = self.spike * self.mean_norm.clamp(min=self.clip)
            limit = torch.where(self.accepted >= SETTLED, limit, torch.inf)
            # A spike enters the mean at the limit, so that a lasting rise, five times the mean within ten steps, is
            # accepted.
            bad, counted = broken | (norm > limit), torch.minimum(norm, limit)
        weight = torch.where(self.accepted == 0, 1.0, 1 - MEMORY)
        self.mean_norm = torch.where(broken, self.mean_norm, torch.lerp(self.mean_norm, counted, weight))
        self.accepted = self.accepted + (~bad)
        self.refused_in_a_row = torch.where(bad, self.refused_in_a_row + 1, torch.zeros_like(self.refused_in_a_row))
        return bad.float()

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint."""
        return {"accepted": self.accepted, "mean_norm": self.mean_norm, "refused_in_a_row": self.refused_in_a_row}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        self.accepted, self.mean_norm = state["accepted"], state["mean_norm"]
        self.refused_in_a_row = state["refused_in_a_row"]
