"""Protocols (typing) of what `walk.py` and `speculation.py` need of a model; `FathomModel` and `FathomForCausalLM`
satisfy them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..axes.fields import DecoderConfig
from ..axes.roles import Recurrence, Residual
from ..axes.visit import Plan


class Decoder(Protocol):
    """Protocol of a decoder: its layers, its embedding and final norm, and the order in which layers run."""

    config: DecoderConfig
    training: bool
    embed_tokens: nn.Embedding
    embedding_scale: float
    norms_embedding: bool
    """Whether the final norm also norms the embeddings."""
    layers: nn.ModuleList
    layer_types: tuple[str, ...]
    norm: nn.Module
    rotary_emb: nn.Module
    """Cosines and sines of positions, by layer type where these differ."""
    mixes_unrotated: bool
    """Whether mixers score queries and keys before rotation."""
    final_residual: Residual
    recurrence: Recurrence
    plans: dict[int, Plan]
    """The plan of every number of trips that was asked for."""
    coda: int
    """The first layer that is visited once, after all trips."""
    slotted: bool
    """Whether the cache holds slots."""
    per_visit: bool
    """Whether a layer has a residual for each of its visits."""
    reach: dict[str, int | None]
    """How many tokens back a layer reads, by its type; None for all."""
    balance: Callable[[Sequence[Tensor], Tensor | None], Tensor] | None
    """A trip's loss that balances its experts, from the logits of its routers and a mask; None for none."""

    @property
    def recomputing(self) -> bool:
        """Whether the backward pass recomputes each pass through the layers."""

    def causal_masks(
        self,
        x: Tensor,
        attention_mask: Tensor | Mapping[str, object] | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None,
    ) -> Mapping[str, object]:
        """Causal masks by layer type."""

    def embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The input of the first layer for tokens `[B, T]`."""

    def plan_of(self, trips: int) -> Plan:
        """The plan for this number of iterations: which layers run, in order."""

    def trips_asked(self, max_trips: int | None) -> int:
        """The number of iterations that a forward pass makes, given its `max_trips`."""


class CausalDecoder(Protocol):
    """A decoder with a head."""

    config: DecoderConfig
    lm_head: nn.Module

    @property
    def model(self) -> Decoder:
        """The decoder."""
