"""`early_loss`: train the predictions of early iterations as well, so that these can draft tokens
(`speculation.py`).

The loss:

    loss + w · mean over the iterations k before the last of CE(head(norm(r_k)))

The readout after iteration k equals that of the model with `max_trips=k + 1`. Off by default.

In a loop, `looping.py` refuses it with a coda, damping, `blend`, `growth` or an exit gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..axes.roles import Recurrence, RecurrenceOptions, TripState
from ..decoder.arithmetic import loss_flops
from ..decoder.loss import causal_lm_loss

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Out

NAME = "early{}"


@dataclass(frozen=True)
class EarlyLossOptions(RecurrenceOptions):
    """Options of a recurrence that can train on the predictions of early iterations too."""

    early_loss: float = 0.0
    """Weight w of the mean loss of earlier iterations' readouts; trains drafting (`generate(draft_trips=...)`)."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse a negative weight."""
        super().check(config)
        self.require("early_loss", self.early_loss >= 0, "not be negative")


class EarlyReadout(Recurrence):
    """Base class of recurrences that can train on the predictions of early iterations too."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.early_weight = float(EarlyLossOptions.of(config).early_loss)

    @classmethod
    def penalty_flops(cls, config: DecoderConfig, sequence_length: int) -> float:
        """FLOPs of the head and its gradients after every iteration but the last."""
        weight = EarlyLossOptions.of(config).early_loss
        early = (cls.trips_of(config) - 1) * loss_flops(config) if weight else 0
        return super().penalty_flops(config, sequence_length) + early

    def gate(self, out: Out, state: TripState) -> TripState:
        """Also keep each early iteration's hidden state for its loss."""
        new = super().gate(out, state)
        if self.training and self.early_weight and not out.last:
            new[NAME.format(out.trip)] = out.hidden
        return new

    def aux_losses(
        self, state: TripState, targets: Tensor, num_items_in_batch: Tensor | int | None, head: nn.Module
    ) -> dict[str, Tensor]:
        """The weight w times the mean loss of the early iterations' predictions."""
        terms = super().aux_losses(state, targets, num_items_in_batch, head)
        early: list[Tensor] = []
        while (name := NAME.format(len(early))) in state:  # a step may make more trips than `trips`
            early.append(state[name])
        if early:
            losses = [causal_lm_loss(hidden, head, targets, num_items_in_batch) for hidden in early]
            terms = {**terms, "early": self.early_weight * torch.stack(losses).mean()}
        return terms
