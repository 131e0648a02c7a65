"""The three roles that a mechanism can play, and what it must declare.

Each base class *is* the first value of its axis: a `ValueMixer` that mixes nothing, a `Residual` that adds, a
`Recurrence` that makes one trip. A mechanism subclasses one of them in a file of its own and ends that file with
one `Mechanism`. The decoder in `modeling.py` knows these classes and nothing about any mechanism.

State is functional throughout: methods return new tensors and mutate nothing, because a list that is changed inside
a layer breaks activation checkpointing and FSDP2 without an error.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn

from .loss import IGNORE

if TYPE_CHECKING:
    from .configuration import FathomConfig
    from .slots import Out, Visit

ResidualState = tuple[Tensor, ...]
"""What a residual hands from one sub-layer to the next."""
Ways = tuple[Tensor, Tensor, Tensor]
"""What queries, keys and values are made of, `[B, T, hidden_size]` each, where they read different things."""
WriteContext = tuple[Tensor, ...] | None
"""What a residual's `read` computes for its `write` of the same sub-layer, such as mixing weights; never the state."""
TripState = dict[str, Tensor]
"""What a recurrence knows of every token, by name: `[B, T, ...]`."""
Own = TypeVar("Own", bound="MechanismOptions")


class View(enum.Enum):
    """Which slots (token, trip) a slot may read."""

    SAME = "same"  # the same trip of earlier tokens (or the last one they made)
    DUO = "duo"  # trips up to its own
    ALL = "all"  # everything before it

    @property
    def depth_parallel(self) -> bool:
        """Whether one trip of all tokens can be computed at once, exactly."""
        return self is not View.ALL


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a mechanism adds to the vanilla decoder. Everything but `parameters` is per token of a forward pass."""

    parameters: int = 0
    flops: float = 0.0
    """Of matrix products and weighted sums, as the papers count them."""
    elementwise_flops: float = 0.0
    """Of norms, softmaxes and pooling, which the papers leave out."""
    cache_bytes: int = 0
    transient_bytes: int = 0
    """Alive during the forward pass beyond vanilla; nothing of it survives the token."""
    io_bytes: int = 0
    """Activation reads and writes of an unfused implementation."""
    training_flops: float = 0.0
    """What a training step takes beyond three times `flops`: below 0 where backward costs less than twice forward."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)})


@dataclass(frozen=True)
class MechanismOptions:
    """A mechanism's options: the fields are the keys of its dictionary in `config.json`."""

    axis: ClassVar[str]

    @classmethod
    def of(cls: type[Own], config: FathomConfig) -> Own:
        """Those of these fields that `config` holds; a base class reads its part of a mechanism's options."""
        given = getattr(config, f"{cls.axis}_options")
        return cls(**{field.name: given[field.name] for field in fields(cls)})

    def resolve(self: Own, config: FathomConfig) -> Own:
        """Fill in what depends on `config`, and refuse what is impossible."""
        return self


@dataclass(frozen=True)
class NoOptions(MechanismOptions):
    """A mechanism without options."""


class MixerOptions(MechanismOptions):
    """Options of a value mixer."""

    axis = "mixer"


class ResidualOptions(MechanismOptions):
    """Options of a residual."""

    axis = "residual"


@dataclass(frozen=True)
class RecurrenceOptions(MechanismOptions):
    """Options of a recurrence."""

    axis = "recurrence"

    trips: int = 1
    """How many trips a token makes at most, the first included."""
    recompute: bool = False
    """Whether training keeps only the input of each pass through the layers and computes the pass again in the backward
    pass: less memory, the same gradients."""

    def check_trips(self) -> None:
        """Refuse a token that makes no trip."""
        if self.trips < 1:
            raise ValueError(f"recurrence_options.trips must be at least 1, got {self.trips}")


@dataclass(frozen=True)
class HaltingOptions(RecurrenceOptions):
    """Options of a recurrence whose tokens may halt, and which trains trip after trip."""

    skip_dead_rows: bool = False
    """Whether training leaves halted tokens out of a trip: the same numbers for less compute, with one host
    synchronisation per trip. By default they are computed and discarded."""


@dataclass(frozen=True)
class Mechanism:
    """One value of one axis: the declaration at the end of every mechanism file."""

    name: str
    axis: str
    """`mixer`, `residual` or `recurrence`."""
    summary: str
    paper: str
    build: Callable[..., Any]
    """Mixer: (config, layer_idx). Residual: (config, sublayer). Recurrence: (config)."""
    cost: Callable[[FathomConfig, Sequence[Visit], int], Cost]
    """(config, the plan's visits, bytes per scalar)."""
    options: type[MechanismOptions] = NoOptions
    closed: Mapping[str, object] | None = None
    """Options with which a pretrained model computes, for a start, what it did without the mechanism; None for none."""


class MechanismModule(nn.Module):
    """What the three roles share."""

    axis: ClassVar[str]
    no_weight_decay: tuple[str, ...] = ()
    """Local names of parameters that weight decay must leave alone although they have two dimensions or more."""

    def init_weights(self, std: float) -> None:
        """Initialise this module's own parameters and buffers (with `transformers.initialization`)."""

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Follow a schedule over training steps, of which there will be `steps`."""

    def settle(self, config: FathomConfig) -> None:
        """Write the present value of a schedule into `config`, which is about to be saved, as its final one."""


def direct(module: nn.Module) -> Callable[..., Any]:
    """`module.forward` if the module has no hooks and is not offloaded, else `module`.

    Calling `forward` directly saves as much time for one token as an addition takes.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return module if hooks or "forward" in module.__dict__ else module.forward


class ValueMixer(MechanismModule):
    """Decides which value attention stores and reads: `layers.N.self_attn.mixer`."""

    axis = "mixer"

    def __init__(self, config: FathomConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    @staticmethod
    def source_layers(config: FathomConfig, layer_idx: int) -> tuple[int, ...]:
        """The earlier layers that this layer reads, ascending: the only place where the rule is written."""
        return ()

    @staticmethod
    def across_trips(config: FathomConfig, default: str) -> str:
        """How sources cross the trips of a recurrence: `none`, `same_layer` or `grid`.

        Args:
            config: The model.
            default: The rule that its recurrence declares.
        """
        return "none"

    def fused(
        self, projected: Tensor, sources: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
        """A kernel that norms and rotates queries and keys and mixes values at once; None if there is none.

        Attention calls the kernel as `kernel((query, key, value), sources, norms, angles, keys_last)`: projections
        `[B, T, H, D]` before norms and rotation, the two RMS norms, cosines and sines, and whether keys are normed
        after rotation. The kernel returns queries, keys and values as `forward` would see and return them.

        Args:
            projected: A tensor of the projections' device and precision.
            sources: As `forward` takes them.
        """
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """The value to store, `[B, H_kv, T, D]`.

        Args:
            query: `[B, H, T, D]`, normed and rotated.
            key: `[B, H_kv, T, D]`, normed and rotated.
            value: `[B, H_kv, T, D]`, this layer's own projection.
            sources: `(key, mixed value, key, mixed value, ...)` of earlier layers for the *same* tokens, oldest first.
        """
        return value


def ways(residual: Residual) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`read` and `write` of a residual; twice the module itself if hooks wait for its calls."""
    free = direct(residual) is not residual
    return (residual.read, residual.write) if free else (residual, residual)


class Residual(MechanismModule):
    """Decides how a sub-layer's output reaches later ones: `layers.N.{attn,mlp}_residual`, `model.final_residual`.

    Sub-layers are numbered 0 … 2L-1 (attention, MLP, attention, …); 2L is the read before the final norm.

    The state has one way through a layer: every `read` and every `write` takes the state that the call before it
    returned. A layer may therefore read twice before it writes twice, as a parallel layer does.
    """

    axis = "residual"
    multiway = False
    """Whether `read` gives attention three inputs."""

    def __init__(self, config: FathomConfig, sublayer: int) -> None:
        super().__init__()
        self.sublayer = sublayer

    def forward(self, state: ResidualState, *written: Any) -> Any:
        """`write` if an update is given, else `read`. A call of the module, since hooks run only on calls."""
        return self.write(state, *written) if written else self.read(state)

    def begin(self, embeddings: Tensor) -> ResidualState:
        """The state in which a trip starts.

        Args:
            embeddings: `[B, T, hidden_size]`, or the trip's input in a later trip.
        """
        return (embeddings,)

    def read(self, state: ResidualState) -> tuple[Any, ResidualState, WriteContext]:
        """The sub-layer's input, `[B, T, hidden_size]`; the state that the next call takes; what `write` will need.

        Before attention the input may be `Ways`: what queries, keys and values are made of. The layer's norm is called
        for each that is a tensor of its own, then `gained` for all three.

        The state has the values that it had. A mechanism with a backward pass of its own may return other tensors for
        it, so that the gradients of all later uses arrive there as one sum.

        Args:
            state: As the last call left it; its tensors are this mechanism's own, `[B, T, ...]`.
        """
        return state[0], state, None

    def gained(self, ways: Ways) -> Ways:
        """The inputs of the three projections, of what the layer's norm made of `Ways`: for gains of their own. Called
        without hooks, so parameters belong to modules inside this one."""
        return ways

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Merge the sub-layer's output into the state; returns a new one.

        Args:
            state: As the last call left it. It may have been written to since this sub-layer's `read`.
            update: The sub-layer's output, `[B, T, hidden_size]`.
            context: The last value that this sub-layer's `read` returned.
        """
        return (state[0] + update,)


class Recurrence(MechanismModule):
    """Decides how many trips a token makes and what each one starts from: `model.recurrence`.

    Its state is a dictionary of tensors `[B, T, ...]`, one value per token; `sweep` keeps it as it was for tokens that
    have halted.
    """

    axis = "recurrence"
    recompute = False
    """Whether training computes every pass through the layers again in the backward pass."""
    gradient_passes = 0
    """Passes of the Jacobi solver, counted from the last, that gradients flow through in training; 0 for all."""
    skip_dead_rows = False
    """Whether training leaves halted tokens out of a trip instead of computing and discarding them."""
    entry_layer: int | None = None
    """The layer whose input in the first trip `gate` gets as `out.entry`; None for none."""
    across_trips = "none"
    """How a mixer's sources cross trips unless its options say otherwise: `none`, `same_layer` or `grid`."""
    leaves = False
    """Whether `leave` changes what the last trip's looped layers return."""
    halts = False
    """Whether tokens may stop before the last trip; `gate` then leaves `alive` (`[B, T]`, bool) in the state."""
    reads = View.SAME
    """The view, unless a subclass overrides `sees` to take it from an option."""

    def __init__(self, config: FathomConfig) -> None:
        super().__init__()
        self.trips = self.drawn_trips = self.trips_of(config)
        """Trips of a token, the first included; `drawn_trips` is their number in this training step."""
        self.view = self.sees(config)

    @staticmethod
    def trips_of(config: FathomConfig) -> int:
        """Trips of a token, the first included."""
        return 1

    @classmethod
    def training_trips(cls, config: FathomConfig) -> tuple[int, int]:
        """The fewest and the most trips of a training step; the number is drawn uniformly."""
        return cls.trips_of(config), cls.trips_of(config)

    @classmethod
    def training_rounds(cls, config: FathomConfig) -> tuple[int, int]:
        """The fewest and the most Jacobi rounds of a training step; the number is drawn uniformly."""
        return 0, 0

    @classmethod
    def kept_passes(cls, config: FathomConfig) -> int:
        """`gradient_passes` of a model of this configuration."""
        return 0

    @classmethod
    def most_trips(cls, config: FathomConfig) -> int:
        """The largest number of trips that a call may ask for: what the weights were trained for."""
        return cls.training_trips(config)[1]

    @classmethod
    def additions(cls, config: FathomConfig) -> int:
        """Number of trips accumulated in one residual stream; `output_init=depth` divides the initial standard
        deviation by its square root."""
        return 1

    @classmethod
    def sees(cls, config: FathomConfig) -> View:
        """Which slots a slot may read."""
        return cls.reads

    @staticmethod
    def span(config: FathomConfig) -> tuple[int, int]:
        """The layers `[start, stop)` that every trip visits; those outside are visited once, before and after."""
        return 0, config.num_hidden_layers

    @staticmethod
    def needs_head(config: FathomConfig) -> bool:
        """Whether `feed` asks for logits, so that the decoder cannot run without the language-modelling head."""
        return False

    @classmethod
    def penalty_flops(cls, config: FathomConfig, sequence_length: int) -> float:
        """FLOPs per token that `aux_losses` adds to a training step."""
        return 0.0

    @property
    def unrolls(self) -> bool:
        """Whether trips are further layers of a plain decoder and nothing else."""
        return False

    def feed(self, x: Tensor, out: Out, state: TripState) -> Tensor:
        """The next trip's input, `[B, T, hidden_size]`.

        Args:
            x: This trip's input, `[B, T, hidden_size]`.
            out: This trip's output: `out.hidden` is normed, `[B, T, hidden_size]`.
            state: As `gate` left it after this trip.
        """
        raise RuntimeError(f"{type(self).__name__} makes one trip only")

    def gate(self, out: Out, state: TripState) -> TripState:
        """What a trip changes in the state, tensors `[B, T, ...]`. Here: the last trip's output is kept.

        Args:
            out: The trip's output: `out.hidden` is normed, `[B, T, hidden_size]`.
            state: As the trip before left it; empty before the first.
        """
        return {"hidden": out.hidden}

    def leave(self, stream: Tensor, x: Tensor, state: TripState) -> Tensor:
        """What goes on to the layers after the looped span, `[B, T, hidden_size]`, where `leaves` says so; never under
        the view ALL.

        Args:
            stream: The output of the span's last layer in the last trip, `[B, T, hidden_size]`.
            x: That trip's input.
            state: As the trip before left it.
        """
        return stream

    def key_bias(self, state: TripState, trip: int) -> Tensor | None:
        """Added to the attention logits of every query that reads the slots of `trip`, `[B, T]`; None: nothing."""
        return None

    def readout(self, state: TripState) -> Tensor:
        """The hidden state that the head reads, `[B, T, hidden_size]`, normed."""
        return state["hidden"]

    def weighted_readouts(self, state: TripState) -> list[tuple[Tensor, Tensor]] | None:
        """Hidden states `[B, T, hidden_size]` and weights `[B, T]`, whose weighted losses are in training the loss in
        place of the readout's; None: the readout's."""
        return None

    def rounds(self, purpose: str, length: int) -> int:
        """Jacobi rounds under the view ALL: for `train`, `evaluate` (no cache) or `prefill` (with one)."""
        return 0

    def exact(self) -> bool:
        """Whether evaluation and prefill under the view ALL must equal decoding."""
        return False

    def carry(self, state: TripState) -> TripState | None:
        """The part of the state that the gates of the next Jacobi round start with; None for nothing."""
        return None

    def aux_losses(
        self,
        state: TripState,
        targets: Tensor,
        num_items_in_batch: Tensor | int | None,
        head: nn.Module,
    ) -> dict[str, Tensor]:
        """Terms to add to the cross-entropy, by name, averaged over tokens as it is.

        Args:
            state: As `gate` left it.
            targets: `[B, T]`, shifted; -100 is ignored.
            num_items_in_batch: As the loss takes it.
            head: Turns hidden states into logits.
        """
        return {}

    def metrics(self, state: TripState, targets: Tensor) -> dict[str, Tensor]:
        """What training should log, by name: here, what halting and the Jacobi solver did."""
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
