"""`value_gain`: a learned gain on every value, optionally on queries, as a control for mechanisms with learned
gates.

The gains:

    ṽ_ℓ = (1 + g) v_ℓ        with `queries`, q_ℓ ← (1 + a) q_ℓ

g and a start at zero. Nothing is mixed, so a mechanism that does no better than this has found a gain.

`axes/gates.py` has the gains' parameters. `residuals/branch_gain.py` is the control of residuals and loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from ..axes.gates import Gates, gate_shapes
from ..axes.roles import Cost, Mechanism, MixerOptions, ValueMixer

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit


@dataclass(frozen=True)
class ValueGainOptions(MixerOptions):
    """Options of `value_gain`."""

    gates: Literal["layer", "head", "channel"] = "head"
    """One gain per layer, per key-value head or per channel."""
    queries: bool = False
    """Whether the queries of a layer, a key-value head or a channel have a gain too."""

    @property
    def head_gates(self) -> tuple[str, ...]:
        """Gains by head or channel."""
        return () if self.gates == "layer" else ("gates.gain", "query_gates.gain")[: 1 + self.queries]

    def check(self, config: DecoderConfig) -> None:
        """Refuse gains on the queries of a family's own layers, and per-channel gains on queries, since RoPE rotates
        pairs of channels together."""
        super().check(config)
        self.require("queries", not (self.queries and self.gates == "channel"), "be false with gates=channel")
        self.require(
            "queries", not (self.queries and config.host), "be false: a host's attention makes its own queries"
        )


class ValueGain(ValueMixer):
    """Multiplies values, and queries with the option `queries`, by a learned gain."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        options = ValueGainOptions.of(config)
        shape = gate_shapes(config, "mixer")[options.gates]
        self.gates = Gates(shape, mixes=False)
        self.query_gates = Gates(shape, mixes=False) if options.queries else None
        self.asks = options.queries
        self.group = config.num_attention_heads // config.num_key_value_heads

    def init_weights(self, std: float) -> None:
        """Start without a gain."""
        for gates in (self.gates, self.query_gates):
            if gates is not None:
                gates.close()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """(1 + g) v."""
        return self.gates(value)

    def asked(self, query: Tensor) -> Tensor:
        """The scaled queries (1 + a) q; the queries of a group share the gain of their key-value head."""
        assert self.query_gates is not None
        grouped = query.unflatten(1, (-1, self.group))  # [B, H_kv, G, T, D]
        return self.query_gates(grouped.transpose(1, 2)).transpose(1, 2).reshape(query.shape)


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: a product for each channel of values and, with `queries`, of queries."""
    options = ValueGainOptions.of(config)
    heads, width = config.num_key_value_heads, config.head_dim
    size = {"layer": 1, "head": heads, "channel": heads * width}[options.gates]
    multiplied = width * (heads + config.num_attention_heads * options.queries)
    keyed = config.keyed_layers  # a layer with a state has no values
    return Cost(
        parameters=len(keyed) * size * (1 + options.queries),
        elementwise_flops=sum(visit.layer in keyed for visit in visits) * multiplied,
    )


VALUE_GAIN = Mechanism(
    name="value_gain",
    axis="mixer",
    summary="a learned gain on every value: the control of learned gates",
    paper="(control)",
    build=ValueGain,
    cost=cost,
    options=ValueGainOptions,
    closed={},
)
