"""Parse `--with` and `--layers` into keys of a configuration.

Mechanisms whose declaration has `closed` (`Mechanism` in `models/axes/roles.py`) start switched off unless an option
opens them, so the logits stay unchanged. Others, such as `ponder2` and `ponder3`, change the logits at once. So does
view ALL, under which a token reads every iteration of earlier tokens and only one of its own: equal iterations then
count more often than the token itself.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from fathom.errors import SettingsError
from fathom.models.axes.gates import LEARNED
from fathom.models.axes.roles import Mechanism, View
from fathom.models.configuration import FathomConfig
from fathom.models.registry import AXES, DEFAULTS, known, recurrence_class
from fathom.settings import overridden

TRIPS = 2
"""Default loop iterations and pondering steps: the smallest number above one."""


@dataclass(frozen=True)
class Request:
    """Mechanisms to add, and their options."""

    parts: tuple[Mechanism, ...]
    options: dict[str, dict[str, object]] = field(default_factory=dict)
    """The options that were given, by the mechanism's name."""
    layers: tuple[int, int] | None = None
    """First and last layer of a loop; None for all."""

    @property
    def name(self) -> str:
        """The mechanisms' names, joined."""
        return "+".join(part.name for part in self.parts)

    @property
    def loops(self) -> bool:
        """Whether a loop is among the requested mechanisms."""
        return any(part.name == "loop" for part in self.parts)

    @property
    def learns(self) -> bool:
        """Whether a requested mechanism has gates that are trainable parameters."""
        return any(_learns(part, self.options.get(part.name, {})) for part in self.parts)

    def base_learns(self, config: FathomConfig) -> bool:
        """Whether the base model has such gates already; `config` is the configuration with the mechanisms."""
        axes = set(AXES) - {part.axis for part in self.parts}
        return any(_learns(known()[getattr(config, axis)], getattr(config, f"{axis}_options")) for axis in axes)

    def exact(self, config: FathomConfig) -> bool:
        """Whether a model with the mechanisms computes the same as the model without them until it is trained; `config`
        is the configuration with them."""
        if "recurrence" in {part.axis for part in self.parts} and recurrence_class(config).sees(config) is View.ALL:
            return False
        return all(part.closed is not None and not self._opens(part) for part in self.parts)

    def _opens(self, part: Mechanism) -> bool:
        """Whether an option that was given switches a mechanism on from the start."""
        given = self.options.get(part.name, {})
        opened = any(given.get(key, value) not in (value, LEARNED) for key, value in (part.closed or {}).items())
        return opened and not given.get("blend_steps")

    def keys(self, config: FathomConfig) -> dict[str, object]:
        """Keys of `FathomConfig` that add the mechanisms to a model; mechanisms that can be switched off start switched
        off."""
        found: dict[str, object] = {}
        for part in self.parts:
            if (held := getattr(config, part.axis)) != DEFAULTS[part.axis]:
                raise SettingsError(f"mechanism={part.name}: this model has {part.axis}={held} already")
            names = {one.name for one in fields(part.options)}
            options: dict[str, object] = {"trips": TRIPS} if "trips" in names else {}
            if part.name == "loop" and self.layers is not None:
                options |= _span(self.layers, config.num_hidden_layers)
            options |= dict(part.closed or {}) | self.options.get(part.name, {})
            found |= {part.axis: part.name, f"{part.axis}_options": options}
        return found

    def opening(self, steps: int) -> dict[str, dict[str, object]]:
        """The options that blend the mechanisms in over `steps` training steps, by configuration key, such as
        `mixer_options`."""
        closed = [part for part in self.parts if "blend" in (part.closed or {})]
        return {
            f"{part.axis}_options": {"blend": 1.0, "blend_steps": steps}
            for part in closed
            if "blend" not in self.options.get(part.name, {})
        }

    def reopening(self, config: FathomConfig, steps: int) -> dict[str, dict[str, object]]:
        """The options that blend in what is `left_closed`, as `opening` has them."""
        return {f"{axis}_options": {"blend": 1.0, "blend_steps": steps} for axis in self.left_closed(config)}

    def left_closed(self, config: FathomConfig) -> tuple[str, ...]:
        """The axes, such as `mixer`, that an earlier `fathom deepen` closed and no training opened; `config` is the
        configuration with the mechanisms."""
        held = {axis: getattr(config, f"{axis}_options") for axis in AXES if axis not in {p.axis for p in self.parts}}
        return tuple(axis for axis, keys in held.items() if keys.get("blend") == 0 and not keys.get("blend_steps"))


def parse_request(text: str, layers: str | None = None) -> Request:
    """`loop:trips=2,damping=0.5+depth_attention` as a request.

    Args:
        text: Mechanisms joined by +, each with options after a colon, separated by commas.
        layers: `A-B`, first and last layer of a loop.
    """
    parts: list[Mechanism] = []
    options: dict[str, dict[str, object]] = {}
    for word in re.split(r"\+(?=[a-z])", text):
        name, _, given = word.strip().partition(":")
        part = _named(name)
        if any(part.axis == other.axis for other in parts):
            raise SettingsError(f"mechanism={text}: two mechanisms of the {part.axis} axis; name only one")
        parts.append(part)
        options[name] = _options(part, given)
    order = sorted(parts, key=lambda part: -AXES.index(part.axis))
    request = Request(tuple(order), options, None if layers is None else _layers(layers))
    if layers is not None and not request.loops:
        raise SettingsError(f"layers={layers}: needs loop in `mechanism`")
    if layers is not None and options["loop"].keys() & {"prelude", "coda"}:
        raise SettingsError(f"layers={layers}: remove prelude and coda from `mechanism`")
    return request


def _learns(part: Mechanism, options: Mapping[str, object]) -> bool:
    names = {one.name for one in fields(part.options)}
    return "gates" in names and ("blend" not in names or options.get("blend") == LEARNED)


def _named(name: str) -> Mechanism:
    """The mechanism called `name`; names of an axis's default are refused, because a default adds nothing."""
    names = [one for one in known() if one not in DEFAULTS.values()]
    if name in names:
        return known()[name]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(names)}"
    raise SettingsError(f"mechanism={name}: no such mechanism; {hint}")


def _options(part: Mechanism, text: str) -> dict[str, object]:
    names, found = [one.name for one in fields(part.options)], dict[str, object]()
    for word in re.split(r",(?=\s*\w+=)", text) if text else ():
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals or key not in names:
            raise SettingsError(f"mechanism={part.name}:{word.strip()}: allowed: {', '.join(names)}, each as key=value")
        found[key] = overridden({}, [f"{key}={value}"])[key]
    return found


def _layers(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise SettingsError(
            f"layers={text}: allowed: one layer, as in 12, or FIRST-LAST with FIRST not above LAST, as in 12-16; "
            "layers count from 0"
        )
    return int(match[1]), int(match[2] or match[1])


def _span(layers: tuple[int, int], count: int) -> Mapping[str, int]:
    first, last = layers
    if last >= count:
        raise SettingsError(f"layers={first}-{last}: this model has the layers 0 to {count - 1}")
    return {"prelude": first, "coda": count - 1 - last}
