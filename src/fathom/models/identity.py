"""How far a pretrained model is from itself when a finite `self_bias` retrofits it with `depth_attention`.

The bias is added to the logit of a layer's own value. It dominates only while no earlier layer's logit exceeds the
layer's own by about as much, and that lead grows with the gains of the query and key norms, or without bound where
there are none. So it is measured.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .numerics import head_pool, widen

if TYPE_CHECKING:
    from .depth_attention import DepthAttention
    from .pretrained import FathomPreTrainedModel

LENGTH = 64
"""Tokens of the text that is measured."""
LARGEST_SHARE = 1e-3
"""Share of an earlier layer's value above which a warning is given."""


@torch.no_grad()
def largest_lead(model: FathomPreTrainedModel) -> float:
    """By how much an earlier layer's depth logit exceeds a layer's own at most, without the bias, on random tokens."""
    leads = [-math.inf]

    def measure(module: DepthAttention, given: tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]) -> None:
        query, key, _, sources = given
        if sources:
            query, key, sources = module.normed(query, key, sources)
            q = widen(head_pool(query, key.shape[1]))
            own, *others = ((q * widen(k)).sum(-1) for k in (key, *sources[::2]))
            leads.append(max(float((other - own).max()) for other in others) * query.shape[-1] ** -0.5)

    handles = [mixer.register_forward_pre_hook(measure) for mixer in _mixers(model)]
    size, training = min(LENGTH, model.config.max_position_embeddings), model.training
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, size), generator=draw).to(model.device)
    try:
        model.eval()
        model(input_ids=ids, use_cache=False)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return max(leads)


def _mixers(model: FathomPreTrainedModel) -> list[DepthAttention]:
    return [layer.self_attn.mixer for layer in model.base_model.layers]


def warn_if_not_itself(model: FathomPreTrainedModel) -> None:
    """Warn where the `self_bias` of a model that was just retrofitted does not dominate."""
    bias = _mixers(model)[0].initial_bias
    if not bias or any(parameter.is_meta for parameter in model.parameters()):
        return
    lead = largest_lead(model)
    if lead > bias + math.log(LARGEST_SHARE):
        enough = math.ceil(lead - math.log(1e-7))
        warnings.warn(
            f"mixer_options.self_bias={bias:g} does not dominate: in this checkpoint an earlier layer's depth logit "
            f"exceeds a layer's own by up to {lead:.1f}, so the model does not start as itself; "
            f"self_bias={enough} would do",
            stacklevel=3,
        )
