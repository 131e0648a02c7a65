"""Scorers of kvpress as methods here: their scores, in Fathom's frame of positions, padding, chunks and decoding.

A scorer of kvpress projects the queries and keys that it needs from hidden states. Here it gets a stand-in for the
attention layer. Its "hidden states" are the layer's own queries and keys without rotation, side by side, and its
projections take them apart again. So a scorer reads what the layer has computed, in every family of models.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fathom.models.axes.numerics import widen

from .method import UNSEEN, Held, Selection
from .rope import Rope, Still, Turn
from .schedule import Once, Schedule


class StandIn(nn.Module):
    """What a scorer asks of an attention layer.

    Args:
        heads: The number of query heads.
        like: Keys `[B, H_kv, N, D]`.
        rotation: How the layer rotates keys.
    """

    def __init__(self, heads: int, like: Tensor, rotation: Still) -> None:
        super().__init__()
        self.num_key_value_heads, self.head_dim = like.shape[1], like.shape[3]
        self.num_key_value_groups = heads // self.num_key_value_heads
        self.config = SimpleNamespace(
            num_attention_heads=heads, num_key_value_heads=self.num_key_value_heads, head_dim=self.head_dim
        )
        self.scaling, self.rotation = self.head_dim**-0.5, rotation

    def q_proj(self, hidden: Tensor) -> Tensor:
        """The queries, `[B, T, H · D]`."""
        return hidden[..., : self.config.num_attention_heads * self.head_dim]

    def k_proj(self, hidden: Tensor) -> Tensor:
        """The keys, `[B, T, H_kv · D]`."""
        return hidden[..., self.config.num_attention_heads * self.head_dim :]

    def rotary_emb(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[1, n, D]` each; of a layer without rotation, ones and zeros."""
        if not isinstance(self.rotation, Turn):
            one = like.new_ones(1, positions.shape[1], self.head_dim)
            return one, 0 * one
        return self.rotation.table(int(positions[0, 0]), positions.shape[1], like)


class Press(Selection):
    """A scorer of kvpress as a method; `press` makes one class for each scorer."""

    by_name, own_sinks = False, 0
    scorer: Any
    """kvpress's object."""

    def __init__(self, schedule: Schedule, rope: Rope) -> None:
        super().__init__(schedule, rope)
        self.observed = min(schedule.window, schedule.most)

    @classmethod
    def left(cls, length: int, ratio: float) -> int:
        """What kvpress leaves of a prompt of `length` tokens; its own ratio is the share that goes."""
        return max(1, int(length * (1 - cls.scorer.compression_ratio)))

    def note(self, known: Tensor | None, queries: Tensor, start: int, rotation: Still) -> Tensor:
        """All queries since the last compression, without their rotation."""
        bare = rotation.turn(widen(queries), -start, -1)
        return bare if known is None else torch.cat([known, bare], dim=2)

    def scores(self, held: Held) -> Tensor:
        """`[B, H_kv, N]`. After the first compression a scorer sees the hidden states of the new tokens only.

        Some scorers standardise over a whole batch. So each sequence is scored alone, with the same random draws.
        """
        if held.queries is None:
            raise ValueError(UNSEEN)
        alone = zip(held.keys.split(1), held.values.split(1), held.queries.split(1), strict=True)
        first, *others = (Held(*row, held.rotation) for row in alone)
        found = []
        for one in others:
            with torch.random.fork_rng([held.keys.device] if held.keys.is_cuda else []):
                found.append(self.score(one))
        return torch.cat([self.score(first), *found])

    def score(self, held: Held) -> Tensor:
        """The scores of one sequence, `[1, H_kv, N]`."""
        assert held.queries is not None
        rotation, n, size = self.rotation(held), held.keys.shape[2], held.keys.shape[3]
        if isinstance(rotation, Turn) and not rotation.halves(size):
            raise ValueError(
                f"{self.name} rotates a head in two halves, as Llama does, and this model does not: use another method"
            )
        queries = held.queries.to(held.keys.dtype) * size**0.5  # scorers divide by √D themselves
        start = n - queries.shape[2]
        bare = rotation.turn(held.keys, 0, -1)[:, :, start:]
        hidden = torch.cat([x.transpose(1, 2).flatten(2) for x in (queries, bare)], dim=-1)  # [B, T, (H + H_kv) · D]
        layer = StandIn(queries.shape[1], held.keys, rotation)
        places = torch.arange(start, n, device=hidden.device).unsqueeze(0)
        kwargs = {"position_embeddings": layer.rotary_emb(held.keys, places)}
        scorer = copy.copy(self.scorer)
        if not isinstance(self.schedule, Once):
            scorer.compression_ratio = 1 - self.schedule.kept / n
        given = layer, hidden, held.keys, held.values
        try:
            found: Tensor = scorer.score(*given, None, kwargs)
        except AssertionError as error:
            if "eager" not in str(error):
                raise ValueError(f"{self.name}: {str(error) or 'this scorer takes other inputs'}") from error
            rotated = Held(held.keys, held.values, rotation.turn(held.queries, start), rotation)
            found = scorer.score(*given, rotated.attention().flatten(1, 2), kwargs)
        return found


def press(scorer: object) -> type[Press]:
    """A method from a press of kvpress that gives scores, for `compressed` and `build_cache`.

        with compressed(model, press(SnapKVPress(compression_ratio=0.5))):
            model.generate(ids)

    A prompt keeps as many entries as with kvpress, at consecutive positions, as in kvpress's `KeyRerotationPress`. The
    scorer protects its own first entries, so `sinks` is 0 by default.

    Args:
        scorer: A `ScorerPress` of kvpress 0.5, or any object with its `score` and `compression_ratio`.
    """
    ratio = getattr(scorer, "compression_ratio", None)
    if not callable(getattr(scorer, "score", None)) or not isinstance(ratio, float | int):
        raise ValueError(f"{type(scorer).__name__} gives no scores: press takes a ScorerPress of kvpress")
    if not 0 < ratio < 1:
        raise ValueError(f"compression_ratio must lie between 0 and 1, got {ratio}: it is the share that goes")
    name = type(scorer).__name__
    return type(name, (Press,), {"name": name, "scorer": scorer, "own_ratio": 1 - ratio, "__doc__": Press.__doc__})
