"""Which engines may run a model of several trips.

Engines with a cache of their own (transformers' continuous batching, vLLM, SGLang) keep one bank of keys and values for
each layer. A model of several trips needs one for each visit: in a bank that trips share, the later one overwrites the
earlier, and the tokens are wrong without an error. This file travels with every export, so the refusal does too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .configuration import FathomConfig

BACKENDS = ("sdpa", "eager", "flash", "flex", "kernels-community/", "fathom_")
"""Attention backends, by their beginning, that leave the cache to the model."""
HANDED_OVER = ("cache", "attention_instances", "forward_batch")
"""Arguments by which an engine hands over a cache of its own: continuous batching, vLLM and SGLang, SGLang."""


def check_engine(config: FathomConfig, trips: int, arguments: Collection[str] = ()) -> None:
    """Refuse an engine that would make a model of several trips answer wrongly.

    Args:
        config: The model; its attention backend names the engine.
        trips: How many trips a token may make.
        arguments: Names of the further keyword arguments of a forward call.
    """
    backend = str(config._attn_implementation)
    foreign = next((name for name in HANDED_OVER if name in arguments), None)
    if trips == 1 or (backend.startswith(BACKENDS) and foreign is None):
        return
    engine = f"attn_implementation={backend}" if foreign is None else f"an engine that passes {foreign}="
    plain = config.recurrence == "loop" and config.mixer == "none" and config.residual == "plain"
    raise ValueError(
        f"{engine} is not known to keep a cache for each trip: {config.recurrence} makes {trips} trips, each with keys "
        "and values of its own, and the answers would be wrong. Use `generate` or `fathom serve`"
        + (", or `fathom export --as unrolled`" if plain else "")
    )
