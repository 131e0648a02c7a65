"""A mixer: each layer's value is averaged with that of the layer below, by one learned gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from fathom.models.axes.roles import Cost, Mechanism, ValueMixer

if TYPE_CHECKING:  # an export imports this file while it imports these two
    from fathom.models.axes.fields import DecoderConfig
    from fathom.models.axes.visit import Visit


class GatedMean(ValueMixer):
    """g v + (1 - g) ṽ with g = sigmoid(gate), and ṽ the mixed value of the layer below."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate = nn.Parameter(torch.empty(1)) if layer_idx else None

    def init_weights(self, std: float) -> None:  # mostly the layer's own value
        if self.gate is not None:
            init.constant_(self.gate, 2.0)

    @staticmethod
    def source_layers(config: DecoderConfig, layer_idx: int) -> tuple[int, ...]:
        return (layer_idx - 1,) if layer_idx else ()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """`[B, H_kv, T, D]`; `sources` is (key, mixed value) of each source layer, for the same tokens."""
        return torch.lerp(sources[1], value, self.gate.sigmoid().to(value.dtype)) if sources else value


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Three operations per channel wherever there is a layer below."""
    width, mixing = config.num_key_value_heads * config.head_dim, sum(bool(visit.sources) for visit in visits)
    return Cost(parameters=config.num_hidden_layers - 1, elementwise_flops=3 * width * mixing)


GATED_MEAN = Mechanism("gated_mean", "mixer", "gated mean with the layer below", "this example", GatedMean, cost)
