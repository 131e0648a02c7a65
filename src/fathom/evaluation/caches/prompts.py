"""Prompts of an exact length, so that the question comes just before or just after the last compression.

    outside   [ text … | question, lead ] answer        the compression never sees the question
    inside    [ text …, question, lead | ] answer       the question is in the memory that is compressed

The bar is the last compression. All caches of a comparison read the same prompts. `asking.py` decides how many
questions each place gets.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom.errors import SettingsError
from fathom.kvcache.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACES = ("outside", "inside")
"""Where a question is, seen from the last compression."""
MARK = "\u2402fathom\u2403"


@dataclass(frozen=True)
class Cell:
    """A cell of the result tables: a task, a number of compressions, and whether the last compression reads the
    question (inside) or comes before it (outside)."""

    task: str
    place: str
    compressions: int
    """Compressions before the answer."""


@dataclass(frozen=True)
class Parts:
    """The parts of a task's prompt."""

    before: str
    filler: Iterator[str]
    """Filler without end; as many sentences are used as fit."""
    planted: Sequence[str]
    """Sentences to be planted in the filler, in this order."""
    question: str
    lead: str
    """The beginning of the answer, which the model is given."""
    answers: tuple[str, ...]
    most: int = 0
    """Tokens to generate, in which every answer must appear; at 0 the one answer is scored token by token."""


@dataclass(frozen=True)
class Prompt:
    """The prompt of one question, which is the same for every cache."""

    cell: Cell
    ids: Tensor  # [T]
    answers: tuple[str, ...]
    wanted: Tensor  # [n], the answer's tokens, where it is scored token by token
    most: int
    age: int
    """Tokens that were read after the end of the oldest planted sentence that holds an answer."""


@dataclass
class Frame:
    """A tokenizer, and the text that its chat template puts before and after a message; without a template, BOS and an
    empty line."""

    tokenizer: PreTrainedTokenizerBase
    prefix: str = field(init=False)
    suffix: str = field(init=False)

    def __post_init__(self) -> None:
        self.prefix, self.suffix = self.tokenizer.bos_token or "", "\n\n"
        if self.tokenizer.chat_template:
            message = [{"role": "user", "content": MARK}]
            shown = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            self.prefix, _, self.suffix = str(shown).partition(MARK)

    def ids(self, text: str) -> list[int]:
        """The token ids of a part of a prompt, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def answer(self, lead: str, answer: str) -> list[int]:
        """The tokens of an answer that follow its lead, the beginning that the prompt gives away."""
        start, whole = self.ids(lead), self.ids(f"{lead} {answer}")
        return whole[len(start) :] if whole[: len(start)] == start else self.ids(f" {answer}")

    def length(self, cell: Cell, schedule: Schedule, tail: int) -> int:
        """The number of tokens of a prompt whose question and lead have `tail` tokens."""
        last = schedule.window + (cell.compressions - 1) * schedule.freed  # the token that compresses for the last time
        return last + (tail if cell.place == "outside" else 1)

    def room(self, cell: Cell, schedule: Schedule, parts: Parts) -> int:
        """The number of tokens that a prompt has for filler and planted sentences."""
        head, tail = self._around(parts)
        return self.length(cell, schedule, len(tail)) - len(head) - len(tail)

    def _around(self, parts: Parts) -> tuple[list[int], list[int]]:
        before, after = f"{self.prefix}{parts.before}\n\n", f"\n\n{parts.question}{self.suffix}{parts.lead}"
        return self.ids(before), self.ids(after)

    def build(self, cell: Cell, schedule: Schedule, parts: Parts, draw: random.Random) -> Prompt:
        """Build a prompt of exactly the length that its place of the question and its number of compressions need."""
        head, tail = self._around(parts)
        wanted = [] if parts.most else self.answer(parts.lead, parts.answers[0])
        planted = [self.ids(f" {sentence}") for sentence in parts.planted]
        room = self.room(cell, schedule, parts) - sum(map(len, planted))
        answer = max(len(wanted), parts.most)
        if room < 0 or (cell.place == "outside" and len(tail) > schedule.freed):
            raise SettingsError(
                f"{cell.task}: the question needs {len(head) + len(tail) + sum(map(len, planted))} tokens, "
                f"{len(tail)} of them after the text; a prompt has {self.length(cell, schedule, len(tail))} before an "
                f"answer of {answer}, and at most {schedule.freed} after its last compression: give a larger window"
            )
        units: list[list[int]] = []
        while sum(map(len, units)) < room:
            units.append(self.ids(f" {next(parts.filler)}"))
        excess = sum(map(len, units)) - room
        if excess:
            units[-1] = units[-1][: len(units[-1]) - excess]
        places = sorted(draw.randrange(len(units) + 1) for _ in planted)
        ids, oldest = list(head), None
        for i in range(len(units) + 1):
            for place, sentence, words in zip(places, planted, parts.planted, strict=True):
                if place == i:
                    ids += sentence
                    if oldest is None and any(answer in words for answer in parts.answers):
                        oldest = len(ids)
            ids += units[i] if i < len(units) else []
        ids += tail
        age = len(ids) - (len(ids) if oldest is None else oldest)
        return Prompt(cell, torch.tensor(ids), parts.answers, torch.tensor(wanted), parts.most, age)
