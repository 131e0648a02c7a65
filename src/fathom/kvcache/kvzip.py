"""KVzip (arXiv 2505.23416): keep the entries by which a model reconstructs its context. The score is:

    score = max over queries and over the heads that share a key head of  softmax(q · [k_sinks, k_chunk, k_input])

The context is read once with a full cache. Then the model is asked to repeat it, chunk by chunk: an input is a request
and the chunk's tokens. An entry's score is the most attention that any token of the input that repeats its chunk pays
to it. No question is needed, so one compressed context serves many. Each head keeps as many entries as any other; the
paper's heads and layers share one budget.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from fathom.models.axes.cache_name import passed
from fathom.models.modeling import FathomForCausalLM, FathomModel
from fathom.models.trips.slots import with_banks

from .build import cache_of, config_of
from .cache import MemoryCache
from .memory import Memory
from .method import UNSEEN, Held, Selection
from .observe import observed_backend
from .rope import Rope, refuse
from .schedule import RATIO, SINKS, Once
from .states import own_layers
from .watch import decoder_of

CHUNK = 2048
"""Tokens that one input repeats, as in the paper."""


class KVzip(Selection):
    """Keeps the entries with the highest reconstruction scores, which `reconstruct` passes in the place of queries."""

    name, by_name = "kvzip", False

    def scores(self, held: Held) -> Tensor:
        """`[B, H_kv, N]`."""
        if held.queries is None:
            raise ValueError("kvzip needs reconstruction scores: call reconstruct(model, ids, request)")
        return held.queries


class Reader(DynamicLayer):
    """An uncompressed layer cache that records how much a repeated chunk attends to the chunk's original entries."""

    keys: Tensor
    values: Tensor
    repeated: tuple[int, int] | None = None
    """The chunk that is repeated now."""
    scores: Tensor
    """`[B, H_kv, T]`."""
    sinks = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them with a reference to this layer (see observe.py)."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        keys = keys.view_as(keys)
        keys.memory = self
        return keys, values

    def observe(self, queries: Tensor, module: nn.Module) -> None:
        """Record the attention weights of queries `[B, H, q, D]`, rotated and scaled."""
        if self.repeated is None:
            self.scores = self.values.new_zeros(self.values.shape[:3], dtype=torch.float32)
            return
        (start, stop), q = self.repeated, queries.shape[2]
        sinks = min(self.sinks, start)
        read = (self.keys[:, :, :sinks], self.keys[:, :, start:stop], self.keys[:, :, -q:])
        looks = Held(torch.cat(read, dim=2).float(), self.values, queries).attention()
        chunk = looks.amax((2, 3))[..., sinks : sinks + stop - start]  # [B, H_kv, G, q, ·] to [B, H_kv, n]
        self.scores[..., start:stop] = chunk

    def forget(self, length: int) -> None:
        """Keep the first entries only."""
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


@torch.no_grad()
def reconstruct(
    model: PreTrainedModel,
    ids: Tensor,
    request: Tensor,
    ratio: float = RATIO,
    sinks: int = SINKS,
    chunk: int = CHUNK,
) -> MemoryCache:
    """Make a compressed cache of a context for any questions: it keeps the entries that the model needs to repeat the
    context. For example:

        request = tokenizer("\\n\\nRepeat the previous context exactly.", return_tensors="pt").input_ids
        cache = reconstruct(model, ids, request)
        model(question, past_key_values=cache.branch())

    Reading takes two to three times as long as without. During it the full cache is held.

    Args:
        model: Any decoder whose layers all keep the whole context.
        ids: The context, `[B, T]`, without padding.
        request: The words before each repeated chunk, `[1, n]`, in the model's chat format if it has one.
        ratio: The share of the entries to keep, sinks included.
        sinks: First entries that are kept whatever their score.
        chunk: Tokens that are repeated at a time.
    """
    config, decoder, length = config_of(model), decoder_of(model), ids.shape[1]
    refuse(config, 1 << 40)
    if not all(type(own) is DynamicLayer and state is None for own, state in own_layers(config)):
        raise ValueError("kvzip needs layers that keep the whole context: use another method for this model")
    method = KVzip(Once.at(length, sinks, ratio), Rope(config))
    head = {"head": model.lm_head} if isinstance(model, FathomForCausalLM) else {}  # `ponder` reads logits
    full, was = Cache(layers=[Reader() for _ in own_layers(config)]), decoder.config._attn_implementation
    decoder.config._attn_implementation = observed_backend(decoder)
    try:
        decoder(ids, use_cache=True, **head, **passed(decoder, full))
        readers = cast("list[Reader]", full.layers)  # in a loop one for each iteration
        for start in range(0, length, chunk):
            repeated = ids[:, start : start + chunk]
            for reader in readers:
                reader.repeated, reader.sinks = (start, start + repeated.shape[1]), sinks
            words = request.to(ids.device).expand(len(ids), -1)
            decoder(torch.cat([words, repeated], dim=1), use_cache=True, **head, **passed(decoder, full))
            for reader in readers:
                reader.forget(length)
    finally:
        decoder.config._attn_implementation = was
    if not hasattr(readers[0], "scores"):
        raise ValueError(UNSEEN)
    cache = cache_of(method, config, model)
    if isinstance(decoder, FathomModel):
        with_banks(cache, decoder.plan_of(decoder.served_trips))
    for memory, reader in zip(cache.layers, readers, strict=True):
        assert isinstance(memory, Memory)
        memory.take(reader.keys, reader.values, reader.scores)
    return cache
