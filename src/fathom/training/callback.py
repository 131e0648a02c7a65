"""Schedules of mechanisms under transformers' own Trainer, which does not know of them."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class FollowSteps(TrainerCallback):
    """Tells every mechanism of a Fathom model how far training has come: `Trainer(..., callbacks=[FollowSteps()])`."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Before every optimizer step."""
        model = kwargs["model"]
        getattr(model, "module", model).set_step(state.global_step, state.max_steps)
