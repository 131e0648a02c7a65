"""Additions to transformers' `generate`: checks of logits, stop strings, and streamed words.

In a file of prompts, one without finite logits gets an `error` (`generate_each` in `generate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from fathom.errors import RequestError, SettingsError
from fathom.inference.sampling import NO_NUMBERS, finite
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
        """Receive new tokens; the first call brings the prompt, which is not written."""
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
        drafts: Whether a step may add several tokens to the one sequence, which may then end before its last token.
    """

    def __init__(self, inner: StoppingCriteria, width: int, drafts: bool = False) -> None:
        self.inner, self.width, self.drafts = inner, width, drafts
        self.end: int | None = None
        """With `drafts`: the number of generated tokens after which the sequence ends."""
        self._lengths = (
            width,
            width,
        )  # of the last two calls; one may be for a draft that is not accepted yet

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **more: object) -> torch.BoolTensor:
        """Which sequences `[B, T]` end."""
        length = input_ids.shape[1]
        first = min(length, 1 + min(self._lengths)) if self.drafts else length
        self._lengths, self.end = (self._lengths[1], length), None
        for end in range(first, length + 1):
            made: torch.BoolTensor = self.inner(input_ids[:, self.width : end], scores, **more)
            if self.drafts and made.all():
                self.end = end - self.width
                break
        return made


class Finite(LogitsProcessor):
    """Raises an error for logits without a finite maximum, for which transformers would take the first token or
    raise."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Check the scores `[B, V]` and return them unchanged."""
        if not finite(scores).all():
            none_left = bool((scores.amax(-1) == -math.inf).any())
            raise (
                SettingsError("the sampling settings exclude every token")
                if none_left
                else RequestError(NO_NUMBERS, "failed")
            )
        return scores
