"""Which layers are sources: the options and the rule of mixers that read a grid of earlier layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from .roles import MixerOptions

if TYPE_CHECKING:
    from .configuration import FathomConfig

Schedule = TypeVar("Schedule", bound="ScheduleOptions")


@dataclass(frozen=True)
class ScheduleOptions(MixerOptions):
    """Which layers are sources."""

    stride: int | None = None
    """Every stride-th layer, counted from layer 0, is a source for all layers above it. Default: half the number of
    layers."""
    recent_layers: int = 0
    """Number of layers just below that are sources too."""
    across_trips: str | None = None
    """Sources from earlier trips: `none`, `same_layer` (the layer's own earlier trips), `grid` (the grid of every
    earlier trip) or `first` (each source is taken once, at its layer's first visit). Default: as the recurrence
    declares."""

    def resolve(self: Schedule, config: FathomConfig) -> Schedule:
        """Fill in the defaults that depend on the model."""
        layers = config.num_hidden_layers
        stride = max(1, layers // 2) if self.stride is None else self.stride
        if not 1 <= stride <= layers:
            raise ValueError(
                f"mixer_options.stride must be between 1 and {layers} (the number of layers), got {stride}"
            )
        if not 0 <= self.recent_layers <= layers:
            raise ValueError(f"mixer_options.recent_layers must be between 0 and {layers}, got {self.recent_layers}")
        return replace(self, stride=stride)


def grid_sources(config: FathomConfig, layer_idx: int) -> tuple[int, ...]:
    """The sources of a layer: every stride-th layer below it, and the `recent_layers` just below."""
    options = ScheduleOptions.of(config)
    assert options.stride is not None
    return tuple(i for i in range(layer_idx) if i % options.stride == 0 or i >= layer_idx - options.recent_layers)


def trip_rule(config: FathomConfig, default: str) -> str:
    """How sources cross trips: the option, else the recurrence's rule."""
    rule = ScheduleOptions.of(config).across_trips
    return default if rule is None else rule
