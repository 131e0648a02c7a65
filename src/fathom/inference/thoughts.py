"""Separates the reasoning that a model marks at the beginning of an answer, as `<think>…</think>`, from the answer.

`server.py` decides which answers may have reasoning: chats, unless a grammar leaves no room for it (`Wanted.whole` in
`shape.py`). `answers.py` and `responses.py` return the reasoning, and report its tokens as `reasoning_tokens`. `api.py`
lets earlier messages of a chat hold it (`reasoning_content`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathom.inference.tools import may_begin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKS = ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")
"""The marks before and behind thoughts, by the models that are known."""
END = 8
"""Tokens at the end of a prompt in which its template may begin a thought."""

Marks = tuple[str, str]


def marks_of(tokenizer: PreTrainedTokenizerBase) -> Marks | None:
    """The marks around reasoning in a chat template, such as `<think>`; None if the template has none."""
    template = str(tokenizer.chat_template or "")
    return next((marks for marks in MARKS if marks[1] in template), None)


class Thoughts:
    """Separates an answer's reasoning from its text while the answer is generated.

    Args:
        marks: What stands before and behind thoughts.
        begun: Whether the prompt ends in a thought.
    """

    def __init__(self, marks: Marks, begun: bool = False) -> None:
        self.marks, self.inside = marks, begun
        self._waits, self._after = not begun, False  # for its beginning; behind a thought
        self._blank, self._rest = True, ""

    @classmethod
    def after(
        cls, marks: Marks, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], begun: str = ""
    ) -> Thoughts:
        """The parser for an answer to a prompt, whose template may open the reasoning; or for an answer that continues
        a message, whose text is `begun`."""
        if begun:
            return cls(marks, begun.rfind(marks[0]) > begun.rfind(marks[1]))
        return cls(marks, str(tokenizer.decode(prompt[-END:])).rstrip().endswith(marks[0]))

    def hear(self, new: str, last: bool = False) -> tuple[str, str]:
        """The reasoning and the text that a new piece of the answer adds."""
        self._rest += new
        if self._waits and not self._decided(last):
            return "", ""
        thought = self._thought(last) if self.inside else ""
        if self.inside:
            return thought, ""
        text, self._rest = self._rest, ""
        return thought, self._first(text) if self._after else text

    def _decided(self, last: bool) -> bool:
        """Whether the text so far decides if the answer begins with reasoning."""
        opening, begin = self.marks[0], self._rest.lstrip()
        if begin.startswith(opening):
            self.inside, self._rest = True, begin[len(opening) :]
        elif not last and opening.startswith(begin):
            return False
        self._waits = False
        return True

    def _thought(self, last: bool) -> str:
        """The text that certainly belongs to the reasoning; white space before the closing mark does not."""
        thought, found, behind = self._rest.partition(self.marks[1])
        if found:
            last_piece = self._first(thought.rstrip())
            self.inside, self._after, self._blank, self._rest = False, True, True, behind
            return last_piece
        held = "" if last else may_begin(thought, [self.marks[1]])
        sure = thought[: len(thought) - len(held)]
        kept = sure if last else sure.rstrip()
        self._rest = thought[len(kept) :]
        return self._first(kept)

    def _first(self, text: str) -> str:
        """A piece of the reasoning, or of the text after it, without blank lines at the beginning."""
        text = text.lstrip("\n") if self._blank else text
        self._blank = self._blank and not text
        return text
