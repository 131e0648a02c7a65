"""The registry of all mechanisms by name. To add one, write its file and add it to `ALL`.

Whether a mechanism can start without changing a pretrained model is declared in its file, by `closed`
(`axes/roles.py`). `packages.py` adds the mechanisms of other packages, by entry point or `add_mechanism`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import nn

from ..values import allowed, finite, fit, hints_of, plain
from .axes.roles import Cost, Mechanism, Recurrence, Residual, ValueMixer
from .mixers.depth_attention import DEPTH_ATTENTION
from .mixers.uniform_depth import UNIFORM_DEPTH
from .mixers.value_gain import VALUE_GAIN
from .mixers.value_residual import VALUE_RESIDUAL
from .recurrences.adaponder import ADAPONDER
from .recurrences.latent_cot import LATENT_COT
from .recurrences.looping import LOOP
from .recurrences.ponder import PONDER
from .recurrences.ponder2 import PONDER2
from .recurrences.ponder3 import PONDER3
from .residuals.attention_residuals import ATTENTION_RESIDUALS
from .residuals.branch_gain import BRANCH_GAIN
from .residuals.denseformer import DENSEFORMER
from .residuals.hyper_connections import HYPER_CONNECTIONS
from .residuals.mudd import MUDD

if TYPE_CHECKING:
    from .axes.fields import DecoderConfig
    from .axes.visit import Visit


def free(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Zero cost."""
    return Cost()


NONE = Mechanism("none", "mixer", "each layer's own value", "Qwen3", ValueMixer, free, closed={})
PLAIN = Mechanism("plain", "residual", "add to one stream", "Qwen3", Residual, free, closed={})
ONCE = Mechanism("once", "recurrence", "one pass through the layers", "Qwen3", Recurrence, free, closed={})

ALL = (
    *(NONE, DEPTH_ATTENTION, UNIFORM_DEPTH, VALUE_RESIDUAL, VALUE_GAIN),
    *(PLAIN, DENSEFORMER, ATTENTION_RESIDUALS, HYPER_CONNECTIONS, MUDD, BRANCH_GAIN),
    *(ONCE, LOOP, PONDER, PONDER2, PONDER3, ADAPONDER, LATENT_COT),
)
MECHANISMS: dict[str, Mechanism] = {mechanism.name: mechanism for mechanism in ALL}
late: list[Callable[[], None]] = []
"""Functions that add mechanisms from other packages, called on the first look-up; empty in an export."""
AXES = ("mixer", "residual", "recurrence")
DEFAULTS = {"mixer": "none", "residual": "plain", "recurrence": "once"}
VANILLA = "vanilla"


def known() -> dict[str, Mechanism]:
    """All mechanisms by name, including those that other packages register."""
    while late:
        late.pop()()
    return MECHANISMS


def mechanism(axis: str, name: str) -> Mechanism:
    """The mechanism with this name on this axis; raises a `ValueError` if there is none."""
    found = known().get(name) if isinstance(name, str) else None
    if found is None or found.axis != axis:
        names = ", ".join(m.name for m in known().values() if m.axis == axis)
        close = get_close_matches(str(name), names.split(", "), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{axis} must be one of {names}, got {name!r}{hint}")
    return found


def parse_mechanism(text: str) -> dict[str, str]:
    """Parse a name such as `loop+depth_attention` into one mechanism for each axis; `vanilla` has the default on every
    axis."""
    values = dict(DEFAULTS)
    taken: set[str] = set()
    for name in (part.strip() for part in text.split("+")):
        if name == VANILLA:
            continue
        if name not in known():
            raise ValueError(f"unknown mechanism {name!r}; there are {VANILLA}, {', '.join(sorted(known()))}")
        axis = MECHANISMS[name].axis
        if axis in taken:
            raise ValueError(f"{text!r} names two mechanisms of the {axis} axis")
        taken.add(axis)
        values[axis] = name
    return values


def mechanism_name(config: DecoderConfig) -> str:
    """The inverse of `parse_mechanism`."""
    names = [getattr(config, axis) for axis in reversed(AXES) if getattr(config, axis) != DEFAULTS[axis]]
    return "+".join(names) or VANILLA


def resolve_options(config: DecoderConfig, axis: str) -> dict[str, object]:
    """The options of `axis` (`mixer`, `residual` or `recurrence`) with all defaults.

    A `ValueError` names a wrong key or value.
    """
    chosen, given = mechanism(axis, getattr(config, axis)), getattr(config, f"{axis}_options") or {}
    if not isinstance(given, dict):
        raise ValueError(f"{axis}_options must be a dictionary of options, got {given!r}")
    hints, values = hints_of(chosen.options), {}
    for key, value in given.items():
        if key not in hints:
            known = ", ".join(hints) or "none"
            raise ValueError(f"{axis}_options.{key} is not an option of {chosen.name} (it has: {known})")
        try:
            values[key] = fit(hints[key], value)
        except ValueError:
            raise ValueError(f"{axis}_options.{key} must be {allowed(hints[key])}, got {value!r}") from None
        if not finite(value):
            raise ValueError(f"{axis}_options.{key} must be a number, got {value}")
    options = chosen.options(**values)
    options.check(config)
    return {key: plain(value) for key, value in asdict(options.resolve(config)).items()}


def check_trips(config: DecoderConfig) -> None:
    """Refuse a mixer that reads sources from earlier iterations without a recurrence, under the view ALL (all
    iterations are solved at once), or if later iterations make no values."""
    recurrence = recurrence_class(config)
    crosses = config.recurrence != DEFAULTS["recurrence"] and recurrence.sees(config).depth_parallel
    crosses &= not recurrence.shares(config)
    allowed = ("none", "same_layer", "grid", "first") if crosses else ("none",)
    rule = across_trips(config)
    if rule not in allowed:
        raise ValueError(
            f"mixer_options.across_trips must be one of {', '.join(allowed)} with recurrence={config.recurrence}"
            f"{' and shared keys and values' * recurrence.shares(config)}, got {rule}"
        )


def check_visits(config: DecoderConfig) -> None:
    """Refuse `per_visit` without a recurrence, if all iterations are computed in one pass, or if a forward pass may
    make more iterations than there are parameters for."""
    recurrence = recurrence_class(config)
    if not config.residual_options.get("per_visit"):
        return
    trips, most = recurrence.trips_of(config), recurrence.most_trips(config)
    if trips < most:
        raise ValueError(f"residual_options.per_visit: set recurrence_options.trips to its maximum {most}, got {trips}")
    if config.recurrence == DEFAULTS["recurrence"] or not recurrence.sees(config).depth_parallel:
        why = "has one iteration" if config.recurrence == DEFAULTS["recurrence"] else "has all iterations in one pass"
        raise ValueError(f"residual_options.per_visit: recurrence={config.recurrence} {why}; set per_visit to false")


def across_trips(config: DecoderConfig) -> str:
    """How a mixer reads sources from earlier iterations: `none`, `same_layer`, `grid` or `first`."""
    recurrence = recurrence_class(config)
    return mixer_class(config).across_trips(config, "none" if recurrence.shares(config) else recurrence.across_trips)


def mixer_class(config: DecoderConfig) -> type[ValueMixer]:
    """The class behind `config.mixer`."""
    return mechanism("mixer", config.mixer).build  # type: ignore[return-value]


def residual_sets(config: DecoderConfig, layer: int) -> int:
    """How many sets of residual parameters a layer has: one, or one for each iteration with `per_visit`."""
    recurrence = recurrence_class(config)
    start, stop = recurrence.span(config)
    return recurrence.trips_of(config) if config.residual_options.get("per_visit") and start <= layer < stop else 1


def add_residuals(layer: nn.Module, config: DecoderConfig, layer_idx: int) -> None:
    """Give a layer the residuals of its two sub-layers, with separate ones for each iteration if `per_visit` is set."""
    build = mechanism("residual", config.residual).build

    def of_trip(trip: int) -> dict[str, nn.Module]:
        pair = {"attn": build(config, 2 * layer_idx), "mlp": build(config, 2 * layer_idx + 1)}
        for residual in pair.values():
            residual.trip = trip
        return pair

    layer.attn_residual, layer.mlp_residual = of_trip(0).values()
    layer.again = nn.ModuleList(nn.ModuleDict(of_trip(k)) for k in range(1, residual_sets(config, layer_idx)))


def residuals(layer: Any, trip: int) -> tuple[Residual, Residual]:
    """The residuals of a layer's attention and MLP in one iteration; a pass of fewer iterations uses the first ones."""
    if not trip or not layer.again:
        return layer.attn_residual, layer.mlp_residual
    return layer.again[trip - 1]["attn"], layer.again[trip - 1]["mlp"]


def recurrence_class(config: DecoderConfig) -> type[Recurrence]:
    """The class behind `config.recurrence`."""
    return mechanism("recurrence", config.recurrence).build  # type: ignore[return-value]
