"""What vLLM loads in each of its processes, so that it finds Fathom's models without running code of a checkpoint.

vLLM's transformers backend puts its own attention, linear layers and embeddings into a transformers model and keeps
one key-value cache per layer. It looks the class up as an attribute of `transformers`, asks whether it is compatible,
and opens it with `AutoModel.from_config`. Nothing of vLLM is imported here.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoModel

import fathom
from fathom.models import FathomConfig, FathomForCausalLM, FathomModel
from fathom.models.slots import plan


class FathomModelForVllm(FathomModel):
    """The decoder, which refuses what vLLM would compute wrongly without a word."""

    def __init__(self, config: FathomConfig, *args: Any, **kwargs: Any) -> None:
        trips = len(plan(config))
        if trips > 1 and str(config._attn_implementation).startswith("vllm"):
            plain = config.recurrence == "loop" and config.mixer == "none" and config.residual == "plain"
            raise ValueError(
                f"vLLM keeps one cache per layer, and {config.recurrence} makes {trips} trips, each with keys and "
                "values of its own: use `fathom serve`" + (" or `fathom export --as unrolled`" if plain else "")
            )
        super().__init__(config, *args, **kwargs)


def register() -> None:
    """Make Fathom's models known to transformers and so to vLLM. The entry point of `vllm.general_plugins`."""
    fathom.register()
    AutoModel.register(FathomConfig, FathomModelForVllm, exist_ok=True)
    # transformers replaces its own module while it is imported, and vLLM's registry may hold the one from before.
    registry = sys.modules.get("vllm.model_executor.models.registry")
    for module in (sys.modules["transformers"], getattr(registry, "transformers", None)):
        if module is not None:
            setattr(module, FathomForCausalLM.__name__, FathomForCausalLM)
