"""Where layers rotate queries and keys differently, or some not at all, mixers score them without rotation.

Scores between rotated queries and keys of two such layers would depend on a token's position. A family's attention
hands over rotated ones. Its own function turns them back: angles a stand for a factor r e^{ia} (r is 1 but for some
scaled kinds of rotary embedding), and those of e^{-ia} / r undo it.

`let_turn` decides this for a family's layers, and `mixes_unrotated` in `configuration.py` for Fathom's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .handover import Handover, KeyValue
from .hosted_layer import Hosted, takes

Angles = Any
"""The argument `position_embeddings` of a family's attention: cosines and sines, or complex numbers (Llama 4)."""


@dataclass
class TurnedHandover(Handover):
    """One layer in one iteration. The walk gets the key that mixers score before key and value."""

    angles: Angles = None
    """The angles by which the layer has rotated queries and keys; None if it has not."""
    turn: Any = None
    """The family's function that did so."""
    returned: ClassVar[int] = 3

    @property
    def kept_for_others(self) -> tuple[Tensor, ...]:
        """The key before rotation, the key and the value; an iteration that borrows them keeps those of the first
        iteration."""
        key, value = cast(KeyValue, self.pair)
        return (key if self.lent is not None else self.scored), key, value

    def mixed(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> KeyValue:
        """The key and the value after mixing over depth; a key that was mixed is rotated again."""
        if self.angles is None:
            self.scored, value = self.mixer.stored(query, key, value, self.sources)
            return self.scored, value
        query, own = rotated(self.turn, query, key, back(self.angles))
        self.scored, value = self.mixer.stored(query, own, value, self.sources)
        return key if self.scored is own else rotated(self.turn, query, self.scored, self.angles)[1], value


@dataclass
class TriedHandover(Handover):
    """One layer whose key is looked at. Nothing is mixed, since gates by channel may fit the other layers' heads
    alone."""

    def mixed(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> KeyValue:
        """The layer's own key and value."""
        return key, value


def back(angles: Angles) -> Angles:
    """The angles that undo others."""
    if isinstance(angles, Tensor):
        return angles.reciprocal()
    cos, sin = angles
    square = cos.float().square() + sin.float().square()
    return cos / square, -sin / square


def rotated(turn: Callable[..., Any], query: Tensor, key: Tensor, angles: Angles) -> KeyValue:
    """Rotate queries and keys `[B, H, T, D]` with the family's own function."""
    if isinstance(angles, Tensor):
        both = turn(query.transpose(1, 2), key.transpose(1, 2), angles)
        return both[0].transpose(1, 2), both[1].transpose(1, 2)
    both = turn(query, key, *angles)
    return both[0].to(query.dtype), both[1].to(key.dtype)


def let_turn(layers: Sequence[Hosted], rotation: Any, rope: Mapping[str, Any], x: Tensor, host: str) -> None:
    """Make mixers score queries and keys before rotation, if layers rotate them differently.

    Args:
        layers: Those with keys.
        rotation: Angles of one position, by layer type where these differ.
        rope: The family's parameters of rotation, by layer type where these differ.
        x: A layer's input, `[1, 1, D]`.
        host: The family's name, for the error.

    Raises:
        ValueError: If the keys of two layers differ in heads or width.
    """
    of_kind = rotation if isinstance(rotation, dict) else {layer.kind: rotation for layer in layers}
    shapes, rotate = zip(*(tried(layer, of_kind.get(layer.kind), x) for layer in layers), strict=True)
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"{host}: layers differ in number or size of key heads, so keys of two layers cannot be compared"
        )
    turns = [turned and rope.get(layer.kind, rope) for layer, turned in zip(layers, rotate, strict=True)]
    if any(turn != turns[0] for turn in turns):
        for layer, turned in zip(layers, rotate, strict=True):
            layer.handover, layer.rotates = TurnedHandover, turned
            home = inspect.getmodule(type(layer._modules[layer.parts[0]]))
            named = "apply_rotary_emb" if isinstance(of_kind[layer.kind], Tensor) else "apply_rotary_pos_emb"
            layer.turn = of_both(getattr(home, named))


def of_both(turn: Callable[..., Any]) -> Callable[..., Any]:
    """A family's rotary function for queries and keys together, also if its own takes one tensor at a time (Gemma
    4)."""
    _, second, *_ = inspect.signature(turn).parameters
    return partial(each, turn) if second == "cos" else turn


def each(turn: Callable[..., Tensor], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
    """Rotate queries and keys by two separate calls."""
    return turn(query, cos, sin), turn(key, cos, sin)


def turning(layers: Iterable[nn.Module]) -> bool:
    """Whether any of these layers is a hosted layer whose mixer scores queries and keys before rotation."""
    return any(getattr(layer, "rotates", None) is not None for layer in layers)


def tried(layer: Hosted, angles: Angles, x: Tensor) -> tuple[torch.Size, bool]:
    """The shape of a layer's key, and whether the layer rotates it, which is so if it has a gradient with respect to
    the angles. On the meta device too, where numbers are not known."""
    part: Any = layer._modules[layer.parts[0]]
    name, allowed = takes(type(part))
    part.eval()  # with dropout it would draw numbers, and other initial weights would follow
    with torch.enable_grad():
        parts = [one.detach().requires_grad_() for one in ((angles,) if isinstance(angles, Tensor) else angles or ())]
        hand = TriedHandover(cast(Any, layer.depth_mixer), cast(Any, layer.own_attention), None)
        given = {"position_embeddings": parts[0] if isinstance(angles, Tensor) else tuple(parts) or None}
        given |= {"position_ids": x.new_zeros(1, 1, dtype=torch.long), "attention_mask": None, "handover": hand}
        given |= {"shared_kv_states": {}, name: None}
        part(hidden_states=x, **{key: one for key, one in given.items() if allowed is None or key in allowed})
        key = cast(KeyValue, hand.pair)[0]
        reached = torch.autograd.grad(key.sum(), parts, allow_unused=True) if parts and key.requires_grad else ()
    part.train()
    return key.shape, any(one is not None for one in reached)
