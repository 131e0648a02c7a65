"""`latent_cot` (token-level adaptive latent chain of thought): a router decides after each latent thought whether a
token makes another.

The recurrence:

    x_{k+1} = h_k        g_k = sigmoid(w·h_k + b)        R_0 = 1,  R_{k+1} = R_k g_k        go on iff R_{k+1} > τ
    readout Σ_k q_k h_k  with  q_k = R_k - R_{k+1},  and all that is left for the last iteration

With `blend` λ the readout is h_0 + λ (Σ_k q_k h_k - h_0).

With `router: mlp`, the paper's ablation, g_k is the sigmoid of a two-layer MLP of h_k.

Iteration k reads iterations up to k of earlier tokens (view DUO), so all tokens make it at once, exactly.

The penalty charges for going on in proportion to the probability p that the true next token already has:
λ · mean_t Σ_k p(h_k)^β R_{k+1}, without gradient through p.

With `trips: 1` or a shut router the readout is h_0, which is what the vanilla decoder computes.

`trips/slots.py` keeps a halted token's readout, `trips/reading.py` decides what an iteration reads (view DUO), and
`cost.py` counts its attention scores. `pondering.py` draws the tokens on which the penalty is measured. `lens/look.py`
shows the prediction of each iteration by itself, so its last row differs from the output, which is the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..axes.blend import Blended, BlendOptions
from ..axes.numerics import IGNORE, widen
from ..axes.roles import Cost, HaltingOptions, Mechanism, TripState, View, valid_mean
from ..decoder.loss import per_item
from .pondering import GateMLP, Sampled, SampleOptions, entropy, gate_mlp_size, spread, trips_cost

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Out, Visit


@dataclass(frozen=True)
class LatentCotOptions(SampleOptions, HaltingOptions, BlendOptions):
    """Options of `latent_cot`."""

    learns = False

    trips: int = 4
    """Maximum number of iterations of a token, the first included."""
    tau: float = 1e-2
    """Threshold τ: a token stops when its remaining share R falls below τ."""
    router: str = "linear"
    """Router: `linear`, or a two-layer `mlp`. All iterations share it."""
    router_bias: float = 2.0
    """Initial bias of the router: positive means continue, and at -10 no token makes a second iteration."""
    penalty: float = 0.05
    """Weight λ of the penalty."""
    penalty_beta: float = 1.0
    """β: larger values charge uncertain tokens less."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse invalid thresholds and penalties."""
        super().check(config)
        self.require_one_of("router", ("linear", "mlp"))
        self.require("penalty", self.penalty >= 0, "not be negative")
        self.require("penalty_beta", self.penalty_beta >= 0, "not be negative")
        self.require("tau", 0 < self.tau < 1, "lie between 0 and 1")


class LatentCot(Blended, Sampled[LatentCotOptions]):
    """Feeds the normed hidden state back, and predicts from a mixture of all latent thoughts' hidden states."""

    options_class = LatentCotOptions
    reads = View.DUO
    halts = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.router = nn.Linear(width, 1) if self.options.router == "linear" else GateMLP(width)

    @classmethod
    def penalty_flops(cls, config: DecoderConfig, sequence_length: int) -> float:
        """0 without a penalty."""
        return super().penalty_flops(config, sequence_length) if LatentCotOptions.of(config).penalty else 0.0

    def init_weights(self, std: float) -> None:
        """Initialise the router so that tokens continue with high probability."""
        super().init_weights(std)
        if isinstance(self.router, GateMLP):
            self.router.init_weights(std, self.options.router_bias)
        else:
            init.normal_(self.router.weight, std=std)
            init.constant_(self.router.bias, self.options.router_bias)

    def gate(self, out: Out, state: TripState) -> TripState:
        """Divide the probability of reaching this iteration between stopping here and continuing."""
        h, k = out.hidden, out.trip
        reach = state["reach"] if k else torch.ones_like(widen(h[..., 0]))
        first = {"first": h} if self.blend is not None and not k else {}
        if out.last:
            hidden = spread(state.get("hidden"), reach, h)
            return {"hidden": hidden, "alive": torch.zeros_like(reach, dtype=torch.bool), **first}
        gate = widen(self.router(h).squeeze(-1)).sigmoid()
        onward = reach * gate
        alive = onward > self.options.tau
        new = {
            "hidden": spread(state.get("hidden"), torch.where(alive, reach - onward, reach), h),
            "alive": alive,
            "reach": onward,
            **first,
        }
        if self.training:
            new |= {f"gate{k}": gate, f"reach{k}": onward, f"thought{k}": h.detach()}
        return new

    def readout(self, state: TripState) -> Tensor:
        """The mixture of all thoughts' hidden states, blended by λ with that of the first iteration."""
        return state["hidden"] if self.blend is None else self.blended(state["first"], state["hidden"])

    def aux_losses(
        self, state: TripState, targets: Tensor, num_items_in_batch: Tensor | int | None, head: nn.Module
    ) -> dict[str, Tensor]:
        """The penalty on continuing, λ · mean_t Σ_k p^β R_{k+1}, measured on a sample of the tokens."""
        executed = [k for k in range(self.trips - 1) if f"reach{k}" in state]
        if not executed or not self.options.penalty:
            return {}
        columns = self.sample(targets.shape[1])
        target = targets[:, columns]
        valid = target != IGNORE
        total = state["reach0"].new_zeros(())
        for k in executed:
            with torch.no_grad():
                p = widen(head(state[f"thought{k}"][:, columns])).softmax(-1)
                p = p.gather(-1, target.where(valid, 0).unsqueeze(-1)).squeeze(-1) ** self.options.penalty_beta
            total = total + (p * state[f"reach{k}"][:, columns]).where(valid, 0).sum()
        total = total * targets.shape[1] / len(columns)
        return {"penalty": self.options.penalty * per_item(total, targets, num_items_in_batch)}

    def metrics(self, state: TripState, targets: Tensor) -> dict[str, Tensor]:
        """Metrics to log: the mean number of iterations, and the router's entropy."""
        found = super().metrics(state, targets)
        gates = [state[f"gate{k}"] for k in range(self.trips - 1) if f"gate{k}" in state]
        if gates:
            found["gate_entropy"] = valid_mean(entropy(torch.stack(gates, -1).detach()), targets)
        return found


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost if no token stops: the layers and the router again for every latent thought."""
    width = config.hidden_size
    linear = LatentCotOptions.of(config).router == "linear"
    parameters, flops = (width + 1, 2 * width) if linear else gate_mlp_size(width)
    return trips_cost(config, visits, scalar, flops, parameters)


LATENT_COT = Mechanism(
    name="latent_cot",
    axis="recurrence",
    summary="think in hidden states until a router stops",
    paper="arXiv 2602.08220",
    build=LatentCot,
    cost=cost,
    options=LatentCotOptions,
    closed={"blend": 0.0},
)
