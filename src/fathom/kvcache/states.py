"""Layers with a recurrent state of constant size, alone or next to attention: only the attention entries are
compressed.

In a model such as LFM2 or Qwen3-Next most layers keep a state instead of keys, in Falcon-H1 every layer keeps both, and
in Nemotron-H some layers keep nothing. Only attention gets a memory; the rest keeps what transformers gives it.

`rope.py` finds out whether a state goes wrong if it continues by several tokens at once (`by_token`). If it does,
everything after the first chunk is read token by token (`cuts` in `cache.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionLayer

from fathom.models.hosts.build import native_config

STATES = ("linear_attention", "conv")
"""Types of layers with a state and no keys."""
BOTH = ("hybrid",)
"""Types of layers with both."""
NEITHER = ("moe", "mlp")
"""Types of layers without a cache."""


def family(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration that describes a model's layers; for a model family that Fathom hosts, the family's own
    configuration."""
    return native_config(config) if getattr(config, "host", "") else config


def has_states(config: PreTrainedConfig) -> bool:
    """Whether some layers keep a recurrent state."""
    return not {*STATES, *BOTH}.isdisjoint(getattr(config, "layer_types", None) or ())


class State(LinearAttentionLayer):
    """A recurrent state from which sequences of the batch can be selected, and which can be copied to continue it
    twice."""

    def reset(self) -> None:
        """Delete the state, and forget the batch size for which it was made."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: sequence i of the batch is replaced by sequence `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.each(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.each(lambda x: x.repeat_interleave(repeats, dim=0))

    def branch(self) -> State:
        """An independent copy of this state to continue from; the tensors are copied because states are written in
        place."""
        return copy.deepcopy(self)

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change every tensor."""
        for states in (self.conv_states, self.recurrent_states):
            states.update({i: change(x) for i, x in states.items() if x is not None})

    def held(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        both = {"conv_states": self.conv_states, "recurrent_states": self.recurrent_states}
        return {f"state.{name}.{i}": x for name, states in both.items() for i, x in states.items() if x is not None}

    def take(self, held: dict[str, Tensor]) -> None:
        """Copy the tensors of another state, given under the names that this class uses."""
        for name, x in held.items():
            _, kind, i = name.split(".")
            self.lazy_initialization(**{kind: x}, state_idx=int(i))
            getattr(self, kind)[int(i)].copy_(x)
            self.has_previous_state[int(i)] = True


def own_layers(config: PreTrainedConfig) -> list[tuple[object, State | None]]:
    """For each layer: the layer that transformers' cache has for it (None if it only has a recurrent state), and its
    state, if any."""
    found: list[tuple[object, State | None]] = []
    for layer in DynamicCache(config=family(config)).layers:
        state = State(number_of_states=layer.number_of_states) if isinstance(layer, LinearAttentionLayer) else None
        attends = state is None or isinstance(layer, CacheLayerMixin)
        found.append((layer if attends else None, state))
    return found
