"""Additions to transformers' `generate`: drafts, classifier-free guidance, chunked prompts and masks of slots; and to
its continuous batching, a cache layer for every visit."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_masks_for_generate

from .engines import check_engine, engine_config
from .slots import plan
from .speculation import Speculation, check_request, decode

if TYPE_CHECKING:
    from transformers import GenerationConfig


class FathomGenerationMixin(GenerationMixin):
    """transformers' generation; requests that cannot be exact are refused."""

    def check_chunks(self, size: int | None) -> None:
        """Refuse to read a prompt in chunks of `size` tokens if this would change the result."""
        recurrence = self.model.recurrence
        if size and recurrence.trips > 1 and not recurrence.view.depth_parallel and not recurrence.exact():
            raise ValueError(
                f"prefill_chunk_size={size}: {self.config.recurrence} reads a prompt by a few Jacobi rounds, whose "
                "result depends on where it is cut; set recurrence_options.prefill=exact, or leave the chunk size out"
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
        """transformers' `generate`; requests that cannot be exact are refused.

        Args:
            inputs: See transformers.
            generation_config: See transformers.
            draft_trips: Draft with this many first trips and verify with the rest (`speculation.py`).
            draft_tokens: Initial number of tokens per draft.
            speculation: Replaces these two options; afterwards holds the counts of drafted and accepted tokens.
            kwargs: See transformers.
        """
        own = generation_config or self.generation_config
        self.check_chunks(kwargs.get("prefill_chunk_size", own.prefill_chunk_size))
        if draft_trips is not None:
            speculation = Speculation(draft_trips, draft_tokens)
        if speculation is not None:
            check_request(kwargs, own)
            speculation.streamer = kwargs.get("streamer")
            kwargs["custom_generate"] = partial(decode, speculation=speculation)
        return super().generate(inputs, generation_config, **kwargs)

    def _get_logits_processor(self, *args: object, **kwargs: object) -> LogitsProcessorList:
        """See transformers; guidance runs the model with the same number of trips as the text."""
        made: LogitsProcessorList = super()._get_logits_processor(*args, **kwargs)
        given = kwargs.get("model_kwargs")
        most = given.get("max_trips") if isinstance(given, dict) else None
        for one in made:
            if most is not None and isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                one.model = partial(self, max_trips=most)  # type: ignore[misc]  # a module is callable
        return made

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **kwargs: object) -> object:
        """The masks of a static cache. For slots the padding of the call's own tokens is returned: only the model's own
        passes know who reads which slot."""
        if self.model.slotted:
            return None if attention_mask is None else attention_mask[:, -kwargs["inputs_embeds"].shape[1] :]  # type: ignore
        return create_masks_for_generate(attention_mask=attention_mask, **kwargs)

    def init_continuous_batching(self, *args: object, **kwargs: object) -> object:
        """See transformers; the cache has a layer for every visit, and unsupported models are refused."""
        visits = plan(self.config, self.model._trips(None))
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
