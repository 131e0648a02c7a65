"""Checks that refuse what a hosted decoder (a family's own layers) does not support, with one-line errors.

`arrangement.py` refuses padding inside a text that is longer than a window, and padding after a stored state.

These checks concern mechanisms. `checkpoints/families/layouts.py` refuses configurations of the families themselves,
such as Gemma 4 with shared keys, and `keys.py` next to it keys of `config.json`, such as an unread `sliding_window`.
`registry.py` next to it refuses types that do not open, and `../loading.py` block-quantised weights (`mxfp4`, `fp8`).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..axes.fields import DecoderConfig
from ..axes.roles import Recurrence, View
from ..registry import DEFAULTS
from .layout import Layout


def check_host(config: DecoderConfig, recurrence: Recurrence, multiway: bool) -> None:
    """Refuse mechanisms that a family's layers cannot have.

    Args:
        config: The model's configuration, which names a host.
        recurrence: Its recurrence.
        multiway: Whether its residual gives queries, keys and values inputs of their own.
    """
    if (why := next(_faults(config, recurrence, multiway), None)) is not None:
        raise ValueError(f"{config.host}: {why}")


def _faults(config: DecoderConfig, recurrence: Recurrence, multiway: bool) -> Iterator[str]:
    layouts, keyed = Layout.all_of(config), config.keyed_layers
    latent = any(layout.latent for layout in layouts)
    stateful = next((i for i in range(config.num_hidden_layers) if i not in keyed), None)
    own_slots = recurrence.view is not View.SAME or recurrence.halts or recurrence.lends
    if own_slots and stateful is not None:
        yield (
            f"layer {stateful} is {config.layer_types[stateful]}: its state cannot be rolled back, so halting, views "
            f"of other trips and kv=first are not possible (recurrence={config.recurrence})"
        )
    if (recurrence.view is not View.SAME or recurrence.halts) and "chunked_attention" in config.layer_types:
        yield f"layers read chunks of a text, which slots of other trips do not know (recurrence={config.recurrence})"
    counted = config.native.get("attn_temperature_tuning") and 0 in (config.native.get("no_rope_layers") or ())
    if (recurrence.view is not View.SAME or recurrence.halts or recurrence.lends) and counted:
        yield (
            "attn_temperature_tuning scales queries by the length of the cache, which later trips do not have "
            f"(recurrence={config.recurrence}): set attn_temperature_tuning to false"
        )
    rope = config.native.get("rope_parameters") or {}
    if config.rereads and any(isinstance(part, dict) for part in rope.values()):
        yield "rope_parameters: angles that change with the length of a text must do so in all layers alike"
    if multiway:
        yield f"queries, keys and values have one input; residual={config.residual} gives each its own (set ways to r)"
    if config.residual != DEFAULTS["residual"] and (sealed := next((x.sealed for x in layouts if x.sealed), "")):
        yield f"residual={config.residual}: {sealed}"
    if config.mixer != DEFAULTS["mixer"]:
        if latent and config.mixer_options.get("mixes", "value") != "value":
            yield "attention makes keys and values of one latent: set mixer_options.mixes to value, which mixes latents"
        if len(keyed) < 2:
            yield f"mixer={config.mixer} needs two layers with keys, and there are {len(keyed)}"
    if config.output_init != "plain":
        yield f"output_init={config.output_init}: the family initialises its own projections; set it to plain"
