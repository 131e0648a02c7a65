"""Continuous batching: sequences join and leave between tokens, and each sequence gets the same tokens as when it is
generated alone. `fathom generate` has other batches: `prompt_file.py` forms them, and `generate.py` decides which of
their prompts run separately.

A row's prompt is read in chunks, then it joins; one step makes one token for every row that has joined. The kind of
cache depends on the model:

    SlabBatch    one trip, or several that do not read one another: a slab of keys and values for each bank, in which a
                 row starts at the left and is written in place. Short prompts are read several at a time
    DraftBatch   as that, several tokens in one step: drafted with the first trips, checked with the rest
    SlotBatch    slots (views other than SAME, halting): the slot cache, merged and cut by rows. A token that halted
                 early takes no part in later trips, so it costs nothing, whatever other rows do. Short prompts are read
                 several at a time here too
    LoneBatch    everything else, such as caches of constant size: a cache for each row, one after the other

`engine.py` decides whether each row is attended to by itself (`by_rows.py`): 8-bit weights need it to get the same
tokens. It also decides how many sequences run at a time, whether a prompt waits for memory, which short prompts are
read together, and which requests end after a failure. `may_chunk` here decides which models read a whole prompt at
once, and `keeps_prefixes` that a `LoneBatch`, such as one with `--kvcache`, does not use the prefix cache.
"""

from __future__ import annotations

import copy
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from fathom.errors import SettingsError
from fathom.iterations import counting
from fathom.kvcache.policy import Policy
from fathom.kvcache.prefill import PROBED, chunks, continues
from fathom.models import FathomForCausalLM
from fathom.models.axes.cache_name import passed
from fathom.models.trips.slot_cache import GrowingLayer, drop_row, merge_slots, trim_slots
from fathom.models.trips.slot_table import with_spare
from fathom.models.trips.slots import banks_of, joined
from fathom.models.trips.speculation import Speculation, Stages, check_speculation, side_by_side

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN = ("qwen3", "qwen2", "llama", "mistral", "smollm3", "olmo2")
"""Decoders of transformers whose attention takes any mask and whose cache is keys and values alone."""
GRAIN = 256
"""Slabs grow in steps of this many tokens."""
DRAFTS = 16
"""Most tokens that are drafted at a time."""

Mask = Tensor | dict[str, Tensor | None] | None
"""Which keys each new token sees, `[n, 1, T, N]`; by kind of attention for a model of several kinds; None for all.
For slots, whose masks only the model knows: which tokens are no padding, `[n, T]`."""


class LiveBatch(ABC):
    """Sequences that generate together. If one leaves, the last one may move into the gap."""

    reads_several = False
    """Whether several whole prompts can be read in one forward pass."""
    keeps_prefixes = False
    """Whether another sequence can reuse the cache of a prompt's first tokens."""
    keeps_steps = False
    """Whether another sequence can reuse the cache of generated tokens."""

    def __init__(self, model: PreTrainedModel, trips: int | None) -> None:
        self.model, self.trips = model, trips
        self.arguments = {} if trips is None else {"max_trips": trips}
        self.lengths: list[int] = []
        """Tokens that each row's cache holds."""
        self.read_already = 0
        """Prompt tokens read so far of the row that is joining."""
        self.trips_made: list[int] | None = None
        """The loop iterations of each row's last token in the last call, where tokens may halt."""
        self.fresh: Cache | None = None
        """The joining sequence's own cache, where it has one."""

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def read(self, chunk: Sequence[int], every: bool = False) -> Tensor:
        """Read a part of the joining sequence's prompt; returns the logits `[1, V]` of its last token, or `[T, V]` of
        all its tokens."""

    def read_several(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read whole prompts, whose sequences become the last of the batch; returns the logits `[n, V]` of their last
        tokens."""
        raise NotImplementedError(f"{type(self).__name__} reads one prompt at a time")

    @abstractmethod
    def join(self) -> None:
        """Append the sequence whose prompt was read to the batch."""

    def forget(self) -> None:
        """Discard the sequence whose prompt is being read."""
        self.fresh, self.read_already = None, 0

    def pause(self) -> tuple[object, int]:
        """Pause the reading of a prompt; returns the state for `resume`, and the bytes that the state takes outside the
        batch."""
        state = self.fresh, self.read_already
        self.fresh = None  # it lives on in the state
        self.forget()
        return state, 0

    def resume(self, state: object) -> None:
        """Restore a sequence from the state that `pause` returned, to continue reading its prompt."""
        self.fresh, self.read_already = cast(tuple[Cache, int], state)

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Feed one more token of each sequence; returns logits `[rows, V]`."""

    @abstractmethod
    def leave(self, row: int) -> int:
        """Remove a sequence; returns the index of the sequence that took its place, or `row` if later sequences moved
        up.

        Nothing of it stays where another row will be: a masked place weighs 0, but 0 times NaN is NaN.
        """

    def kept(self, row: int | None = None) -> tuple[object, int]:
        """A copy of the cache of a sequence (by default the one whose prompt is being read), and the copy's size in
        bytes."""
        raise NotImplementedError(f"{type(self).__name__} keeps no prefixes")

    def take_over(self, state: object, count: int) -> None:
        """Start reading a prompt with the first `count` tokens of a cache that `kept` returned."""
        raise NotImplementedError(f"{type(self).__name__} keeps no prefixes")

    def reserve(self, rows: int, tokens: int) -> None:  # noqa: B027
        """Make room for `rows` sequences of `tokens` tokens, including the one whose prompt is being read, and free the
        rest."""

    def _call(
        self, ids: Tensor, positions: Tensor | None, cache: Cache, every: bool = False, mask: Mask = None
    ) -> Tensor:
        device = self.model.device
        keep: dict[str, object] = {} if every else {"logits_to_keep": 1}
        if positions is not None:
            keep["position_ids"] = positions.to(device)
        given = {"input_ids": ids.to(device), "attention_mask": mask, "use_cache": True, **passed(self.model, cache)}
        if not _slotted(self.model):
            return self.model(**given, **keep, **self.arguments).logits.float()
        with counting(self.model) as made:
            logits = self.model(**given, **keep, **self.arguments).logits.float()
        counted = made[-1] if made else torch.tensor(1)  # a model of one trip counts none
        self.trips_made = counted.expand(len(ids), -1)[:, -1].tolist() if counted.dim() > 1 else None
        return logits

    def _chunk(self, chunk: Sequence[int]) -> tuple[Tensor, Tensor]:
        first = self.read_already
        self.read_already += len(chunk)
        return torch.tensor([chunk]), torch.arange(first, self.read_already).unsqueeze(0)


class Slab:
    """The shared size of all layers' cache buffers; and, for each forward pass, its sequences and their lengths."""

    def __init__(self) -> None:
        self.rows, self.tokens = 0, 0
        """Rows and tokens for which there is room."""
        self.first, self.filled = 0, torch.zeros(0, dtype=torch.long)
        """First row of this call, and the number of tokens that its rows hold, `[n]`."""
        self.most = 0
        self.places: tuple[Tensor, Tensor] | None = None
        """Where the call's tokens are written, which all banks share: rows `[n, 1]`, columns `[n, T]`."""

    def about(self, first: int, filled: Sequence[int], device: torch.device) -> None:
        """Set which sequences the next forward pass contains, and how many tokens each of them holds."""
        self.first, self.most, self.places = first, max(filled), None
        self.filled = torch.tensor(filled, device=device)

    def places_of(self, new: int) -> tuple[Tensor, Tensor]:
        """The row and position indices at which `new` tokens of each sequence are stored."""
        if self.places is None:
            row = torch.arange(self.first, self.first + len(self.filled), device=self.filled.device)
            self.places = row[:, None], self.filled[:, None] + torch.arange(new, device=row.device)
        return self.places


class SlabLayer(GrowingLayer):
    """The keys and values of one layer, each a buffer `[rows, H_kv, tokens, D]` that is written in place."""

    is_croppable = False

    def __init__(self, slab: Slab) -> None:
        super().__init__()
        self.slab = slab

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the whole slab."""
        self.keys, self.values = (self._zeros(states) for states in (key_states, value_states))
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def _zeros(self, like: Tensor) -> Tensor:
        """A zero tensor for a slab (preallocated cache buffer) `[rows, H_kv, tokens, D]`, for new keys or values `[n,
        H_kv, T, D]`."""
        return untouched((self.slab.rows, like.shape[1], self.slab.tokens, like.shape[3]), like)

    def fit(self, rows: int, tokens: int) -> None:
        """Resize keys and values to the shared buffer size, one tensor at a time, so that at most one tensor exists
        twice.

        Args:
            rows: Sequences whose contents are kept.
            tokens: Positions of each that are kept.
        """
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._zeros(old)
            new[:rows, :, :tokens] = old[:rows, :, :tokens]
            setattr(self, name, new)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy one sequence over another."""
        for stored in (self.keys, self.values):
            stored[target, :, :tokens] = stored[source, :, :tokens]

    def wipe(self, row: int, first: int, end: int) -> None:
        """Zero the keys and values of a sequence from position `first` to `end`, and drafted tokens behind them."""
        for stored in (self.keys, self.values) if self.is_initialized else ():
            stored[row : row + 1, :, first : end + DRAFTS] = 0

    def blank(self, places: Tensor) -> None:
        """Zero the keys and values of the current sequences where the mask `[n, T]` is true."""
        rows = slice(self.slab.first, self.slab.first + len(places))
        for stored in (self.keys, self.values):
            stored[rows, :, : places.shape[1]].masked_fill_(places[:, None, :, None], 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values `[n, H_kv, T, D]` to the current sequences, and return all keys and values of these
        sequences."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slab, (n, _, new, _) = self.slab, key_states.shape
        rows = slice(slab.first, slab.first + n)
        if n == 1:
            place = slice(slab.most, slab.most + new)
            self.keys[rows, :, place], self.values[rows, :, place] = key_states, value_states
        else:
            row, column = slab.places_of(new)
            self.keys[row, :, column] = key_states.transpose(1, 2)
            self.values[row, :, column] = value_states.transpose(1, 2)
        end = slab.most + new
        return self.keys[rows, :, :end], self.values[rows, :, :end]

    def get_seq_length(self) -> int:
        """The length of the longest sequence in the current forward pass."""
        return self.slab.most


MAPPED = 1 << 20
"""Least bytes of what is kept in pages of its own."""
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
"""Private pages, which are faster to write than the shared ones that are mmap's default."""


def set_aside(count: int, like: Tensor) -> Tensor:
    """A flat tensor, not yet written, for data that is stored for long. On a CPU a large one has pages of its own: in
    the heap it would lie between activations, whose memory the heap could then not reuse. A process may have only so
    many mappings."""
    size = count * like.element_size()
    if like.device.type != "cpu" or size < MAPPED:
        return like.new_empty(count)
    return torch.frombuffer(mmap.mmap(-1, size, **PRIVATE), dtype=like.dtype, count=count)


def untouched(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros. On a CPU the pages of a large tensor take neither time nor memory until something is written."""
    count = math.prod(shape)
    if like.device.type != "cpu" or count * like.element_size() < MAPPED:
        return like.new_zeros(shape)
    return set_aside(count, like).view(shape)


class SlabBatch(LiveBatch):
    """A batch for models with one loop iteration, or with iterations that do not read one another: all sequences share
    padded buffers, and masks hold each sequence's length."""

    reads_several = True
    keeps_prefixes = True
    keeps_steps = True

    def __init__(self, model: PreTrainedModel, trips: int | None) -> None:
        super().__init__(model, trips)
        self.slab = Slab()
        self.cache = Cache(layers=[SlabLayer(self.slab) for _ in range(banks(model, trips))])
        config = model.config
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        self.windows = {kind: window if kind == "sliding_attention" else None for kind in kinds or ()}
        if not kinds:  # one mask for all layers: these decoders ignore a window in their configuration
            self.windows = {"full_attention": window if config.model_type == "mistral" else None}

    def kept(self, row: int | None = None) -> tuple[object, int]:
        """See `LiveBatch.kept`."""
        at, tokens = (len(self), self.read_already) if row is None else (row, self.lengths[row])
        parts = [x[at, :, :tokens] for layer in self.cache.layers for x in (layer.keys, layer.values)]
        whole = set_aside(sum(x.numel() for x in parts), parts[0])
        copies = [
            to.view(x.shape).copy_(x) for to, x in zip(whole.split([x.numel() for x in parts]), parts, strict=True)
        ]
        return list(zip(copies[::2], copies[1::2], strict=True)), whole.nbytes

    def take_over(self, state: object, count: int) -> None:
        """See `LiveBatch.take_over`."""
        for layer, pair in zip(self.cache.layers, cast(list[tuple[Tensor, Tensor]], state), strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(*(x[None] for x in pair))
            for stored, x in zip((layer.keys, layer.values), pair, strict=True):
                stored[len(self), :, :count] = x[:, :count]
        self.read_already = count

    def reserve(self, rows: int, tokens: int) -> None:
        """Grow or shrink the cache buffers of all layers; the sequences' contents are kept."""
        slab = self.slab
        if (rows, tokens) == (slab.rows, slab.tokens):
            return
        held = min(rows, slab.rows, len(self) + 1), min(tokens, slab.tokens, self._longest + DRAFTS)
        slab.rows, slab.tokens = rows, tokens
        for layer in self.cache.layers:
            layer.fit(*held)

    @property
    def _longest(self) -> int:
        """The number of tokens of the longest sequence, including the one whose prompt is being read."""
        return max([self.read_already, *self.lengths])

    def read(self, chunk: Sequence[int], every: bool = False) -> Tensor:
        """See `LiveBatch.read`."""
        self._about(len(self), [self.read_already])
        ids, positions = self._chunk(chunk)
        return self._call(ids, positions, self.cache, every, self._mask(positions))[0]

    def read_several(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See `LiveBatch.read_several`. Shorter prompts are padded at the end, where their next tokens go."""
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)], row[len(prompt) :] = torch.tensor(prompt), prompt[-1]
        self._about(len(self), [0] * len(prompts))
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        device, head = self.model.device, self.model.get_output_embeddings()
        given = {"head": head, **self.arguments} if isinstance(self.model, FathomForCausalLM) else self.arguments
        out = self.model.base_model(
            input_ids=ids.to(device),
            attention_mask=self._mask(positions),
            position_ids=positions.to(device),
            use_cache=True,
            **passed(self.model.base_model, self.cache),
            **given,
        )
        self.lengths += lengths
        last = torch.tensor(lengths, device=device) - 1
        if min(lengths) < max(lengths):  # leaving sequences are zeroed up to their length, not padding
            behind = torch.arange(ids.shape[1], device=device) > last[:, None]
            for layer in self.cache.layers:
                layer.blank(behind)
        return head(out.last_hidden_state[torch.arange(len(prompts), device=device), last]).float()

    def pause(self) -> tuple[object, int]:
        """See `LiveBatch.pause`."""
        copy, size = self.kept()
        state = copy, self.read_already
        self.forget()
        return state, size

    def resume(self, state: object) -> None:
        """See `LiveBatch.resume`."""
        self.take_over(*cast(tuple[object, int], state))

    def join(self) -> None:
        """See `LiveBatch.join`."""
        self.lengths.append(self.read_already)
        self.read_already = 0

    def forget(self) -> None:
        """See `LiveBatch.forget`."""
        for layer in self.cache.layers:
            layer.wipe(len(self), 0, self.read_already)
        super().forget()

    def step(self, tokens: Sequence[int]) -> Tensor:
        """See `LiveBatch.step`."""
        self._about(0, self.lengths)
        positions = torch.tensor(self.lengths).unsqueeze(1)
        logits = self._call(torch.tensor(tokens).unsqueeze(1), positions, self.cache, mask=self._mask(positions))
        self.lengths = [length + 1 for length in self.lengths]
        return logits[:, 0]

    def check(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """The logits `[rows, T, V]` after several candidate tokens of each sequence, before `keep` says how many are
        right; shorter sequences are padded."""
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows])
        self._about(0, self.lengths)
        positions = torch.tensor(self.lengths).unsqueeze(1) + torch.arange(width)
        return self._call(ids, positions, self.cache, True, self._mask(positions))

    def keep(self, kept: Sequence[int]) -> None:
        """Accept this many of each sequence's checked tokens; later writes overwrite the rest."""
        self.lengths = [length + more for length, more in zip(self.lengths, kept, strict=True)]

    def leave(self, row: int) -> int:
        """Remove a sequence: the last one moves into the gap, and one whose prompt is being read moves to the last
        one's index."""
        last = len(self) - 1
        for layer in self.cache.layers:
            if row != last:
                layer.move(last, row, self.lengths[last])
                layer.wipe(row, self.lengths[last], self.lengths[row])
            if self.read_already:
                layer.move(last + 1, last, self.read_already)
                layer.wipe(last + 1, 0, self.read_already)
            layer.wipe(last, self.read_already, self.lengths[last])
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        return last

    def _about(self, first: int, filled: Sequence[int]) -> None:
        self.slab.about(first, filled, self.model.device)

    def _mask(self, positions: Tensor) -> Mask:
        """The mask `[n, T, N]` of the keys that each new token attends to; None if it attends to all. `positions` is
        `[n, T]`."""
        masks = self._masks(positions)
        alone = masks["full_attention"] if set(masks) == {"full_attention"} else masks
        return alone if not isinstance(self.model, FathomForCausalLM) else masks

    def _masks(self, positions: Tensor) -> dict[str, Tensor | None]:
        """The attention masks by layer type, before `_mask` selects the form that the model takes."""
        end = self.slab.most + positions.shape[1]
        at = torch.arange(end)
        masks = {}
        for kind, window in self.windows.items():
            far = positions.unsqueeze(2) - at  # [n, T, N]
            seen = far >= 0 if window is None else (far >= 0) & (far < window)
            masks[kind] = self._as_backend_takes(seen.unsqueeze(1))
        return masks

    def _as_backend_takes(self, seen: Tensor) -> Tensor | None:
        if bool(seen.all()):
            return None if seen.shape[2] == 1 else seen.to(self.model.device)
        seen = seen.to(self.model.device)
        if str(self.model.config._attn_implementation).startswith("sdpa"):
            return seen
        least = torch.finfo(self.model.dtype).min
        return torch.zeros(seen.shape, dtype=self.model.dtype, device=seen.device).masked_fill(~seen, least)


class DraftBatch(SlabBatch):
    """Self-speculative decoding: the first loop iterations draft some tokens of a sequence, and the remaining
    iterations verify all of them.

    Args:
        model: A model of several trips.
        trips: The number of trips.
        draft_trips: How many of these trips draft.
    """

    keeps_steps = False  # several prompts in one pass, which a later read could not reproduce bit for bit

    def __init__(self, model: FathomForCausalLM, trips: int, draft_trips: int) -> None:
        check_speculation(model, Speculation(draft_trips), trips)
        if model.config.rope_stretches:  # drafts may pass the context, which would change the angles of all sequences
            raise ValueError(
                "draft_trips: this model's RoPE angles change with the length of a sequence; leave draft_trips out"
            )
        super().__init__(model, trips)
        self.stages = Stages(model, trips, self.cache)
        self.drafting, self.checking = range(draft_trips), range(draft_trips, trips)
        self.count = 6
        """Tokens to draft in the next step: one more after one in which most rows kept all, one fewer after others."""

    def draft(self, tokens: Sequence[int], count: int, choose: Callable[[Tensor], Sequence[int]]) -> Tensor:
        """Draft `count` tokens for each sequence with the first loop iterations, and return the whole model's logits at
        the drafted positions, `[rows, count, V]`.

        Args:
            tokens: The last token of each row.
            count: Number of drafted tokens.
            choose: The next draft of each row, from logits `[rows, V]`.
        """
        stages, device = self.stages, self.model.device
        starts, sources, states = [], [], []
        for i in range(count):
            filled = [length + i for length in self.lengths]
            self._about(0, filled)
            positions = torch.tensor(filled).unsqueeze(1)
            found: dict[int, tuple[Tensor, Tensor]] = {}
            there = positions.to(device)
            x, masks = stages.embed(torch.tensor(tokens, device=device).unsqueeze(1), there), self._masks(positions)
            hidden, start, state = stages.make(x, there, masks, self.drafting, found)
            starts.append(start)
            sources.append(found)
            states.append(state)
            tokens = choose(self.model.lm_head(hidden[:, -1]).float())
        self._about(0, self.lengths)
        positions = torch.tensor(self.lengths).unsqueeze(1) + torch.arange(count)
        x, masks, kept = torch.cat(starts, 1), self._masks(positions), side_by_side(sources)
        hidden, *_ = stages.make(x, positions.to(device), masks, self.checking, kept, joined(states))
        return self.model.lm_head(hidden).float()

    def adapt(self, kept: Sequence[int], count: int) -> None:
        """Choose how many tokens to draft next, given how many of the last `count` drafts were accepted in each
        sequence."""
        whole = 2 * sum(one == count for one in kept) > len(kept)
        self.count = min(count + 1, DRAFTS) if whole else max(count - 1, 1)


class SlotBatch(LiveBatch):
    """A batch for models with slot caches: a prompt has its own cache until its sequence is merged into the batch."""

    reads_several = True
    keeps_prefixes = True

    def __init__(self, model: PreTrainedModel, trips: int | None) -> None:
        super().__init__(model, trips)
        self.cache: Cache | None = None

    def kept(self, row: int | None = None) -> tuple[object, int]:
        """See `LiveBatch.kept`; here only the sequence whose prompt is being read can be copied."""
        assert row is None and self.fresh is not None
        state = copy.deepcopy(self.fresh)
        trim_slots(state, 0)
        return (state, self.read_already), sum(x.nbytes for layer in state.layers for x in layer.stored)

    def take_over(self, state: object, count: int) -> None:
        """See `LiveBatch.take_over`."""
        cache, tokens = cast(tuple[Cache, int], state)
        self.fresh, self.read_already = copy.deepcopy(cache), count
        if count < tokens:
            self.fresh.crop(count - tokens)

    def reserve(self, rows: int, tokens: int) -> None:
        """Free the cache memory that sequences no longer need; memory grows without this call."""
        if self.cache is not None:  # one position beyond the capacity takes discarded slots
            trim_slots(self.cache, with_spare(tokens * trips_of(self.model, self.trips)) - 1)

    def read(self, chunk: Sequence[int], every: bool = False) -> Tensor:
        """See `LiveBatch.read`."""
        self.fresh = self.fresh or DynamicCache(config=self.model.config)
        return self._call(*self._chunk(chunk), self.fresh, every)[0]

    def read_several(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See `LiveBatch.read_several`. Shorter prompts are padded in front; padding is never stored."""
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.empty(len(prompts), max(lengths), dtype=torch.long)
        real = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i], real[i, -len(prompt) :] = prompt[0], 1  # its own values: another token's may be NaN
            ids[i, -len(prompt) :] = torch.tensor(prompt)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        self.fresh = DynamicCache(config=self.model.config)
        mask = None if min(lengths) == max(lengths) else real.to(self.model.device)
        logits = self._call(ids, positions, self.fresh, mask=mask)
        self._merge(lengths)
        return logits[:, -1]

    def join(self) -> None:
        """See `LiveBatch.join`."""
        self._merge([self.read_already])

    def _merge(self, lengths: Sequence[int]) -> None:
        """Append the sequences whose prompts were read to the batch; `lengths` holds their token counts."""
        assert self.fresh is not None
        if self.cache is None:
            self.cache = self.fresh
        else:
            merge_slots(self.cache, self.fresh)
        self.lengths += lengths
        self.forget()

    def step(self, tokens: Sequence[int]) -> Tensor:
        """See `LiveBatch.step`."""
        positions = torch.tensor(self.lengths).unsqueeze(1)
        logits = self._call(torch.tensor(tokens).unsqueeze(1), positions, self.cache)
        self.lengths = [length + 1 for length in self.lengths]
        return logits[:, 0]

    def leave(self, row: int) -> int:
        """See `LiveBatch.leave`; here the last sequence takes the removed one's index."""
        last = len(self) - 1
        if last == 0:
            self.cache = None
        else:
            drop_row(self.cache, row)
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        return last


class LoneBatch(LiveBatch):
    """A batch in which each sequence has its own cache and its own forward pass."""

    def __init__(self, model: PreTrainedModel, trips: int | None, policy: Policy | None = None) -> None:
        super().__init__(model, trips)
        self.policy = policy
        self.caches: list[Cache] = []

    def read(self, chunk: Sequence[int], every: bool = False) -> Tensor:
        """See `LiveBatch.read`; here a chunk is split where the cache is compressed."""
        if self.fresh is None:
            host = getattr(self.model.base_model, "host", None)
            config = self.model.config if host is None else host.config
            self.fresh = DynamicCache(config=config) if self.policy is None else self.policy.empty(self.model)
        ids, _ = self._chunk(chunk)
        logits = [self._call(piece, None, self.fresh, every)[0] for piece in chunks(ids, self.fresh)]
        return torch.cat(logits) if every else logits[-1]

    def join(self) -> None:
        """See `LiveBatch.join`."""
        self.caches.append(self.fresh)
        self.lengths.append(self.read_already)
        self.forget()

    def step(self, tokens: Sequence[int]) -> Tensor:
        """See `LiveBatch.step`."""
        logits, made = [], list[int]()
        for token, cache in zip(tokens, self.caches, strict=True):
            logits.append(self._call(torch.tensor([[token]]), None, cache)[0])
            made += self.trips_made or []
        self.trips_made = made or None
        self.lengths = [length + 1 for length in self.lengths]
        return torch.cat(logits)

    def leave(self, row: int) -> int:
        """See `LiveBatch.leave`."""
        self.caches.pop(row)
        self.lengths.pop(row)
        return row


def batch_for(
    model: PreTrainedModel,
    trips: int | None = None,
    policy: Policy | None = None,
    draft_trips: int | None = None,
) -> LiveBatch:
    """An empty batch of the kind that the model and these options need.

    Args:
        model: An open causal language model.
        trips: Most trips per token; None for the model's own number.
        policy: A cache of constant size for each row.
        draft_trips: Draft with this many first trips, if the model makes more.
    """
    if draft_trips is not None and draft_trips < trips_of(model, trips):
        if policy is not None:
            raise ValueError(
                "speculative decoding must remove cache entries, which a cache of constant size cannot: use only one "
                "of the two"
            )
        return DraftBatch(model, trips_of(model, trips), draft_trips)
    if policy is not None:
        return LoneBatch(model, trips, policy)
    if _slotted(model):
        return SlotBatch(model, trips)
    return SlabBatch(model, trips) if shares(model) else LoneBatch(model, trips)


def shares(model: PreTrainedModel) -> bool:
    """Whether sequences of this model can share one cache buffer, which supports neither recurrent states nor chunked
    attention masks."""
    if isinstance(model, FathomForCausalLM):
        return not model.model.stateful and model.config.attention_chunk_size is None
    return model.config.model_type in PLAIN


def _slotted(model: PreTrainedModel) -> bool:
    return isinstance(model, FathomForCausalLM) and model.model.slotted


def banks(model: PreTrainedModel, trips: int | None) -> int:
    """The largest number of key-value layers (banks) that a sequence needs."""
    if not isinstance(model, FathomForCausalLM):
        return int(model.config.num_hidden_layers)
    return len(banks_of(model.model.plan_of(trips_of(model, trips))))


def trips_of(model: PreTrainedModel, trips: int | None) -> int:
    """The largest number of loop iterations of a token: `trips`, or the model's own number."""
    if not isinstance(model, FathomForCausalLM):
        return 1
    return trips or model.config.max_trips or model.model.recurrence.trips


def token_bytes(model: PreTrainedModel, trips: int | None) -> int:
    """The largest number of bytes that one token's keys and values take."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    whole = 2 * heads * width * model.dtype.itemsize * banks(model, trips)
    return with_spare(whole) if _slotted(model) else whole


def may_chunk(model: PreTrainedModel) -> bool:
    """Whether a prompt may be read in several parts without changing the result. `ponder2` and `ponder3` read a whole
    prompt at once, unless `prefill` is `exact`: the result of a few Jacobi rounds depends on where a prompt is cut. So
    do classes of transformers that continue a recurrent state by single tokens only, as Mamba's."""
    if not isinstance(model, FathomForCausalLM):
        return shares(model) or continues(model, PROBED // 2)
    recurrence = model.model.recurrence
    return recurrence.view.depth_parallel or recurrence.exact() or recurrence.trips == 1


def refuse_forgetful(model: PreTrainedModel) -> None:
    """Refuse a model of transformers whose class does not continue a text from the cache that it is given: RWKV's, and
    RecurrentGemma's, which keeps the state in its modules."""
    kind = model.config.model_type
    try:
        able = isinstance(model, FathomForCausalLM) or continues(model, 1)
    except Exception as error:
        words = str(error).partition("\n")[0]
        raise SettingsError(
            f"{kind} failed to read a few tokens into transformers' cache ({words}): use `fathom generate`"
        ) from error
    if not able:
        raise SettingsError(f"{kind} does not continue a text from transformers' cache: use `fathom generate`")
