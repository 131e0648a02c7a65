"""A trained matrix instead of the DCT: the reference for fixed low-pass filters.

    C starts as `average`. All layers share its L · M numbers, for keys and values, and train them through the attention
    function

It is a module: give its parameters to the optimizer, save its state, and pass the module itself to `build_cache`.

`compress_in_training` in `attention.py` switches a model to it.
"""

from __future__ import annotations

from torch import Tensor, nn

from .average import Average
from .method import Linear
from .rope import Rope
from .schedule import Schedule


class Learned(Linear, nn.Module):
    """A compression method whose matrix C is a trainable parameter."""

    name = "learned"
    by_name = False

    def __init__(self, schedule: Schedule, rope: Rope) -> None:
        super().__init__(schedule, rope)
        self.weight = nn.Parameter(Average.build(schedule.kept, schedule.compressed).float())

    def reduce(self, x: Tensor) -> Tensor:
        """C x."""
        return self.weight.to(x) @ x
