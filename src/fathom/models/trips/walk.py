"""Run the decoder's layers for all iterations, with or without a cache, and decide what each iteration reads and
stores.

If no iteration reads another one (view SAME, no halting), every iteration is an ordinary forward pass with its own
bank, and any Hugging Face cache works (`Banked`); a model of one iteration is the simplest case. Otherwise there are
two cases. Without a cache (training, evaluation), keys and values of earlier iterations enter each layer as tensors
(`Dense`; `Packed` leaves halted tokens out), or, under ALL, all slots go through the stack side by side
(`Interleaved`). With a cache (inference), they are in the slot cache (`Stored`).

Decoding neither computes nor stores halted tokens, unless it is compiled (`_stored`); training computes and discards
them unless `skip_dead_rows` is set. In each iteration the residual begins anew with the iteration's input and ends with
its final read, so its state does not pass to the next iteration (`_through`).

`slots.py` has the solvers, `sweep` and `jacobi`, and the plan of layers, and keeps a halted token's result.
FlexAttention is refused here for gradients on a CPU or MPS, and for a static cache of slots. `modeling.py`
(`trips_asked`) decides how many iterations a forward pass makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from ..axes.host import to_host
from ..axes.roles import TripState, View, Way
from ..axes.visit import Out, Visit
from ..decoder.rotary import Rotation, angles
from .fixed_table import FixedTable
from .flex_reading import FLEX, NO_BACKWARD, ReadingRule, read_rule
from .protocols import Decoder
from .reading import BY_ROWS, MASKED, read_mask, side_by_side
from .slot_cache import repeat_last
from .slot_table import Placement, SlotTable, Tags
from .slots import TokenSubset, Turn, jacobi, joined, sweep

KeyValue = tuple[Tensor, Tensor]
DEAD = -1e4
"""The bias of a slot that is not there: its weight is 0 in every precision."""
AT_ONCE = 1024
"""Prefill chunk size for slot caches; bounds mask memory (chunk x cache length)."""


@dataclass
class Inputs:
    """The arguments of a decoder's forward pass, other than the embeddings."""

    trips: int
    positions: Tensor
    """`[1 or B, T]`"""
    packed: Tensor | None
    """Positions that restart at each packed document of a row; None if no positions restart."""
    padding: Tensor | None
    """`[B, past + T]`; None without padding."""
    cache: Cache | None
    """The caller's cache, at which masks look."""
    dtype: torch.dtype
    """Type of additive masks."""
    head: nn.Module | None
    """The projection to logits, for recurrences that need them."""
    extra: Mapping[str, object]
    """Further keyword arguments for the attention backend."""
    hidden: list[Tensor] | None = None
    """Filled with every visit's input, in the plan's order."""
    furthest: Tensor | None = None
    """The last position of the forward pass, if rotary angles depend on it: a part of its tokens gets the same ones."""
    balances: list[tuple[Tensor, Tensor | None]] | None = None
    """Filled with every trip's loss that balances its experts, and whether a token made the trip."""

    @property
    def live(self) -> Tensor | None:
        """A mask `[B, T]` of the new tokens that are not padding; None without padding, or where the caller's mask
        says only which token reads which."""
        if not isinstance(self.padding, Tensor) or self.padding.ndim != 2:
            return None
        return self.padding[:, -self.positions.shape[1] :].bool()

    def columns(self, start: int, stop: int) -> Inputs:
        """The part of these arguments that belongs to the new tokens `[start, stop)`."""
        padding = None
        if self.padding is not None:
            padding = self.padding[:, : self.padding.shape[1] - self.positions.shape[1] + stop]
        return replace(self, positions=self.positions[:, start:stop], padding=padding)

    def documents(self) -> Tensor | None:
        """The number of the packed document of each token, `[1 or B, T]`; None if positions never restart."""
        if self.packed is None:
            return None
        starts = self.packed[:, 1:] != self.packed[:, :-1] + 1
        return torch.nn.functional.pad(starts.long().cumsum(1), (1, 0))


@dataclass
class Store:
    """A slot cache and the table of what it stores where."""

    cache: Cache
    table: SlotTable | FixedTable


def run(model: Decoder, x: Tensor, inputs: Inputs, cache: Cache | Store | None) -> TripState:
    """Run all iterations of all tokens through the layers; returns the recurrence's final state.

    Args:
        model: The decoder.
        x: Iteration 0's input, `[B, T, hidden_size]`.
        inputs: The other arguments of the forward pass.
        cache: A cache with a bank for every visit; the `Store` of a model with slots.
    """
    recurrence, backend = model.recurrence, model.config._attn_implementation
    if x.requires_grad and x.device.type in NO_BACKWARD and backend == FLEX:
        raise ValueError(f"attn_implementation={FLEX} has no backward pass on {x.device.type}: use sdpa")
    store = cache if isinstance(cache, Store) else None
    way = recurrence.way(inputs.trips, packs=model.training and inputs.hidden is None)
    if recurrence.view is View.DUO or (recurrence.halts and (way is Way.SOLVED or store is not None)):
        check_backend(model, inputs.trips)
    if store is not None:
        return _stored(model, x, inputs, store, way is Way.SOLVED)
    if way is Way.SOLVED:
        return _solved(model, x, inputs)
    if way is Way.ONCE:
        return {"hidden": model.norm(Banked(model, inputs, x, cache).once(x))}
    live = inputs.live if recurrence.halts else None
    pick = TokenSubset.pack if way is Way.PACKED else None
    return sweep(recurrence, x, MAKERS[way](model, inputs, x, cache), inputs.trips, live=live, pick=pick)[0]


def _solved(model: Decoder, x: Tensor, inputs: Inputs) -> TripState:
    """Run view ALL without a cache by the Jacobi solver: all iterations of all tokens in the same passes."""
    recurrence = model.recurrence
    exact = recurrence.exact() and not model.training
    rounds = recurrence.rounds("train" if model.training else "evaluate", x.shape[1])
    if exact:
        rounds = _exact_rounds(x.shape[1], inputs.trips)
    still = exact and not torch.compiler.is_compiling() and not torch.is_grad_enabled() and not _among_ranks()
    still = still and not x.is_meta  # which has no numbers to compare
    through = Interleaved(model, inputs)
    kept = recurrence.gradient_passes if model.training else 0
    return jacobi(recurrence, x, through, inputs.trips, rounds, inputs.live, until_still=still, kept=kept)


def _exact_rounds(length: int, trips: int) -> int:
    """The number of Jacobi rounds that makes the result equal token-by-token decoding; raises if the length is
    symbolic, as in `torch.export` with `dynamic_shapes`."""
    if torch.compiler.is_exporting() and isinstance(length, torch.SymInt):
        raise ValueError(
            "recurrence_options.prefill=exact makes more passes the longer the text is, so torch.export cannot leave "
            "the length free: set prefill=jacobi, or export one length"
        )
    return (length - 1) * (trips - 1)


def _among_ranks() -> bool:
    """Whether several processes run together, which must make equal numbers of passes if they gather sharded
    weights."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _stored(model: Decoder, x: Tensor, inputs: Inputs, store: Store, solve: bool) -> TripState:
    """Run a forward pass with a slot cache, in chunks of tokens, or token by token if the solver must be exact."""
    recurrence, table, length = model.recurrence, store.table, x.shape[1]
    if model.config._attn_implementation == FLEX and isinstance(table, FixedTable):
        raise ValueError(f"attn_implementation={FLEX} cannot read this static cache: use sdpa, or a dynamic cache")
    table.open(table.columns + length)  # type: ignore[arg-type]  # each kind counts its own way
    exact = recurrence.exact()
    step = AT_ONCE if not solve else 1 if exact else length
    if length > step and inputs.hidden is None and inputs.packed is None:
        pieces = [(t, min(t + step, length)) for t in range(0, length, step)]
        return joined([_stored(model, x[:, a:b], inputs.columns(a, b), store, solve) for a, b in pieces])
    table.columns += length
    if not solve or length == 1:
        # A compiled step does not synchronise with the host: halted tokens are computed and discarded.
        picked = recurrence.halts and inputs.hidden is None and not torch.compiler.is_compiling()
        through = Stored(model, inputs, x, store)
        pick = TokenSubset.pick if picked else None
        state = sweep(recurrence, x, through, inputs.trips, live=inputs.live, pick=pick)[0]
        through.finish()
        return state
    rounds = _exact_rounds(length, inputs.trips) if exact else recurrence.rounds("prefill", length)
    return jacobi(recurrence, x, Interleaved(model, inputs, store), inputs.trips, rounds, inputs.live)


def check_backend(model: Decoder, trips: int) -> None:
    """Refuse an attention backend that supports only causal masks if the model needs other masks, before computing
    anything."""
    backend = str(model.config._attn_implementation).removesuffix(BY_ROWS)
    if trips > 1 and backend not in (*MASKED, FLEX):
        able = f"{', '.join(MASKED)} or {FLEX}"
        raise ValueError(
            f"a recurrence whose iterations read one another needs attn_implementation {able}, not {backend}"
        )


@dataclass
class Pass:
    """The arguments of one pass through the layers, other than its input."""

    visits: Sequence[Visit]
    masks: Mapping[str, object]
    rotation: Rotation
    position_ids: Tensor
    cache: Cache | Noting | Exchange | None = None
    """An object with `update(key, value, layer)`."""
    by_bank: bool = False
    """Whether the cache has a layer for every visit, not only for every layer."""
    earlier: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Keys and values of earlier trips of the same tokens, by layer."""
    alive: Tensor | None = None
    """`[B, 1, M, 1]`: the tokens that make this trip; the others keep the keys and values of their last one."""
    sources: dict[int, KeyValue] = field(default_factory=dict)
    """Keys and mixed values of earlier trips, which mixers read, by visit."""
    keep: bool = False
    """Whether all layers' keys and values are needed afterwards, not only those that mixers read."""
    key_bias: Tensor | None = None
    """`[B, M]`: bias on the logit of every query that reads a slot of this pass."""
    lent: Mapping[int, KeyValue] = field(default_factory=dict)
    """The keys and values that later visits, which make none of their own, attend to, by layer."""
    leave: Callable[[Tensor], Tensor] | None = None
    """The recurrence's transformation of the looped layers' output; None if it is passed on unchanged."""


@dataclass
class Passed:
    """The results of one pass."""

    residual: Tensor
    pairs: dict[int, KeyValue]
    """Key and mixed value, by visit."""
    sources: dict[int, KeyValue]
    """Key and mixed value, by visit, with the keys that mixers score."""
    hidden: list[Tensor]
    """Every visit's input, if asked for."""
    entry: Tensor | None = None
    """The input of the recurrence's `entry_layer` in the first trip."""
    routed: tuple[Tensor, ...] = ()
    """The logits of routers, `[B, M, experts]`, if experts are to be balanced."""


class TripMaker:
    """Base class of objects that run the iterations of a forward pass; each subclass stores and reads keys and values
    in its own way."""

    def __init__(self, model: Decoder, inputs: Inputs) -> None:
        self.model, self.inputs, self.view = model, inputs, model.recurrence.view
        self.plan = model.plans[inputs.trips]
        self.sources: dict[int, KeyValue] = {}
        """By visit: keys and mixed values of the call's tokens that mixers of later trips read."""
        self.rotary: Rotation = None

    @property
    def by_rule(self) -> bool:
        """Whether the model has slots that FlexAttention reads, by a `ReadingRule` instead of a mask."""
        return self.model.slotted and self.model.config._attn_implementation == FLEX

    def make(self, turn: Turn, masks: Mapping[str, object], **reading: Any) -> Passed:
        """Run one iteration for the tokens of a `Turn`; the keywords `reading` are further fields of its `Pass`."""
        tokens, positions = turn.tokens, self.inputs.positions
        if tokens.whole:
            if self.rotary is None:
                self.rotary = angles(self.model.rotary_emb, turn.x, positions, self.inputs.furthest)
            rotary, sources = self.rotary, dict(self.sources)
        else:
            positions = tokens.take(positions.expand(turn.x.shape[:2]))
            rotary = angles(self.model.rotary_emb, turn.x, positions, self.inputs.furthest)
            sources = {i: (_take(tokens, key), _take(tokens, value)) for i, (key, value) in self.sources.items()}
        one = Pass(self.plan[turn.trip], masks, rotary, positions, sources=sources, **reading)
        recurrence = self.model.recurrence
        if recurrence.leaves and 0 < turn.trip == self.inputs.trips - 1:
            x, state = tokens.take(turn.x), tokens.take_all(turn.state)
            one.leave = partial(recurrence.leave, x=x, state=state, trip=turn.trip)
        passed = self.through(tokens.take(turn.x), one)
        if turn.trip + 1 < len(self.plan):
            later = {i for trip in self.plan[turn.trip + 1 :] for visit in trip for i in visit.sources}
            for i in later & passed.sources.keys():
                key, value = passed.sources[i]
                self.sources[i] = _put(tokens, key), _put(tokens, value)
        self.record(passed)
        self.balance(passed.routed, tokens)
        return passed

    def out(self, residual: Tensor, trip: int, entry: Tensor | None = None) -> Out:
        """The output of an iteration in the form that the recurrence's methods take."""
        model, last = self.model, trip == self.inputs.trips - 1
        head, scale = self.inputs.head, model.embedding_scale
        more = self.inputs.positions, model.norms_embedding, entry
        return Out(residual, model.norm, head, model.embed_tokens, scale, trip, last, *more)

    def through(self, x: Tensor, one: Pass) -> Passed:
        """Run the layers of an iteration once; with the recurrence's option `recompute`, the backward pass recomputes
        them."""
        if one.cache is None and self.model.recomputing:  # with a cache, recomputing would store twice
            return checkpoint(self._through, x, one, use_reentrant=False)
        return self._through(x, one)

    def _through(self, x: Tensor, one: Pass) -> Passed:
        model, layers, kinds = self.model, list(self.model.layers), self.model.layer_types
        residual, entry_layer = model.final_residual, model.recurrence.entry_layer
        given = {
            "rotation": one.rotation,
            "position_ids": one.position_ids,
            "past_key_values": one.cache,
            "backend": model.config._attn_implementation,
            **({} if one.alive is None else {"alive": one.alive}),
            **({} if one.key_bias is None else {"key_bias": one.key_bias}),
        }
        state = residual.begin(x)
        pairs: dict[int, KeyValue] = {}
        sources: dict[int, KeyValue] = {} if model.mixes_unrotated else pairs
        hidden: list[Tensor] = []
        routed: list[Tensor] = []
        entry = None
        for visit in one.visits:
            if one.leave is not None and visit.layer == model.coda:
                state = residual.begin(one.leave(residual(state)[0]))
            if visit.layer == entry_layer and visit.trip == 0:
                entry = residual(state)[0] if visit.layer else x
            if self.inputs.hidden is not None:
                hidden.append(residual(state)[0] if hidden else x)
            if visit.sources:
                found = [sources[i] if i in sources else one.sources[i] for i in visit.sources]
                given["sources"] = tuple(chain.from_iterable(found))  # key, value, key, value, ...
            else:
                given["sources"] = ()
            if one.earlier:
                given["earlier"] = one.earlier.get(visit.layer, ())
            if model.per_visit:
                given["trip"] = visit.trip
            *after, key, value = layers[visit.layer](
                *state,
                attention_mask=one.masks[kinds[visit.layer]],
                bank=visit.bank if one.by_bank else visit.layer,
                **given,
                **({"lent": one.lent[visit.layer]} if visit.borrows else {}),
                **self.inputs.extra,
            )
            if model.balance is not None and (logits := after.pop()) is not None:
                routed.append(logits)
            if model.mixes_unrotated:
                scored = after.pop()
                if visit.kept:
                    sources[visit.index] = (scored, value)
            state = tuple(after)
            if visit.kept or one.keep:
                pairs[visit.index] = (key, value)
        stream = residual(state)[0]
        if one.leave is not None and model.coda == len(layers):
            stream = one.leave(stream)
        # Made whole: what a compiled graph of torch 2.13 writes over an attribute after FlexAttention is lost.
        return Passed(stream, pairs, sources, hidden, entry, tuple(routed))

    def record(self, passed: Passed, stages: int = 1) -> None:
        """Record the hidden states of a pass, if requested; interleaved iterations are separated."""
        if self.inputs.hidden is not None and stages == 1:
            self.inputs.hidden.extend(passed.hidden)  # the tensors themselves, so that gradients reach them
        elif self.inputs.hidden is not None:
            for j in range(stages):
                self.inputs.hidden.extend(h.unflatten(1, (-1, stages))[:, :, j] for h in passed.hidden)

    def balance(self, routed: Sequence[Tensor], tokens: TokenSubset) -> None:
        """Record an iteration's expert-balancing loss over the tokens that take part in it."""
        if self.inputs.balances is None or self.model.balance is None or not routed:
            return
        mask = tokens.valid if tokens.valid is not None else _both(self.inputs.live, tokens.alive)
        some = None
        if mask is not None:
            some = mask.any()
            mask = mask.expand(routed[0].shape[:2]) | ~some  # over no token at all it would be 0 / 0
        self.inputs.balances.append((self.model.balance(routed, mask), some))

    def causal_masks(self, x: Tensor, padding: Tensor | None, packed: Tensor | None) -> Mapping[str, object]:
        """The usual causal masks, from `padding` `[B, N]` or from the positions of `packed` documents."""
        if self.by_rule:
            token = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            first, inputs = torch.zeros_like(token), self.inputs
            tags = Tags(token, first, inputs.live, None, inputs.documents(), halt=first)
            return {kind: read_rule(self.view, tags, tags, reach) for kind, reach in self.model.reach.items()}
        return self.model.causal_masks(x, padding, None if self.model.slotted else self.inputs.cache, packed)

    def masks(self, query: Tags, key: Tags) -> Mapping[str, Tensor | ReadingRule]:
        """The attention masks between query and key slots, by layer type."""
        check_backend(self.model, self.inputs.trips)
        if self.by_rule:
            return {kind: read_rule(self.view, query, key, reach) for kind, reach in self.model.reach.items()}
        as_bool = self.model.config._attn_implementation in ("sdpa", f"sdpa{BY_ROWS}") and key.bias is None
        as_bool = as_bool and not torch.is_grad_enabled()  # with gradients every layer would keep an additive copy
        dtype = None if as_bool else self.inputs.dtype
        return {kind: read_mask(self.view, query, key, reach, dtype) for kind, reach in self.model.reach.items()}


class Banked(TripMaker):
    """View SAME without halting: each iteration is an ordinary forward pass with cache layers of its own."""

    def __init__(self, model: Decoder, inputs: Inputs, x: Tensor, cache: Cache | None) -> None:
        super().__init__(model, inputs)
        self.cache = cache
        self.plain = self.causal_masks(x, inputs.padding, inputs.packed)

    def __call__(self, turn: Turn) -> Out:
        """Make one iteration."""
        passed = self.make(turn, self.plain, cache=self.cache, by_bank=True)
        return self.out(passed.residual, turn.trip, passed.entry)

    def once(self, x: Tensor) -> Tensor:
        """Run a model with a single iteration, without the overhead of `sweep`, which would slow down decoding."""
        rotary, positions = angles(self.model.rotary_emb, x, self.inputs.positions, None), self.inputs.positions
        passed = self.through(x, Pass(self.plan[0], self.plain, rotary, positions, self.cache, by_bank=True))
        self.record(passed)
        self.balance(passed.routed, TokenSubset())
        return passed.residual


class Lending(Banked):
    """Like `Banked`, but later iterations attend to the keys and values of the first iteration instead of their own."""

    def __init__(self, model: Decoder, inputs: Inputs, x: Tensor, cache: Cache | None) -> None:
        super().__init__(model, inputs, x, cache)
        self.lent: dict[int, KeyValue] = {}

    def __call__(self, turn: Turn) -> Out:
        """Make one iteration."""
        noting = None if self.cache is None else Noting(self.cache)
        passed = self.make(turn, self.plain, cache=noting, by_bank=True, keep=not turn.trip, lent=self.lent)
        if not turn.trip:
            own = {visit.layer: passed.pairs[visit.index] for visit in self.plan[0]}
            self.lent = own if noting is None else own | noting.read
        return self.out(passed.residual, turn.trip, passed.entry)


class Noting:
    """A cache wrapper that remembers the keys and values that attention reads from it. Recomputed layers ask no cache,
    so nothing is noted twice."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.read: dict[int, KeyValue] = {}

    def update(self, key: Tensor, value: Tensor, layer: int) -> KeyValue:
        """Update the wrapped cache, and remember the keys and values that it returned."""
        self.read[layer] = self.cache.update(key, value, layer)
        return self.read[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens in the cache, which Llama 4's attention asks for."""
        return self.cache.get_seq_length(layer_idx)


class Dense(TripMaker):
    """View SAME with halting, or view DUO, without a cache: every iteration is computed for every token, and discarded
    for halted tokens."""

    def __init__(self, model: Decoder, inputs: Inputs, x: Tensor, cache: None = None) -> None:
        super().__init__(model, inputs)
        self.plain = self.causal_masks(x, inputs.padding, inputs.packed)
        self.earlier: dict[int, tuple[Tensor, ...]] = {}
        self.tags: list[Tags] = []

    def __call__(self, turn: Turn) -> Out:
        """Make one iteration."""
        duo = self.view is View.DUO
        alive = turn.tokens.alive if turn.trip and not duo else None
        passed = self.make(
            turn,
            self._masks(turn),
            earlier=dict(self.earlier) if duo or alive is not None else {},  # its current value
            alive=None if alive is None else alive[:, None, :, None],
            keep=True,
        )
        for visit in self.plan[turn.trip]:
            before = self.earlier.get(visit.layer, ()) if duo else ()
            self.earlier[visit.layer] = (*before, *passed.pairs[visit.index])
        return self.out(passed.residual, turn.trip, passed.entry)

    def _masks(self, turn: Turn) -> Mapping[str, object]:
        inputs = self.inputs
        if self.view is View.SAME:
            return self.plain
        token = torch.arange(turn.x.shape[1], device=turn.x.device).unsqueeze(0)
        live = _both(inputs.live, turn.tokens.alive)
        query = Tags(token, torch.full_like(token, turn.trip), live, turn.bias, inputs.documents())
        self.tags.append(query)
        return self.plain if turn.trip == 0 else self.masks(query, side_by_side(self.tags))


class Interleaved(TripMaker):
    """View ALL (all earlier slots are read) for all tokens at once: all iterations pass through the layers as one
    sequence, interleaved by token."""

    def __init__(self, model: Decoder, inputs: Inputs, store: Store | None = None) -> None:
        super().__init__(model, inputs)
        self.store = store
        self.capped = model.recurrence.halts and model.config.attn_logit_softcapping is not None
        """Whether masks hold the biases of keys, since one on the logits would be capped with them."""
        self.causal = not self.capped and set(self.model.reach.values()) == {None}
        """Whether every layer reads everything before: then an ordinary causal mask over the slots is enough."""

    def __call__(self, turns: Sequence[Turn], final: bool) -> list[Out]:
        """Run one pass of the Jacobi solver through the layers."""
        inputs, store, stages = self.inputs, self.store, len(turns)
        x = torch.stack([turn.x for turn in turns], 2).flatten(1, 2)  # [B, T (m+1), hidden_size]
        positions = inputs.positions.repeat_interleave(stages, 1)
        tags = self._tags(turns)
        rotary = angles(self.model.rotary_emb, x, positions, inputs.furthest)
        reading = Pass(self.plan[0], {}, rotary, positions)
        placement, fresh = None, store is None or not store.table.end
        if store is not None and (final or not fresh):
            placement = store.table.place(tags, None)
            reading.cache = Exchange(store, placement, own_only=fresh)
        if store is None or placement is None or fresh:
            reading.masks, reading.position_ids = self._own_masks(x, turns, tags)
            reading.key_bias = self._own_bias(tags)
        else:
            reading.masks = self.masks(tags, store.table.tags(placement))
        passed = self.through(x, reading)
        if final:
            self.record(passed, stages)
            for j, turn in enumerate(turns):
                self.balance([logits.unflatten(1, (-1, stages))[:, :, j] for logits in passed.routed], turn.tokens)
        if final and store is not None and placement is not None:
            store.table.note(tags, placement, stages - 1)
            store.table.commit(tags, placement)
        return [self.out(each, j) for j, each in enumerate(passed.residual.unflatten(1, (-1, stages)).unbind(2))]

    def _tags(self, turns: Sequence[Turn]) -> Tags:
        inputs, documents = self.inputs, self.inputs.documents()
        first = 0 if self.store is None else self.store.table.columns - inputs.positions.shape[1]
        column = torch.arange(turns[0].x.shape[1], device=turns[0].x.device).unsqueeze(0) + first
        parts = [
            Tags(column, torch.full_like(column, j), _both(inputs.live, turn.tokens.alive), turn.bias, documents)
            for j, turn in enumerate(turns)
        ]
        return side_by_side(parts, interleave=True)

    def _own_masks(self, x: Tensor, turns: Sequence[Turn], tags: Tags) -> tuple[Mapping[str, object], Tensor]:
        """The attention masks among the slots of this pass, and positions that kernels do not mistake for packed
        documents."""
        inputs, stages = self.inputs, len(turns)
        first = torch.arange(stages, device=x.device)
        slots = (inputs.positions.unsqueeze(2) * stages + first).flatten(1, 2)
        if self.by_rule:
            return self.masks(tags, tags), slots
        if not self.causal:
            tags = tags if self.capped else replace(tags, bias=None)
            return self.masks(tags, tags), slots
        padding = None if inputs.padding is None else inputs.padding.repeat_interleave(stages, 1)
        if self._own_bias(tags) is not None:
            padding = None  # the key bias hides it
        return self.causal_masks(x, padding, None if inputs.packed is None else slots), slots

    def _own_bias(self, tags: Tags) -> Tensor | None:
        """The bias that attention adds to the logits of this pass's keys, `[B, N]`; None without one. With a plain
        causal mask it also hides dead slots; a rule has it inside."""
        if self.by_rule or self.capped:
            return None
        if not self.causal or not (self.model.recurrence.halts and tags.live is not None):
            return tags.bias
        bias = torch.zeros((), device=tags.live.device) if tags.bias is None else tags.bias
        return torch.where(tags.live, bias, DEAD)


class Picking(TripMaker):
    """Base class for running iterations on the remaining tokens only: halted tokens are left out."""

    def __init__(self, model: Decoder, inputs: Inputs, x: Tensor, first: int | Tensor = 0) -> None:
        super().__init__(model, inputs)
        shape, documents = x.shape[:2], inputs.documents()
        self.column = (torch.arange(shape[1], device=x.device) + first).expand(shape)
        self.documents = None if documents is None else documents.expand(shape)

    def tags(self, turn: Turn) -> Tags:
        """The tags (token, iteration and others) of the slots that an iteration makes."""
        tokens, living = turn.tokens, turn.tokens.living
        live = tokens.valid if tokens.valid is not None else _both(self.inputs.live, tokens.alive)
        if live is not None and living is None and not torch.compiler.is_compiling():
            living = to_host(live.sum(1))
        token = tokens.take(self.column)
        whole = live is None or (living is not None and min(living) == token.shape[1])
        return Tags(
            token,
            torch.full_like(token, turn.trip),
            None if whole else live,
            None if turn.bias is None else tokens.take(turn.bias),
            None if self.documents is None else tokens.take(self.documents),
            living=living,
        )


class Packed(Picking):
    """Training with halting (view SAME) or view DUO: halted tokens are left out of later iterations."""

    def __init__(self, model: Decoder, inputs: Inputs, x: Tensor, cache: None = None) -> None:
        super().__init__(model, inputs, x)
        self.plain = self.causal_masks(x, inputs.padding, inputs.packed)
        self.halt = torch.zeros_like(self.column)
        self.earlier: dict[int, tuple[Tensor, ...]] = {}
        self.made: list[Tags] = []

    def __call__(self, turn: Turn) -> Out:
        """Make one iteration."""
        query, masks, alive = self.tags(turn), self.plain, turn.tokens.alive
        self.made.append(query)
        if alive is not None:
            self.halt = torch.where(alive, turn.trip, self.halt)
            keys = side_by_side(self.made)
            masks = self.masks(query, replace(keys, halt=self.halt.gather(1, keys.token.expand(len(self.halt), -1))))
        passed = self.make(turn, masks, earlier=dict(self.earlier), keep=True)
        for visit in self.plan[turn.trip]:
            self.earlier[visit.layer] = (*self.earlier.get(visit.layer, ()), *passed.pairs[visit.index])
        return self.out(passed.residual, turn.trip, passed.entry)


class Stored(Picking):
    """Inference with a slot cache, one iteration after another, under any view; halted tokens are neither computed nor
    stored."""

    def __init__(self, model: Decoder, inputs: Inputs, x: Tensor, store: Store) -> None:
        super().__init__(model, inputs, x, store.table.columns - x.shape[1])
        self.store = store
        self.fresh = not store.table.end
        self.alone = x.shape[1] == 1
        """By the call's tokens, not by those left in a trip: one survivor of a prompt must not read later tokens."""
        self.complete = False
        """Whether all tokens have made every trip that the table has room for."""
        self.plain = self.causal_masks(x, inputs.padding, inputs.packed) if self.fresh else None

    def __call__(self, turn: Turn) -> Out:
        """Make one iteration."""
        tokens, table = turn.tokens, self.store.table
        query = self.tags(turn)
        placement = table.place(query, tokens.batch, tokens.rows)
        table.note(query, placement, turn.trip)
        own_only = self.fresh and (turn.trip == 0 or (self.view is View.SAME and self._all(query, placement)))
        if not own_only:
            placement = table.narrow(placement, query, turn.trip, self.alone)
        masks = self.plain if own_only else self._masks(query, placement, turn.trip)
        assert masks is not None
        passed = self.make(turn, masks, cache=Exchange(self.store, placement, own_only))
        table.commit(query, placement)
        self.complete = isinstance(table, FixedTable) and turn.trip == table.trips - 1 and self._all(query, placement)
        return self.out(passed.residual, turn.trip, passed.entry)

    def finish(self) -> None:
        """Called after the last iteration."""
        table = self.store.table
        if isinstance(table, FixedTable) and table.view is View.SAME and not self.complete:
            repeat_last(self.store.cache, self.column)

    def _all(self, query: Tags, placement: Placement) -> bool:
        """Whether all tokens of the forward pass take part in this iteration."""
        return query.live is None and placement.batch is None and query.token.shape == self.column.shape

    def _masks(self, query: Tags, placement: Placement, trip: int) -> Mapping[str, object]:
        table = self.store.table
        everything = {View.ALL: True, View.DUO: trip >= table.deepest, View.SAME: trip == table.deepest == 0}
        if isinstance(placement.seen, Tensor):
            full = placement.found is None
        else:
            full = placement.slot is None and everything[self.view]
        plain = not table.extra and set(self.model.reach.values()) == {None}
        if self.alone and full and plain and not self.by_rule:  # without a rule transformers' kernel would read
            return dict.fromkeys(self.model.reach)
        return self.masks(query, table.tags(placement))


MAKERS: Mapping[Way, Callable[..., Callable[[Turn], Out]]] = {
    Way.BANKED: Banked,
    Way.LENDING: Lending,
    Way.DENSE: Dense,
    Way.PACKED: Packed,
}


@dataclass
class Exchange:
    """The cache object that layers get in one pass: stores the pass's slots, and returns the slots that the pass may
    read."""

    store: Store
    placement: Placement
    own_only: bool
    """Whether nothing was stored before this pass, so that its tokens read only one another."""

    def update(self, key: Tensor, value: Tensor, layer: int) -> KeyValue:
        """Store one layer's new keys and values; returns the keys and values that the pass attends to."""
        seen = self.store.cache.layers[layer].exchange(self.placement, (key, value))
        return (key, value) if self.own_only else seen


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _take(tokens: TokenSubset, x: Tensor) -> Tensor:
    return tokens.take(x.transpose(1, 2)).transpose(1, 2)  # [B, H_kv, T, D]


def _put(tokens: TokenSubset, x: Tensor) -> Tensor:
    return x if tokens.valid is None else tokens.put(None, x.transpose(1, 2)).transpose(1, 2)
