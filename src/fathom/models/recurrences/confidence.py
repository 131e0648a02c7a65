"""`exit_confidence`: a token halts once its most likely next token is probable enough. `fathom deepen --exit` sets it.

With z_k the logits of a token after iteration k, and τ the option:

    c_k = max_v softmax(z_k)_v          the token halts after the first iteration with c_k ≥ τ, or after the last

In decoding, a halted token is computed no more. Its readout is that of its last iteration. Iteration k of a later token
reads the keys and values which the halted token made in its last iteration, min(k, halt): the rule of the view SAME, in
one forward pass over a text as in decoding. Training makes all iterations.

`deepen/exits.py` chooses τ so that the loss rises by a bounded amount. `trips/walk.py` leaves halted tokens out of
decoding, in `generate` and `serve`; `trips/slots.py` keeps their readouts, and `trips/reading.py` has that rule.
`looping.py` refuses `exit_confidence` with a coda, `kv: first`, damping, `blend`, `growth` or an exit gate, and
`trips/engines.py` refuses engines that keep one key and value for each token. `exit_gate.py` is the trained gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..axes.roles import Recurrence, RecurrenceOptions, TripState
from ..decoder.loss import top_probability

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Out


@dataclass(frozen=True)
class ConfidenceOptions(RecurrenceOptions):
    """Options of a recurrence whose tokens may halt once their prediction is confident."""

    exit_confidence: float | None = None
    """Outside training, a token makes no further iteration once its likeliest next token has this probability; null:
    all make every iteration. `fathom deepen --exit` chooses it."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse anything but a probability."""
        super().check(config)
        self.require("exit_confidence", self.exit_confidence is None or 0 <= self.exit_confidence <= 1, "lie in 0..1")


class ConfidenceExit(Recurrence):
    """Base class of recurrences whose tokens halt once their prediction is confident, if `exit_confidence` is set."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.confidence = ConfidenceOptions.of(config).exit_confidence

    @classmethod
    def stops(cls, config: DecoderConfig) -> bool:
        """Whether tokens may halt early, because `exit_confidence` is set or as the base class decides."""
        return ConfidenceOptions.of(config).exit_confidence is not None or super().stops(config)

    @staticmethod
    def needs_head(config: DecoderConfig) -> bool:
        """Whether exits are on, since the probability of a token needs logits."""
        return ConfidenceOptions.of(config).exit_confidence is not None

    def gate(self, out: Out, state: TripState) -> TripState:
        """Compute the readout, and which tokens make another iteration: outside training from the logits after each
        iteration but the last."""
        new = super().gate(out, state)
        if self.confidence is None or out.last:
            return new
        if self.training:
            return new | {"alive": torch.ones_like(out.hidden[..., 0], dtype=torch.bool)}
        return new | {"alive": top_probability(out.hidden, out.projection) < self.confidence}
