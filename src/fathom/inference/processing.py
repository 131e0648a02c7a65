"""What watches transformers' `generate` as it draws: logits, stop strings, and the words that are streamed."""

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
    """Writes an answer's words as its tokens come. Transformers' own loses blanks that begin a line.

    Args:
        words: What makes them of tokens.
        write: Receives them.
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
    """A criterion that sees what was generated, and nothing of the prompt.

    Args:
        inner: The criterion.
        width: Tokens of the prompt, with its padding.
    """

    def __init__(self, inner: StoppingCriteria, width: int) -> None:
        self.inner, self.width = inner, width

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **more: object) -> torch.BoolTensor:
        """Which rows `[B, T]` end."""
        made: torch.BoolTensor = self.inner(input_ids[:, self.width :], scores, **more)
        return made


class Finite(LogitsProcessor):
    """Refuses logits from which no token can be chosen; of these, transformers takes the first, or raises."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` as they are."""
        if not finite(scores).all():
            none_left = bool((scores.amax(-1) == -math.inf).any())
            raise (
                SettingsError("the sampling settings exclude every token")
                if none_left
                else RequestError(NO_NUMBERS, "failed")
            )
        return scores


class Unpadded(LogitsProcessor):
    """A processor of logits that reads each row from where its text begins, without the padding before it.

    Args:
        process: What it does to one row.
        first: The column where each row's text begins.
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
    """Arguments of `generate` that check logits, and keep padding out of what depends on a row's tokens or length."""
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
        filler = ids[:, -1:] if size == 1 else -1  # a word that the prompt has, or one that no text has
        processors.append(EncoderNoRepeatNGramLogitsProcessor(size, ids.where(mask == 1, filler)))
        off["encoder_no_repeat_ngram_size"] = 0
    return {**off, "logits_processor": processors}
