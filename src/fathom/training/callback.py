"""A callback for transformers' Trainer that tells mechanisms with a schedule the current training step.

Without it, `models/pretrained.py` (`expect_steps`) stops a training with `blend_steps` at its second forward pass. In
your own loop, call `model.set_step(step, steps)` before each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from fathom.models import FathomForCausalLM


class FollowSteps(TrainerCallback):
    """Tells every mechanism of a Fathom model how far training has come: `Trainer(..., callbacks=[FollowSteps()])`."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: object
    ) -> None:
        """Before every optimizer step."""
        inner = cast("FathomForCausalLM", getattr(model, "module", model))
        inner.set_step(state.global_step, state.max_steps)
