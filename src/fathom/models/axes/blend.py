"""`blend`: a mechanism may start with weight λ = 0, so that a model trained without it first computes the same.

The blend is linear:

    y = a + λ (b - a)        a is the result without the mechanism, b the result with it

λ is the option `blend`. With `blend_steps`, λ rises linearly from 0 to that value over the first training steps. At
λ = 0 the result is `a` to the last bit, and at λ = 1 it is `b`: `torch.lerp` of finite numbers is exact at both ends.

With `blend: learned`, λ is a parameter that starts at zero, next to a gain on `a` (`gates.py`).

`pretrained.py` passes the training step on (`set_step`), stops a training with `blend_steps` that never calls it, and
saves a model with the current λ; transformers' Trainer needs `training/callback.py`. `deepen/request.py` adds a
mechanism with the λ of its `closed` (`roles.py`), and by default opens it by `blend_steps`. A mechanism whose `blend`
cannot be learned says `learns = False` in its options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .gates import LEARNED, Gates, gate_shapes
from .numerics import widen
from .roles import (
    Cost,
    MechanismModule,
    MechanismOptions,
    MixerOptions,
    Residual,
    ResidualState,
    ValueMixer,
    WriteContext,
)

if TYPE_CHECKING:
    from .fields import DecoderConfig
    from .visit import Visit


@dataclass(frozen=True)
class BlendOptions(MechanismOptions):
    """Options of a mechanism that can start with weight λ = 0, so that a pretrained model first computes the same."""

    learns: ClassVar[bool] = True
    """Whether `blend` may be `learned`."""
    blend: float | Literal["learned"] = 1.0
    """λ: weight of the mechanism's result. With 0 the model computes what it would compute without the mechanism. With
    `learned`, λ and a gain on what the model computes without the mechanism are parameters, which start at zero."""
    gates: Literal["layer", "head", "channel"] = "layer"
    """For `blend: learned`: one λ and one gain per layer, per head (mixers only) or per channel."""
    blend_steps: int = 0
    """Training steps over which λ rises from 0 to `blend`; 0 keeps λ constant. A saved model holds the current λ."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse a `blend` outside 0 … 1, negative `blend_steps`, and `gates` that the mechanism cannot have."""
        super().check(config)
        if isinstance(self.blend, str):
            self.require("blend", self.learns, "lie in 0..1: this mechanism has no learned gates")
            self.require("blend_steps", self.blend_steps == 0, "be 0, because blend=learned has no schedule")
            self.require_one_of("gates", list(gate_shapes(config, self.axis)))
        else:
            self.require("blend", 0 <= self.blend <= 1, "lie in 0..1, or be learned")
            self.require("gates", self.gates == "layer", "be layer, because only blend=learned has gates")
        self.require("blend_steps", self.blend_steps >= 0, "not be negative")

    @property
    def blends(self) -> bool:
        """Whether the blending weight λ is, or may become, different from 1."""
        return self.blend != 1 or self.blend_steps > 0

    @property
    def learned(self) -> bool:
        """Whether λ is a parameter."""
        return self.blend == LEARNED


class Blended(MechanismModule):
    """Base class of mechanisms with a blending weight λ; list it first among the bases, before the axis's class."""

    def __init__(self, config: DecoderConfig, *place: int) -> None:
        super().__init__(config, *place)
        given = getattr(config, f"{self.axis}_options")
        self.blend_gates: Gates | None = None
        if given["blend"] == LEARNED and self.gated(config, *place):
            self.blend_gates = Gates(gate_shapes(config, self.axis)[given["gates"]], self.mixes(config, *place))
        self.final_blend = 1.0 if given["blend"] == LEARNED else float(given["blend"])
        self.blend_steps = given["blend_steps"]
        self.blend_now = 0.0 if self.blend_steps else self.final_blend
        # a tensor, because a Python number that changes every step would trigger a recompilation every step
        closes = self.blend_steps or self.final_blend != 1
        self.blend = nn.Buffer(torch.tensor(self.blend_now), persistent=False) if closes else None

    @classmethod
    def gated(cls, config: DecoderConfig, *place: int) -> bool:
        """Whether a module has parameters for learned gates; False where the mechanism never computes anything."""
        return True

    @classmethod
    def mixes(cls, config: DecoderConfig, *place: int) -> bool:
        """Whether learned gates have a λ besides the gain g."""
        return True

    @property
    def closable(self) -> bool:
        """Whether a forward pass must also compute the result without the mechanism, in order to blend the two."""
        return self.blend is not None or self.blend_gates is not None

    def init_weights(self, std: float) -> None:
        """Also set learned gates to zero, and any other λ to its current value, since checkpoints do not contain it."""
        super().init_weights(std)
        if self.blend_gates is not None:
            self.blend_gates.close()
        if self.blend is not None:
            init.constant_(self.blend, self.blend_now)

    @property
    def scheduled(self) -> bool:
        """Whether λ rises over training, or the base class changes something over training."""
        return bool(self.blend_steps) or super().scheduled

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Also set the scheduled λ to its value at this step."""
        super().set_step(step, steps)
        if self.blend is not None and self.blend_steps:
            self.blend_now = self.final_blend * min(1.0, step / self.blend_steps)
            self.blend.fill_(self.blend_now)

    def settle(self, config: DecoderConfig) -> None:
        """Write the current λ into `config` as a constant, without its schedule."""
        super().settle(config)
        if self.blend_steps:
            getattr(config, f"{self.axis}_options").update(blend=self.blend_now, blend_steps=0)

    def opened(self, update: Tensor) -> Tensor:
        """The update times λ, for mechanisms that add their update to a stream which is unchanged otherwise."""
        return update if self.blend is None else update * self.blend.to(update.dtype)

    def blended(self, without: Tensor, result: Tensor) -> Tensor:
        """Blend the results a (without the mechanism) and b (with it) in at least float32: a + λ (b - a), or (1 + g) a
        + λ b with learned gates."""
        if self.blend_gates is not None:
            return self.blend_gates(without, result)
        if self.blend is None:
            return result
        wide = widen(result)
        return torch.lerp(widen(without), wide, self.blend.to(wide.dtype)).to(result.dtype)


@dataclass(frozen=True)
class BlendedMixerOptions(MixerOptions, BlendOptions):
    """Options of a mixer that can start with weight λ = 0, so that a pretrained model first computes the same."""

    shuffled: bool = False
    """For `blend: learned`: the mechanism's result comes from another sequence of the batch, at the same positions. It
    has the statistics of the true result without its content, so the option makes a control."""

    @property
    def head_gates(self) -> tuple[str, ...]:
        """Those of learned gates by head or channel."""
        return ("blend_gates.gain", "blend_gates.mix") if self.learned and self.gates != "layer" else ()

    def check(self, config: DecoderConfig) -> None:
        """Refuse `shuffled` unless `blend` is `learned`."""
        super().check(config)
        self.require("shuffled", self.learned or not self.shuffled, "be false unless blend is learned")


class BlendedMixer(Blended, ValueMixer):
    """Base class of mixers with a blending weight λ. With learned gates it stores (1 + g) v + λ m, where m is what the
    sources alone make."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.shuffled = BlendedMixerOptions.of(config).shuffled

    @classmethod
    def mixes(cls, config: DecoderConfig, *place: int) -> bool:
        """Whether the layer has anything to mix in: a source in a lower layer, or in an earlier iteration. Its number
        counts layers with keys."""
        loop, layer = config.recurrence_options, config.keyed_layers[place[0]]
        again = loop.get("prelude", 0) <= layer < config.num_hidden_layers - loop.get("coda", 0)
        crosses = config.recurrence != "once" and again and config.read_across_trips != "none"
        return crosses or bool(cls.source_layers(config, *place))

    def of_sources(self, query: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """The mix m of the sources' values alone, without the layer's own value, `[B, H_kv, T, D]`."""
        raise NotImplementedError

    def with_gates(self, query: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """The value to store, (1 + g) v + λ m."""
        assert self.blend_gates is not None
        if not sources:
            return self.blend_gates(value)
        mix = self.of_sources(query, sources)
        if self.shuffled and len(mix) == 1:
            raise ValueError("mixer_options.shuffled: a batch needs two sequences or more")
        return self.blend_gates(value, mix.roll(1, 0) if self.shuffled else mix)


class BlendedResidual(Blended, Residual):
    """Base class of residuals with a blending weight λ; list it before the mechanism's own class among the bases. While
    λ may be below 1, the state begins with the plain stream x, and a sub-layer reads x + λ (h - x), where h is what the
    mechanism reads. With learned gates it reads (1 + g) x + λ h."""

    def __init__(self, config: DecoderConfig, *place: int) -> None:
        super().__init__(config, *place)
        self.adds = self.closable

    def begin(self, embeddings: Tensor) -> ResidualState:
        """The initial state: the plain stream, followed by the mechanism's own state."""
        own = super().begin(embeddings)
        return (embeddings, *own) if self.closable else own

    def read(self, state: ResidualState) -> tuple[Any, ResidualState, WriteContext]:
        """Interpolate between the plain stream and the input that the mechanism reads."""
        if not self.closable:
            return super().read(state)
        x, own, context = super().read(state[1:])
        if isinstance(x, tuple):
            return tuple(self.blended(state[0], way) for way in x), (state[0], *own), context
        return self.blended(state[0], x), (state[0], *own), context

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Write to both."""
        if not self.closable:
            return super().write(state, update, context)
        return (state[0] + update, *super().write(state[1:], update, context))


def gate_size(config: DecoderConfig, options: BlendOptions) -> int:
    """The size of one learned gate of a mechanism; 0 if its gates are not learned."""
    return math.prod(gate_shapes(config, options.axis)[options.gates]) if options.learned else 0


def blending_cost(config: DecoderConfig, reads: int, scalar: int, options: BlendOptions) -> Cost:
    """Cost of blending the plain stream into `reads` inputs of sub-layers, not counting parameters."""
    width = config.hidden_size
    return Cost(elementwise_flops=4 * width * reads, transient_bytes=width * scalar) if options.blends else Cost()


def mixing_cost(
    config: DecoderConfig, visits: Sequence[Visit], options: BlendOptions, mixer: type[BlendedMixer]
) -> Cost:
    """Cost of blending mixed values with the layers' own. Learned gates have parameters, and a gain in every layer with
    keys."""
    width, mixing = config.num_key_value_heads * config.head_dim, sum(bool(v.sources) for v in visits)
    if not options.learned:
        return Cost(elementwise_flops=3 * width * mixing * options.blends)
    gates = sum(1 + mixer.mixes(config, i) for i in range(len(config.keyed_layers)))
    gained = sum(visit.layer in config.keyed_layers for visit in visits)
    return Cost(parameters=gates * gate_size(config, options), elementwise_flops=width * (gained + 2 * mixing))
