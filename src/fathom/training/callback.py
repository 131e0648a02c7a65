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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: object
    ) -> None:
        """Before an evaluation at the start, and in a resumed training that has no further step."""
        _tell(model, state.global_step, state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: object
    ) -> None:
        """Before every optimizer step."""
        _tell(model, state.global_step, state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: object
    ) -> None:
        """After it, before the Trainer evaluates and saves."""
        _tell(model, state.global_step, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: object
    ) -> None:
        """After `load_best_model_at_end`, schedules return to the best checkpoint's step."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None and state.best_global_step:
            _tell(model, state.best_global_step, state)


def _tell(model: nn.Module, step: int, state: TrainerState) -> None:
    inner = cast("FathomForCausalLM", getattr(model, "module", model))
    inner.set_step(step, state.max_steps)
