"""Fathom's decoder for vLLM's transformers backend, with one cache layer per layer pass: a looped layer has one for
each iteration.

This file is imported by vLLM, by the name that `vllm_plugin.py` registers; the module needs vLLM.

`models/trips/engines.py` decides which recurrences an inference engine runs, and refuses the others.
`models/configuration.py` says how layers are split for tensor parallelism (`_tensor_parallel_plan`). `served_trips` in
`models/modeling.py` is the number of iterations that an engine makes. Compressed caches (`kvcache/`) are not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from vllm.model_executor.models.transformers import TransformersForCausalLM

from fathom.models import FathomConfig
from fathom.models.modeling import FathomModel
from fathom.models.trips.engines import engine_config
from fathom.models.trips.slots import plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's compiler binds arguments by the signature, which `by_any_name` takes from the method that it wraps.
FathomModel.forward = FathomModel.forward.__wrapped__  # type: ignore[method-assign]


class FathomForVllm(TransformersForCausalLM):
    """Fathom's model for vLLM, with any mechanism whose loop iterations do not read one another."""

    text_config: FathomConfig

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                "Fathom's models cannot be split over pipeline stages: a layer reads outputs of earlier layers, which "
                "vLLM does not pass to the next stage. Use --tensor-parallel-size, or several servers"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if hasattr(self.model, "lm_head"):  # for a recurrence that reads logits: the head that vLLM has loaded
            self.model.lm_head = _Head(self)

    def _create_attention_instances(self, prefix: str = "") -> None:
        whole = self.text_config
        self.text_config = engine_config(whole, plan(whole, self.model.served_trips))
        try:
            super()._create_attention_instances(prefix)
        finally:
            self.text_config = whole


class _Head(nn.Module):
    """Maps hidden states to logits with vLLM's own head."""

    def __init__(self, owner: FathomForVllm) -> None:
        super().__init__()
        self.__dict__["owner"] = owner  # a plain reference, because the head holds this module

    def forward(self, hidden: Tensor) -> Tensor:
        owner = self.__dict__["owner"]
        return owner.compute_logits(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
