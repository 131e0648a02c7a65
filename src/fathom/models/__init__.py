"""The decoder and its mechanisms. This folder is flat, because every exported checkpoint contains a copy of it."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto import modeling_auto

from .configuration import FathomConfig
from .heads import FathomForQuestionAnswering, FathomForSequenceClassification, FathomForTokenClassification
from .modeling import FathomForCausalLM, FathomModel
from .packages import add_mechanism

__all__ = [
    "FathomConfig",
    "FathomForCausalLM",
    "FathomForQuestionAnswering",
    "FathomForSequenceClassification",
    "FathomForTokenClassification",
    "FathomModel",
    "add_mechanism",
]

AutoConfig.register(FathomConfig.model_type, FathomConfig, exist_ok=True)
AutoModel.register(FathomConfig, FathomModel, exist_ok=True)
# transformers' Trainer shifts labels for the causal classes named here, and its pipelines know all of them.
for auto, model, names in (
    (AutoModelForCausalLM, FathomForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (
        AutoModelForSequenceClassification,
        FathomForSequenceClassification,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    (
        AutoModelForTokenClassification,
        FathomForTokenClassification,
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ),
    (
        AutoModelForQuestionAnswering,
        FathomForQuestionAnswering,
        modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    ),
):
    auto.register(FathomConfig, model, exist_ok=True)
    names[FathomConfig.model_type] = model.__name__
