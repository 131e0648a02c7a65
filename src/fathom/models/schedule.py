"""Which layers are sources: the options and the rule that mixers share which read a grid of earlier layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .configuration import FathomConfig


@dataclass(frozen=True)
class ScheduleOptions:
    """Which layers are sources."""

    stride: int | None = None
    """Every stride-th layer, counted from layer 0, is a source for all layers above it. Default: half the layers."""
    recent_window: int = 0
    """How many layers just below are sources too."""
    across_trips: str | None = None
    """Sources from earlier trips of a loop: `none`, `same_layer` (the layer's own earlier trips; the default in a
    loop) or `grid` (the grid of every earlier trip)."""

    def resolve(self, config: FathomConfig) -> ScheduleOptions:
        """Fill in the defaults that depend on the model."""
        layers = config.num_hidden_layers
        stride = max(1, layers // 2) if self.stride is None else self.stride
        if not 1 <= stride <= layers:
            raise ValueError(
                f"mixer_options.stride must be between 1 and {layers} (the number of layers), got {stride}"
            )
        if not 0 <= self.recent_window <= layers:
            raise ValueError(f"mixer_options.recent_window must be between 0 and {layers}, got {self.recent_window}")
        return replace(self, stride=stride)


def grid_sources(config: FathomConfig, layer_idx: int) -> tuple[int, ...]:
    """The absolute grid below a layer, and its recent window."""
    stride, window = config.mixer_options["stride"], config.mixer_options["recent_window"]
    return tuple(i for i in range(layer_idx) if i % stride == 0 or i >= layer_idx - window)


def trip_rule(config: FathomConfig) -> str:
    """How sources cross trips: as the option says, or what suits the recurrence."""
    rule = config.mixer_options["across_trips"]
    return rule if rule is not None else "same_layer" if config.recurrence == "loop" else "none"
