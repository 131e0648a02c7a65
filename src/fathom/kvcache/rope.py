"""Rotates stored keys to other positions exactly as the model does, and refuses models for which this is impossible.

A compression moves entries: entry s is rotated back by s, compressed, and rotated forward by s + F. Only differences of
positions matter to attention, so the tables hold small angles for any length of text. Angles and rotation are those of
the family's own code. A test of the model shows which layers rotate, and by which angles: the model reads a few tokens
at two positions, and each layer's keys at one position must equal the rotated keys at the other.

Presses of kvpress also refuse models whose RoPE does not pair the halves of a head (`Press.score` in `press.py`).
`Method.moves` decides whether entries get new positions; of Fathom's methods only presses set it to False.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fathom.models.axes.cache_name import passed
from fathom.models.axes.roles import View
from fathom.models.decoder.rotary import RotaryEmbedding
from fathom.models.registry import recurrence_class

from .states import BOTH, NEITHER, STATES, family, has_states

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

POSITION_LINEAR = ("default", "linear", "llama3", "proportional", "yarn")
CHANGING = ("dynamic", "longrope")
ATTENDING = ("full_attention", "sliding_attention")
KNOWN = (*ATTENDING, *BOTH, *STATES, *NEITHER)
PLACE, TOKENS = 37, 6
"""How a model is asked: the same TOKENS tokens at position 0 and at position PLACE; one with states, also in halves."""

Apply = Callable[..., tuple[Tensor, Tensor]]


class Still:
    """The rotation of a layer whose keys hold no position: nothing is rotated."""

    def turn(self, x: Tensor, start: int, step: int = 1) -> Tensor:
        """`x`."""
        return x

    def place(self, x: Tensor, start: int) -> Tensor:
        """`x`."""
        return x

    def turn_each(self, x: Tensor, by: Tensor, least: int, most: int) -> Tensor:
        """`x`."""
        return x

    def turn_mean(self, x: Tensor, start: int, count: int) -> Tensor:
        """`x`."""
        return x


class Turn(Still):
    """The rotation of one type of layer; the attention factor of some rotary scalings is left out.

    Args:
        embed: The family's rotary embedding.
        apply: The family's function that rotates queries and keys `[B, H, T, D]` by cosines and sines `[B, T, R]`.
        kind: The type of layer, if each type has its own angles.
    """

    def __init__(self, embed: nn.Module, apply: Apply, kind: str | None = None) -> None:
        self.embed, self.apply, self.kind = embed, apply, kind
        self._prefix = f"{kind}_" if kind is not None and hasattr(embed, f"{kind}_inv_freq") else ""
        self.scale: float = getattr(embed, f"{self._prefix}attention_scaling", 1.0)
        angles: Tensor = getattr(embed, f"{self._prefix}inv_freq")
        self.angles: bytes = angles.float().numpy().tobytes()
        """The angle per position of each pair of channels; models with equal angles can share keys."""
        self.rotated = 2 * len(angles)
        """The channels that are rotated; cosines may have one column for each of them, or one for each pair."""
        self._tables: dict[tuple[int, int, int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        self._factors: dict[tuple[int, int, torch.dtype, torch.device], tuple[Tensor, Tensor, int]] = {}

    def adopt(self, embed: nn.Module) -> None:
        """Copy the rotary angles of a model's own module, because a model that was cast to half precision uses rounded
        angles."""
        name = f"{self._prefix}inv_freq"
        if getattr(embed, name).is_meta:
            return
        with torch.inference_mode(False):
            setattr(self.embed, name, getattr(embed, name).detach().float().cpu().clone())
        self._tables.clear()

    def turn(self, x: Tensor, start: int, step: int = 1) -> Tensor:
        """Rotate entry s of keys `[B, H, n, D]` by `start + s · step` positions."""
        return self._turned(x, *self._table(start, x.shape[2] if step else 1, step, x))

    def place(self, x: Tensor, start: int) -> Tensor:
        """Rotate entry s of keys `[B, H, n, D]` by `start + s` positions: x · a + (x with its pairs swapped) · b.

        The same as `turn` in few operations, for the keys that are read with every token.
        """
        turned = x if self.rotated == x.shape[-1] else x[..., : self.rotated]
        key = (start, x.shape[2], x.dtype, x.device)
        if key not in self._factors:
            self._factors.clear()  # all layers read the same positions
            cos, sin = self._table(start, x.shape[2], 1, x)
            one = torch.ones_like(turned[:1, :1])
            a, b = self._turned(one, cos, 0 * sin), self._turned(one, 0 * cos, sin)
            first = torch.zeros_like(one[:, :, :1]).index_fill(-1, torch.tensor(0, device=x.device), 1.0)
            partner = int(self._turned(first, 0 * cos[:, :1], 0 * sin[:, :1] + 1).abs().argmax())
            self._factors[key] = a, b, partner
        a, b, partner = self._factors[key]
        swapped = turned.roll(partner, -1) if partner > 1 else turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        out = (turned * a).addcmul_(swapped, b)
        return out if turned is x else torch.cat([out, x[..., self.rotated :]], dim=-1)

    def turn_each(self, x: Tensor, by: Tensor, least: int, most: int) -> Tensor:
        """Rotate entry i of keys `[B, H, n, D]` by `by[..., i]` positions; `by` is `[B, H, n]` with values from `least`
        to `most`."""
        cos, sin = self._table(least, most - least + 1, 1, x)
        places = (by - least).flatten(0, 1)  # [B · H, n]
        return self._turned(x.flatten(0, 1).unsqueeze(1), cos[0][places], sin[0][places]).reshape(x.shape)

    def turn_mean(self, x: Tensor, start: int, count: int) -> Tensor:
        """The mean of keys `[B, H, n, D]` over rotations by `count` positions from `start`."""
        cos, sin = self._table(start, count, 1, x)
        return self._turned(x, cos.mean(1, keepdim=True), sin.mean(1, keepdim=True))

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : self.rotated], x[..., self.rotated :]
        # the function rotates queries and keys alike; here there are no queries
        turned = self.apply(turned[:, :0], turned, cos, sin)[1]
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def halves(self, size: int) -> bool:
        """Whether the rotation covers a whole head of this size and pairs each channel with the one half a head
        further, as in Llama."""
        x = torch.zeros(1, 1, 1, size).index_fill(-1, torch.tensor(0), 1.0)
        return self.rotated == size and bool(self.turn(x, 1)[..., size // 2] != 0)

    def table(self, start: int, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines of `n` positions, `[1, n, R]` each, without the attention factor."""
        return self._table(start, n, 1, like)

    @torch.inference_mode(False)  # training may use them later
    @torch.no_grad()
    def _table(self, start: int, n: int, step: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines of positions `start`, `start + step`, …, `[1, n, R]` each."""
        key = (start, n, step, x.dtype, x.device)
        if key not in self._tables:
            if len(self._tables) > 16:
                self._tables.clear()  # each layer uses the table of a text's total shift once
            self.embed.to(x.device)
            positions = (torch.arange(n) * step + start).to(x.device).unsqueeze(0)
            like = x[..., :0].detach().clone()  # for its dtype and device only
            cos, sin = self.embed(like, positions, self.kind) if self._prefix else self.embed(like, positions)
            self._tables[key] = cos / self.scale, sin / self.scale
        return self._tables[key]


class Rope:
    """The rotation of each layer's keys: read from a configuration, and corrected by testing the model (`ask`)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        config = family(config)
        kinds = getattr(config, "layer_types", None) or []
        layers = config.num_hidden_layers
        self._asked = self.by_token = False
        """Later, whether a state goes wrong if it continues by several tokens at once."""
        with torch.device("cpu"):
            self.turns: dict[str | None, Turn] = dict(_turns(config))
        first = next(iter(self.turns.values()), Still())
        self.plan: list[Still] = [self.turns.get(kinds[i] if kinds else None, first) for i in range(layers)]
        """The rotation of each layer."""
        if config.model_type == "fathom":
            self.plan = [turn if config.rotates(i) else Still() for i, turn in enumerate(self.plan)]

    @property
    def angles(self) -> bytes:
        """The rotary angles of all types of layers, as bytes; models with equal angles can share keys."""
        return b"".join(self.turns[kind].angles for kind in sorted(self.turns, key=str))

    def turns_as(self, other: Rope) -> bool:
        """Whether two models rotate keys by the same angles."""
        return self.angles == other.angles

    def ask(self, decoder: PreTrainedModel) -> None:
        """Determine the rotation of each layer by testing the model with a few tokens at two positions.

        Raises:
            ValueError: The keys at one position are not the rotated keys of another.
        """
        if self._asked:
            return
        if family(decoder.config).model_type == "fathom":  # the configuration says which layers rotate
            for kind, turn in self.turns.items():
                turn.adopt(decoder.rotary_emb if kind is None else decoder.rotary_emb[kind])
        else:
            for module in decoder.modules():
                for turn in self.turns.values():
                    if type(module) is type(turn.embed):
                        turn.adopt(module)
            kinds, self.by_token = _answers(decoder, self)
            self.plan = [Still() if kind == STILL else self.turns[kind] for kind in kinds]
        self._asked = True


STILL = "no rotation"
_ASKED: WeakKeyDictionary[PreTrainedModel, tuple[list[str | None], bool]] = WeakKeyDictionary()


def _apply(code: ModuleType) -> Apply | None:
    """The function with which a model family's code rotates queries and keys."""
    apply: Apply | None = getattr(code, "apply_rotary_pos_emb", None)
    if apply is None:
        return None
    second = [*inspect.signature(apply).parameters][1:2]
    if second == ["cos"]:  # Gemma 4 rotates queries and keys by a call each
        one = cast("Callable[..., Tensor]", apply)
        return lambda q, k, cos, sin: (q, one(k, cos, sin))
    return apply if second in (["k"], []) else None


def _modelling(config: PreTrainedConfig) -> ModuleType:
    if config.model_type == "fathom":
        return import_module("transformers.models.qwen3.modeling_qwen3")
    package, _, name = type(config).__module__.rpartition(".")
    try:
        return import_module(f"{package}.{name.replace('configuration_', 'modeling_', 1)}")
    except ImportError as error:
        raise ValueError(f"{config.model_type}: its modelling code cannot be imported ({error}); use 'full'") from None


def _no_rotary(config: PreTrainedConfig) -> str:
    """The reason why keys of a model family without an ordinary rotary embedding cannot be moved."""
    kind = config.model_type
    if any("rotary" in name for name in vars(_modelling(config))):
        return f"{kind} rotates its keys in code of its own, without a rotary embedding that could be read; use 'full'"
    return f"{kind} has no rotary embedding, so its keys hold positions that cannot be moved; use method 'full'"


def _embedding(code: ModuleType) -> type[nn.Module] | None:
    names = (name for name in vars(code) if name.endswith("RotaryEmbedding") and "Vision" not in name)
    return next((vars(code)[name] for name in names), None)


def _turns(config: PreTrainedConfig) -> Iterator[tuple[str | None, Turn]]:
    """The rotations that a configuration describes, by layer type, or under the key None; none for a model whose
    recurrent states encode positions."""
    rope: dict[str, object] = getattr(config, "rope_parameters", None) or {}
    code = _modelling(config)
    if not rope and has_states(config):
        return
    embed, apply = _embedding(code), _apply(code)
    if embed is None or apply is None:
        raise ValueError(_no_rotary(config))
    kinds = getattr(config, "layer_types", None)
    by_type: list[str | None] = [
        kind for kind, one in rope.items() if isinstance(one, dict) and (not kinds or kind in kinds)
    ]
    if config.model_type != "fathom":
        shared = embed(config)
        yield from ((kind, Turn(shared, apply, kind)) for kind in by_type or [None])
        return
    for kind in by_type or [None]:
        own = copy.copy(config)
        own.rope_parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
        yield kind, Turn(RotaryEmbedding(own), apply)


def _answers(decoder: PreTrainedModel, rope: Rope) -> tuple[list[str | None], bool]:
    """For each layer, the type of rotation that explains its keys; and whether the model's recurrent states can only
    continue token by token."""
    if decoder not in _ASKED:
        config, weight = family(decoder.config), next(decoder.parameters())
        if weight.is_meta:
            kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
            return [kind if kind in rope.turns else next(iter(rope.turns), STILL) for kind in kinds], False
        _ASKED[decoder] = _explained(decoder, rope, half=weight.dtype.itemsize <= 2)
    return _ASKED[decoder]


@torch.no_grad()
def _explained(decoder: PreTrainedModel, rope: Rope, half: bool) -> tuple[list[str | None], bool]:
    # Later tokens attend to earlier ones, and half precision rounds that differently at other positions: a massive
    # activation may appear in one reading only. The first token sees itself alone, wherever it is.
    near, told = (0.1, 1) if half else (1e-3, TOKENS)
    config = family(decoder.config)
    family_name, states = config.model_type, has_states(config)
    training = [module for module in decoder.modules() if module.training]
    try:
        decoder.eval()  # without dropout
        (here, first), (there, second) = _read(decoder, 0), _read(decoder, PLACE)
        halves = _read(decoder, 0, TOKENS // 2)[0] if states else here
    except Exception as error:
        words = str(error).partition("\n")[0]
        raise ValueError(f"{family_name} failed to read a few tokens into a cache ({words}); use 'full'") from error
    finally:
        for module in training:
            module.training = True
    if len(first) != config.num_hidden_layers:
        raise ValueError(
            f"{family_name} stores keys of {len(first)} layers, which other layers share; use method 'full'"
        )
    if _apart(here[:, :told], there[:, :told]) > 10 * near:
        raise ValueError(f"{family_name} computes other outputs if all positions are shifted; use method 'full'")
    own = getattr(config, "layer_types", None) or [None] * len(first)
    kinds: list[str | None] = []
    for layer, keys in enumerate(zip(first, second, strict=True)):
        kind, apart = _kind(rope, own[layer], *(None if x is None else x[:, :, :told] for x in keys))
        if apart > near:
            raise ValueError(
                f"{family_name}: the keys of layer {layer} do not follow a rotary embedding; use method 'full'"
            )
        kinds.append(kind)
    return kinds, _apart(halves, here) > near


def _kind(rope: Rope, own: str | None, here: Tensor | None, there: Tensor | None) -> tuple[str | None, float]:
    """The type of rotation that comes nearest to turning a layer's keys at one position into its keys at another."""
    if here is None or there is None:  # a state, or the keys of an earlier layer of this type (Gemma 4)
        kind = own if own in rope.turns else None
        return kind if own in ATTENDING and kind in rope.turns else STILL, 0.0
    found: dict[str | None, float] = {STILL: _apart(here, there)}
    for kind, turn in rope.turns.items():
        if turn.rotated <= here.shape[-1]:  # Gemma 4's types of layers have heads of other sizes
            found[kind] = _apart(turn.turn(here, PLACE, 0), there)
    best = min(found, key=lambda kind: (found[kind], kind != own))
    return own if found.get(own) == found[best] else best, found[best]


def _read(decoder: PreTrainedModel, start: int, part: int = TOKENS) -> tuple[Tensor, list[Tensor | None]]:
    """The last hidden states, and the keys of all layers, for a few test tokens that begin at position `start` and are
    read in parts."""
    device, config = next(decoder.parameters()).device, decoder.config
    ids = (torch.arange(TOKENS, device=device) + 3).unsqueeze(0) % config.vocab_size
    places = torch.arange(start, start + TOKENS, device=device).unsqueeze(0)
    once = {"max_trips": 1} if config.model_type == "fathom" else {}
    cache = keeping_all(config)
    hidden = [
        decoder(input_ids=x, position_ids=at, use_cache=True, **passed(decoder, cache), **once).last_hidden_state
        for x, at in zip(ids.split(part, 1), places.split(part, 1), strict=True)
    ]
    return torch.cat(hidden, 1).float(), [layer.keys.float() if keeps(layer) else None for layer in cache.layers]


def keeping_all(config: PreTrainedConfig) -> DynamicCache:
    """A growing cache for a model of this configuration, in which layers with a window keep all keys too."""
    cache = DynamicCache(config=family(config))
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[i] = DynamicLayer()
    return cache


def keeps(layer: object) -> bool:
    """Whether a cache's layer holds keys; those of layers with a state only do not."""
    return isinstance(layer, CacheLayerMixin) and layer.is_initialized


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12)) if a.shape == b.shape else torch.inf


def left_alone(config: PreTrainedConfig, layer: int, window: int) -> int | None:
    """The sliding window of a layer if it is smaller than `window`, else None; a layer with such a window keeps its own
    bounded cache."""
    sliding = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not sliding or sliding >= window or getattr(config, "use_sliding_window", True) is False:
        return None
    return sliding if kinds is None or kinds[layer] == "sliding_attention" else None


def refuse(config: PreTrainedConfig, window: int) -> None:
    """Raise an error for a model whose keys cannot be moved exactly; the error names the alternative."""
    if config.model_type == "fathom":
        _refuse_fathom(config)
    given, config = config, family(config)
    kind, kinds = config.model_type, getattr(config, "layer_types", None) or ()
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{kind} stores latents (MLA), from which keys are computed at each token: latents cannot be rotated, "
            "selected or mixed like keys; use method 'full'"
        )
    for layer, layer_type in enumerate(kinds):
        if layer_type not in KNOWN:
            raise ValueError(
                f"layer {layer} is {layer_type}, and compressed caches support only {', '.join(KNOWN)}; "
                "use method 'full'"
            )
    if kinds and {*ATTENDING, *BOTH}.isdisjoint(kinds):
        raise ValueError(f"{kind}: no layer keeps keys, so there is nothing to compress; use method 'full'")
    rope = getattr(config, "rope_parameters", None)
    if not rope and not has_states(config):
        raise ValueError(_no_rotary(config))
    for one in [part for part in (rope or {}).values() if isinstance(part, dict)] or [rope or {}]:
        rope_type = one.get("rope_type", "default")
        if rope_type not in POSITION_LINEAR:
            reason = "changes its angles with the length of the text" if rope_type in CHANGING else "is not known here"
            raise ValueError(
                f"RoPE scaling {rope_type!r} {reason}, so stored keys cannot be moved; set rope_type to one of "
                f"{', '.join(POSITION_LINEAR)}, or use method 'full'"
            )
    layers = [i for i in range(config.num_hidden_layers) if not kinds or kinds[i] not in (*STATES, *NEITHER)]
    if all(left_alone(given, layer, window) for layer in layers):
        raise ValueError(
            f"all layers of this model have a sliding window of {config.sliding_window} tokens, which bounds its "
            f"own cache: set window to {config.sliding_window} or less, or use method 'full'"
        )


def _refuse_fathom(config: PreTrainedConfig) -> None:
    if config.positions == "learned":
        raise ValueError("learned positions are part of the keys, which cannot be moved; use method 'full'")
    if config.k_norm_position == "after_rope":
        raise ValueError(
            "k_norm_position 'after_rope': keys that were normed after RoPE cannot be rotated back; use method 'full'"
        )
    recurrence = recurrence_class(config)
    view = recurrence.sees(config)
    if view is not View.SAME:
        raise ValueError(
            f"recurrence {config.recurrence!r} attends to other iterations (view {view.name}), so several entries "
            "share a position; use method 'full', or a recurrence of view SAME"
        )
    if recurrence.shares(config):
        raise ValueError(
            f"recurrence_options.kv={config.recurrence_options['kv']} shares keys between iterations; use method 'full'"
        )
    if recurrence.stops(config):
        halting = f"recurrence {config.recurrence!r} lets tokens halt one by one, which no compressed cache supports"
        raise ValueError(f"{halting}; use the uncompressed cache, method 'full'")
