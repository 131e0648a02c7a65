"""The plugin that vLLM loads in each of its processes, so that it finds Fathom's models without remote code.

The transformers backend of vLLM puts its own attention, linear layers and embeddings into a transformers model and
keeps one key-value cache per layer. It looks the class up as an attribute of `transformers`, asks whether it is
compatible, and opens it with `AutoModel.from_config`. A model of several trips needs a cache for every visit
(`vllm_model.py`); one that needs slots refuses to run there (`models/trips/engines.py`). Nothing of vLLM is imported
here.

`vllm_model.py` refuses pipeline parallelism. Without this plugin, vLLM runs the code that an export contains
(`checkpoints/export.py`), as SGLang does, and `models/trips/engines.py` in it refuses models of several iterations.
"""

from __future__ import annotations

import sys

from fathom.models import FathomForCausalLM  # the import registers the models with transformers


def register() -> None:
    """Register Fathom's models with transformers, and thereby with vLLM. The entry point of `vllm.general_plugins`."""
    # transformers replaces its own module during import, and vLLM's registry may hold the earlier one.
    registry = sys.modules.get("vllm.model_executor.models.registry")
    for module in (sys.modules["transformers"], getattr(registry, "transformers", None)):
        if module is not None:
            setattr(module, FathomForCausalLM.__name__, FathomForCausalLM)
    if registry is not None:
        where = "fathom.inference.vllm_model:FathomForVllm"
        registry.ModelRegistry.register_model(FathomForCausalLM.__name__, where)
