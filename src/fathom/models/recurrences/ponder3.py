"""`ponder3` (PonderLM-3): `ponder2` with a router that decides in advance how many latent thoughts a token gets.

The router:

    s = softmax(W h_0 + b)        w_k = Σ_{j>=k} s_j        iteration k runs iff w_k > τ        readout Σ_k s_k h_k

Every query that reads slot (t, k) adds log w_{t,k} to its logit, so a thought fades before it is cut, and the router
learns both from the mixture and from attention.

The penalty is λ Σ_k (mean of the lowest ρ_k of w_k) over the iterations k after the first. ρ_1 is the quality Q_1 of
the readout that stops before iteration 1; later, ρ_k = max(0, Q_k - Q_{k-1}), the quality that one more iteration has
added. The token at the edge of that share counts in part, so that the penalty is 0 where the quality is 0.

`pondering.py` draws the sample and the Jacobi rounds, `trips/slots.py` makes the rounds, and `axes/numerics.py`
(`lowest_mean`) takes the lowest share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ..axes.numerics import IGNORE, widen
from ..axes.roles import Cost, Mechanism, TripState, View, valid_mean
from ..decoder.loss import per_item
from .pondering import OVER, Sampled, SampleOptions, Solved, SolverOptions, lowest_sum, ramp, spread, trips_cost

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Out, Visit

PENALTIES = ("prefix_quality", "expected_trips", "none")


@dataclass(frozen=True)
class Ponder3Options(SolverOptions, SampleOptions):
    """Options of `ponder3`."""

    trips: int = 4
    """Maximum number of iterations of a token, the first included."""
    jacobi_train: list = field(default_factory=lambda: [4, 6])
    """`[least, most]`: range from which the number of Jacobi rounds of each training step is drawn."""
    jacobi_eval: int = 10
    """Number of Jacobi rounds of a forward pass without a cache."""
    tau: float = 1e-4
    """Threshold τ: an iteration is made only if its weight w is above τ."""
    router_bias: float = 0.0
    """Initial bias of iteration 0 in the router; at 20 no token makes a second iteration."""
    router_damping: float = 1.0
    """Share of a Jacobi round's new router output that the next round uses; below 1 the solver never becomes exact."""
    penalty: str = "prefix_quality"
    """Penalty: `prefix_quality`, `expected_trips` (Σ_k w_k, the expected number of latent thoughts) or `none`."""
    penalty_max: float = 0.1
    """Final weight λ of the penalty."""
    penalty_steps: list = field(default_factory=lambda: [1000, 4000])
    """Training steps between which λ grows from 0."""
    penalty_over: str = "row"
    """Whether the penalty takes its lowest tokens from every `row` or from the whole `batch`; the latter depends on the
    micro-batch size."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse invalid thresholds and penalties."""
        super().check(config)
        self.require_one_of("penalty", PENALTIES)
        self.require_one_of("penalty_over", OVER)
        self.require_range("penalty_steps")
        self.require("penalty_max", self.penalty_max >= 0, "not be negative")
        self.require("router_damping", 0 < self.router_damping <= 1, "lie in (0, 1]")
        self.require("tau", 0 < self.tau < 1, "lie between 0 and 1")


class Ponder3(Solved[Ponder3Options], Sampled[Ponder3Options]):
    """Feeds the normed hidden state back for as many latent thoughts as the router allots to a token."""

    options_class = Ponder3Options
    reads = View.ALL
    halts = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.router = nn.Linear(config.hidden_size, self.trips)
        self.weight = nn.Buffer(torch.zeros(()), persistent=False)  # current λ

    @classmethod
    def penalty_flops(cls, config: DecoderConfig, sequence_length: int) -> float:
        """FLOPs of the penalty `prefix_quality`, the only one that runs the head; 0 for other penalties."""
        options = Ponder3Options.of(config)
        asks = options.penalty == "prefix_quality" and options.penalty_max > 0
        return super().penalty_flops(config, sequence_length) if asks else 0.0

    def init_weights(self, std: float) -> None:
        """Initialise the router so that every token makes every iteration."""
        super().init_weights(std)
        init.zeros_(self.weight)
        width = self.router.weight.shape[1]
        init.trunc_normal_(self.router.weight, std=math.sqrt(2 / (5 * width)))
        bias = torch.zeros_like(self.router.bias)
        bias[0] = self.options.router_bias
        init.copy_(self.router.bias, bias)  # does not touch a bias that came from a checkpoint

    @property
    def scheduled(self) -> bool:
        """Whether the penalty grows over training, or the base class changes something over training."""
        return (self.options.penalty != "none" and self.options.penalty_max > 0) or super().scheduled

    def set_step(self, step: int, steps: int | None = None) -> None:
        """λ at this step."""
        super().set_step(step, steps)
        self.weight.fill_(self.options.penalty_max * ramp(step, *self.options.penalty_steps))

    def gate(self, out: Out, state: TripState) -> TripState:
        """Compute the router's shares s and weights w at iteration 0; at every iteration, add a term to the readout."""
        h, k = out.hidden, out.trip
        new: TripState = {}
        if k == 0:
            share = widen(self.router(h)).softmax(-1)  # [B, T, K+1]
            if "before" in state:
                share = torch.lerp(state["before"], share, self.options.router_damping)
            state = new = {"share": share, "tail": share.flip(-1).cumsum(-1).flip(-1)}
        share, tail = state["share"], state["tail"]
        # A token that a budget stops early reads out all remaining weight.
        new["hidden"] = spread(state.get("hidden"), tail[..., k] if out.last else share[..., k], h)
        alive = torch.zeros_like(tail[..., 0], dtype=torch.bool) if out.last else tail[..., k + 1] > self.options.tau
        new["alive"] = alive
        if self.training and not out.last:
            new |= {f"prefix{j}": new["hidden"].detach() for j in range(k, self.trips - 1)}
        return new

    def key_bias(self, state: TripState, trip: int) -> Tensor | None:
        """The attention bias log w for slots of the tokens that make this iteration."""
        tail = state["tail"][..., trip]
        return tail.where(tail > self.options.tau, 1).log()

    def carry(self, state: TripState) -> TripState | None:
        """The router's output, for damping."""
        return {"before": state["share"]} if self.options.router_damping < 1 else None

    def aux_losses(
        self, state: TripState, targets: Tensor, num_items_in_batch: Tensor | int | None, head: nn.Module
    ) -> dict[str, Tensor]:
        """The weight λ times the chosen penalty on latent thoughts."""
        kind = self.options.penalty
        if kind == "none" or self.trips == 1 or not self.options.penalty_max:
            return {}
        tail = state["tail"]
        if kind == "expected_trips":
            total = tail[..., 1:].sum(-1).where(targets != IGNORE, 0).sum()
        else:
            if "prefix0" not in state:
                return {}
            total, before = tail.new_zeros(()), None
            for k in range(1, self.trips):
                quality = self._quality(state[f"prefix{k - 1}"], targets, head)  # [B]
                fraction = quality if before is None else (quality - before).clamp(min=0)
                total = total + lowest_sum(tail[..., k : k + 1], targets, fraction, self.options.penalty_over)
                before = quality
        return {"penalty": self.weight.to(total.dtype) * per_item(total, targets, num_items_in_batch)}

    @torch.no_grad()
    def _quality(self, prefix: Tensor, targets: Tensor, head: nn.Module) -> Tensor:
        """A sequence's prediction quality, 1 - mean σ(10 (CE - 0.5)), measured on a sample of its tokens without
        gradient."""
        columns = self.sample(targets.shape[1])
        target = targets[:, columns]
        ce = F.cross_entropy(
            widen(head(prefix[:, columns])).flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="none"
        ).view_as(target)
        valid = target != IGNORE
        return (1 - (10 * (ce - 0.5)).sigmoid()).where(valid, 0).sum(1) / valid.sum(1).clamp(min=1)

    def metrics(self, state: TripState, targets: Tensor) -> dict[str, Tensor]:
        """Metrics to log: the mean number of iterations, and the router's entropy."""
        share = state["share"].detach().float()
        entropy = valid_mean(-(share * share.clamp(min=1e-9).log()).sum(-1), targets)
        return {**super().metrics(state, targets), "gate_entropy": entropy}


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost if no token stops: the stack for every latent thought, the router once, and a bias per slot."""
    width, trips = config.hidden_size, Ponder3Options.of(config).trips
    router = Cost(flops=2 * width * trips, cache_bytes=4 * trips)
    return trips_cost(config, visits, scalar, 0, (width + 1) * trips) + router


PONDER3 = Mechanism(
    name="ponder3",
    axis="recurrence",
    summary="a router says beforehand how many thoughts a token is worth",
    paper="arXiv 2603.02023",
    build=Ponder3,
    cost=cost,
    options=Ponder3Options,
)
