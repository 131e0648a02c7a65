"""Additions to transformers' `generate`: checks of logits, stop strings, and streamed words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from fathom.errors import RequestError, SettingsError
from fathom.inference.sampling import NO_NUMBERS, finite
from fathom.inference.settings import Sampling
from fathom.inference.texts import AnswerWords

Write = Callable[[str], object]


class Streamer(BaseStreamer):
    """Writes an answer's words as its tokens are generated. Transformers' streamer loses spaces at the start of a line.

    Args:
        words: Turns tokens into words.
        write: Called with the words.
    """

    def __init__(self, words: AnswerWords, write: Write) -> None:
        self.words, self.write, self.prompt = words, write, True

    def put(self, value: Tensor) -> None:
        """New tokens; the first ones are the prompt."""
        if not self.prompt:
            self.write(self.words.add(value.flatten().tolist()))
        self.prompt = False

    def end(self) -> None:
        """No more tokens."""
        self.write(self.words.add([], last=True))


class OfTheText(StoppingCriteria):
    """A stopping criterion that sees only generated tokens, not the prompt.

    Args:
        inner: The criterion.
        width: Length of the prompt, padding included.
    """

    def __init__(self, inner: StoppingCriteria, width: int) -> None:
        self.inner, self.width = inner, width

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **more: object) -> torch.BoolTensor:
        """Which sequences `[B, T]` end."""
        made: torch.BoolTensor = self.inner(input_ids[:, self.width :], scores, **more)
        return made


class Finite(LogitsProcessor):
    """Refuses logits that contain no finite maximum; transformers would take the first token, or raise."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the scores `[B, V]` unchanged."""
        if not finite(scores).all():
            none_left = bool((scores.amax(-1) == -math.inf).any())
            raise (
                SettingsError("the sampling settings exclude every token")
                if none_left
                else RequestError(NO_NUMBERS, "failed")
            )
        return scores


class Unpadded(LogitsProcessor):
    """A logits processor that sees each sequence without its left padding.

    Args:
        process: The processor for one sequence.
        first: The column where each sequence's text begins.
    """

    def __init__(self, process: LogitsProcessor, first: Sequence[int]) -> None:
        self.process, self.first = process, first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` after `[B, T]`."""
        rows = zip(input_ids, scores, self.first, strict=True)
        return torch.cat([self.process(ids[None, first:], row[None]) for ids, row, first in rows])


def processing(
    model: PreTrainedModel, sampling: Sampling, stops: list[int], ids: Tensor, mask: Tensor
) -> dict[str, Any]:
    """Arguments of `generate` that check logits, and hide padding from processors that would see it."""
    if mask.all():
        return {"logits_processor": LogitsProcessorList([Finite()])}

    def chosen(name: str) -> Any:
        return sampling.options.get(name, getattr(model.generation_config, name))

    again, prompt = (float(chosen(name) or 1) for name in ("repetition_penalty", "encoder_repetition_penalty"))
    size, least = chosen("no_repeat_ngram_size") or 0, 0 if chosen("min_new_tokens") else chosen("min_length") or 0
    inner, off = list[LogitsProcessor](), dict[str, float | None]()
    if again != 1:
        inner.append(RepetitionPenaltyLogitsProcessor(again))
        off["repetition_penalty"] = 1.0
    if size:
        inner.append(NoRepeatNGramLogitsProcessor(size))
        off["no_repeat_ngram_size"] = 0
    if least and stops:
        inner.append(MinLengthLogitsProcessor(least, stops, device=str(model.device)))
        off["min_length"] = 0
    if chosen("forced_bos_token_id") is not None:  # after a prompt of one token
        inner.append(ForcedBOSTokenLogitsProcessor(chosen("forced_bos_token_id")))
        off["forced_bos_token_id"] = None
    first = mask.argmax(1).repeat_interleave(sampling.beams(model)).tolist()
    processors = LogitsProcessorList([Finite(), *(Unpadded(one, first) for one in inner)])
    if prompt != 1:
        processors.append(EncoderRepetitionPenaltyLogitsProcessor(prompt, ids.where(mask == 1, ids[:, -1:])))
        off["encoder_repetition_penalty"] = 1.0
    if (size := chosen("encoder_no_repeat_ngram_size") or 0) > 0:
        filler = ids[:, -1:] if size == 1 else -1  # a word that the prompt contains, or one that no text contains
        processors.append(EncoderNoRepeatNGramLogitsProcessor(size, ids.where(mask == 1, filler)))
        off["encoder_no_repeat_ngram_size"] = 0
    return {**off, "logits_processor": processors}
