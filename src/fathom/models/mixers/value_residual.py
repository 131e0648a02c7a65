"""`value_residual`: every layer's value becomes half the first layer's value plus half its own.

The mixed value:

ṽ_ℓ = ½ v_0 + ½ v_ℓ        for ℓ ≥ 1;        with `blend` λ, ṽ_ℓ = v_ℓ + ½ λ (v_0 - v_ℓ)

With `blend: learned`, ṽ_ℓ = (1 + g) v_ℓ + λ v_0.

In a loop v_0 is that of the same iteration, or layer 0's one value if that layer is in the prelude (`_sources` in
`trips/slots.py`). Gradients reach v_0. `axes/blend.py` has `blend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..axes.blend import BlendedMixer, BlendedMixerOptions, mixing_cost
from ..axes.roles import Cost, Mechanism

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit


@dataclass(frozen=True)
class ValueResidualOptions(BlendedMixerOptions):
    """Options of `value_residual`."""


class ValueResidual(BlendedMixer):
    """Mixes with layer 0 only. It is not recursive, since layer 0's mixed value is its own value."""

    @staticmethod
    def source_layers(config: DecoderConfig, layer_idx: int) -> tuple[int, ...]:
        """The sources of a layer: layer 0 for every layer above it."""
        return (0,) if layer_idx else ()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """½ v_0 + ½ v_ℓ."""
        if self.blend_gates is not None:
            return self.with_gates(query, value, sources)
        return self.blended(value, torch.lerp(value, sources[1], 0.5)) if sources else value

    def of_sources(self, query: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """The value v_0 of layer 0, which includes layer 0's own gain."""
        return sources[1]


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: two products and a sum per channel for each layer and iteration."""
    width = config.num_key_value_heads * config.head_dim
    mixing = sum(bool(v.sources) for v in visits)
    options = ValueResidualOptions.of(config)
    return mixing_cost(config, visits, options, ValueResidual) + Cost(
        flops=0 if options.learned else 3 * width * mixing,
        transient_bytes=2 * width * scalar * sum(v.kept for v in visits),
        io_bytes=3 * scalar * width * mixing,
    )


VALUE_RESIDUAL = Mechanism(
    name="value_residual",
    axis="mixer",
    summary="half of the first layer's value, half of the own",
    paper="arXiv 2410.17897",
    build=ValueResidual,
    cost=cost,
    options=ValueResidualOptions,
    closed={"blend": 0.0},
)
