"""A family's own layer in our walk: its norms and parts between a residual's `read` and `write`.

Its attention runs unchanged. Where a mixer, halted tokens or earlier trips need its queries, keys and values, they meet
it in the attention function, after projections, norms and rotation (`handover.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..axes.cache_name import first_of
from ..axes.roles import Residual, ResidualState, ValueMixer, ways
from ..registry import residuals
from .handover import Handover
from .layout import Layout
from .router import logits_of


class Bank:
    """One layer of a cache, whatever index its reader asks for: a trip's own, though its modules are shared."""

    def __init__(self, cache: Cache, bank: int) -> None:
        self.cache, self.bank = cache, bank

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int = 0, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values; returns those to attend to."""
        return self.cache.update(key, value, self.bank)

    @property
    def layers(self) -> _Single:
        """What older families read states from, by the index of their own layer."""
        return _Single(self.cache.layers[self.bank])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.cache, name)
        return _Asked(found, self.bank) if name in BY_LAYER else found


ASKED = ("earlier", "alive", "key_bias", "lent")
"""What the walk asks of attention besides sources."""
BY_LAYER = (
    *("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"),
    *("is_recording_past", "has_previous_state", "get_seq_length", "get_mask_sizes", "update_indexer"),
)
"""Methods of a cache that take a layer's index."""


class _Single:
    """The layers of a cache for a reader that has one of them."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getitem__(self, index: int) -> Any:
        return self.layer


class _Asked:
    """A method of a cache for one of its layers."""

    def __init__(self, method: Callable[..., Any], bank: int) -> None:
        self.method, self.bank = method, bank
        self.at = list(inspect.signature(method).parameters).index("layer_idx")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "layer_idx" in kwargs or len(args) <= self.at:
            return self.method(*args, **{**kwargs, "layer_idx": self.bank})
        return self.method(*args[: self.at], self.bank, *args[self.at + 1 :], **kwargs)


@cache
def takes(kind: Hashable) -> tuple[str, frozenset[str] | None]:
    """The name under which a part's class takes the cache, and the arguments that it takes; None for all."""
    names = inspect.signature(cast(type[nn.Module], kind).forward).parameters
    cached = cast(str, first_of(names))
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in names.values())
    return cached, None if anything else frozenset(names)


class Hosted:
    """Mixed into a family's layer class, whose modules it calls by the names of a layout."""

    layout: Layout
    parts: tuple[str, tuple[str, ...]]
    kind: str
    """The layer's type."""
    routes = False
    """Whether the walk wants the logits of routers."""
    router = ""
    """The router's name; empty in a layer that has none."""
    value_mixer: ValueMixer | None
    """None where the part keeps no key and value of every token."""
    attn_residual: Residual
    mlp_residual: Residual
    again: nn.ModuleList
    """The residuals of further trips, where each trip has its own."""

    def forward(
        self,
        *state: Tensor,
        attention_mask: Tensor | None,
        bank: int,
        rotation: Any,
        position_ids: Tensor,
        past_key_values: Cache | None = None,
        backend: str = "sdpa",
        sources: tuple[Tensor, ...] = (),
        trip: int = 0,
        **extra: Any,
    ) -> ResidualState:
        """The new residual state and, last, this layer's key and mixed value; before these, if the walk `routes`, the
        router's logits `[B, T, experts]`."""
        rotation = rotation[self.kind] if isinstance(rotation, dict) else rotation
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "position_embeddings": rotation}
        view: Any = None if past_key_values is None else Bank(past_key_values, bank)
        part = getattr(self, self.parts[0])
        attn, mlp = residuals(self, trip)
        (read, write), (read_mlp, write_mlp) = ways(attn), ways(mlp)
        x, state, context = read(state)
        hand = None
        if self.value_mixer is not None:
            asked = {name: extra.pop(name) for name in ASKED if name in extra}
            asked |= {"visit": bank, "paged": extra.pop("cache", None)}
            hand = Handover(self.value_mixer, backend, view, sources, **asked)
            view, given["handover"] = (None if view is None else hand), hand
        y = self._norm(self.layout.before[0], x)
        update = self._mixed(part, y, view, given | extra)
        if self.layout.parallel:
            x, state, second = read_mlp(state)
        if self.layout.parallel == "sum" and type(self.attn_residual) is Residual:
            state = write(state, update + self._channel(x), context)
        else:
            state = write(state, update, context)
            if not self.layout.parallel:
                x, state, second = read_mlp(state)
            state = write_mlp(state, self._channel(x), second)
        return cast(ResidualState, (*state, *self._routed(x), *self._pair(hand)))

    def _mixed(self, part: nn.Module, y: Tensor, view: Any, given: dict[str, Any]) -> Tensor:
        """The update of what mixes tokens."""
        name, allowed = takes(cast(Hashable, type(part)))
        given = given if allowed is None else {key: value for key, value in given.items() if key in allowed}
        update = part(hidden_states=y, **given, **{name: view})
        update = update[0] if isinstance(update, tuple) else update
        return self._scaled(self._norm(self.layout.after[0], update))

    def _channel(self, x: Tensor) -> Tensor:
        """The update of what mixes channels."""
        y, update = self._norm(self.layout.before[1], x), None
        for name in self.parts[1]:
            made = getattr(self, name)(y)
            made = made[0] if isinstance(made, tuple) else made
            update = made if update is None else update + made
        return self._scaled(self._norm(self.layout.after[1], cast(Tensor, update)))

    def _routed(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """The router's logits for `x`, if they are wanted."""
        if not self.routes:
            return ()
        return (logits_of(cast(nn.Module, self), self.router, x.shape[:2]) if self.router else None,)

    def _pair(self, hand: Handover | None) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if hand is None or hand.pair is None else hand.pair

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.layout.multiplier is None else x * getattr(self, self.layout.multiplier)
