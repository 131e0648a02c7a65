"""The order in which a layer's two sub-layers read from and write to the residual, for Fathom's layers and hosted
ones.

The orders:

    in turn     s ← write(s, mix_tokens(read(s)));  s ← write(s, mix_channels(read(s)))
    at once     both read s, then both write; GPT-NeoX rounds the sum of both updates first (`sum`)

A layer gets one of these when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from .axes.roles import Residual, ResidualState, ValueMixer, ways
from .registry import residuals

Order = Callable[[Any, ResidualState, int, Mapping[str, Any]], ResidualState]
"""From a layer, the residual state, the trip and what attention is given: the new state and what attention returns."""


class Sublayers:
    """Mixin for decoder layers, which must have the methods `mix_tokens` and `mix_channels`."""

    before: tuple[str | None, str | None]
    """The norms of the sub-layers' inputs, by the names of the layer's modules."""
    after: tuple[str | None, str | None]
    """The norms of their outputs."""
    multiplier: float = 1.0
    """The factor by which both outputs are multiplied."""
    order: Order
    depth_mixer: ValueMixer | None
    """The mixer of its tokens' values over depth; None if nothing can."""
    _modules: dict[str, Any]

    def normed(self, name: str | None, x: Tensor) -> Tensor:
        """Apply the layer's norm of this name to `x`; if the name is None, return `x`."""
        return x if name is None else self._modules[name](x)

    def scaled(self, x: Tensor) -> Tensor:
        """An update times the multiplier."""
        return x if self.multiplier == 1.0 else x * self.multiplier


def order_of(layer: nn.Module, parallel: str) -> Order:
    """The function that runs a layer's sub-layers in the right order; the layer must have its residuals already.

    Args:
        layer: The layer.
        parallel: `steps` if both sub-layers read the layer's input and are added one after the other, `sum` if their
            sum is added; else empty.
    """
    if not parallel:
        return in_turn
    if parallel == "steps":
        return at_once
    return summed if type(layer.attn_residual) is Residual else partial(at_once, rounded=True)


def in_turn(layer: Any, state: ResidualState, trip: int, given: Mapping[str, Any]) -> ResidualState:
    """Attention, then the MLP."""
    parts = layer._modules
    attn, mlp = residuals(layer, trip) if trip else (parts["attn_residual"], parts["mlp_residual"])
    (read, write), (read_mlp, write_mlp) = ways(attn), ways(mlp)
    x, state, context = read(state)
    update, *kept = layer.mix_tokens(x, attn.gained, **given)
    state = write(state, update, context)
    x, state, context = read_mlp(state)
    return *write_mlp(state, layer.mix_channels(x), context), *kept


def summed(layer: Any, state: ResidualState, trip: int, given: Mapping[str, Any]) -> ResidualState:
    """Run attention and MLP in parallel on one plain residual stream, to which the sum of both updates is added."""
    if type(layer.attn_residual) is not Residual or type(layer.mlp_residual) is not Residual:  # replaced since
        return at_once(layer, state, trip, given, rounded=True)
    (read, write), (read_mlp, _) = ways(layer.attn_residual), ways(layer.mlp_residual)
    x, state, context = read(state)
    y, state, _ = read_mlp(state)
    update, *kept = layer.mix_tokens(x, layer.attn_residual.gained, **given)
    return *write(state, update + layer.mix_channels(y), context), *kept


def at_once(
    layer: Any, state: ResidualState, trip: int, given: Mapping[str, Any], rounded: bool = False
) -> ResidualState:
    """Run attention and MLP in parallel: both read the same state, then both write; with `rounded`, a plain stream gets
    the sum of both updates."""
    attn, mlp = residuals(layer, trip)
    (read, write), (read_mlp, write_mlp) = ways(attn), ways(mlp)
    x, state, context = read(state)
    y, state, second = read_mlp(state)
    update, *kept = layer.mix_tokens(x, attn.gained, **given)
    made = layer.mix_channels(y)
    after = write_mlp(write(state, update, context), made, second)
    return *((state[0] + (update + made), *after[1:]) if rounded and mlp.adds else after), *kept
