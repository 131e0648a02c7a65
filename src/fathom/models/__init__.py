"""The decoder and its mechanisms. This folder is flat, because every exported checkpoint contains a copy of it."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

from .configuration import FathomConfig
from .modeling import FathomForCausalLM, FathomModel
from .packages import add_mechanism

__all__ = ["FathomConfig", "FathomForCausalLM", "FathomModel", "add_mechanism"]

AutoConfig.register(FathomConfig.model_type, FathomConfig, exist_ok=True)
AutoModel.register(FathomConfig, FathomModel, exist_ok=True)
AutoModelForCausalLM.register(FathomConfig, FathomForCausalLM, exist_ok=True)
# transformers' Trainer shifts labels for the causal classes named here, and its pipelines know all of them.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FathomConfig.model_type] = FathomForCausalLM.__name__
