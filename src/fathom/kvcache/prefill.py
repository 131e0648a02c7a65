"""Reads a prompt of any length into a compressed cache, in chunks that end at compressions; and finds out which models
can read chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from fathom.models.axes.cache_name import passed

from .cache import MemoryCache
from .watch import watch

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

PROBED = 8
"""Tokens with which `continues` tries a model."""
_CONTINUES: WeakKeyDictionary[PreTrainedModel, dict[int, bool]] = WeakKeyDictionary()
"""What `continues` has found."""


def chunks(input_ids: Tensor, cache: Cache) -> Iterator[Tensor]:
    """Split tokens `[B, T]` into the longest chunks that a forward pass may have, starting after the tokens in the
    cache."""
    if not isinstance(cache, MemoryCache):
        yield input_ids
        return
    yield from input_ids.split(cache.cuts(input_ids.shape[1]), dim=1)


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: Cache,
    attention_mask: Tensor | None = None,
    max_trips: int | None = None,
) -> ModelOutput:
    """Feed tokens `[B, T]` into `cache`, and return the last chunk's output, with the logits of the last position only.

    To generate next, leave the prompt's last token out here, and call `model.generate(prompt, past_key_values=cache)`;
    with `num_beams=n`, after `cache.batch_repeat_interleave(n)`.

    Args:
        model: The model that reads the prompt.
        input_ids: Sequences, padded on the left if their lengths differ.
        cache: A cache, empty or with the preceding tokens.
        attention_mask: Mask of padding, with the tokens in the cache: `[B, seen + T]`.
        max_trips: Maximum trips per token, equal to that of later forward passes; only for models of several trips.
    """
    if input_ids.shape[1] == 0:
        raise ValueError("prefill needs at least one token")
    if isinstance(cache, MemoryCache):
        watch(model)
        cache.admit(attention_mask)
        attention_mask = None
    given = {} if max_trips is None else {"max_trips": max_trips}
    for chunk in chunks(input_ids, cache):
        output = model(
            chunk, attention_mask=attention_mask, use_cache=True, logits_to_keep=1, **passed(model, cache), **given
        )
    return output


@torch.inference_mode()
def continues(model: PreTrainedModel, part: int) -> bool:
    """Whether a model of transformers, after half of a few tokens, reads the others in parts of `part` tokens with the
    same result as all at once, also if it reads another text in between. It is tried once."""
    known = _CONTINUES.setdefault(model, {})
    if part not in known:
        ids = (torch.arange(PROBED, device=model.device) + 3).unsqueeze(0) % model.config.get_text_config().vocab_size
        alone, beside = (_in_parts(model, ids, part, other) for other in (None, ids.flip(1)))
        whole = model(ids, use_cache=False).logits[:, -1].float()
        near = 0.1 if model.dtype.itemsize <= 2 else 1e-3
        differs = (alone - whole).norm() > near * whole.norm() or (alone - beside).norm() > 1e-3 * whole.norm()
        known[part] = not bool(differs)  # NaN is reported with each text
    return known[part]


def _in_parts(model: PreTrainedModel, ids: Tensor, part: int, other: Tensor | None) -> Tensor:
    """The last logits of a text of which the second half is read in parts, the other text after each."""
    cache = DynamicCache(config=model.config)
    for piece in ids.split([PROBED // 2, *[part] * (PROBED // 2 // part)], dim=1):
        found = model(piece, use_cache=True, **passed(model, cache)).logits[:, -1].float()
        if other is not None:
            model(other, use_cache=True, **passed(model, DynamicCache(config=model.config)))
    return found
