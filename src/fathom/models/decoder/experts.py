"""Mixture of experts: a router sends each token to k of E small MLPs.

The output is

    y(x) = Σ_{e in the k largest of r} softmax(r over these k)_e · mlp_e(x),    r = R x

An expert has 1/k of the channels of `intermediate_size`, so that a token costs as much as in the dense MLP, and the
router. Tokens are sorted by expert and each expert is called once. No expert has a capacity, so no token is dropped.
The loss that balances them is in `hosts/router.py`. Under `torch.compile` every expert computes every token (`_all`).

`configuration.py` refuses `experts` for a family with layers of its own. `cost.py` counts the parameters that a token
uses. `experiments/arms.py` replaces `as-large-as-ARM` by a number of experts. No family of
`checkpoints/families/registry.py` has these experts (`unlike`), so `form=native` is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..axes.host import to_host
from ..axes.numerics import widen
from .feed_forward import FeedForward

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig


class KeepsLogits:
    """Mixin for routers: keeps the router's logits of a forward pass until the layer takes them, immediately
    afterwards. A layer that is recomputed returns them again, and nothing is counted twice."""

    logits: Tensor | None = None

    def taken(self) -> Tensor:
        """Return the router's logits of the last forward pass, `[tokens, experts]`, and forget them."""
        logits, self.logits = self.logits, None
        assert logits is not None
        return logits


class SparseFeedForward(KeepsLogits, nn.Module):
    """A sparse MLP: experts that are each a small `FeedForward`, and a linear router."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.top_k = config.experts_per_token
        self.keeps = config.router_aux_loss_coef > 0
        self.router = nn.Linear(config.hidden_size, config.experts, bias=False)
        inner = config.intermediate_size // self.top_k
        self.experts = nn.ModuleList(FeedForward(config, inner) for _ in range(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the experts to hidden states `[B, T, hidden_size]`."""
        flat = x.flatten(0, -2)  # [N, D]
        logits = self.router(flat)  # [N, E]
        if self.keeps:
            self.logits = logits
        best, chosen = widen(logits).topk(self.top_k)  # [N, k]
        weights = best.softmax(-1).to(x.dtype)
        # The sizes of a compiled graph may not depend on what is computed.
        visit = self._all if torch.compiler.is_compiling() else self._sorted
        return visit(flat, weights, chosen).view(x.shape)

    def _sorted(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run each expert on the tokens that are routed to it."""
        count, experts = chosen.numel(), len(self.experts)
        if chosen.is_meta:  # which has no numbers: as if all experts were visited equally often
            sizes = [count // experts + (e < count % experts) for e in range(experts)]
        else:
            sizes = to_host((chosen.view(-1, 1) == torch.arange(experts, device=chosen.device)).sum(0))
        order = chosen.flatten().argsort(stable=True)  # [N k], a token's k copies by expert
        parts = x.index_select(0, order // self.top_k).split(sizes)
        # In training an expert without tokens is called too, so that all ranks have gradients of the same parameters.
        called = [self.experts[e](part) for e, part in enumerate(parts) if sizes[e] or torch.is_grad_enabled()]
        made = torch.cat(called).index_select(0, order.argsort())
        return (made.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def _all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every expert over every token."""
        share = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype, device=x.device).scatter(1, chosen, weights)
        made: Any = sum(expert(x) * share[:, e, None] for e, expert in enumerate(self.experts))
        return made


def feed_forward(config: DecoderConfig) -> nn.Module:
    """A layer's MLP, dense or sparse."""
    return SparseFeedForward(config) if config.experts else FeedForward(config, config.intermediate_size)
