"""`loop`: run the same layers several times (a looped transformer).

The next iteration starts from

    x_{k+1} = r_k        (the residual stream as the last layer left it, un-normed)

With this feed and no halting the model is a plain decoder of `trips` times the depth whose weights repeat; each
iteration has keys and values of its own. Options make of it the loops that others train, e being what entered the loop,
after the prelude, and n a norm between iterations:

    injection none        x_{k+1} = n(r_k)
              add         x_{k+1} = n(r_k) + e
              diagonal    x_{k+1} = exp(-Δ ⊙ exp(a)) ⊙ n(r_k) + Δ ⊙ B e        Δ = softplus(δ)

With `kv: first` later iterations make queries only, and attend to the keys and values that each layer made in the
first: the cache is that of a model without a loop.

With `exit_confidence` a token whose prediction is sure makes no further iteration (`confidence.py`). With `exit` a gate
chooses which iteration is read out (`exit_gate.py`).

With `growth` iterations are added one by one in training (`growth.py`).

With `damping` δ an iteration moves the stream by a part of what the looped layers g would, and with `blend` λ the loop
ends between the first iteration's result and its own; x_0 is what entered the loop, K the number of iterations:

    x_{k+1} = x_k + δ (g(x_k) - x_k)        result  g(x_0) + λ (x_K - g(x_0))

With λ = 0 that is the model without a loop, and with δ = 1 and λ = 1 the plain loop. With `blend: learned` λ is learned
and there is a gain γ: (1 + γ) g(x_0) + λ (x_K - g(x_0)); both start at zero. δ = 1/K integrates the looped
layers over the time for which they were trained.

Gradients flow through all iterations; `gradient_passes` (`pondering.py`, `slots.py`) is for recurrences whose tokens
read every iteration (view ALL).

The diagonal's factor on r lies between 0 and 1 whatever its weights (Parcae, whose first state is noise and whose
readout has one more matrix; here the first iteration starts from e as it is).

`trips/slots.py` decides a mixer's sources and what `kv: first` borrows; `trips/walk.py` starts residuals over with each
iteration; `draws.py` draws `trips_range`; `modeling.py` (`trips_asked`) applies `max_trips`. With `kv: first`,
`registry.py` refuses `across_trips`, `trips/speculation.py` drafts, `trips/engines.py` engines with caches of their
own, and `kvcache/rope.py` compressed caches. `checkpoints/export.py` unrolls a plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..axes.blend import Blended, BlendOptions, gate_size
from ..axes.numerics import widen
from ..axes.roles import Cost, Mechanism, TripState
from ..decoder.arithmetic import head_flops, layer_cache_bytes, layer_flops
from ..decoder.rms_norm import RMSNorm
from .confidence import ConfidenceExit, ConfidenceOptions
from .early_loss import EarlyLossOptions, EarlyReadout
from .exit_gate import ExitGate, ExitOptions
from .growth import GrowingTrips, GrowthOptions

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Out, Visit


INJECTIONS = ("none", "add", "diagonal")
NORMS = ("none", "final", "own")
KEPT = ("own", "first")
DECAY = math.sqrt(0.2)
"""The diagonal's factor on the stream at the start."""


@dataclass(frozen=True)
class LoopOptions(GrowthOptions, EarlyLossOptions, ExitOptions, ConfidenceOptions, BlendOptions):
    """Options of `loop`."""

    trips: int = 3
    """How often the looped layers run."""
    trips_max: int | None = None
    """The maximum number of iterations that may be requested; by default the maximum in training."""
    prelude: int = 0
    """Layers that run once, before the loop."""
    coda: int = 0
    """Layers that run once, after the loop."""
    injection: str = "none"
    """How the loop's input e enters every further iteration: `none`, `add` or `diagonal` (Parcae's)."""
    entry_norm: bool = False
    """Whether the loop's input e is normed before it is injected."""
    norm_between: str = "none"
    """The norm of the stream between iterations: `none`, `final` (the model's last norm) or `own` (one more norm)."""
    kv: str = "own"
    """The keys and values that later iterations attend to: `own`, or `first`, those of the first iteration."""
    damping: float = 1.0
    """Damping δ: the fraction of its update by which an iteration moves the stream; 1 is the plain loop."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse a prelude and coda that leave no layers to loop, and options that exclude each other."""
        super().check(config)
        self.require("damping", 0 < self.damping <= 1, "lie above 0 and be at most 1")
        if self.damping < 1 and not (self.injection == "none" and self.norm_between == "none"):
            raise ValueError("recurrence_options.damping: set injection and norm_between to none, or damping to 1")
        if self.grows and not (self.injection == "none" and self.norm_between == "none" and self.damping == 1):
            raise ValueError("recurrence_options.growth: set injection and norm_between to none, and damping to 1")
        ends = {"blend": self.blends, "damping": self.damping < 1, "growth": self.grows}
        leaves = next((name for name, given in ends.items() if given), None)
        if leaves and self.coda and config.residual != "plain":
            # There the stream is read and begun again, which a residual with a history would notice at λ = 1 and δ = 1.
            raise ValueError(f"recurrence_options.{leaves} with a coda needs residual=plain, got {config.residual}")
        names = {"early_loss": self.early_loss, "exit": self.exits, "exit_confidence": self.exit_confidence is not None}
        early = next((name for name, given in names.items() if given), None)
        if early and self.coda:
            raise ValueError(f"recurrence_options.{early}: a coda runs only after the last iteration; set coda to 0")
        if early and (self.damping < 1 or self.blends):
            raise ValueError(f"recurrence_options.{early} needs damping 1 and blend 1")
        if early and self.grows:
            raise ValueError(f"recurrence_options.{early} reads out early iterations: set growth to none")
        if self.exit_confidence is not None and (self.exits or self.kv != "own"):
            raise ValueError("recurrence_options.exit_confidence needs exit=none and kv=own")
        if self.early_loss and self.exits:
            raise ValueError("recurrence_options: early_loss and exit both read out early iterations; set only one")
        if self.prelude < 0 or self.coda < 0 or self.prelude + self.coda >= config.num_hidden_layers:
            raise ValueError(
                f"recurrence_options.prelude + coda must leave at least one of the {config.num_hidden_layers} layers "
                f"to loop, got {self.prelude} + {self.coda}"
            )
        self.require_one_of("injection", INJECTIONS)
        self.require_one_of("norm_between", NORMS)
        self.require_one_of("kv", KEPT)
        if self.entry_norm and self.injection == "none":
            raise ValueError("recurrence_options.entry_norm: nothing is injected; set injection to add or diagonal")
        most = self.trips_range[1] if self.trips_range else self.trips
        self.require("trips_max", self.trips_max is None or self.trips_max >= most, f"be at least {most}")

    @property
    def is_plain(self) -> bool:
        """Whether the options make the loop equal to a plain decoder with more layers."""
        altered = self.injection != "none" or self.norm_between != "none" or self.damping < 1
        stops = self.exits or self.exit_confidence is not None
        return not (altered or self.blends or stops or self.grows or self.kv != "own")


class Loop(Blended, GrowingTrips, EarlyReadout, ExitGate, ConfidenceExit):
    """Feeds the residual stream back into the looped layers."""

    no_weight_decay = ("entry_map",)
    across_trips = "same_layer"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.options = LoopOptions.of(config)
        self.recompute = self.options.recompute
        self.injects = self.options.injection != "none"
        self.damps = self.options.damping < 1
        self.leaves = self.damps or self.closable or self.newest is not None
        self.entry_layer = self.options.prelude if self.injects or self.damps else None
        width, eps = config.hidden_size, config.rms_norm_eps
        if self.options.entry_norm:
            self.entry_norm = RMSNorm(width, eps)
        if self.options.norm_between == "own":
            self.norm = RMSNorm(width, eps)
        if self.options.injection == "diagonal":
            self.step_size, self.rate = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))  # δ, a
            self.entry_map = nn.Parameter(torch.empty(width, width))  # B
        self.set_step(0)

    def init_weights(self, std: float) -> None:
        """Initialise the diagonal injection with a decay of √(1/5) and B as the identity matrix."""
        super().init_weights(std)
        if self.options.injection == "diagonal":
            init.constant_(self.step_size, math.log(math.expm1(-math.log(DECAY))))  # softplus⁻¹
            init.zeros_(self.rate)
            init.eye_(self.entry_map)

    @staticmethod
    def trips_of(config: DecoderConfig) -> int:
        """The option `trips`."""
        return LoopOptions.of(config).trips

    @classmethod
    def most_trips(cls, config: DecoderConfig) -> int:
        """The option `trips_max`."""
        return LoopOptions.of(config).trips_max or super().most_trips(config)

    @classmethod
    def additions(cls, config: DecoderConfig) -> int:
        """The number of iterations that add to one residual stream: all, or 1 if a norm between them rescales it."""
        return cls.trips_of(config) if LoopOptions.of(config).norm_between == "none" else 1

    @staticmethod
    def span(config: DecoderConfig) -> tuple[int, int]:
        """The looped layers `[start, stop)`: those between prelude and coda."""
        options = LoopOptions.of(config)
        return options.prelude, config.num_hidden_layers - options.coda

    @classmethod
    def shares(cls, config: DecoderConfig) -> bool:
        """Whether later iterations use the first iteration's keys and values (`kv: first`)."""
        return LoopOptions.of(config).kv == "first"

    @property
    def unrolls(self) -> bool:
        """Whether the iterations equal further layers of a plain decoder, because no option changes them."""
        return self.options.is_plain

    def gate(self, out: Out, state: TripState) -> TripState:
        """Also compute the injection of the loop's input e once, since it is the same for all iterations."""
        new = super().gate(out, state)
        if self.closable and out.trip == 0 and not out.last:
            new["first"] = out.residual
        if self.injects and out.trip == 0 and not out.last:
            new["entry"] = self(out.entry)
        return new

    def forward(self, x: Tensor, *injected: Tensor) -> Tensor:
        """Call `merged` if the injection is given, else `injected`. A call of the module, since hooks run only on
        calls."""
        return self.merged(x, *injected) if injected else self.injected(x)

    def injected(self, entry: Tensor) -> Tensor:
        """The injection: the loop's input e, or Δ ⊙ B e with `diagonal`, `[B, T, hidden_size]`."""
        if self.options.entry_norm:
            entry = self.entry_norm(entry)
        if self.options.injection == "add":
            return entry
        return (widen(nn.functional.linear(entry, self.entry_map)) * self._step()).to(entry.dtype)

    def feed(self, x: Tensor, out: Out, state: TripState) -> Tensor:
        """The next iteration's input: the un-normed residual stream, as changed by damping, a norm or injection."""
        if self.damps:
            return self.damped(x if out.trip else out.entry, out.residual)
        stream = out.hidden if self.options.norm_between == "final" else out.residual
        if self.options.norm_between == "own":
            stream = self.norm(stream)
        return self(stream, state["entry"]) if self.injects else stream

    def leave(self, stream: Tensor, x: Tensor, state: TripState, trip: int) -> Tensor:
        """The loop's output: the last iteration's, or with `blend` an interpolation between the first's and the
        last's."""
        stream = self.opening(x, self.damped(x, stream) if self.damps else stream, trip)
        if self.blend_gates is not None:
            return self.blend_gates(state["first"], stream - state["first"])
        return stream if self.blend is None else self.blended(state["first"], stream)

    def damped(self, x: Tensor, stream: Tensor) -> Tensor:
        """Damp an iteration from input x to output g(x): x + δ (g(x) - x), `[B, T, hidden_size]`."""
        return torch.lerp(x, stream, self.options.damping)

    def merged(self, stream: Tensor, injected: Tensor) -> Tensor:
        """The next iteration's input: the stream (decayed with `diagonal`) plus the injection, `[B, T,
        hidden_size]`."""
        if self.options.injection == "diagonal":
            stream = (widen(stream) * self.decay()).to(stream.dtype)
        return stream + injected

    def decay(self) -> Tensor:
        """The decay factor on the stream with `injection: diagonal`, `[hidden_size]`."""
        return torch.exp(-self._step() * widen(self.rate).exp())

    def _step(self) -> Tensor:
        return nn.functional.softplus(widen(self.step_size))  # Δ


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: every extra iteration repeats the looped layers' FLOPs and, with keys and values of its own, their cache;
    the injection is computed once per token. With `kv: first` a family's own projections still run, and count."""
    again, options, width = len(visits) - config.num_hidden_layers, LoopOptions.of(config), config.hidden_size
    diagonal = options.injection == "diagonal"
    parameters = width * (options.entry_norm + (options.norm_between == "own")) + diagonal * (width * width + 2 * width)
    parameters += (width + 1) * options.exits + 2 * gate_size(config, options)
    further, sure = visits[-1].trip, options.exit_confidence is not None
    reading = further * sure * head_flops(config)  # of the head, outside training
    moving = (further + 1) * (options.damping < 1) + options.blends + options.learned / 3 if further else 0
    shared = sum(visit.borrows for visit in visits)
    return Cost(
        parameters=parameters,
        flops=again * layer_flops(config)
        - (0 if config.host else shared) * 4 * width * config.num_key_value_heads * config.head_dim
        + (2 * width * width if diagonal and further else 0)
        + 2 * width * further * options.exits
        + reading,
        elementwise_flops=3 * width * moving,
        cache_bytes=(again - shared) * layer_cache_bytes(config, scalar),
        training_flops=-3 * reading,
    )


LOOP = Mechanism(
    name="loop",
    axis="recurrence",
    summary="pass the layers several times",
    paper="arXiv 1807.03819",
    build=Loop,
    cost=cost,
    options=LoopOptions,
    closed={"blend": 0.0},
)
