"""Base of mixers that read every stride-th and the most recent earlier layers: options, and which layers are
sources.

The strided layers are an absolute grid, those with i mod stride = 0, whatever layer reads them. `../trips/slots.py`
adds the sources of earlier iterations (`across_trips`).

Schedules over training steps are elsewhere: `blend_steps` in `../axes/blend.py`, `set_step` in `../pretrained.py`.

`registry.py` (`check_trips`) refuses values of `across_trips` that a recurrence excludes, such as all but `none` with
`kv: first`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ..axes.blend import BlendedMixer, BlendedMixerOptions

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig

Schedule = TypeVar("Schedule", bound="ScheduleOptions")


@dataclass(frozen=True)
class ScheduleOptions(BlendedMixerOptions):
    """Which layers are sources."""

    stride: int | None = None
    """Every stride-th layer, counted from layer 0, is a source for all layers above it; by default half of
    them. Layers without keys do not count."""
    recent_layers: int = 0
    """Number of layers directly below a layer that are its sources too."""
    across_trips: str | None = None
    """Sources from earlier iterations: `none`, `same_layer` (the layer's own), `grid` (the grid of every earlier
    iteration) or `first` (each source once, from its layer's first iteration). Default: as the recurrence declares."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse a `stride` or `recent_layers` larger than the number of layers."""
        super().check(config)
        layers, stride = config.num_hidden_layers, self.stride
        within = stride is None or 1 <= stride <= layers
        self.require("stride", within, f"be between 1 and {layers} (the number of layers)")
        self.require("recent_layers", 0 <= self.recent_layers <= layers, f"be between 0 and {layers}")

    def resolve(self: Schedule, config: DecoderConfig) -> Schedule:
        """Fill in the stride."""
        return replace(self, stride=max(1, len(config.keyed_layers) // 2) if self.stride is None else self.stride)


class GridMixer(BlendedMixer):
    """Base class of mixers with a blending weight λ whose sources are every stride-th and the most recent layers."""

    @staticmethod
    def source_layers(config: DecoderConfig, layer_idx: int) -> tuple[int, ...]:
        """The sources of a layer: every stride-th layer below it, and the `recent_layers` layers just below it."""
        options = ScheduleOptions.of(config)
        assert options.stride is not None
        return tuple(i for i in range(layer_idx) if i % options.stride == 0 or i >= layer_idx - options.recent_layers)

    @staticmethod
    def across_trips(config: DecoderConfig, default: str) -> str:
        """The option `across_trips` if it is set, else the recurrence's rule."""
        rule = ScheduleOptions.of(config).across_trips
        return default if rule is None else rule
