"""PyramidKV (arXiv 2406.02069): SnapKV with a separate budget for each layer, large in the first and small in the last.
The budgets are:

    k_l = k_0 − (k_0 − k_m) · l / m,    k_m = k̄ / β,    k_0 = 2 k̄ − k_m        for layers l = 0 … m

Each layer keeps the sinks, the last w entries and its k_l others; k̄ is their mean, so the sum is that of SnapKV. Where
k_0 is more than there are, it is all of them and k_m is 2 k̄ − k_0.
"""

from __future__ import annotations

import copy
from itertools import pairwise

from .method import Method
from .rope import Rope
from .schedule import Once, Schedule
from .snapkv import SnapKV


class PyramidKV(SnapKV):
    """SnapKV with fewer entries from layer to layer, only for `compressed`: in a cache with a fixed window, layers
    would be full at different tokens.

    Args:
        schedule: The mean over layers.
        rope: The model's rotation.
        observed: w, the last queries, whose entries stay.
        kernel: Neighbours over which votes are smoothed.
        beta: β, how much steeper than a uniform cache.
    """

    name, by_name = "pyramidkv", False

    def __init__(
        self, schedule: Schedule, rope: Rope, observed: int | None = None, kernel: int = 5, beta: float = 20.0
    ) -> None:
        super().__init__(schedule, rope, observed, kernel)
        self.beta = beta
        if not isinstance(schedule, Once):
            raise ValueError("pyramidkv compresses a prompt once, not a window: use compressed(model, PyramidKV)")
        if not beta >= 1:
            raise ValueError(f"beta must be at least 1, got {beta}")

    def budgets(self, layers: int) -> list[int]:
        """The number of entries that each layer keeps in addition to the sinks."""
        schedule = self.schedule
        mean, most = schedule.kept - self.observed, schedule.compressed - self.observed - 1
        first = min(2 * mean - mean / self.beta, most)
        step = 2 * (first - mean) / max(1, layers - 1)
        ends = [round(l * first - step * l * (l - 1) / 2) for l in range(layers + 1)]  # noqa: E741
        if layers == 1:
            return [schedule.kept]
        return [self.observed + stop - start for start, stop in pairwise(ends)]

    def for_layer(self, layer: int, layers: int) -> Method:
        """The same method with the budget of this layer."""
        own = copy.copy(self)
        own.place = layer, layers
        own.schedule = Once(self.schedule.window, self.schedule.sinks, self.budgets(layers)[layer])
        return own
