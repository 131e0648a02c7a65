"""A family's own layer inside Fathom's decoder: its norms and sub-layers run between a residual's `read` and `write`.

Its attention runs unchanged. Where a mixer, halted tokens or earlier iterations need its queries, keys and values, they
meet it in the attention function, after projections, norms and rotation (`handover.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..axes.cache_name import first_of
from ..axes.roles import Residual, ResidualState, ValueMixer
from ..sublayers import Sublayers
from .arrangement import Arrangement
from .handover import Handover
from .mixed import Made
from .router import Routing


class OneLayer:
    """A view of one layer of a cache that ignores the requested index, so that each iteration of a shared layer has its
    own."""

    def __init__(self, cache: Cache, bank: int) -> None:
        self.cache, self.bank = cache, bank

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int = 0, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; returns the keys and values to attend to."""
        return self.cache.update(key, value, self.bank)

    @property
    def layers(self) -> _Single:
        """The cache layer under the attribute `layers`, which families with recurrent states index by their layer
        number."""
        return _Single(self.cache.layers[self.bank])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.cache, name)
        return _AtLayer(found, self.bank) if name in BY_LAYER else found


ASKED = ("earlier", "alive", "key_bias", "lent")
"""The walk's requests to attention besides sources."""
PACKED = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""The arguments that tell a family's part of packed documents, which are no longer in one row."""
METHODS = (
    *("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"),
    *("is_recording_past", "has_previous_state", "get_seq_length", "get_mask_sizes", "update_indexer"),
)
BY_LAYER = {
    name: list(inspect.signature(getattr(Cache, name)).parameters).index("layer_idx") - 1
    for name in METHODS
    if hasattr(Cache, name)
}
"""Methods of a cache that take a layer's index, and at which place; asked once, since a compiled graph cannot ask."""


class _Single:
    """A list-like view that returns the same cache layer for every index."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getitem__(self, index: int) -> Any:
        return self.layer


class _AtLayer:
    """A cache's method, bound to one of the cache's layers."""

    def __init__(self, method: Callable[..., Any], bank: int) -> None:
        self.method, self.bank, self.at = method, bank, BY_LAYER[method.__name__]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "layer_idx" in kwargs or len(args) <= self.at:
            return self.method(*args, **{**kwargs, "layer_idx": self.bank})
        return self.method(*args[: self.at], self.bank, *args[self.at + 1 :], **kwargs)


def takes(kind: type[nn.Module]) -> tuple[str, frozenset[str] | None]:
    """The name of a module class's cache argument, and the arguments that its `forward` takes; None if it takes any
    keyword."""
    names = inspect.signature(kind.forward).parameters
    cached = cast(str, first_of(names))
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in names.values())
    return cached, None if anything else frozenset(names)


class Hosted(Made, Routing, Sublayers):
    """Mixin for a family's layer class; calls the layer's modules by the names in a layout."""

    parts: tuple[str, tuple[str, ...]]
    taken: tuple[str, frozenset[str] | None]
    """The value of `takes` for the part that mixes tokens, or of the layer if that is called whole."""
    own_attention: Callable[..., Any] | None
    """The family's attention without a kernel."""
    kind: str
    """The layer's type."""
    whole = False
    """Whether the family's layer is called as it is, with its own additions to one stream."""
    stateful: bool
    """Whether it has a state, and no key and value of every token."""
    forgets: bool
    """Whether a part with a state forgets it where it reads several tokens at once; then it reads them one by one."""
    depth_mixer: ValueMixer | None
    """None where the part keeps no key and value of every token, or a latent that nothing mixes."""
    handover: type[Handover]
    rotates: bool | None = None
    """Whether it rotates queries and keys; None if all layers do so alike, or nothing mixes their values."""
    turn: Callable[..., Any]
    """The family's function that rotates queries and keys, where layers do so differently."""
    attn_residual: Residual
    mlp_residual: Residual
    again: nn.ModuleList
    """The residuals of further trips, where each trip has its own."""

    def forward(self, *state: Tensor, trip: int = 0, **kwargs: Any) -> ResidualState:
        """Run the layer: returns the new residual state, the router's logits `[B, T, experts]` if `routes` is set, and
        the key and mixed value."""
        made = self.order(self, state, trip, kwargs)
        return self.with_logits(made, state[0].shape[:2]) if self.routes else made

    def mix_tokens(
        self,
        x: Tensor,
        gained: object,
        *,
        bank: int,
        rotation: Any,
        past_key_values: Cache | None = None,
        backend: str = "sdpa",
        sources: tuple[Tensor, ...] = (),
        arrangement: Arrangement | None = None,
        **given: Any,
    ) -> tuple[Any, ...]:
        """The update of the sub-layer that mixes tokens (attention or a recurrent state), and its key and mixed value,
        or None."""
        given["position_embeddings"] = rotation.get(self.kind) if isinstance(rotation, dict) else rotation
        view: Any = None if past_key_values is None else OneLayer(past_key_values, bank)
        hand = None
        if self.depth_mixer is not None:
            asked = {name: given.pop(name) for name in ASKED if name in given}
            asked |= {"visit": bank, "paged": given.pop("cache", None)}
            if self.rotates is not None:
                asked |= {"angles": given["position_embeddings"] if self.rotates else None, "turn": self.turn}
            function = ALL_ATTENTION_FUNCTIONS.get_interface(backend, self.own_attention)
            hand = self.handover(self.depth_mixer, function, view, sources, **asked)
            view, given["handover"] = hand if hand.waits or view is not None else None, hand
        if not self.stateful:
            arrangement = None
        if arrangement is not None:
            given = {key: value for key, value in given.items() if key not in PACKED}
            given["attention_mask"], x = arrangement.mask, arrangement.read(x)
        part: Any = super().forward if self.whole else self._modules[self.parts[0]]  # type: ignore[misc]
        name, allowed = self.taken
        given = given if allowed is None else {key: value for key, value in given.items() if key in allowed}
        y = self.normed(self.before[0], x)
        alone = self.forgets and view is not None and y.shape[1] > 1 and view.has_previous_state()
        if alone and arrangement is not None:
            raise ValueError(
                f"{self.kind} reads later prompt chunks token by token: padding must be in the first chunk"
            )
        if alone and "attention_mask" in given:
            given = given | {"attention_mask": None}  # it is as long as the text, and no new token is padding
        made = [part(hidden_states=one, **given, **{name: view}) for one in (y.split(1, 1) if alone else (y,))]
        update = torch.cat([one[0] if isinstance(one, tuple) else one for one in made], 1) if alone else made[0]
        update = update[0] if isinstance(update, tuple) else update
        update = update if arrangement is None else arrangement.put_back(update)
        if hand is not None and hand.pair is None:
            raise ValueError(f"{type(part).__name__} calls no attention function of transformers")
        kept = (None,) * self.handover.returned if hand is None else hand.kept_for_others
        return self.scaled(self.normed(self.after[0], update)), *kept

    def mix_channels(self, x: Tensor) -> Tensor:
        """The update of the sub-layer that mixes channels (an MLP or experts)."""
        y = self.normed(self.before[1], x)
        made = (self._modules[name](y) for name in self.parts[1])
        # Llama 4's experts return rows of tokens
        updates = [(one[0] if isinstance(one, tuple) else one).reshape(x.shape) for one in made]
        return self.scaled(self.normed(self.after[1], reduce(torch.add, updates)))


def whole(layer: Hosted, state: ResidualState, trip: int, given: Mapping[str, Any]) -> ResidualState:
    """Run a sealed layer as a whole, with the order of sub-layers in its own `forward`."""
    return layer.mix_tokens(state[0], None, **given)
