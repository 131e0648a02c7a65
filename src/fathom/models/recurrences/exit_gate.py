"""`exit`: a gate that chooses for each token the iteration whose prediction is used (Ouro). Off by default.

With h_k the readout after iteration k, counted from 0, K the last iteration, and CE_k the cross-entropy of h_k:

    λ_k = σ(w · h_k + b)          p_k = λ_k Π_{j<k} (1 - λ_j),  p_K = Π_{j<K} (1 - λ_j)

    read out      h_k of the first k with p_0 + … + p_k ≥ `exit_threshold`; the last iteration's with a threshold of 1
    joint         loss = Σ_k p_k CE_k - β H(p)
    gate          loss = CE_K + mean over k ≥ 1 of BCE(1 - λ_k, w_k)       w_k = σ(50 (max(0, CE_{k-1} - CE_k) - 0.005))

`joint` trains everything; `gate` is for a model whose other weights are frozen, and its targets w_k get no gradient.

All iterations of all tokens are made, because later tokens read the keys and values of each iteration. So a threshold
changes what is read out and not what it costs, and decoding equals prefill.

`looping.py` refuses the options of a loop that exclude an exit gate (`coda`, `damping`, `blend`, `growth`,
`early_loss`, `exit_confidence`).

`confidence.py` is the other exit: by the confidence of a readout, without a gate. It saves compute, and
`fathom deepen --exit` (`deepen/exits.py`) chooses its threshold. `families/ouro.py` opens Ouro's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..axes.numerics import widen
from ..axes.roles import Recurrence, RecurrenceOptions, TripState
from ..decoder.arithmetic import head_flops
from ..decoder.loss import target_mean, token_losses

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Out

LOSSES = ("none", "joint", "gate")
HIDDEN, LOGIT = "exit_hidden{}", "exit_logit{}"
ROUNDING = 2.0**-20
"""The amount by which a sum of probabilities may differ from the gate's own product in float32."""
SLOPE, GAIN = 50.0, 0.005
"""The slope of w_k, and the gain in nats from which a further trip is worth making."""


@dataclass(frozen=True)
class ExitOptions(RecurrenceOptions):
    """Options of a recurrence with an exit gate, which may choose an early iteration's prediction for a token."""

    exit: str = "none"
    """The loss that trains the exit gate: `none` (no gate), `joint` or `gate` (Ouro)."""
    exit_threshold: float = 1.0
    """A token is read out after the first iteration at which the exit probabilities reach this sum; 1 means the last
    iteration."""
    exit_entropy: float = 0.05
    """β: weight of the entropy of the exit distribution in the loss, `joint` only."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse an unknown `exit`, and invalid thresholds and weights."""
        super().check(config)
        self.require_one_of("exit", LOSSES)
        self.require("exit_threshold", 0 < self.exit_threshold <= 1, "lie above 0 and be at most 1")
        self.require("exit_entropy", self.exit_entropy >= 0, "not be negative")

    @property
    def exits(self) -> bool:
        """Whether there is a gate."""
        return self.exit != "none"


class ExitGate(Recurrence):
    """Base class of recurrences that have an exit gate if the option `exit` is set."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.exit = ExitOptions.of(config)
        self.exit_gate = nn.Linear(config.hidden_size, 1) if self.exit.exits else None

    def init_weights(self, std: float) -> None:
        """Initialise the gate to exit with probability ½ at every iteration."""
        super().init_weights(std)
        if self.exit_gate is not None:
            init.zeros_(self.exit_gate.weight)
            init.zeros_(self.exit_gate.bias)

    @classmethod
    def penalty_flops(cls, config: DecoderConfig, sequence_length: int) -> float:
        """FLOPs that training adds for the head after every iteration. With `joint` forward, recomputation and backward
        replace those of the last iteration; with `gate` only forward passes are added."""
        options = ExitOptions.of(config)
        heads = {"none": 0, "joint": 4 * options.trips - 3, "gate": options.trips}[options.exit]
        return super().penalty_flops(config, sequence_length) + heads * head_flops(config)

    def gate(self, out: Out, state: TripState) -> TripState:
        """In training, keep each iteration's hidden state and gate logit; otherwise keep the hidden state that the
        threshold selects."""
        new = super().gate(out, state)
        if self.exit_gate is None:
            return new
        if self.training:
            return new | {HIDDEN.format(out.trip): out.hidden, LOGIT.format(out.trip): self.logit(out.hidden)}
        if self.exit.exit_threshold == 1:
            return new
        left = state.get("left")  # Π (1 - λ_j) of the earlier trips
        if left is not None:
            going = 1 - left < self.exit.exit_threshold
            new["hidden"] = torch.where(going.unsqueeze(-1), out.hidden, state["hidden"])
        if not out.last:
            stays = F.logsigmoid(-self.logit(out.hidden)).exp()
            new["left"] = stays if left is None else left * stays
        return new

    def logit(self, hidden: Tensor) -> Tensor:
        """The exit gate's logit w · h + b, `[B, T]`, in at least float32."""
        assert self.exit_gate is not None
        return widen(self.exit_gate(hidden)).squeeze(-1)

    def weighted_readouts(self, state: TripState) -> list[tuple[Tensor, Tensor]] | None:
        """With `joint`, each iteration's hidden state and exit probability; None otherwise."""
        if self.exit.exit != "joint":
            return super().weighted_readouts(state)
        hidden, logits = readouts(state)
        return [(h, log_p.exp()) for h, log_p in zip(hidden, log_exits(logits), strict=True)]

    def aux_losses(
        self, state: TripState, targets: Tensor, num_items_in_batch: Tensor | int | None, head: nn.Module
    ) -> dict[str, Tensor]:
        """The entropy term -β H(p) with `joint`, or the gate's own loss with `gate`."""
        terms = super().aux_losses(state, targets, num_items_in_batch, head)
        hidden, logits = readouts(state)
        if self.exit.exit == "joint":
            log_p = torch.stack(log_exits(logits))
            entropy = -(log_p.exp() * log_p).sum(0)
            terms["exit_entropy"] = -self.exit.exit_entropy * target_mean(entropy, targets, num_items_in_batch)
        if self.exit.exit == "gate" and len(hidden) > 1:
            losses = [token_losses(h, head, targets) for h in hidden]
            gains = [(before - after).clamp(min=0) for before, after in pairwise(losses)]
            wanted = [torch.sigmoid(SLOPE * (gain - GAIN)) for gain in gains]
            each = [
                F.binary_cross_entropy_with_logits(-logit, onward, reduction="none")  # σ(-logit) = 1 - λ
                for logit, onward in zip(logits[1:], wanted, strict=True)
            ]
            terms["exit_gate"] = target_mean(torch.stack(each).mean(0), targets, num_items_in_batch)
        return terms


def readouts(state: TripState) -> tuple[list[Tensor], list[Tensor]]:
    """Each iteration's hidden state `[B, T, hidden_size]` and gate logit `[B, T]`; empty lists without a gate."""
    count = sum(name.startswith(LOGIT.format("")) for name in state)
    return [state[HIDDEN.format(k)] for k in range(count)], [state[LOGIT.format(k)] for k in range(count)]


def log_exits(logits: list[Tensor]) -> list[Tensor]:
    """The log-probability of exiting at each iteration; the last iteration's gate is not used."""
    found, left = [], torch.zeros_like(logits[0])
    for logit in logits[:-1]:
        found.append(left + F.logsigmoid(logit))
        left = left + F.logsigmoid(-logit)
    return [*found, left]


def threshold_for(probabilities: Tensor, trips: float) -> float:
    """The largest `exit_threshold` with which tokens exit after at most `trips` iterations on average.

    Args:
        probabilities: p_k of held-out tokens, `[tokens, trips]`; its rows add up to 1.
        trips: The mean, the first iteration included, between 1 and the number of iterations.
    """
    if not 1 <= trips <= probabilities.shape[1]:
        raise ValueError(f"trips must lie in 1..{probabilities.shape[1]}, got {trips}")
    reached = probabilities.double().cumsum(1)[:, :-1]  # a token makes another trip if this is below the threshold
    onward = (trips - 1) * len(reached)
    ordered = reached.flatten().sort().values
    if onward >= len(ordered):
        return 1.0
    threshold = float(ordered[int(onward)]) - ROUNDING
    if threshold <= 0:
        raise ValueError(f"trips={trips}: no threshold lets so many tokens exit so early; allowed: a larger mean")
    return threshold
