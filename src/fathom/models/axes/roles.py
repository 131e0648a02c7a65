"""The base classes of mechanisms (mixer, residual, recurrence), and what a mechanism must declare.

Each base class *is* the first value of its axis: a `ValueMixer` that mixes nothing, a `Residual` that adds, a
`Recurrence` that makes one iteration. A mechanism subclasses one of them in its own file, which ends with one
`Mechanism`. The decoder in `modeling.py` knows only these classes, no mechanism.

State is functional: methods return new tensors and mutate nothing. A list that is changed inside a layer would break
activation checkpointing and FSDP2 without an error.

`../pretrained.py` calls `set_step` of all mechanisms. If nobody calls the model's own, it refuses to train with
`blend_steps`, and warns of other schedules. `../registry.py` builds the parameters of `per_visit`, and refuses it
without iterations that follow one another (`check_visits`).

`trips/slots.py` (`sweep`) calls `gate` and `feed`, and keeps the state of halted tokens; for drafts
`trips/speculation.py` calls them. A recurrence under the view ALL derives from `Solved` (`recurrences/pondering.py`).
`training/optimizer.py` reads `no_weight_decay`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from .numerics import IGNORE

if TYPE_CHECKING:
    from .fields import DecoderConfig
    from .visit import Out, Visit

ResidualState = tuple[Tensor, ...]
"""The tensors that a residual hands from one sub-layer to the next."""
Stored = Tensor | tuple[Tensor, Tensor]
"""The tensors that a mixer has stored: a value, or a key and a value, `[B, H_kv, T, D]` each."""
Ways = tuple[Tensor, Tensor, Tensor]
"""The inputs of queries, keys and values, `[B, T, hidden_size]` each, where they read different things."""
WriteContext = tuple[Tensor, ...] | None
"""The tensors that a residual's `read` computes for its `write`, such as mixing weights; never the state."""
TripState = dict[str, Tensor]
"""The tensors that a recurrence keeps for every token, by name: `[B, T, ...]`."""
Own = TypeVar("Own", bound="MechanismOptions")


class View(enum.Enum):
    """Which slots a slot may read; a slot is a pair (token, iteration)."""

    SAME = "same"  # the same trip of earlier tokens (or their last one)
    DUO = "duo"  # trips up to its own
    ALL = "all"  # all earlier slots

    @property
    def depth_parallel(self) -> bool:
        """Whether one iteration can be computed for all tokens at once, exactly."""
        return self is not View.ALL


class Way(enum.Enum):
    """The ways in which a forward pass without a slot cache runs its iterations; `walk.py` has a class for each."""

    ONCE = enum.auto()  # one trip, and nothing after it
    BANKED = enum.auto()  # each trip an ordinary pass with a bank of its own
    LENDING = enum.auto()  # the same, with the first trip's keys and values in all of them
    DENSE = enum.auto()  # halted tokens are computed and discarded
    PACKED = enum.auto()  # halted tokens are left out
    SOLVED = enum.auto()  # the trips of all tokens side by side


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost that a mechanism adds to the vanilla decoder; all fields except `parameters` are per token of a forward
    pass."""

    parameters: int = 0
    flops: float = 0.0
    """FLOPs of matrix products and weighted sums, as papers count them."""
    elementwise_flops: float = 0.0
    """FLOPs of norms, softmaxes and pooling, which papers omit."""
    cache_bytes: int = 0
    transient_bytes: int = 0
    """Bytes in use during the forward pass beyond vanilla; they are freed after the token."""
    io_bytes: int = 0
    """Activation reads and writes of an unfused implementation."""
    training_flops: float = 0.0
    """FLOPs of a training step beyond three times `flops`; negative if backward costs less than twice forward."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)})


@dataclass(frozen=True)
class MechanismOptions:
    """A mechanism's options: the fields are the keys of its dictionary in `config.json`."""

    axis: ClassVar[str]

    @classmethod
    def of(cls: type[Own], config: DecoderConfig) -> Own:
        """Read this class's fields from the options in `config`; a base class thus reads its part of a
        mechanism's options."""
        given = getattr(config, f"{cls.axis}_options")
        return cls(**{field.name: given[field.name] for field in fields(cls)})

    def check(self, config: DecoderConfig) -> None:
        """Refuse invalid values. An override begins with `super().check(config)`, so that every base class checks the
        options that it adds."""

    def resolve(self: Own, config: DecoderConfig) -> Own:
        """Fill in defaults that depend on `config`."""
        return self

    def require(self, name: str, holds: bool, says: str) -> None:
        """Raise a `ValueError` for an option unless `holds`; the text `says` completes "must …"."""
        if not holds:
            raise ValueError(f"{self.axis}_options.{name} must {says}, got {getattr(self, name)!r}")

    def require_one_of(self, name: str, allowed: Sequence[str]) -> None:
        """Refuse an unknown choice."""
        self.require(name, getattr(self, name) in allowed, f"be one of {', '.join(allowed)}")

    def require_range(self, name: str) -> None:
        """Refuse anything but two integers `[least, most]`."""
        value = getattr(self, name)
        whole = len(value) == 2 and all(type(number) is int for number in value)
        self.require(name, whole and 0 <= value[0] <= value[1], "be [least, most]")


class MixerOptions(MechanismOptions):
    """Options of a value mixer."""

    axis = "mixer"

    @property
    def head_gates(self) -> tuple[str, ...]:
        """The mixer's parameters, by name, that have numbers of their own for each key-value head."""
        return ()


class ResidualOptions(MechanismOptions):
    """Options of a residual."""

    axis = "residual"


@dataclass(frozen=True)
class VisitOptions(ResidualOptions):
    """Options of a residual that may have separate parameters for each loop iteration."""

    per_visit: bool = False
    """Whether a layer that runs in several iterations has these residual parameters once for each iteration; its other
    weights are shared."""


@dataclass(frozen=True)
class RecurrenceOptions(MechanismOptions):
    """Options of a recurrence."""

    axis = "recurrence"

    trips: int = 1
    """Maximum number of iterations of a token, the first included."""
    recompute: bool = False
    """Whether training keeps only the input of each pass through the layers and recomputes the pass in the backward
    pass: less memory, the same gradients."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse fewer than one iteration."""
        super().check(config)
        self.require("trips", self.trips >= 1, "be at least 1")


@dataclass(frozen=True)
class HaltingOptions(RecurrenceOptions):
    """Options of a recurrence whose tokens may halt, and which trains one iteration after another."""

    skip_dead_rows: bool = False
    """Whether training leaves halted tokens out of an iteration: the same numbers for less compute, with one host
    synchronisation per iteration. By default halted tokens are computed and discarded."""


@dataclass(frozen=True)
class Mechanism:
    """The declaration of a mechanism (one value of one axis), at the end of every mechanism's file."""

    name: str
    axis: str
    """`mixer`, `residual` or `recurrence`."""
    summary: str
    paper: str
    build: Callable[..., Any]
    """The module's constructor. Mixer: (config, layer_idx). Residual: (config, sublayer). Recurrence: (config)."""
    cost: Callable[[DecoderConfig, Sequence[Visit], int], Cost]
    """Its cost from (config, the plan's visits, bytes per scalar)."""
    options: type[MechanismOptions] = MechanismOptions
    closed: Mapping[str, object] | None = None
    """Options with which a pretrained model initially computes the same as without the mechanism; None if it cannot."""


class MechanismModule(nn.Module):
    """Common base class of mixers, residuals and recurrences."""

    axis: ClassVar[str]
    no_weight_decay: tuple[str, ...] = ()
    """Local names of parameters with two or more dimensions that are excluded from weight decay."""

    @property
    def scheduled(self) -> bool:
        """Whether the module has a schedule over training steps, so that training must call `set_step`."""
        return False

    def init_weights(self, std: float) -> None:
        """Initialise the parameters and buffers that belong to this module itself (with
        `transformers.initialization`)."""

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Set the current value of a schedule over training steps; `steps` is the total."""

    def settle(self, config: DecoderConfig) -> None:
        """Write a schedule's current value into `config` as its final value, before `config` is saved."""


def watched(module: nn.Module) -> bool:
    """Whether calling the module does more than `forward`, because it has hooks or is offloaded."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def direct(module: nn.Module) -> Callable[..., Any]:
    """`module.forward` if the module has no hooks and is not offloaded, else `module`.

    For one token, calling `forward` directly saves the time of an addition.
    """
    return module if watched(module) else module.forward


class ValueMixer(MechanismModule):
    """Base class of mixers, which decide the value that attention stores and reads: `layers.N.self_attn.mixer`."""

    axis = "mixer"
    asks = False
    """Whether `asked` changes the queries."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    @staticmethod
    def source_layers(config: DecoderConfig, layer_idx: int) -> tuple[int, ...]:
        """The indices of the earlier layers whose keys and values this layer's mixer reads, ascending. The rule is
        defined only here."""
        return ()

    @staticmethod
    def across_trips(config: DecoderConfig, default: str) -> str:
        """How a layer's sources from earlier iterations are chosen in a recurrence: `none`, `same_layer`, `grid` or
        `first`.

        Args:
            config: The model's configuration.
            default: The rule of its recurrence.
        """
        return "none"

    def fused(
        self, projected: Tensor, sources: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
        """A fused kernel that norms and rotates queries and keys and mixes values; None if there is none.

        Attention calls the kernel as `kernel((query, key, value), sources, norms, angles, keys_last)`: projections
        `[B, T, H, D]` before norms and rotation, the two RMS norms, cosines and sines, and whether keys are normed
        after rotation. The kernel returns queries, keys and values as `forward` would see and return them.

        Args:
            projected: A tensor of the projections' device and precision.
            sources: See `forward`.
        """
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Stored:
        """The value to store, `[B, H_kv, T, D]`; a mixer that changes keys too returns `(key, value)`.

        Queries and keys are normed and rotated. They are not rotated where layers rotate differently, because scores
        between such layers would depend on the token's position (`FathomConfig.mixes_unrotated`).

        Args:
            query: `[B, H, T, D]`.
            key: `[B, H_kv, T, D]`.
            value: `[B, H_kv, T, D]`, this layer's own projection.
            sources: `(key, mixed value, key, mixed value, ...)` of earlier layers for the *same* tokens, oldest first.
        """
        return value

    def asked(self, query: Tensor) -> Tensor:
        """Change the queries `[B, H, T, D]` of attention; called only if `asks` is set, and not for a family's own
        layers."""
        return query

    def stored(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The key and the value to store, whether `forward` returns both or the value alone; calls the module if it has
        hooks, else `forward`."""
        found = direct(self)(query, key, value, sources)
        return found if isinstance(found, tuple) else (key, found)

    def source_weights(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Tensor | None:
        """The weights with which `forward` adds up the sources' values and the layer's own value, which comes last.

        They are `[B, H_kv, T, S + 1]`, and measured: where value j is the j-th unit vector, the result holds all
        weights. None if `forward` adds up values in another way, such as channel by channel. Override this if the
        weights depend on the values. The arguments are those of `forward`.
        """
        keys, values, found = sources[::2], (*sources[1::2], value), []

        def mixed(*values: Tensor) -> Tensor:
            pairs = zip(keys, values, strict=False)
            found = self.forward(query, key, values[-1], tuple(part for pair in pairs for part in pair))
            return found[1] if isinstance(found, tuple) else found

        for first in range(0, len(values), value.shape[-1]):
            units = [torch.zeros_like(one) for one in values]
            for channel, one in enumerate(units[first : first + value.shape[-1]]):
                one[..., channel] = 1
            found.append(mixed(*units)[..., : len(values) - first])
        weights = torch.cat(found, -1)
        total, wanted = sum(w[..., None] * v for w, v in zip(weights.unbind(-1), values, strict=True)), mixed(*values)
        near = (total - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        return weights if near else None


def ways(residual: Residual) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions `read` and `write` of a residual; the module itself for both if it has hooks or is offloaded."""
    return (residual, residual) if watched(residual) else (residual.read, residual.write)


class Residual(MechanismModule):
    """Base class of residuals, which decide how a sub-layer's output reaches later ones:
    `layers.N.{attn,mlp}_residual`, `model.final_residual`.

    Sub-layers are numbered 0 … 2L-1 (attention, MLP, attention, …); 2L is the read before the final norm.

    The state passes through a layer linearly: every `read` and `write` takes the state that the previous call returned.
    A layer may read twice before it writes twice, as a parallel layer does.
    """

    axis = "residual"
    trip = 0
    """The trip that the parameters belong to, where each trip has its own."""
    multiway = False
    """Whether `read` gives attention three inputs."""
    adds = False
    """Whether the state's first tensor is a stream to which every update is added. A parallel layer then adds the sum
    of its two updates, which GPT-NeoX rounds first."""

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__()
        self.sublayer = sublayer

    def forward(self, state: ResidualState, *written: Any) -> Any:
        """Call `write` if an update is given, else `read`. A call of the module, since hooks run only on calls."""
        return self.write(state, *written) if written else self.read(state)

    def begin(self, embeddings: Tensor) -> ResidualState:
        """The initial state of an iteration.

        Args:
            embeddings: `[B, T, hidden_size]`; in a later iteration, the iteration's input.
        """
        return (embeddings,)

    def read(self, state: ResidualState) -> tuple[Any, ResidualState, WriteContext]:
        """Return the sub-layer's input `[B, T, hidden_size]`, the state for the next call, and a context for `write`.

        Before attention the input may be `Ways`: separate inputs of queries, keys and values. The layer's norm is
        called for each distinct tensor, then `gained` for all three.

        The state keeps its values. A mechanism with its own backward pass may return other tensors with these values,
        so that the gradients of all later uses arrive there as one sum.

        Args:
            state: The state that the last call returned; its tensors `[B, T, ...]` are private to the mechanism.
        """
        return state[0], state, None

    def gained(self, ways: Ways) -> Ways:
        """The inputs of the query, key and value projections after the layer's norm; a residual may apply a gain to
        each. Called without hooks, so parameters belong to modules inside this one."""
        return ways

    def stream_weights(self) -> Mapping[int, float] | None:
        """The weights of the embeddings (key 0) and of each block's output (1 for the first block) in the stream after
        this sub-layer; None if they differ by token."""
        return None

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Merge the sub-layer's output into the state; returns a new state.

        Args:
            state: The state that the last call returned. It may have been written to since this sub-layer's `read`.
            update: The sub-layer's output, `[B, T, hidden_size]`.
            context: The last value that this sub-layer's `read` returned.
        """
        return (state[0] + update,)


class Recurrence(MechanismModule):
    """Base class of recurrences, which decide how many iterations a token makes and the input of each:
    `model.recurrence`.

    Its state is a dictionary of tensors `[B, T, ...]`, one value per token. For halted tokens `sweep` keeps the state
    unchanged.
    """

    axis = "recurrence"
    recompute = False
    """Whether training recomputes every pass through the layers in the backward pass."""
    gradient_passes = 0
    """Passes of the Jacobi solver, counted from the last, that gradients flow through in training; 0 for all."""
    skip_dead_rows = False
    """Whether training leaves halted tokens out of a trip instead of computing and discarding them."""
    entry_layer: int | None = None
    """The layer whose input in the first trip is passed to `gate` as `out.entry`; None for none."""
    across_trips = "none"
    """How a mixer's sources cross trips unless its options set it: `none`, `same_layer`, `grid` or `first`."""
    leaves = False
    """Whether `leave` changes the output of the last trip's looped layers."""
    halts = False
    """Whether tokens may stop before the last trip; `gate` then puts `alive` (`[B, T]`, bool) into the state.
    A subclass may override `stops` to take it from an option."""
    reads = View.SAME
    """The view; a subclass may override `sees` to take it from an option."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.trips = self.drawn_trips = self.grown = self.trips_of(config)
        """Trips of a token, the first included; `drawn_trips` is their number in this training step, and `grown` that
        which training has reached."""
        self.view = self.sees(config)
        self.foreseen = self.foresees(config)
        self.lends = self.shares(config)
        self.halts = self.stops(config)

    @staticmethod
    def trips_of(config: DecoderConfig) -> int:
        """The number of iterations that a token makes, the first included."""
        return 1

    @classmethod
    def training_trips(cls, config: DecoderConfig) -> tuple[int, int]:
        """The minimum and maximum iterations of a training step; the number is drawn uniformly."""
        return cls.trips_of(config), cls.trips_of(config)

    @classmethod
    def training_shares(cls, config: DecoderConfig) -> dict[int, float]:
        """The share of training steps with each number of iterations."""
        least, most = cls.training_trips(config)
        return dict.fromkeys(range(least, most + 1), 1 / (most - least + 1))

    @classmethod
    def progress(cls, config: DecoderConfig, step: int, steps: int) -> tuple[float, ...]:
        """The values at a step, counted from 0, of schedules that depend on the total number of steps."""
        return ()

    @classmethod
    def training_rounds(cls, config: DecoderConfig) -> tuple[int, int]:
        """The minimum and maximum Jacobi rounds of a training step; the number is drawn uniformly."""
        return 0, 0

    @classmethod
    def kept_passes(cls, config: DecoderConfig) -> int:
        """The number of last Jacobi passes that gradients flow through (`gradient_passes`) for this configuration; 0
        for all."""
        return 0

    @classmethod
    def most_trips(cls, config: DecoderConfig) -> int:
        """The maximum number of iterations that a forward pass may request: the number that the weights were trained
        for."""
        return cls.training_trips(config)[1]

    @classmethod
    def additions(cls, config: DecoderConfig) -> int:
        """Number of iterations accumulated in one residual stream; `output_init=depth` divides the initial standard
        deviation by its square root."""
        return 1

    @classmethod
    def sees(cls, config: DecoderConfig) -> View:
        """Which slots (token, iteration) a slot may read."""
        return cls.reads

    @classmethod
    def stops(cls, config: DecoderConfig) -> bool:
        """Whether tokens may stop before the last iteration."""
        return cls.halts

    @staticmethod
    def span(config: DecoderConfig) -> tuple[int, int]:
        """The looped layers `[start, stop)`, which every iteration runs; the layers before and after them run once."""
        return 0, config.num_hidden_layers

    @classmethod
    def shares(cls, config: DecoderConfig) -> bool:
        """Whether later iterations reuse the keys and values of the layer's first iteration instead of making their
        own."""
        return False

    @classmethod
    def foresees(cls, config: DecoderConfig) -> bool:
        """Whether `feed` uses its first argument only: all iterations' inputs are then known in advance, so the view
        ALL needs one exact pass instead of a solver."""
        return False

    @staticmethod
    def needs_head(config: DecoderConfig) -> bool:
        """Whether `feed` uses logits, so that the decoder cannot run without the language-modelling head."""
        return False

    @classmethod
    def penalty_flops(cls, config: DecoderConfig, sequence_length: int) -> float:
        """FLOPs per token that `aux_losses` adds to a training step."""
        return 0.0

    @property
    def slotted(self) -> bool:
        """Whether iterations attend to one another or tokens halt, so that a cache must store slots (token,
        iteration)."""
        return self.view is not View.SAME or self.halts

    def way(self, trips: int, packs: bool) -> Way:
        """The way in which a forward pass runs `trips` iterations; `packs` says whether it may leave halted tokens
        out."""
        if not self.slotted:
            return Way.ONCE if type(self) is Recurrence else Way.LENDING if self.lends else Way.BANKED
        if self.view is View.ALL and trips > 1:
            return Way.SOLVED
        return Way.PACKED if packs and self.skip_dead_rows else Way.DENSE

    @property
    def unrolls(self) -> bool:
        """Whether the iterations equal further layers of a plain decoder."""
        return False

    def feed(self, x: Tensor, out: Out, state: TripState) -> Tensor:
        """The next iteration's input, `[B, T, hidden_size]`.

        Args:
            x: This iteration's input, `[B, T, hidden_size]`.
            out: This iteration's output: `out.hidden` is normed, `[B, T, hidden_size]`.
            state: The state that `gate` returned after this iteration.
        """
        raise RuntimeError(f"{type(self).__name__} makes one trip only")

    def gate(self, out: Out, state: TripState) -> TripState:
        """The entries of the state that change after an iteration, tensors `[B, T, ...]`. By default the last
        iteration's output is kept.

        Args:
            out: The iteration's output: `out.hidden` is normed, `[B, T, hidden_size]`.
            state: The state after the previous iteration; empty before the first.
        """
        return {"hidden": out.hidden}

    def leave(self, stream: Tensor, x: Tensor, state: TripState, trip: int) -> Tensor:
        """The looped layers' output as later layers read it, `[B, T, hidden_size]`; called only if `leaves` is set, and
        never under the view ALL.

        Args:
            stream: The output of the span's last layer in the last iteration, `[B, T, hidden_size]`.
            x: The input of that iteration.
            state: The state after the previous iteration.
            trip: That iteration, counted from 0.
        """
        return stream

    def key_bias(self, state: TripState, trip: int) -> Tensor | None:
        """A bias `[B, T]` that attention adds to the logits of this iteration's keys, for all queries; None without
        one."""
        return None

    def readout(self, state: TripState) -> Tensor:
        """The hidden state that the head reads, `[B, T, hidden_size]`, normed."""
        return state["hidden"]

    def weighted_readouts(self, state: TripState) -> list[tuple[Tensor, Tensor]] | None:
        """Hidden states `[B, T, hidden_size]` and weights `[B, T]`: their weighted losses replace the readout's loss in
        training; None to train on the readout's."""
        return None

    def rounds(self, purpose: str, length: int) -> int:
        """Jacobi rounds under the view ALL for `train`, `evaluate` (no cache) or `prefill` (with a cache)."""
        return 0

    def exact(self) -> bool:
        """Whether evaluation and prefill under the view ALL must give the same results as token-by-token decoding."""
        return False

    def carry(self, state: TripState) -> TripState | None:
        """The part of the state that the next Jacobi round's calls of `gate` start from; None to start from nothing."""
        return None

    def aux_losses(
        self,
        state: TripState,
        targets: Tensor,
        num_items_in_batch: Tensor | int | None,
        head: nn.Module,
    ) -> dict[str, Tensor]:
        """Terms to add to the cross-entropy, by name, averaged over tokens like the cross-entropy.

        Args:
            state: The state that `gate` returned.
            targets: `[B, T]`, shifted; -100 is ignored.
            num_items_in_batch: See the loss.
            head: The projection to logits.
        """
        return {}

    def metrics(self, state: TripState, targets: Tensor) -> dict[str, Tensor]:
        """Values to log in training, by name. By default those of halting and of the Jacobi solver."""
        found: dict[str, Tensor] = {}
        if "trips" in state:
            found["trips"] = valid_mean(state["trips"], targets)
            for k in range(1, self.trips + 1):
                found[f"trips_{k}"] = valid_mean(state["trips"] == k, targets)
        return found | {name: state[name] for name in ("jacobi_residual", "jacobi_rounds") if name in state}


def valid_mean(values: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens that have a target, `[B, T, ...]` and `[B, T]`; 0 without any."""
    valid = (targets != IGNORE).view(*targets.shape, *[1] * (values.ndim - 2)).expand_as(values)
    return values.float().where(valid, 0).sum() / valid.sum().clamp(min=1)
