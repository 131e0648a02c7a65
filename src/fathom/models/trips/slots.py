"""The order in which (layer, iteration) pairs run, which tokens take part, and solvers for all tokens at once.

A slot is one pass of one token through the stack. The *plan* lists, iteration by iteration, the visits that a forward
pass makes; it is a pure function of the configuration, so the model loop, the declared cost and the lens always agree.
Rotary positions never depend on the iteration.

`sweep` is the loop that defines every recurrence: iteration, gate, feed. With one token and a cache it is decoding.
With all tokens in parallel it computes the same at once, if the view allows it (SAME, DUO); under ALL, `jacobi` wraps
it. Neither knows any mechanism. `reading.py` decides what an iteration may read, and `walk.py` makes its pass.

A token that halted keeps its state, and so its output (`TokenSubset.put`); values that it lacks, such as later gates,
are 0. `plan` also lists which visits a mixer reads: `across_trips` adds those of earlier iterations.

With `kv: first` the visits of later iterations borrow the keys and values of the layer's first iteration: the
recurrence's `shares` requests it, and `plan` sets `borrows`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..axes.host import to_host
from ..axes.visit import Out, Plan, Visit
from ..registry import across_trips, mixer_class, recurrence_class

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.roles import Recurrence, TripState


def plan(config: DecoderConfig, trips: int | None = None) -> Plan:
    """The plan of a forward pass: for each iteration, the layers that run, in order. Layers before the looped span
    belong to iteration 0, those after it to the last.

    Args:
        config: The model's configuration.
        trips: Number of iterations; by default the configuration's.
    """
    if trips is None:
        trips = recurrence_class(config).trips_of(config)
    start, stop = recurrence_class(config).span(config)
    order = [(layer, 0) for layer in range(start)]
    order += [(layer, trip) for trip in range(trips) for layer in range(start, stop)]
    order += [(layer, trips - 1) for layer in range(stop, config.num_hidden_layers)]

    index = {slot: i for i, slot in enumerate(order)}
    shared = recurrence_class(config).shares(config)
    borrows = [shared and trip > 0 and (layer, 0) in index for layer, trip in order]
    sources = [() if borrows[i] else _sources(config, layer, trip, index) for i, (layer, trip) in enumerate(order)]
    read = {i for group in sources for i in group}
    visits = [
        Visit(i, layer, trip, i in read, sources[i], layer if shared else i, borrows[i])
        for i, (layer, trip) in enumerate(order)
    ]
    return tuple(tuple(v for v in visits if v.trip == trip) for trip in range(trips))


def _sources(config: DecoderConfig, layer: int, trip: int, index: dict[tuple[int, int], int]) -> tuple[int, ...]:
    """The visits whose values a visit's mixer reads: the mixer's `source_layers` in this iteration and, by the rule
    `across_trips`, in earlier ones."""
    mixer = mixer_class(config)
    keyed = config.keyed_layers
    if layer not in keyed:
        return ()
    grid = [keyed[i] for i in mixer.source_layers(config, keyed.index(layer))]
    rule = across_trips(config)

    whole_trip = [keyed[i] for i in mixer.source_layers(config, len(keyed)) if (keyed[i], 0) in index]  # as on top

    def latest(source: int, until: int) -> int:
        # A layer before the looped span runs once; its single visit is its visit in every trip.
        return index[(source, until) if (source, until) in index else (source, 0)]

    if rule == "first" or recurrence_class(config).shares(config):
        found = {index[(source, 0) if (source, 0) in index else (source, trip)] for source in grid}
        found |= {index[source, 0] for source in whole_trip if trip and rule == "first"}
    else:
        found = {latest(source, trip) for source in grid}
    if rule == "grid":
        found |= {latest(source, k) for k in range(trip) for source in whole_trip}
    elif rule == "same_layer":
        found |= {index[layer, k] for k in range(trip) if (layer, k) in index}
    return tuple(sorted(found - {index[layer, trip]}))


def banks_of(trips: Sequence[Sequence[Visit]]) -> list[int]:
    """The layer index of each bank (cache layer) in a plan, in the order of the banks."""
    layers = {visit.bank: visit.layer for trip in trips for visit in trip}
    return [layers[bank] for bank in sorted(layers)]


def with_banks(cache: Cache, trips: Sequence[Sequence[Visit]]) -> Cache:
    """Extend a cache so that it has one layer for each (layer, iteration) pair that stores keys and values. Idempotent.

    A bank holds the keys and values of one layer in one iteration, or in all of them where iterations share them; to a
    Hugging Face cache it is one more layer, which is why dynamic, static, sliding and quantised caches need no code
    here. The layers are copied while the cache is empty, so they cost nothing until they are written.

    Args:
        cache: A cache of one iteration, or one that has its banks already.
        trips: The visits of each iteration, as in a plan.
    """
    if len(trips) == 1 and len(cache.layers) == len(trips[0]):
        return cache  # at every decoded token of most models
    layers = banks_of(trips)
    if len(cache.layers) in (0, len(layers)):  # a cache without layers makes them as they are asked for
        return cache
    if len(cache.layers) != len(set(layers)):
        raise ValueError(
            f"this cache has {len(cache.layers)} layers, but the model needs {len(layers)} for all its iterations; "
            "start from an empty cache"
        )
    counted = (layer for layer in cache.layers if hasattr(layer, "get_seq_length"))  # experts alone store nothing
    if any(getattr(layer, "is_initialized", False) and int(layer.get_seq_length()) > 0 for layer in counted):
        raise ValueError("this cache was filled by a model without iterations; start from an empty cache")
    one_trip, used = list(cache.layers), set()
    cache.layers.clear()
    for i in layers:
        cache.layers.append(copy.deepcopy(one_trip[i]) if i in used else one_trip[i])
        used.add(i)
    return cache


@dataclass  # not frozen: dynamo cannot build frozen ones
class TokenSubset:
    """The tokens that take part in an iteration. Dense: every token is computed and `put` keeps the halted ones as they
    were. Picked: the others are left out, and what is left is packed to a rectangle."""

    alive: Tensor | None = None
    """`[B, T]`; None when no token has halted."""
    batch: Tensor | None = None
    """Rows of the batch that take part, `[B']`; None for all."""
    index: Tensor | None = None
    """Columns of the tokens that take part, `[B', M]`; None for all. Shorter rows are filled with columns of halted
    tokens, which `valid` marks."""
    valid: Tensor | None = None
    """`[B', M]`; False where `index` only pads the rectangle."""
    rows: list[int] | None = None
    """`batch`, on the host."""
    living: list[int] | None = None
    """Number of valid columns of each row, on the host."""

    @classmethod
    def pick(cls, alive: Tensor) -> TokenSubset | None:
        """Leave out halted tokens, and sequences whose tokens have all halted; None if no token is left."""
        known = to_host(alive)
        rows = [i for i, row in enumerate(known) if any(row)]
        return cls._left(alive, known, None if len(rows) == len(known) else rows) if rows else None

    @classmethod
    def pack(cls, alive: Tensor) -> TokenSubset:
        """Leave out halted tokens in each sequence, and pad the sequences to the longest. At least one column stays
        even if all have halted: the penalty reads the iteration's gates, and ranks that share a model must make the
        same passes."""
        return cls._left(alive, to_host(alive), None)

    @property
    def whole(self) -> bool:
        """Whether every token is computed."""
        return self.batch is None and self.index is None

    @classmethod
    def _left(cls, alive: Tensor, known: list[list[bool]], rows: list[int] | None) -> TokenSubset:
        batch, inside = None, alive
        if rows is not None:
            batch = _first_true(alive.any(1), len(rows))
            inside = alive[batch]
        living = [sum(row) for row in known if rows is None or any(row)]
        most = max(1, *living)
        if most == alive.shape[1]:
            return cls(alive, batch, None, inside, rows, living)
        index = _first_true(inside, most)
        return cls(alive, batch, index, inside.gather(1, index), rows, living)

    def take(self, x: Tensor) -> Tensor:
        """Select the tokens that take part in an iteration: `[B, T, ...]` becomes `[B', M, ...]`."""
        if self.batch is not None:
            x = x[self.batch]
        if self.index is not None:
            x = x.gather(1, self.index.view(*self.index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))
        return x

    def put(self, old: Tensor | None, new: Tensor) -> Tensor:
        """Merge the new values of the tokens that took part with the old ones (or zero) of the others, `[B, T,
        ...]`."""
        if self.alive is None:
            return new
        if self.valid is None:
            alive = self.alive.view(*self.alive.shape, *[1] * (new.ndim - 2))
            return torch.where(alive, new, torch.zeros_like(new) if old is None else old)
        old = new.new_zeros((*self.alive.shape, *new.shape[2:])) if old is None else old
        shape = (*self.valid.shape, *[1] * (new.ndim - 2))
        made = torch.where(self.valid.view(shape), new.to(old.dtype), self.take(old))
        if self.index is not None:  # columns are distinct within a row, including padding
            part = old if self.batch is None else old[self.batch]
            made = part.scatter(1, self.index.view(shape).expand_as(made), made)
        return made if self.batch is None else old.index_copy(0, self.batch, made)

    def take_all(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply `take` to every tensor of a state."""
        return dict(state) if self.whole else {name: self.take(x) for name, x in state.items()}

    def put_all(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply `put` to every tensor of a state."""
        if self.alive is None:
            return {**old, **new}
        return {**old, **{name: self.put(old.get(name), x) for name, x in new.items()}}


def _first_true(which: Tensor, count: int) -> Tensor:
    """The first `count` indices along the last axis after sorting the True entries to the front."""
    return (~which).to(torch.int8).argsort(dim=-1, stable=True)[..., :count]


@dataclass
class Turn:
    """An iteration that is about to run: its number, input, tokens and state."""

    trip: int
    x: Tensor
    """Its input for every token, `[B, T, hidden_size]`."""
    tokens: TokenSubset
    bias: Tensor | None = None
    """Bias on the logit of every query that reads a slot of this trip, `[B, T]`."""
    state: TripState = field(default_factory=dict)
    """The recurrence's state after the previous trip."""


def sweep(
    recurrence: Recurrence,
    x: Tensor,
    make: Callable[[Turn], Out],
    trips: int,
    *,
    live: Tensor | None = None,
    pick: Callable[[Tensor], TokenSubset | None] | None = None,
    stop: int | None = None,
    state: TripState | None = None,
) -> tuple[TripState, list[Turn]]:
    """Run iterations one after another: the layers, the recurrence's `gate`, then its `feed` for the next input.
    Returns the final state and turns.

    A token that halts keeps the state, and therefore the readout, of its last iteration. The result is the same whether
    halted tokens are left out (`pick`) or computed and discarded.

    Args:
        recurrence: Supplies `gate`, `feed` and `key_bias`.
        x: Iteration 0's input, `[B, T, hidden_size]`.
        make: Runs the stack once over the tokens of a turn.
        trips: Maximum iterations of a token, the first included.
        live: `[B, T]`, False for padding, which makes one iteration only when tokens may halt.
        pick: Selects the tokens of the next iteration, or returns None to end the sweep. Without `pick`, halted tokens
            are computed and discarded.
        stop: Stop after this many iterations, with the input of the next one made; 0 makes all iterations and feeds
            none.
        state: The state carried over from the previous Jacobi round.
    """
    state = dict(state or {})
    turn = Turn(0, x, TokenSubset())
    turns, residual, made = [turn], None, None
    for k in range(stop or trips):
        tokens = turn.tokens
        out = make(turn)
        state = tokens.put_all(state, recurrence.gate(out, tokens.take_all(state)))
        if k == trips - 1:
            break
        if recurrence.halts:
            alive = state["alive"] if live is None else state["alive"] & live
            made = made if made is not None else torch.ones_like(alive, dtype=torch.long)
            if pick is not None:
                left = pick(alive)
                if left is None:
                    break
                residual = tokens.put(residual, out.residual)
                tokens = left
                out = out.of(tokens.take(residual))
            else:
                tokens = TokenSubset(alive)
            made = made + alive
        if stop != 0:
            x = tokens.put(turn.x, recurrence.feed(tokens.take(turn.x), out, tokens.take_all(state)))
        turn = Turn(k + 1, x, tokens, recurrence.key_bias(state, k + 1), state)
        turns.append(turn)
    if made is not None:
        state["trips"] = made
    return state, turns


def jacobi(
    recurrence: Recurrence,
    x: Tensor,
    through: Callable[[Sequence[Turn], bool], list[Out]],
    trips: int,
    rounds: int,
    live: Tensor | None = None,
    until_still: bool = False,
    kept: int = 0,
) -> TripState:
    """Jacobi solver: compute all tokens in parallel although an iteration reads later iterations of other tokens.

    The steps:

        grow    S_0 = x_0;  for m in 0..K-1:  H = pass(S_0..S_m);  S_{j+1} <- feed(S_j, H_j)  for j = 0..m in turn
        rounds  n times:                      H = pass(S_0..S_K);  S_{j+1} <- feed(S_j, H_j)  for j = 0..K-1 in turn
        final                                 H = pass(S_0..S_K);  read out

    All H_j come from the same pass, and `feed` gets the S_j already updated in this round. If no S_j depends on a pass
    (`foreseen`), only the final pass is made.

    Args:
        recurrence: Supplies `gate`, `feed` and `key_bias`.
        x: Iteration 0's input, `[B, T, hidden_size]`.
        through: One pass over the slots of some turns, interleaved by token, and whether it is the final one.
        trips: K + 1.
        rounds: n; the result is exact for n ≥ (T - 1) K.
        live: See `sweep`.
        until_still: Stop as soon as a round changes nothing.
        kept: Number of passes, counted from the final one, that gradients flow through; 0 for all.
    """
    left = trips + rounds - kept if kept else 0  # passes without gradients

    def again(
        turns: Sequence[Turn], stop: int, final: bool = False, state: TripState | None = None
    ) -> tuple[TripState, list[Turn]]:
        nonlocal left
        left -= 1
        with nullcontext() if left < 0 else torch.no_grad():
            outs = through(turns, final)
            return sweep(recurrence, x, lambda turn: outs[turn.trip], trips, live=live, stop=stop, state=state)

    turns: list[Turn] = [Turn(0, x, TokenSubset())]
    state: TripState = {}
    if recurrence.foreseen:
        left = rounds = 0
        for k in range(1, trips):
            turns.append(Turn(k, recurrence.feed(turns[-1].x, Out(x, nn.Identity()), {}), TokenSubset()))
    else:
        for m in range(trips - 1):
            state, turns = again(turns, m + 1)
    moved = None
    for n in range(rounds if trips > 1 else 0):
        before = turns
        state, turns = again(turns, trips, state=recurrence.carry(state) if n + 1 < rounds else None)
        moved = torch.stack([(a.x - b.x).detach().float().square().mean() for a, b in zip(turns, before, strict=True)])
        if until_still and not any(to_host(moved)):
            break
    state, _ = again(turns, 0, final=True)
    if moved is not None:
        state["jacobi_residual"] = moved[1:].mean().sqrt()
        state["jacobi_rounds"] = moved.new_full((), float(n + 1))
    return state


def joined(states: Sequence[TripState]) -> TripState:
    """Concatenate the states of consecutive chunks of tokens; entries that are not in all of them are dropped."""
    names = [name for name in states[0] if all(name in state for state in states)]
    return {name: torch.cat([state[name] for state in states], 1) for name in names}
