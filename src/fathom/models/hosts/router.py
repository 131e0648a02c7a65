"""The loss that balances the load of experts, computed per loop iteration: a family's own, or Qwen3-MoE's for Fathom's
layers.

Over the visits of all iterations pooled it would be blind: a first iteration that sends everything to one expert and a
second that sends everything to another balance each other.

`modeling.py` adds the loss as `router`, and reports the busiest expert's load over its even share as `expert_load`.
Families whose class has no balancing loss get none. In evaluation there is no such loss. Nothing changes
`e_score_correction_bias` in training.

`decoder/experts.py` routes tokens to experts in Fathom's own layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..axes.fields import DecoderConfig
from ..decoder.experts import KeepsLogits
from .mixed import Made, mixed


class Router(Made, KeepsLogits):
    """Mixin for a family's router that keeps its logits."""

    top_k: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Route like the family's own router, and keep its logits."""
        made = super().forward(*args, **kwargs)  # type: ignore[misc]
        self.logits = made[0]
        return made


@dataclass(frozen=True)
class Balance:
    """The loss of one iteration."""

    function: Callable[..., Tensor]
    """The family's, which wants logits `[tokens, experts]` by layer, experts, choices and a mask."""
    coefficient: float
    top_k: int

    def __call__(self, logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """The balancing loss and the `load`, stacked, from the router logits `[B, T, experts]` of all layers with a
        router. `mask` `[B, T]` says which tokens count, and at least one does."""
        flat = tuple(one.flatten(0, 1) for one in logits)
        loss = self.coefficient * self.function(flat, flat[0].shape[-1], self.top_k, mask)
        return torch.stack((loss, self.load(torch.stack(flat).detach(), mask).to(loss.dtype)))

    def load(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """The busiest expert's number of tokens relative to an even share, averaged over layers, from logits `[layers,
        tokens, experts]`."""
        chosen = torch.zeros_like(logits).scatter_(-1, logits.topk(self.top_k, -1).indices, 1)
        counts = (chosen if mask is None else chosen * mask.flatten().unsqueeze(-1)).sum(1)  # [layers, experts]
        return (counts.amax(-1) / counts.mean(-1)).mean()


def adopt_routers(decoder: PreTrainedModel) -> Balance | None:
    """Prepare a family's routers for its own expert-balancing loss, and return it; None if it has none or does not use
    it."""
    config, module = decoder.config, inspect.getmodule(type(decoder))
    function = getattr(module, "load_balancing_loss_func", None)
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if function is None or not coefficient or not getattr(config, "output_router_logits", False):
        return None
    recorded = type(decoder)._can_record_outputs
    if "router_logits" not in recorded:  # Granite's hybrid before 5.23, whose own loss is then 0
        raise ValueError(
            f"{config.model_type}: transformers {transformers.__version__} records no router logits, so there is no "
            "load-balancing loss: install a later version, or set output_router_logits to false"
        )
    kind = recorded["router_logits"].target_class
    found = None
    for layer in decoder.layers:
        layer.routes = True
        for name, part in layer.named_modules():
            if isinstance(part, kind):
                part.__class__ = mixed(Router, kind, kind.__name__)
                layer.routed_by, found = name, part
    return None if found is None else Balance(function, float(coefficient), cast(Any, found).top_k)


def mean_of_trips(losses: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Average `Balance` results over those iterations that some token made; each comes with whether one did (None: all
    did)."""
    made = [loss.new_ones(()) if any_ is None else any_.to(loss.dtype) for loss, any_ in losses]
    total = sum(loss * one for (loss, _), one in zip(losses, made, strict=True))
    return cast(Tensor, total) / torch.stack(made).sum().clamp(min=1)


class Routing:
    """Mixin for layers that return their router's logits if `routes` is set."""

    routes = False
    """Whether the walk wants the logits of routers."""
    routed_by = ""
    """The name of the module that keeps them, which no family may use; empty in a layer that has none."""

    def with_logits(self, made: tuple[Any, ...], shape: torch.Size) -> tuple[Any, ...]:
        """Insert the router's logits `[B, T, experts]` (None without a router) before key and value in a layer's
        outputs."""
        logits = None
        if self.routed_by:
            logits = cast(Any, self).get_submodule(self.routed_by).taken().view(*shape, -1)
        return *made[:-2], logits, *made[-2:]


def balance_of(config: DecoderConfig, layers: nn.ModuleList) -> Balance | None:
    """Prepare Fathom's own layers for the expert-balancing loss of Qwen3-MoE over all layers of an iteration, and
    return it; None without experts or a coefficient."""
    if not config.experts or not config.router_aux_loss_coef:
        return None
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    for layer in layers:
        layer.routes, layer.routed_by = True, "mlp"  # type: ignore[assignment]
    return Balance(load_balancing_loss_func, config.router_aux_loss_coef, config.experts_per_token)
