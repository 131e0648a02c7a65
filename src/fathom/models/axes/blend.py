"""`blend`: an exact start for weights that were trained without a mechanism.

    y = a + λ (b - a)        a is the result without the mechanism, b the result with it

λ is the option `blend`. With `blend_steps`, λ rises linearly from 0 to that value over the first training steps. At
λ = 0 the result is `a` to the last bit, and at λ = 1 it is `b`: `torch.lerp` of finite numbers is exact at both ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .numerics import widen
from .roles import Cost, MechanismModule, MechanismOptions, Residual, ResidualState, WriteContext

if TYPE_CHECKING:
    from .fields import DecoderConfig


@dataclass(frozen=True)
class BlendOptions(MechanismOptions):
    """Options of a mechanism that can start closed."""

    blend: float = 1.0
    """λ: weight of the mechanism's result. With 0 the model computes what it computes without the mechanism."""
    blend_steps: int = 0
    """Training steps over which λ rises from 0 to `blend`; 0 keeps it constant. A saved model has its current λ."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse a weight outside 0 … 1 and a negative number of steps."""
        super().check(config)
        self.require("blend", 0 <= self.blend <= 1, "lie in 0..1")
        self.require("blend_steps", self.blend_steps >= 0, "not be negative")

    @property
    def blends(self) -> bool:
        """Whether λ is, or may become, different from 1."""
        return self.blend != 1 or self.blend_steps > 0


class Blended(MechanismModule):
    """A mechanism with λ; listed before its role among the base classes."""

    def __init__(self, config: DecoderConfig, *place: int) -> None:
        super().__init__(config, *place)
        given = getattr(config, f"{self.axis}_options")
        self.final_blend, self.blend_steps = float(given["blend"]), given["blend_steps"]
        self.blend_now = 0.0 if self.blend_steps else self.final_blend
        # a tensor, because a Python number that changes every step would trigger a recompilation every step
        closes = self.blend_steps or self.final_blend != 1
        self.blend = nn.Buffer(torch.tensor(self.blend_now), persistent=False) if closes else None

    def init_weights(self, std: float) -> None:
        """Also initialise λ, which checkpoints do not contain."""
        super().init_weights(std)
        if self.blend is not None:
            init.constant_(self.blend, self.blend_now)

    @property
    def scheduled(self) -> bool:
        """λ rises, or something else changes."""
        return bool(self.blend_steps) or super().scheduled

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Also set λ for this step."""
        super().set_step(step, steps)
        if self.blend is not None and self.blend_steps:
            self.blend_now = self.final_blend * min(1.0, step / self.blend_steps)
            self.blend.fill_(self.blend_now)

    def settle(self, config: DecoderConfig) -> None:
        """Fix λ at its current value."""
        super().settle(config)
        if self.blend_steps:
            getattr(config, f"{self.axis}_options").update(blend=self.blend_now, blend_steps=0)

    def opened(self, update: Tensor) -> Tensor:
        """λ b, for streams that the mechanism otherwise leaves unchanged."""
        return update if self.blend is None else update * self.blend.to(update.dtype)

    def blended(self, without: Tensor, result: Tensor) -> Tensor:
        """a + λ (b - a) of the results without and with the mechanism, in at least float32."""
        if self.blend is None:
            return result
        wide = widen(result)
        return torch.lerp(widen(without), wide, self.blend.to(wide.dtype)).to(result.dtype)


class BlendedResidual(Blended, Residual):
    """A residual with λ; it stands before the mechanism's own class among the bases. While λ may be below 1, the state
    begins with the plain stream x, and a sub-layer reads x + λ (h - x), where h is what the mechanism reads."""

    def __init__(self, config: DecoderConfig, *place: int) -> None:
        super().__init__(config, *place)
        self.adds = self.blend is not None

    def begin(self, embeddings: Tensor) -> ResidualState:
        """The plain stream, followed by the mechanism's own state."""
        own = super().begin(embeddings)
        return own if self.blend is None else (embeddings, *own)

    def read(self, state: ResidualState) -> tuple[Tensor, ResidualState, WriteContext]:
        """Interpolate between the plain stream and the mechanism's."""
        if self.blend is None:
            return super().read(state)
        x, own, context = super().read(state[1:])
        return self.blended(state[0], x), (state[0], *own), context

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Write to both."""
        if self.blend is None:
            return super().write(state, update, context)
        return (state[0] + update, *super().write(state[1:], update, context))


def blending_cost(width: int, reads: int, scalar: int, blends: bool) -> Cost:
    """Cost of blending `reads` tensors of `width` channels with a plain stream."""
    return Cost(elementwise_flops=4 * width * reads, transient_bytes=width * scalar) if blends else Cost()
