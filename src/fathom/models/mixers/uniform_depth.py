"""`uniform_depth`: average over the sources of `depth_attention` with equal weights, as a control for it.

The mixed value:

ṽ_ℓ = (v_ℓ + Σ_{j ∈ D_ℓ} ṽ_j) / M_ℓ,        M_ℓ = |D_ℓ| + 1;        with `blend` λ, ṽ_ℓ = v_ℓ + λ (mean - v_ℓ)

With `blend: learned` the mean is over the sources alone: ṽ_ℓ = (1 + g) v_ℓ + λ mean_{j ∈ D_ℓ} ṽ_j.

`source_layers.py` decides which layers are sources. `axes/blend.py` has `blend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..axes.blend import mixing_cost
from ..axes.roles import Cost, Mechanism
from .source_layers import GridMixer, ScheduleOptions

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit


@dataclass(frozen=True)
class UniformDepthOptions(ScheduleOptions):
    """Options of `uniform_depth`."""


class UniformDepth(GridMixer):
    """Averages values over depth, without attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """The mean of the layer's own value and the sources' mixed values."""
        if self.blend_gates is not None:
            return self.with_gates(query, value, sources)
        if not sources:
            return value
        return self.blended(value, mean((value, *sources[1::2])))

    def of_sources(self, query: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """The mean of the sources' mixed values."""
        return mean(sources[1::2])


def mean(values: Sequence[Tensor]) -> Tensor:
    """The mean of several tensors, summed in the given order."""
    total, *others = values
    for other in others:
        total = total + other
    return total / len(values)


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: one addition for each source, and a division."""
    width = config.num_key_value_heads * config.head_dim
    candidates = sum(len(v.sources) + 1 for v in visits if v.sources)
    kept, moved = sum(v.kept for v in visits), candidates + len(visits)
    options = UniformDepthOptions.of(config)
    if options.learned:
        candidates -= sum(bool(v.sources) for v in visits)
    return mixing_cost(config, visits, options, UniformDepth) + Cost(
        flops=width * candidates,
        transient_bytes=2 * width * scalar * kept,
        io_bytes=scalar * width * moved,
    )


UNIFORM_DEPTH = Mechanism(
    name="uniform_depth",
    axis="mixer",
    summary="average earlier layers' values of the same token",
    paper="arXiv 2606.05014, Table 5",
    build=UniformDepth,
    cost=cost,
    options=UniformDepthOptions,
    closed={"blend": 0.0},
)
