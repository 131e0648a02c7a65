"""Heads for other tasks: a label per sequence, a label per token, or an answer span.

transformers' generic classes around `FathomModel`. They train with their task's loss only, without the terms that a
recurrence adds to a language model's loss (`aux_losses`).
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from .configuration import FathomConfig
from .modeling import FathomModel
from .pretrained import FathomPreTrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FathomWithHead(FathomPreTrainedModel):
    """Base of these heads: also opens a language model's checkpoint, with an untrained head."""

    def __init__(self, config: FathomConfig) -> None:
        # Not the generic classes' own __init__: it calls `AutoModel`, which would ask for trust_remote_code again.
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = FathomModel(config)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str] | None, *args: object, **kwargs: object
    ) -> PreTrainedModel:
        """Like every Fathom model; the head may be missing. A recurrence that reads logits keeps its `lm_head`."""
        kwargs.setdefault("key_mapping", {r"^lm_head\.": "model.lm_head."})
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


class FathomForSequenceClassification(GenericForSequenceClassification, FathomWithHead):
    """A label per sequence, read at its last token that is not padding; `num_labels=1` is a regression."""

    task_layers = ("score.",)

    def __init__(self, config: FathomConfig) -> None:
        FathomWithHead.__init__(self, config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class FathomForTokenClassification(GenericForTokenClassification, FathomWithHead):
    """A label per token, after a dropout of 0.1 unless `classifier_dropout` is set."""

    task_layers = ("score.",)

    def __init__(self, config: FathomConfig) -> None:
        FathomWithHead.__init__(self, config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class FathomForQuestionAnswering(GenericForQuestionAnswering, FathomWithHead):
    """The first and the last token of an answer."""

    task_layers = ("qa_outputs.",)

    def __init__(self, config: FathomConfig) -> None:
        FathomWithHead.__init__(self, config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()
