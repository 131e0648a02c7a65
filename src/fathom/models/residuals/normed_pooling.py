"""Attention residuals as Inkling-2 computes them: `attention_residuals` with `variant: inkling2`.

With N(s) = s / rms(s), d the width, B the sums of completed blocks, the embeddings first, and p the open block's sum:

    read(q) = Σ_s α_s N(s)        α = softmax_s(q · N(s) / √d)        over s in B and p

Against `block_sum` the values are normed too, the norm has no weight, and scores are divided by √d. The first sub-layer
reads the embeddings as they are. With `queries: 3` a layer of full attention makes its queries, keys and values of
three such reads, each with a query q of its own, and the norms of keys and values have gains of their own.

p is added up in float32 inside a layer, and rounded to the model's type after its MLP.

`attention_residuals.py` has the other variants, and the options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..axes.numerics import widen, without_autocast
from ..axes.roles import Residual, ResidualState, Ways, WriteContext

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig


class WayGains(nn.Module):
    """The norm weights for the inputs of keys and of values, divided by those for the inputs of queries."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.value = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, ways: Ways) -> Ways:
        """`[B, T, hidden_size]` each."""
        query, key, value = ways
        return query, key * self.key, value * self.value


def queries_of(config: DecoderConfig, sublayer: int) -> int:
    """The number of learned queries by which a sub-layer reads: 0 for the model's first sub-layer, else 1 or 3."""
    layer, mlp = divmod(sublayer, 2)
    attends = not mlp and layer < config.num_hidden_layers
    if attends and config.residual_options["queries"] == 3 and config.layer_types[layer] == "full_attention":
        return 3 if layer else 0
    return 1 if sublayer else 0


class NormedPooling(Residual):
    """Inkling-2's attention residuals; the state is the embeddings, the sums of completed blocks and the unfinished
    block's sum."""

    no_weight_decay = ("query",)

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer)
        self.starts_block = sublayer % config.residual_options["block_size"] == 0
        self.ends_layer, self.eps = sublayer % 2 == 1, config.rms_norm_eps
        self.queries = queries_of(config, sublayer)
        self.multiway = self.queries == 3
        if self.queries:
            self.query = nn.Parameter(torch.empty(self.queries, config.hidden_size))
        self.gains = WayGains(config.hidden_size) if self.multiway else None

    def init_weights(self, std: float) -> None:
        """Initialise the queries to zero, so that all sources have equal weight, and the gains to one."""
        if self.queries:
            init.zeros_(self.query)
        if self.gains is not None:
            init.ones_(self.gains.key)
            init.ones_(self.gains.value)

    def read(self, state: ResidualState) -> tuple[Tensor | Ways, ResidualState, WriteContext]:
        """The input of a sub-layer: a weighted sum of normed sources for each of its queries."""
        if not self.queries:
            return state[0], state, None
        with without_autocast(state[0]):
            found = [x.to(state[0].dtype) for x in self.pooled(state)]
        return (found[0], found[1], found[2]) if self.multiway else found[0], state, None

    def pooled(self, sources: ResidualState) -> tuple[Tensor, ...]:
        """The weighted sum of normed sources for each query, `[B, T, hidden_size]` each, in at least float32."""
        stacked = torch.stack([widen(source) for source in sources], -2)  # [B, T, S, hidden_size]
        normed = stacked * torch.rsqrt(stacked.square().mean(-1, keepdim=True) + self.eps)
        query = widen(self.query).expand(*stacked.shape[:2], -1, -1)  # [B, T, Q, hidden_size]
        return F.scaled_dot_product_attention(query, normed, normed, scale=stacked.shape[-1] ** -0.5).unbind(-2)

    def gained(self, ways: Ways) -> Ways:
        """Multiply the inputs of keys and of values by gains of their own."""
        return ways if self.gains is None else self.gains(ways)

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Add the update to the unfinished block's sum, or start the sum of a new block."""
        begins = self.starts_block or len(state) == 1  # a trip of a loop may begin inside a block
        made = widen(update) if begins else widen(state[-1]) + update
        return (*(state if begins else state[:-1]), made.to(state[0].dtype) if self.ends_layer else made)
