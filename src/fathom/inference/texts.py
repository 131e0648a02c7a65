"""A text as its tokens come: whole characters, up to a stop string; behind its prompt if that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

from fathom.inference.engine import Scored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = "\ufffd"
"""Where bytes are no whole character."""


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before any stop string, and the rest, which may be the beginning of one; None once one was found."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)], None
    # From the longest on, which is most often right where there are long ones: a client writes the stops.
    ends = (text[-n:] for n in range(min(len(text), max(map(len, stops), default=0)), 0, -1))
    held = next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")
    return text[: len(text) - len(held)], held


class AnswerWords:
    """Tokens to text, whole characters at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: bool = False) -> None:
        self.tokenizer, self.hidden = tokenizer, not special
        self.ids: list[int] = []
        self._from, self._told = 0, 0  # start of the tokens to decode, and of those whose text was not returned yet

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that tokens add; empty while a character may be incomplete, unless they are the last."""
        self.ids += tokens
        parts = self.ids[self._from : self._told], self.ids[self._from :]
        before, now = (str(self.tokenizer.decode(ids, skip_special_tokens=self.hidden)) for ids in parts)
        if len(now) <= len(before) or (now.endswith(UNKNOWN) and not last):
            return ""
        self._from, self._told = self._told, len(self.ids)
        return now[len(before) :]

    def unsaid(self, token: int) -> str:
        """The text of a special token that is not part of the answer's; empty for any other token."""
        shown = self.tokenizer.decode([token], skip_special_tokens=self.hidden)
        return "" if shown else str(self.tokenizer.decode([token]))


@dataclass
class Text:
    """One text."""

    words: AnswerWords
    stops: Sequence[str]
    echo: str = ""
    """The prompt, if the text is to begin with it, until it does."""
    said: str = ""
    tokens: int = 0
    finish: str | None = None
    """Why it ended."""
    scores: list[tuple[Scored, int]] = field(default_factory=list)
    """Scores that were not sent yet, each with the position in the text where its token begins."""
    _held: str = ""
    """What may be the beginning of a stop string, with the special tokens in it."""
    _shown: Sequence[bool] = ()
    """Which characters of that are the answer's."""
    _length: int = 0

    def hear(self, event: Scored | list[Scored] | str) -> str:
        """The text that can be sent after an event of the engine; `finish` says whether that was the end."""
        new, self.echo = self.echo, ""
        self.said += new
        if isinstance(event, list):
            self._score_prompt(event)
        if new:
            self._length = len(new)
        if isinstance(event, Scored):
            self.tokens += 1
            if event.logprob is not None:
                self.scores.append((event, self._length))
            word = self.words.add([event.token])
            new += self._tell(word, "" if word or not self.stops else self.words.unsaid(event.token))
        elif isinstance(event, str):
            new += self._tell(self.words.add([], last=True))
            if self.finish is None:
                self.finish = event
                rest = "".join(compress(self._held, self._shown))
                self.said += rest
                new += rest
        return new

    def _score_prompt(self, scores: Sequence[Scored]) -> None:
        tokens = [one.token for one in scores]
        places = read_places(self.words.tokenizer, self.said, tokens)
        if places is None:
            places = written_places(self.words.tokenizer, self.said, tokens)
        self.scores += zip(scores, places, strict=True)

    def _tell(self, new: str, unsaid: str = "") -> str:
        """Stop strings are looked for in the text with its special tokens, as transformers does."""
        self._length += len(new)
        shown = [*self._shown, *[False] * len(unsaid), *[True] * len(new)]
        text, held = before_stop(self._held + unsaid + new, self.stops)
        new = "".join(compress(text, shown))
        self._held, self._shown = held or "", shown[len(text) :]
        if held is None:
            self.finish = "stop"
        self.said += new
        return new


def read_places(tokenizer: PreTrainedTokenizerBase, text: str, tokens: Sequence[int]) -> list[int] | None:
    """Where each token begins in the text that a tokenizer read them from; None if it reads others, or cannot tell.

    A token begins where the one before ends, at blanks that it may have stripped, or within the character that both
    share. One that the tokenizer added has no text of its own; a blank that begins the text has, though offsets that
    leave out blanks (`trim_offsets`) say that it ends where it begins.
    """
    if not tokenizer.is_fast:
        return None
    found = tokenizer(text, return_offsets_mapping=True, verbose=False)  # too long a prompt is reported elsewhere
    if found["input_ids"] != list(tokens):
        return None
    places, end = [], 0
    for token, (first, last) in zip(tokens, found["offset_mapping"], strict=True):
        places.append(min(first, end) if last > first else end)
        if first == last == end and text.startswith(" ", end) and tokenizer.decode([token]) == " ":
            end += 1
        end = max(end, last)
    return places


def written_places(tokenizer: PreTrainedTokenizerBase, text: str, tokens: Sequence[int]) -> list[int]:
    """Where each token begins in a text that was decoded from them, or that a tokenizer read without saying where.

    A special token has a place where the text has its own, and none where the tokenizer added it.
    """
    inside, special, places, end = AnswerWords(tokenizer, special=True), set(tokenizer.all_special_ids), [], 0
    for token in tokens:
        places.append(end)
        if token not in special or text.startswith(str(tokenizer.decode([token])), end):
            end += len(inside.add([token]))
    return places
