"""Turns tokens into text while they are generated: whole characters, up to a stop string, with or without the
prompt.

`server.py` and `generate.py` decide what a text continues: a completion continues its prompt, so its leading space is
kept. `thoughts.py` separates reasoning from the text, and `tools.py` separates calls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

from fathom.inference.engine import Scored
from fathom.inference.thoughts import Thoughts
from fathom.inference.tools import CallReader, may_begin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = "\ufffd"
"""Where bytes are no whole character."""
BYTES = 4
"""Most bytes of a character."""
BEHIND = 16
"""Most tokens of a prompt that are looked at for one that has a text."""


def before_stop(text: str, stops: Sequence[str], old: int = 0) -> tuple[str, str | None]:
    """The text before any stop string, and the rest, which may be the beginning of a stop string; the rest is None once
    a stop string was found.

    Args:
        text: What was not sent yet.
        stops: The stop strings, sorted.
        old: The number of its first characters in which no stop string may end.
    """
    found = [at for stop in stops if (at := text.find(stop, max(0, old + 1 - len(stop)))) >= 0]
    if found:
        return text[: min(found)], None
    held = may_begin(text, stops)
    return text[: len(text) - len(held)], held


class AnswerWords:
    """Turns tokens into text, whole characters at a time.

    Each token is decoded behind those of the last words alone. Where bytes make no character, these are many: then the
    first, which say that their run is none, and the last stand for all of them.

    Args:
        tokenizer: The model's.
        special: Whether special tokens are part of the text.
        after: Tokens of a text that the new tokens continue; a decoder may drop a space at the beginning of a text.
        mute: Tokens that are no part of the text, though others like them are.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        special: bool = False,
        after: Sequence[int] = (),
        mute: Collection[int] = (),
    ) -> None:
        self.tokenizer, self.hidden, self.mute = tokenizer, not special, mute
        self.ids: list[int] = []
        tails = (list(after[-n:]) for n in range(1, min(len(after), BEHIND) + 1))
        end = next((tail for tail in tails if self._decoded(tail)), [])
        self._window = [] if self._decoded(end).endswith(UNKNOWN) else end
        self._text = self._decoded(self._window)
        self._said = len(self._text)  # text returned so far, in characters
        self._told = len(self._window)  # tokens whose text was returned already

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that new tokens add; empty while a character may be incomplete, unless these are the last tokens."""
        self.ids += tokens
        new = "".join(self._heard(token) for token in tokens if token not in self.mute)
        if last:
            new, self._said = new + self._text[self._said :], max(self._said, len(self._text))
        return new

    def _heard(self, token: int) -> str:
        now = self._decoded([*self._window, token])
        if now == self._text and self._silent(token):
            return ""
        self._window.append(token)
        self._text = now
        if now.endswith(UNKNOWN) and not self._piece(token).endswith(UNKNOWN):
            return self._settled() if len(self._window) - self._told > 2 * BYTES else ""
        if len(now) <= self._said:
            return ""
        new, self._window = now[self._said :], self._window[self._told :]
        self._told, self._text = len(self._window), self._decoded(self._window)
        self._said = len(self._text)
        return new

    def _settled(self) -> str:
        """The part of the text of invalid bytes that no further byte can change; the window of undecided bytes is cut
        accordingly."""
        first = self._decoded(self._window[:-BYTES])
        settled = next(first[:n] for n in range(len(first), -1, -1) if self._text.startswith(first[:n]))
        new, rest = settled[self._said :], len(self._text) - max(self._said, len(settled))
        self._window = self._window[self._told :][:BYTES] + self._window[-2 * BYTES :]
        self._told, self._text = 0, self._decoded(self._window)
        self._said = len(self._text) - rest
        return new

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=self.hidden))

    def _piece(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token) or "")

    def _silent(self, token: int) -> bool:
        """Whether a token never has text: it is hidden, or unknown to the tokenizer."""
        return not self._piece(token) or bool(self.unsaid(token))

    def unsaid(self, token: int) -> str:
        """The text of a special token that is not part of the answer; empty for any other token."""
        return "" if self._decoded([token]) else str(self.tokenizer.decode([token]))


@dataclass
class Text:
    """One text."""

    words: AnswerWords
    stops: Sequence[str]
    """Strings that end it, sorted."""
    echo: str = ""
    """The prompt, if the text begins with it, until it was sent."""
    min_tokens: int = 0
    """Minimum tokens before a stop string may end it."""
    said: str = ""
    tokens: int = 0
    trips: tuple[int, int] = (0, 0)
    """Tokens whose loop iterations are known, and the sum of these."""
    made: list[Scored] = field(default_factory=list)
    """Tokens that were not sent yet."""
    finish: str | None = None
    """Why it ended."""
    reader: CallReader | None = None
    """Separates the text from tool calls, if calls are allowed."""
    thoughts: Thoughts | None = None
    """Separates the text from thoughts, if the model marks them."""
    thought: str = ""
    """The model's reasoning."""
    new_thought: str = ""
    """The part of the reasoning that was not sent yet."""
    thinking: int = 0
    """Tokens of the thought."""
    scores: list[tuple[Scored, int]] = field(default_factory=list)
    """Scores that were not sent yet, each with the position in the text where its token begins."""
    _held: str = ""
    """A possible beginning of a stop string, including special tokens."""
    _shown: Sequence[bool] = ()
    """Which of these characters belong to the answer."""
    _length: int = 0

    def hear(self, event: Scored | list[Scored] | str) -> str:
        """The text that can be sent after an event of the engine; `finish` says whether it was the last."""
        new, self.echo = self.echo, ""
        self.said += new
        if isinstance(event, list):
            self._score_prompt(event)
        if new:
            self._length = len(new)
        if isinstance(event, Scored):
            self.tokens += 1
            if event.trips is not None:
                self.trips = self.trips[0] + 1, self.trips[1] + event.trips
            self.made.append(event)
            if event.logprob is not None:
                self.scores.append((event, self._length))
            word = self.words.add([event.token])
            unsaid = "" if word or not self.stops else self.words.unsaid(event.token)
            if unsaid:
                word = self.words.add([], last=True)  # bytes before a character do not belong to it
            new += self._tell(word, unsaid)
        elif isinstance(event, str):
            new += self._tell(self.words.add([], last=True))
            if self.finish is None:
                self.finish = event
                new += self._say("".join(compress(self._held, self._shown)))
        return new

    def _score_prompt(self, scores: Sequence[Scored]) -> None:
        tokens = [one.token for one in scores]
        places = read_places(self.words.tokenizer, self.said, tokens)
        if places is None:
            places = written_places(self.words.tokenizer, self.said, tokens)
        self.scores += zip(scores, places, strict=True)

    def _tell(self, new: str, unsaid: str = "") -> str:
        """Add new text up to a stop string; stop strings are searched for in the text with its special tokens, as in
        transformers."""
        self._length += len(new)
        shown = [*self._shown, *[True] * len(new), *[False] * len(unsaid)]
        whole = self._held + new + unsaid
        old = len(whole if self.tokens < self.min_tokens else self._held)
        text, held = before_stop(whole, self.stops, old)
        new = "".join(compress(text, shown))
        self._held, self._shown = held or "", shown[len(text) :]
        if held is None:
            self.finish = "stop"
        return self._say(new)

    def _say(self, new: str) -> str:
        """Append to the text, or to the reasoning before it; returns the part that belongs to the text."""
        if self.thoughts is not None:
            thought, new = self.thoughts.hear(new, last=self.finish is not None)
            self.thought, self.new_thought = self.thought + thought, self.new_thought + thought
            self.thinking = self.tokens if self.thoughts.inside else self.thinking
        self.said += new
        return new


def read_places(tokenizer: PreTrainedTokenizerBase, text: str, tokens: Sequence[int]) -> list[int] | None:
    """The position at which each token begins in the text that was tokenized; None if the tokenizer gives other tokens
    for the text, or no positions.

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
    """The position at which each token begins in a text that was decoded from the tokens, or encoded without offsets.

    A special token has a position if the text contains it, and none if the tokenizer added it.
    """
    inside, special, places, end = AnswerWords(tokenizer, special=True), set(tokenizer.all_special_ids), [], 0
    for token in tokens:
        places.append(end)
        if token not in special or text.startswith(str(tokenizer.decode([token])), end):
            end += len(inside.add([token]))
    return places
