"""Turns presses of kvpress into compression methods: kvpress scores the entries, and Fathom handles positions, padding,
chunks and decoding.

A scorer of kvpress projects the queries and keys that it needs from hidden states. Here it gets a stand-in for the
attention layer. Its "hidden states" are the layer's own queries and keys without rotation, side by side, and its
projections take them apart again. So a scorer reads what the layer has computed, in every family of models.

`save_cache` in `stored.py` stores a prompt that a press compressed, but no cache that a press will compress again.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fathom.models.axes.numerics import widen

from .method import UNSEEN, Held, Method, Selection
from .paced import Paced, PacedMemory
from .rope import Rope, Still, Turn
from .schedule import UNTOUCHED, Once, Schedule


class StandIn(nn.Module):
    """A stand-in for an attention layer, with the attributes that a press of kvpress reads.

    Args:
        heads: The number of query heads.
        like: Keys `[B, H_kv, N, D]`.
        rotation: How the layer rotates keys.
        module: The layer itself, for what it projects values by.
    """

    def __init__(self, heads: int, like: Tensor, rotation: Still, module: nn.Module | None = None) -> None:
        super().__init__()
        self.num_key_value_heads, self.head_dim = like.shape[1], like.shape[3]
        self.num_key_value_groups = heads // self.num_key_value_heads
        self.config = SimpleNamespace(
            num_attention_heads=heads, num_key_value_heads=self.num_key_value_heads, head_dim=self.head_dim
        )
        self.scaling, self.rotation = self.head_dim**-0.5, rotation
        if isinstance(output := getattr(module, "o_proj", None), nn.Linear):
            self.o_proj, self.config.hidden_size = output, output.out_features

    def q_proj(self, hidden: Tensor) -> Tensor:
        """The queries, `[B, T, H · D]`."""
        return hidden[..., : self.config.num_attention_heads * self.head_dim]

    def k_proj(self, hidden: Tensor) -> Tensor:
        """The keys, `[B, T, H_kv · D]`."""
        return hidden[..., self.config.num_attention_heads * self.head_dim :]

    def rotary_emb(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines of positions, `[1, n, D]` each; ones and zeros for a layer without rotary positions."""
        if not isinstance(self.rotation, Turn):
            one = like.new_ones(1, positions.shape[1], self.head_dim)
            return one, 0 * one
        return self.rotation.table(int(positions[0, 0]), positions.shape[1], like)


class Press(Selection):
    """A compression method that scores entries with a press of kvpress; `press` makes a subclass for each press."""

    by_name, own_sinks = False, 0
    scorer: Any
    """kvpress's object."""

    def __init__(self, schedule: Schedule, rope: Rope) -> None:
        super().__init__(schedule, rope)
        self.observed = min(schedule.window, schedule.most)

    @classmethod
    def left(cls, length: int, ratio: float) -> int:
        """The number of entries that kvpress leaves of a prompt of `length` tokens; kvpress's own ratio is the share
        that is removed."""
        return max(1, int(length * (1 - cls.scorer.compression_ratio)))

    def note(self, known: Tensor | None, queries: Tensor, start: int, rotation: Still) -> Tensor:
        """Store all queries since the last compression, without their rotation."""
        bare = rotation.turn(widen(queries), -start, -1)
        return bare if known is None else torch.cat([known, bare], dim=2)

    def goes(self, n: int) -> float | None:
        """The share of `n` entries that a compression removes; None if it is the press's own ratio."""
        return None if isinstance(self.schedule, Once) else 1 - self.schedule.kept / n

    def scores(self, held: Held) -> Tensor:
        """`[B, H_kv, N]`. After the first compression a scorer sees the hidden states of the new tokens only.

        So a scorer that needs all hidden states fails in a cache that is compressed again: `score` raises a
        `ValueError` where the scorer's own check fails. Some scorers standardise over a whole batch. So each sequence
        is scored alone, with the same random draws.
        """
        if held.queries is None:
            raise ValueError(UNSEEN)
        alone = zip(held.keys.split(1), held.values.split(1), held.queries.split(1), strict=True)
        first, *others = (replace(held, keys=k, values=v, queries=q) for k, v, q in alone)
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
        bare = rotation.turn(held.keys[:, :, start:], -start - held.start, -1)
        hidden = torch.cat([x.transpose(1, 2).flatten(2) for x in (queries, bare)], dim=-1)  # [B, T, (H + H_kv) · D]
        layer = StandIn(queries.shape[1], held.keys, rotation, held.module)
        places = torch.arange(start, n, device=hidden.device).unsqueeze(0) + held.start
        kwargs = {"position_embeddings": layer.rotary_emb(held.keys, places)}
        scorer = copy.copy(self.scorer)
        if self.goes(n) is not None:
            scorer.compression_ratio = self.goes(n)
        given = layer, hidden, held.keys, held.values
        try:
            found: Tensor = scorer.score(*given, None, kwargs)
        except (AttributeError, NotImplementedError) as error:
            raise ValueError(
                f"{self.name} asks a layer for more than queries, keys, values and o_proj: {error}"
            ) from error
        except AssertionError as error:
            if "eager" not in str(error):
                raise ValueError(f"{self.name}: {str(error) or 'this scorer takes other inputs'}") from error
            rotated = replace(held, queries=rotation.turn(held.queries, start + held.start))
            found = scorer.score(*given, rotated.attention().flatten(1, 2), kwargs)
        return found


class PacedPress(Press, Paced):
    """A compression method from a `DecodingPress` of kvpress, which compresses while decoding, perhaps after another
    press for the prompt."""

    moves, memory = False, PacedMemory
    prefilling: type[Press] | None
    """The class of `first`."""

    def __init__(self, schedule: Schedule, rope: Rope, prompt: int | None = None, first: Method | None = None) -> None:
        super().__init__(schedule, rope)
        if prompt is None:
            raise ValueError(
                f"{self.name} counts the tokens after a prompt: use it in compressed(model, press(…)), without window"
            )
        self.prompt, self.first = prompt, first

    @classmethod
    def for_prompt(
        cls, kind: type[Schedule], length: int, sinks: int, ratio: float, rope: Rope, **options: object
    ) -> Method:
        """The method for a prompt of `length` tokens, with the sizes that the press itself contains."""
        if kind is not Once or sinks or ratio != cls.own_ratio or options:
            raise ValueError(f"{cls.name} sets its own sizes: leave ratio, sinks, while_decoding and options out")
        own, first = cls.prefilling, None
        if own is not None:
            first = own.for_prompt(Once, length, 0, own.own_ratio, rope)
        if first is not None and first.schedule.window == UNTOUCHED:
            first = None
        return cls(Once(max(length, cls.target + 1), 0, cls.target), rope, length, first)

    def goes(self, n: int) -> float:
        """The share of `n` entries that a compression removes."""
        return 1 - self.target / n


def press(scorer: object) -> type[Press]:
    """Make a compression method, for `compressed` and `build_cache`, from a press of kvpress that scores entries. For
    example:

        with compressed(model, press(SnapKVPress(compression_ratio=0.5))):
            model.generate(ids)

    As with kvpress, a prompt keeps so many entries, and each keeps its position; `KeyRerotationPress` around a scorer
    gives them consecutive ones. The scorer protects its own first entries, so `sinks` is 0 by default. A
    `DecodingPress`, and a `PrefillDecodingPress`, count forward passes as kvpress does, and are for `compressed`.

    Args:
        scorer: A `ScorerPress` of kvpress 0.5, one of these three around it, or any object with `score` and
            `compression_ratio`.
    """
    if isinstance(scorer, type):
        raise ValueError(f"{scorer.__name__} is a class: give an instance, {scorer.__name__}(…)")
    name = type(scorer).__name__
    given: dict[str, Any] = vars(scorer) if hasattr(scorer, "__dict__") else {}
    if name == "PrefillDecodingPress":
        return paced(name, given["decoding_press"], given["prefilling_press"])
    if name == "DecodingPress":
        return paced(name, scorer, None)
    moves = name == "KeyRerotationPress"
    one = given["press"] if moves else scorer
    ratio = ratio_of(one)
    if not 0 < ratio < 1:
        raise ValueError(f"compression_ratio, the share of entries to remove, must lie between 0 and 1, got {ratio}")
    name = type(one).__name__
    return type(
        name, (Press,), {"name": name, "scorer": one, "own_ratio": 1 - ratio, "moves": moves, "__doc__": Press.__doc__}
    )


def ratio_of(scorer: Any) -> float:
    """The share of entries that a press removes; a `ValueError` if the press does not choose entries by scores
    alone."""
    name, compress = type(scorer).__name__, getattr(type(scorer), "compress", None)
    if not callable(getattr(scorer, "score", None)):
        raise ValueError(f"{name} gives no scores: press takes a ScorerPress of kvpress")
    if compress is not None and compress.__qualname__ != "ScorerPress.compress":
        raise ValueError(f"{name} overrides compress: press takes a ScorerPress that only computes scores")
    ratio = getattr(scorer, "compression_ratio", None)
    if not isinstance(ratio, float | int):
        raise ValueError(f"{name} has no compression_ratio: press takes a ScorerPress of kvpress")
    return ratio


def paced(name: str, decoding: Any, prefilling: Any) -> type[PacedPress]:
    """Make the method for a `DecodingPress`, which may follow another press for the prompt."""
    if decoding is None:
        raise ValueError(f"{name} has no decoding_press and compresses only prompts: give press its prefilling_press")
    ratio_of(decoding.base_press)
    for key in ("compression_interval", "target_size", "hidden_states_buffer_size"):
        value, least = getattr(decoding, key), int(key != "hidden_states_buffer_size")
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: {key}={value!r}: wanted a whole number, {least} or more")
    if type(prefilling).__name__ in ("DecodingPress", "PrefillDecodingPress"):
        raise ValueError(f"{name}: prefilling_press must compress prompts, which {type(prefilling).__name__} does not")
    whole = prefilling is None or getattr(prefilling, "compression_ratio", None) == 0
    own = {
        "scorer": decoding.base_press,
        "interval": decoding.compression_interval,
        "target": decoding.target_size,
        "buffer": decoding.hidden_states_buffer_size,
        "prefilling": None if whole else press(prefilling),
    }
    return type(name, (PacedPress,), {"name": name, "__doc__": PacedPress.__doc__, **own})
