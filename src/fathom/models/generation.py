"""Fathom's changes to transformers' generation: self-speculative drafts, guidance, chunked prefill, masks for looped
models, and continuous batching with a cache layer per layer and iteration.

`configuration.py` (`rereads`) decides which models read a text again when its length changes RoPE's angles, and
`decoder/rotary.py` (`changes`) at which length. `modeling.py` refuses these models for vLLM and SGLang,
`init_continuous_batching` for `generate_batch`. `inference/engine.py` refuses all with `longrope` for `fathom serve`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_masks_for_generate

from .axes.cache_name import by_any_name
from .trips.engines import COMPANY, check_engine, engine_config
from .trips.slots import plan
from .trips.speculation import Speculation, check_request, decode

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.cache_utils import Cache


DRAFTS = ("draft_trips", "prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit")
"""Arguments of `generate` that ask for drafts: tokens before and after a length are checked together."""
USUAL_LENGTH = 20
"""New tokens of transformers' `generate` if nothing limits them."""


class FathomGenerationMixin(GenerationMixin):
    """Mixin with transformers' generation methods; refuses options with which results would not be exact."""

    def check_chunks(self, size: int | None) -> None:
        """Refuse to read a prompt in chunks of `size` tokens if this would change the result."""
        recurrence = self.model.recurrence
        if size and recurrence.trips > 1 and not recurrence.view.depth_parallel and not recurrence.exact():
            raise ValueError(
                f"prefill_chunk_size={size}: {self.config.recurrence} reads a prompt by a few Jacobi rounds, whose "
                "result depends on where the prompt is cut; set recurrence_options.prefill=exact, or "
                "leave prefill_chunk_size out"
            )

    def check_length(self, inputs: Tensor | None, own: GenerationConfig, given: Mapping[str, Any]) -> None:
        """Refuse speculative drafts and classifier-free guidance if the text may reach a length at which RoPE's angles
        change."""
        asked = next((name for name in DRAFTS if given.get(name, getattr(own, name, None))), None)
        if (given.get("guidance_scale", own.guidance_scale) or 1) != 1:
            asked = "guidance_scale"
        prompt = next((x for x in (inputs, given.get("input_ids"), given.get("inputs_embeds")) if x is not None), None)
        length = 1 if prompt is None else prompt.shape[1]
        new, most = (given.get(name, getattr(own, name)) for name in ("max_new_tokens", "max_length"))
        most = length + new if new else most or length + USUAL_LENGTH
        if asked and self.model.rotary_emb.changes(length, most):
            raise ValueError(
                f"{asked}: the angles of this model's RoPE change within {most} tokens, and the text would not be read "
                f"again there; leave {asked} out"
            )

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        draft_trips: int | None = None,
        draft_tokens: int = 6,
        speculation: Speculation | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate` with self-speculative drafts; refuses options with which its result would not be
        exact.

        Args:
            inputs: See transformers.
            generation_config: See transformers.
            draft_trips: Draft with this many first iterations and verify with the rest (`speculation.py`).
            draft_tokens: Initial number of tokens per draft.
            speculation: Replaces these two options; afterwards holds the counts of drafted and accepted tokens.
            kwargs: See transformers.
        """
        own = generation_config or self.generation_config
        self.check_chunks(kwargs.get("prefill_chunk_size", own.prefill_chunk_size))
        if self.model.rereads:
            drafts = draft_trips is not None or speculation is not None
            self.check_length(inputs, own, {"draft_trips": drafts or None, **kwargs})
        if draft_trips is not None:
            speculation = Speculation(draft_trips, draft_tokens)
        if speculation is not None:
            if self.model.stateful:
                raise ValueError(
                    f"draft_trips: {self.config.host} has layers whose state cannot be rolled back, and drafts may be "
                    "rejected; leave draft_trips out"
                )
            check_request(kwargs, own)
            speculation.streamer = kwargs.get("streamer")
            kwargs["custom_generate"] = partial(decode, speculation=speculation)
        return super().generate(inputs, generation_config, **kwargs)

    @by_any_name
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers. Where the length of the text changes the angles of RoPE, cached keys have the earlier
        angles: the cache is dropped, and the whole text is read again."""
        if self.model.rereads and past_key_values is not None and (seen := int(past_key_values.get_seq_length())):
            new = input_ids.shape[1] if next_sequence_length is None else next_sequence_length
            positions = kwargs.get("position_ids")
            now = seen + new if positions is None else int(positions.max()) + 1
            if self.model.rotary_emb.changes(now - new, now):
                if inputs_embeds is not None and inputs_embeds.shape[1] + input_ids.shape[1] == seen + new:
                    inputs_embeds = torch.cat((inputs_embeds, self.get_input_embeddings()(input_ids)), 1)
                    kwargs["is_first_iteration"] = True  # only then are embeddings read
                elif input_ids.shape[1] < seen + new:
                    raise ValueError(
                        f"{now} tokens: the angles of this model's RoPE change at this length, so the {seen} tokens of "
                        "the cache must be read again: pass the whole text, and leave out prefill_chunk_size"
                    )
                past_key_values = next_sequence_length = None
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length, past_key_values, inputs_embeds=inputs_embeds, **kwargs
        )

    def _get_logits_processor(self, *args: object, **kwargs: object) -> LogitsProcessorList:
        """Like transformers' method, but classifier-free guidance runs the model with the same `max_trips` as
        generation."""
        made: LogitsProcessorList = super()._get_logits_processor(*args, **kwargs)
        given = kwargs.get("model_kwargs")
        most = given.get("max_trips") if isinstance(given, dict) else None
        for one in made:
            if most is not None and isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                one.model = partial(self, max_trips=most)  # type: ignore[misc]  # a module is callable
        return made

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **kwargs: object) -> object:
        """The attention masks for a static cache, which transformers' `generate` asks for. For slots the padding of
        the call's own tokens is returned: only the model's own passes know who reads which slot."""
        if self.model.slotted:
            return None if attention_mask is None else attention_mask[:, -kwargs["inputs_embeds"].shape[1] :]  # type: ignore
        if self.model.host is not None:
            kwargs["config"] = self.model.native_config()
        return create_masks_for_generate(attention_mask=attention_mask, **kwargs)

    def init_continuous_batching(self, *args: object, **kwargs: object) -> object:
        """Like transformers' method, but the cache has a layer for each layer and iteration; refuses unsupported
        models."""
        if self.model.rereads:
            raise ValueError(COMPANY)
        if self.model.host is not None and any(layer.depth_mixer is None for layer in self.model.layers):
            raise ValueError(
                f"continuous batching: {self.config.host} has layers without a key and value for every token: use "
                "`generate` or `fathom serve`"
            )
        visits = plan(self.config, self.model.trips_asked(None))
        told = engine_config(self.config, visits)
        check_engine(self.config, self.model.recurrence, visits, {"cache": SimpleNamespace(config=told)})
        # The engine gets this model's modules with a configuration that has a layer for each visit.
        engine = self.__dict__.pop("_engine", None) or copy.copy(self)
        engine.__dict__.update(self.__dict__, config=told)
        self.__dict__["_engine"] = engine
        return GenerationMixin.init_continuous_batching(engine, *args, **kwargs)

    def destroy_cached_continuous_batching_manager(self) -> None:
        """See transformers."""
        if engine := self.__dict__.pop("_engine", None):
            GenerationMixin.destroy_cached_continuous_batching_manager(engine)
