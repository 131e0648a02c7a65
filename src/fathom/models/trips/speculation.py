"""Self-speculative decoding: a looped model drafts tokens with its first iterations and verifies them exactly with the
rest.

Tokens are drafted one by one with the first `draft_trips` iterations, read out early. Then the remaining iterations of
all of them are made in one pass that starts where the drafts stopped: in view SAME the first iterations' keys and
values do not depend on how many follow, so none of that work is done twice. The longest run of drafts that the whole
model confirms is kept, its own token replaces the first rejected one, and the caches of the rest are cropped. Greedy
tokens equal those of plain decoding. Sampled tokens have the same distribution (accept with probability min(1, p/q),
else draw from the normalised max(p - q, 0)).

Rows of a batch advance together, as far as the row with the shortest run.

`decode` is for `generate`. In `fathom serve`, `inference/drafting.py` decides when to draft, and `inference/batches.py`
makes and checks the drafts, by `Stages`.

`check_speculation` refuses a coda, halting, views other than SAME and `kv: first`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

from ..axes.cache_name import CACHE
from ..axes.roles import TripState, View
from .protocols import CausalDecoder
from .slots import TokenSubset, Turn, joined
from .walk import Banked, Inputs, KeyValue

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer


@dataclass
class Speculation:
    """Settings of self-speculative decoding, and counts of drafted and accepted tokens."""

    draft_trips: int = 1
    draft_tokens: int = 6
    """Initial number of tokens per draft: increased by one after all were accepted, decreased by one otherwise."""
    verifications: int = field(default=0, init=False)
    """Passes that verify the drafts of all rows with the remaining trips."""
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    """Drafted tokens that the whole model accepted."""
    tokens: int = field(default=0, init=False)
    """New tokens, all rows."""
    streamer: BaseStreamer | None = field(default=None, init=False, repr=False)

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_verification(self) -> float:
        """New tokens per verification."""
        return self.tokens / self.verifications if self.verifications else 0.0


def check_speculation(model: CausalDecoder, asked: Speculation, trips: int) -> None:
    """Refuse to draft with a model whose first iterations cannot be run separately and used for predictions."""
    config, recurrence = model.config, model.model.recurrence
    if recurrence.view is not View.SAME or recurrence.halts:
        raise ValueError(
            f"draft_trips: the first iterations of recurrence={config.recurrence} cannot be computed by themselves"
        )
    if recurrence.span(config)[1] < config.num_hidden_layers:
        raise ValueError("draft_trips: a coda runs only after the last iteration, so earlier iterations cannot draft")
    if recurrence.lends:
        raise ValueError(
            "draft_trips: later iterations have no keys and values of their own; set recurrence_options.kv to own, or "
            "leave draft_trips out"
        )
    if not 1 <= asked.draft_trips < trips:
        raise ValueError(
            f"draft_trips must be between 1 and {trips - 1}, fewer than all iterations, got {asked.draft_trips}"
        )
    if asked.draft_tokens < 1:
        raise ValueError(f"draft_tokens must be 1 or more, got {asked.draft_tokens}")


UNSUPPORTED = {
    "num_beams": (1, "each row is one text; leave out beams"),
    "guidance_scale": (1, "guidance_scale reads every text once more, with a cache of its own; leave it out"),
    "stop_strings": (None, "stop_strings need a tokenizer, which drafting is not given; leave them out"),
    **{
        name: (False, f"{name} is not kept of drafts; leave it out")
        for name in ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    },
}
"""Arguments of `generate` that drafting does not take: the value that asks for nothing, and why."""


def check_request(given: Mapping[str, Any], own: GenerationConfig) -> None:
    """Refuse arguments of `generate` that drafting does not support, in the call or in the generation configuration."""
    for name, (nothing, why) in UNSUPPORTED.items():
        if (given.get(name, getattr(own, name)) or nothing) != nothing:
            raise ValueError(f"draft_trips: {why}")
    if given.get("inputs_embeds") is not None:
        raise ValueError("draft_trips: give input_ids, which drafts continue, not inputs_embeds")


class Stages:
    """Runs the iterations of tokens in two parts, for drafting and for verification, over one cache."""

    def __init__(self, model: CausalDecoder, trips: int, cache: Cache | None = None) -> None:
        self.model, self.decoder, self.trips = model, model.model, trips
        self.cache = DynamicCache() if cache is None else cache
        self.plan = self.decoder.plan_of(trips)

    def make(
        self,
        x: Tensor,
        positions: Tensor,
        padding: Tensor | Mapping[str, Tensor | None] | None,
        trips: range,
        sources: dict[int, KeyValue],
        state: TripState | None = None,
    ) -> tuple[Tensor, Tensor, TripState]:
        """Run some iterations; returns the last one's hidden state, the next one's input (`[B, T, hidden_size]` each),
        and the recurrence's state.

        Args:
            x: The input of the first of these iterations.
            positions: `[B, T]`
            padding: `[B, past + T]`; None without padding; or complete masks by layer type.
            trips: The range of iterations to make.
            sources: By visit, keys and values of earlier iterations of these tokens for mixers; these iterations add
                theirs.
            state: The recurrence's state after earlier iterations of these tokens.
        """
        first = self.plan[trips.start][-1].index
        held = self.cache.layers[first : first + 1]  # masks read this one, the other is longer
        seen = Cache(layers=held) if held else DynamicCache()
        given: Any = padding  # complete masks pass through
        inputs = Inputs(self.trips, positions, None, given, seen, x.dtype, self.model.lm_head, {})
        banked, recurrence = Banked(self.decoder, inputs, x, self.cache), self.decoder.recurrence
        banked.sources = sources
        state = dict(state or {})
        for trip in trips:
            out = banked(Turn(trip, x, TokenSubset(), state=state))
            state = {**state, **recurrence.gate(out, state)}
            x = x if out.last else recurrence.feed(x, out, state)
        return (recurrence.readout(state) if out.last else out.hidden), x, state

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The first iteration's input for token ids, made by the decoder's own embedding."""
        return self.decoder.embedded(ids, positions)

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens."""
        for layer in self.cache.layers if tokens else ():
            layer.crop(-tokens)


@dataclass
class Drafts:
    """Drafted tokens that are verified together, the same number for each sequence."""

    tokens: Tensor
    """`[B, count]`"""
    starts: Tensor
    """The input of the remaining trips, `[B, count, hidden_size]`; the first one belongs to the last token before."""
    positions: Tensor
    sources: dict[int, KeyValue]
    state: TripState
    """The recurrence's state for these tokens."""
    probabilities: Tensor | None
    """The distribution from which each was drawn, `[B, count, V]`; None for greedy drafts."""


def decode(
    model: CausalDecoder,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    speculation: Speculation,
    **given: Any,  # arguments that transformers would pass to its own loop; in the signature they would be passed twice
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate a continuation of prompts `[B, T]` with drafts; transformers' `generate` calls this instead of its own
    loop."""
    asked, sampled = speculation, bool(generation_config.do_sample)
    trips = model.model.trips_asked(given.get("max_trips"))
    check_speculation(model, asked, trips)
    if (past := given.get(CACHE)) is not None and past.get_seq_length():
        raise ValueError("draft_trips: start from an empty cache")
    mask = given.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    run = _Run(Stages(model, trips), asked.draft_trips, mask, logits_processor, sampled)
    run.read(input_ids[:, :-1])
    pad = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
    going = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    count = asked.draft_tokens
    while True:
        room = (generation_config.max_length or input_ids.shape[1] + count) - input_ids.shape[1]
        drafts = run.draft(input_ids, max(1, min(count, room)))
        new, accepted = run.verify(input_ids, drafts)
        whole, drafted = drafts.tokens.shape[1], int(going.sum()) * drafts.tokens.shape[1]
        kept = int((accepted[going] + 1).clamp(max=whole).min())
        run.stages.crop(whole - kept)
        asked.verifications, asked.drafted = asked.verifications + 1, asked.drafted + drafted
        asked.accepted += int(accepted[going].sum())
        count = count + 1 if kept == whole else max(1, count - 1)
        for place, column in enumerate(new[:, :kept].unbind(1), 1):
            asked.tokens += int(going.sum())
            input_ids = torch.cat((input_ids, torch.where(going, column, pad).unsqueeze(1)), 1)
            if asked.streamer is not None:
                asked.streamer.put(input_ids[:, -1].cpu())
            going = going & ~stopping_criteria(input_ids, None)
            if not going.any():
                run.stages.crop(kept - place)
                if asked.streamer is not None:
                    asked.streamer.end()
                if generation_config.return_dict_in_generate:
                    return GenerateDecoderOnlyOutput(sequences=input_ids, **{CACHE: run.stages.cache})
                return input_ids


class _Run:
    """Drafting and verification."""

    def __init__(
        self, stages: Stages, draft_trips: int, mask: Tensor, logits_processor: LogitsProcessorList, sampled: bool
    ) -> None:
        self.stages, self.drafting = stages, range(draft_trips)
        self.checking = range(draft_trips, len(stages.plan))
        self.padding = mask if not bool(mask.all()) else None
        self.places = (mask.cumsum(1) - 1).clamp(min=0)  # [B, T]: positions count no padding
        self.before = mask.sum(1) - mask.shape[1]  # [B]
        self.process, self.sampled = logits_processor, sampled

    def read(self, ids: Tensor) -> None:
        """Prefill the caches with the prompt except its last token."""
        if ids.shape[1]:
            every, positions = range(len(self.stages.plan)), self._positions(0, ids)
            self.stages.make(self.stages.embed(ids, positions), positions, self._padding(ids.shape[1]), every, {})

    def draft(self, ids: Tensor, count: int) -> Drafts:
        """Draft several tokens, each predicted by the first iterations of the previous one."""
        length, starts, drawn_from = ids.shape[1], [], []
        sources: list[dict[int, KeyValue]] = []
        states: list[TripState] = []
        for i in range(count):
            positions, padding = self._positions(length - 1 + i, ids[:, -1:]), self._padding(length + i)
            last = self.stages.embed(ids[:, -1:], positions)
            found: dict[int, KeyValue] = {}
            hidden, start, state = self.stages.make(last, positions, padding, self.drafting, found)
            scores = self._scores(ids, hidden[:, -1])
            if self.sampled:
                drawn_from.append(scores.softmax(-1))
                token = torch.multinomial(drawn_from[-1], 1)
            else:
                token = scores.argmax(-1, keepdim=True)
            starts.append(start)
            sources.append(found)
            states.append(state)
            ids = torch.cat((ids, token), 1)
        return Drafts(
            ids[:, length:],
            torch.cat(starts, 1),
            self._positions(length - 1, ids[:, length:]),
            side_by_side(sources),
            joined(states),
            torch.stack(drawn_from, 1) if self.sampled else None,
        )

    def verify(self, ids: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        """Verify drafts: returns tokens `[B, count]`, the first `accepted + 1` of which are the whole model's, and
        `accepted`."""
        count, whole = drafts.tokens.shape[1], torch.cat((ids, drafts.tokens), 1)
        padding = self._padding(whole.shape[1] - 1)
        hidden, *_ = self.stages.make(
            drafts.starts, drafts.positions, padding, self.checking, drafts.sources, drafts.state
        )
        length = ids.shape[1]
        scores = torch.stack([self._scores(whole[:, : length + i], hidden[:, i]) for i in range(count)], 1)  # [B, n, V]
        if drafts.probabilities is None:
            right = scores.argmax(-1)
            accepted = (right == drafts.tokens).long().cumprod(1).sum(1)
            return right, accepted  # as long as drafts are accepted they are the right tokens
        return accept(scores.softmax(-1), drafts.probabilities, drafts.tokens)

    def _scores(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return self.process(ids, self.stages.model.lm_head(hidden).float())

    def _positions(self, first: int, ids: Tensor) -> Tensor:
        of_prompt = self.places[:, first : first + ids.shape[1]]
        columns = torch.arange(first + of_prompt.shape[1], first + ids.shape[1], device=ids.device)
        return torch.cat((of_prompt, columns + self.before.unsqueeze(1)), 1)

    def _padding(self, length: int) -> Tensor | None:
        if self.padding is None:
            return None
        new = length - self.padding.shape[1]
        return self.padding[:, :length] if new <= 0 else torch.nn.functional.pad(self.padding, (0, new), value=1)


def accept(p: Tensor, q: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection sampling of drafts: returns tokens `[B, n]`, the first `accepted + 1` of which follow p, and `accepted`
    `[B]`.

    Args:
        p: Distributions of the whole model, `[B, n, V]`, each after the drafts before it.
        q: Distributions from which the drafts were drawn.
        drafts: `[B, n]`
    """
    at = drafts.unsqueeze(-1)
    ratio = p.gather(-1, at).squeeze(-1) / q.gather(-1, at).squeeze(-1)  # [B, n]
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
    place = accepted.clamp(max=drafts.shape[1] - 1).view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    p, q = p.gather(1, place).squeeze(1), q.gather(1, place).squeeze(1)
    more = (p - q).clamp(min=0)
    other = torch.multinomial(torch.where(more.sum(-1, keepdim=True) > 0, more, p), 1)
    here = torch.arange(drafts.shape[1], device=drafts.device) == accepted.unsqueeze(1)
    return torch.where(here, other, drafts), accepted


def side_by_side(sources: Sequence[Mapping[int, KeyValue]]) -> dict[int, KeyValue]:
    """Concatenate the keys and values, `[B, H_kv, T, D]` by visit, of tokens that were drafted one after another."""
    gathered = {}
    for visit in sources[0]:
        keys, values = zip(*(one[visit] for one in sources), strict=True)
        gathered[visit] = torch.cat(keys, 2), torch.cat(values, 2)
    return gathered
