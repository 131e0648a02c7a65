"""`adaponder` (AdaPonderLM): `ponder` with a gate after every iteration, by which tokens halt for good.

The gates:

    σ_k = sigmoid(MLP_k(h_k))      alive_{k+1} = alive_k · [σ_k >= τ]      x_{k+1} = x_k + alive_{k+1} σ_k μ_{k+1}

A halted token keeps the keys, values and output of its last iteration, which later iterations of other tokens read. The
gate multiplies the update, so cutting it at τ changes almost nothing, and training needs no gradient estimator for the
cut.

The penalty is λ times the mean of the lowest q of all gates: λ = `penalty_max`, with q growing from 0 to
`penalty_fraction` over `penalty_span`. A halted token's gates count as 0, so the penalty has no gradient once a share q
of all gates is closed: q sets the share of further iterations to save.

`halting` names the arms by which the paper argues: `shared` is one MLP for all iterations, `uniform` and `geometric`
fix the share of tokens that make iteration k, with s = `kept` the share that makes the last of K further iterations:

    uniform     1 - (1 - s) k / K          geometric     s^(k/K)

There σ = 1, nothing is learned and nothing penalised. Who makes iteration k depends on the token's position t alone:
those with frac(t φ) below the share, φ the golden ratio, which spreads any share evenly over the text.

With `blend` λ the update is λ σ_k μ_{k+1}. At λ = 0 every iteration repeats the first one, whatever the gates say.

Training computes halted tokens and discards them; with `skip_dead_rows` it leaves them out (`roles.py` chooses,
`walk.py` does it).

With `trips: 1` or shut gates the model computes what the vanilla decoder does. A gate that is shut for all tokens stays
shut, because no gradient of the cross-entropy reaches it.

`trips/slots.py` keeps a halted token's output, and counts its later gates as 0 (`TokenSubset.put`). `trips/walk.py`
leaves halted tokens out of decoding, and `trips/reading.py` decides which of their iterations other tokens read.
`pondering.py` has `top_k`, `temperature`, `mixture_gain` and the gates' MLP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..axes.blend import Blended, BlendOptions
from ..axes.numerics import widen
from ..axes.roles import Cost, HaltingOptions, Mechanism, TripState, valid_mean
from ..decoder.loss import per_item
from .pondering import (
    OVER,
    GateMLP,
    MixtureOptions,
    Pondering,
    entropy,
    gate_mlp_size,
    lowest_sum,
    mixed,
    mixture_cost,
    ramp,
    trips_cost,
)

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Out, Visit


@dataclass(frozen=True)
class AdaponderOptions(MixtureOptions, HaltingOptions, BlendOptions):
    """Options of `adaponder`."""

    learns = False

    trips: int = 4
    """Largest number of iterations of a token, the first included."""
    halting: str = "own"
    """Who decides which tokens continue: an MLP for each iteration (`own`), one for all (`shared`), or a fixed schedule
    (`uniform`, `geometric`)."""
    kept: float = 0.85
    """Share of the tokens that make the last iteration under a fixed schedule; with `uniform` the default gives 3.7 of
    4 iterations on average."""
    tau: float = 1e-4
    """Threshold τ: a token halts when its gate falls below it."""
    gate_bias: float = 2.0
    """Initial logit of the gates: positive means open, and at -20 no token makes a second iteration."""
    penalty_max: float = 0.1
    """Weight λ of the penalty."""
    penalty_fraction: float = 0.1
    """Final q: the share of all gates that the penalty closes."""
    penalty_span: list = field(default_factory=lambda: [0.1, 0.3])
    """Fractions of training between which q grows."""
    penalty_on: str = "sigmoid"
    """The gate in the penalty: `sigmoid`, whose gradient fades just before the threshold τ, or the `logit`, whose
    gradient does not."""
    penalty_over: str = "row"
    """Take the lowest gates of each `row`, or of the `batch`: the paper's choice, whose result depends on how batches
    are split."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse invalid thresholds and penalties."""
        super().check(config)
        span = self.penalty_span
        numbers = len(span) == 2 and all(isinstance(x, int | float) for x in span)
        self.require("penalty_span", numbers and 0 <= span[0] <= span[1] <= 1, "be two fractions of training")
        self.require_one_of("penalty_over", OVER)
        self.require_one_of("penalty_on", ("sigmoid", "logit"))
        self.require("penalty_max", self.penalty_max >= 0, "not be negative")
        self.require("penalty_fraction", 0 <= self.penalty_fraction <= 1, "lie in 0..1")
        self.require("tau", 0 < self.tau < 1, "lie between 0 and 1")
        self.require_one_of("halting", HALTINGS)
        self.require("kept", 0 < self.kept <= 1, "lie in (0, 1]")

    @property
    def gate_count(self) -> int:
        """The number of gates."""
        return {"own": self.trips - 1, "shared": 1}.get(self.halting, 0) if self.trips > 1 else 0

    def share(self, trip: int) -> float:
        """The share of tokens that make iteration number `trip` under a fixed halting schedule."""
        done = trip / (self.trips - 1)
        return self.kept**done if self.halting == "geometric" else 1 - (1 - self.kept) * done


HALTINGS = ("own", "shared", "uniform", "geometric")
GOLDEN = 2654435769
"""2³² / φ: its multiples modulo 2³² are spread evenly. Whole numbers, which every machine compares alike."""


class Adaponder(Blended, Pondering[AdaponderOptions]):
    """Adds a gated vocabulary mixture to a token's input at each iteration, until the gate falls below τ."""

    options_class = AdaponderOptions
    halts = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.gates = nn.ModuleList(GateMLP(config.hidden_size) for _ in range(self.options.gate_count))
        self.learns = self.options.halting in ("own", "shared")
        # a tensor, because a Python number that changes every step would trigger a recompilation every step
        self.fraction = nn.Buffer(torch.zeros(()), persistent=False)

    @classmethod
    def additions(cls, config: DecoderConfig) -> int:
        """The number of iterations that add to one residual stream: all of them."""
        return cls.trips_of(config)

    @staticmethod
    def needs_head(config: DecoderConfig) -> bool:
        """True, because the vocabulary mixture is computed from logits."""
        return True

    def init_weights(self, std: float) -> None:
        """Initialise the gates open: a bias, and a last layer with small weights."""
        super().init_weights(std)
        init.zeros_(self.fraction)
        for gate in self.gates:
            assert isinstance(gate, GateMLP)
            gate.init_weights(std, self.options.gate_bias)

    @classmethod
    def progress(cls, config: DecoderConfig, step: int, steps: int) -> tuple[float, ...]:
        """How far the penalty has grown."""
        grown = ramp(step / steps, *AdaponderOptions.of(config).penalty_span)
        return (*super().progress(config, step, steps), grown)

    @property
    def scheduled(self) -> bool:
        """Whether the penalty grows over training, or the base class changes something over training."""
        penalised = self.learns and self.options.penalty_max * self.options.penalty_fraction > 0
        return penalised or super().scheduled

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Set the fraction q of penalised gates for this point of training."""
        super().set_step(step, steps)
        if steps:  # without the number of steps, the fraction of training is unknown
            grown = ramp(step / steps, *self.options.penalty_span)
            self.fraction.fill_(self.options.penalty_fraction * grown)

    def gate(self, out: Out, state: TripState) -> TripState:
        """σ_k, and which tokens continue."""
        if out.last:
            return {"hidden": out.hidden}
        if not self.learns:
            assert out.positions is not None
            turn = state["turn"] if out.trip else out.positions.expand(out.residual.shape[:2]) * GOLDEN % (1 << 32)
            alive = turn < round(self.options.share(out.trip + 1) * (1 << 32))
            return {"hidden": out.hidden, "alive": alive, "turn": turn}
        gate = self.gates[0 if self.options.halting == "shared" else out.trip]
        sigma = widen(gate(out.hidden).squeeze(-1)).sigmoid()
        alive = sigma >= self.options.tau
        return {"hidden": out.hidden, "sigma": sigma, "alive": alive, f"gate{out.trip}": sigma}

    def feed(self, x: Tensor, out: Out, state: TripState) -> Tensor:
        """x_k + σ_k μ_{k+1}."""
        update = mixed(out, self.options)
        return x + self.opened(state["sigma"].unsqueeze(-1).to(x.dtype) * update if self.learns else update)

    def _gates(self, state: TripState) -> Tensor | None:
        found = [state[f"gate{k}"] for k in range(self.trips - 1) if f"gate{k}" in state]
        return torch.stack(found, -1) if found else None  # [B, T, K]; 0 where a token had halted before

    def aux_losses(
        self, state: TripState, targets: Tensor, num_items_in_batch: Tensor | int | None, head: nn.Module
    ) -> dict[str, Tensor]:
        """The penalty: λ times the mean of the lowest fraction q of all gates."""
        gates = self._gates(state)
        if gates is None or not self.options.penalty_max:
            return {}
        if self.options.penalty_on == "logit":
            gates = gates.clamp(self.options.tau, 1 - 1e-6).logit()
        total = lowest_sum(gates, targets, self.fraction.to(gates.dtype), self.options.penalty_over)
        return {"penalty": self.options.penalty_max * per_item(total, targets, num_items_in_batch)}

    def metrics(self, state: TripState, targets: Tensor) -> dict[str, Tensor]:
        """Mean iterations, the gates' entropy, and the shares of gates that are closed or nearly closed.

        If a strong penalty shuts all gates, `gates_shut` rises to 1 and `trips` (of the base class) falls to 1.
        """
        gates = self._gates(state)
        found = super().metrics(state, targets)
        if gates is not None:
            gates = gates.detach()
            found["gate_entropy"] = valid_mean(entropy(gates), targets)
            found["gates_below_-4"] = valid_mean(gates < 1 / (1 + math.exp(4)), targets)
            found["gates_shut"] = valid_mean(gates < self.options.tau, targets)
        return found


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost if no token halts: the layers, a mixture and a gate for every extra iteration."""
    gates, (parameters, flops) = AdaponderOptions.of(config).gate_count, gate_mlp_size(config.hidden_size)
    stack = trips_cost(config, visits, scalar, flops if gates else 0, gates * parameters)
    return stack + mixture_cost(config, visits)


ADAPONDER = Mechanism(
    name="adaponder",
    axis="recurrence",
    summary="ponder until a gate shuts",
    paper="arXiv 2603.01914",
    build=Adaponder,
    cost=cost,
    options=AdaponderOptions,
    closed={"blend": 0.0},
)
