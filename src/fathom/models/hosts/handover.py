"""Pass a mixer and other requests to a family's attention module through its cache argument and keyword arguments.

Every attention of transformers updates a cache with keys and values, then calls the attention function of its
configuration with the query. A `Handover` stands in for the cache and passes keys and values through. The function
`attend` finds it among its keywords, mixes and stores the value there, and calls the real backend. A mixer adds nothing
to the cache, in hosted layers and in `modeling.py` (`Attention`): a visit stores one key and one value.

With `kv: first` a later iteration gets the keys and values of the first (`lent`); those that the family's projections
make are discarded, but counted as cost (`cost` in `recurrences/looping.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..axes.roles import ValueMixer
from ..trips.engines import CachedAttention, Seat, handed
from ..trips.flex_reading import ReadingRule, attend_by_rule
from ..trips.reading import attend_beside, with_key_bias

HANDOVER = "fathom_hosted"
"""The attention function of hosted layers."""
KeyValue = tuple[Tensor, Tensor]


class Stores(Protocol):
    """One layer of a cache."""

    def update(self, key: Tensor, value: Tensor) -> KeyValue:
        """Store new keys and values; returns the keys and values to attend to."""


@dataclass
class Handover:
    """What the attention of one layer needs in one iteration, under the names of `Attention.forward`'s arguments."""

    mixer: ValueMixer
    attend: Callable[..., Any]
    """The attention function that runs in the end."""
    bank: Stores | None
    sources: tuple[Tensor, ...] = ()
    earlier: tuple[Tensor, ...] = ()
    alive: Tensor | None = None
    key_bias: Tensor | None = None
    lent: KeyValue | None = None
    visit: int = 0
    """The cache layer of this visit."""
    paged: Any = None
    """The cache of continuous batching."""
    pair: KeyValue | None = field(default=None, init=False)
    """The new tokens' key and mixed value, once attention has run."""
    waits: ClassVar[bool] = False
    """Whether `update` must be called where nothing is cached too."""
    returned: ClassVar[int] = 2
    """How many tensors `kept_for_others` has."""

    @property
    def kept_for_others(self) -> tuple[Tensor, ...]:
        """The tensors that are kept for later layers to mix; the key and the value come last."""
        return cast(KeyValue, self.pair)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> KeyValue:
        """Pass key and value on unchanged, in place of a cache's `update`: mixing needs the query, which comes
        later."""
        return key, value

    def get_seq_length(self, *args: Any) -> int:
        """The number of tokens that the cache holds."""
        return 0 if self.bank is None else cast(Any, self.bank).get_seq_length()

    def store(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> KeyValue:
        """Mix the value over depth and store it; returns the keys and values to attend to."""
        if self.lent is not None:
            self.pair = self.lent
            return self.lent
        self.pair = self.mixed(module, query, key, value)
        if self.alive is not None:
            kept = (torch.where(self.alive, a, b) for a, b in zip(self.pair, self.earlier, strict=True))
            self.pair, self.earlier = cast(KeyValue, tuple(kept)), ()
        return self.pair if self.bank is None else self.bank.update(*self.kept(module, *self.pair))

    def mixed(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> KeyValue:
        """The layer's key, and its value after mixing over depth."""
        return self.mixer.stored(query, key, value, self.sources)

    def kept(self, module: nn.Module, key: Tensor, value: Tensor) -> KeyValue:
        """The tensors to store in the cache: the key and the mixed value."""
        return key, value


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,  # by its place from kvpress's wrapper
    handover: Handover | None = None,
    **kwargs: Any,
) -> Any:
    """The attention function of hosted layers: mixes and stores through the handover, then calls the real backend."""
    if handover is None:
        raise ValueError("a hosted layer can be called only by Fathom's forward pass")
    own: Any = module
    channels, (key, value) = value.shape[-1], handover.store(module, query, key, value)
    if handover.paged is not None:
        kwargs["cache"] = handover.paged
        key, value = handed(key, value, handover.visit, kwargs)
        own = Seat(cast(CachedAttention, module), handover.visit)
    if (bias := handover.key_bias) is not None:
        query, key, value = with_key_bias(query, key, value, bias, kwargs["scaling"])
    function = attend_by_rule if isinstance(attention_mask, ReadingRule) else handover.attend
    if handover.earlier:
        function = partial(attend_beside, function, handover.earlier)
    output, weights = function(own, query, key, value, attention_mask, dropout=dropout, **kwargs)
    return (output if bias is None else output[..., :channels].contiguous()), weights  # AFMoE views it as rows


def _no_mask(*args: Any, **kwargs: Any) -> Any:
    """A mask function that raises; without this entry transformers would silently make no masks for hosted layers."""
    raise ValueError(f"attn_implementation={HANDOVER} is internal to Fathom and makes no masks: choose another")


ALL_ATTENTION_FUNCTIONS.register(HANDOVER, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(HANDOVER, _no_mask)
