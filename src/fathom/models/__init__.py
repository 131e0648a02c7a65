"""The decoder and its mechanisms. This folder is flat because it travels inside every exported checkpoint."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration import FathomConfig
from .modeling import FathomForCausalLM, FathomModel

__all__ = ["FathomConfig", "FathomForCausalLM", "FathomModel"]

AutoConfig.register(FathomConfig.model_type, FathomConfig, exist_ok=True)
AutoModel.register(FathomConfig, FathomModel, exist_ok=True)
AutoModelForCausalLM.register(FathomConfig, FathomForCausalLM, exist_ok=True)
# transformers' Trainer shifts labels for the classes named here, and its pipelines know them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FathomConfig.model_type] = FathomForCausalLM.__name__
