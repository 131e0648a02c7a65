"""Structured output: computes which tokens may come next, so that a text follows a JSON schema, a pattern or a grammar.

A `Constraint` is a function of the tokens that were made, as a `Choice` is: drafts that are not kept, and other texts
of a batch, leave nothing behind in it.

`api_structure.py` reads the fields of a request, such as `response_format` and `disable_any_whitespace`. `shape.py`
chooses the grammar, `grammar.py` writes it and lets the model tokenise forced text, and `grammar_trial.py` limits the
time and memory of compiling it; `FREE` and `EACH` here limit the time that a request may spend on finding the allowed
tokens. `engine.py` ends an answer whose grammar is too complex (`grammar_too_complex`).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fathom.errors import SettingsError
from fathom.inference.control import any_of
from fathom.inference.grammar import Vocabulary, matcher_of, reason
from fathom.inference.grammar_trial import GUESSED, QUICK, GrammarTrial, Tried, attempt, possible

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

KEPT = 1 << 26
"""Most bytes of grammars that stay compiled: an agent sends the same one with each request."""
FREE, EACH = 0.1, 0.005
"""Most processor time of a request's masks: seconds, and seconds for each mask."""


@dataclass(eq=False)
class Compiled:
    """A compiled grammar, which constrains generated texts."""

    matcher: LLMatcher
    """In its initial state."""
    first: Tensor
    """Which tokens may begin a text, `[V]`."""
    bytes: int
    failed: bool = False
    """Whether it grew too complex in a text."""


@dataclass
class MatcherClock:
    """The processor time that the grammar matchers of one request have used."""

    seconds: float = 0.0
    masks: int = 0
    _began: float = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.thread_time() - self._began

    @property
    def over(self) -> bool:
        """Whether the request has used up its time for grammars."""
        return self.seconds > FREE + EACH * self.masks


class Constraint:
    """The constraint of one text: its grammar, and the parser's position in it.

    Args:
        grammar: The grammar.
        ends: Tokens that end a text.
        clock: The time of the text's request.
        never: Tokens that are never allowed.
    """

    def __init__(self, grammar: Compiled, ends: frozenset[int], clock: MatcherClock, never: Sequence[int] = ()) -> None:
        self.grammar, self.ends, self.clock, self._never = grammar, ends, clock, never
        self._matcher, self._stuck = grammar.matcher.deep_copy(), False
        self._taken: list[int] = []  # the tokens that the matcher has consumed

    def allowed(self, made: Sequence[int]) -> Tensor:
        """Which tokens may follow these, as a mask `[V]`; all of them once the text is complete or the grammar has
        failed."""
        if not made:
            return self.grammar.first
        if self.complete(made) or self.fault is not None:
            return torch.ones_like(self.grammar.first)
        with self.clock:
            mask = self._matcher.compute_bitmask()  # a grammar that is too complex at this point becomes an error
        self.clock.masks += 1
        if self.fault is not None:
            return torch.ones_like(self.grammar.first)
        early = () if self._matcher.is_accepting() else self.ends
        allowed = unpacked(mask, len(self.grammar.first), [*self._never, *early])
        self._stuck = not bool(allowed.any())
        return torch.ones_like(allowed) if self._stuck else allowed

    def complete(self, made: Sequence[int]) -> bool:
        """Whether a text with these tokens is complete, i.e. only the end may follow, or could at an earlier token; the
        matcher advances over the tokens."""
        with self.clock:
            return self._advance(made)

    def _advance(self, made: Sequence[int]) -> bool:
        taken, matcher = self._taken, self._matcher
        if list(made[: len(taken)]) != taken:
            pairs = zip(taken, made, strict=False)
            same = next((i for i, (ours, given) in enumerate(pairs) if ours != given), min(len(taken), len(made)))
            matcher.rollback(len(taken) - same)
            del taken[same:]
            self._stuck = False
        for token in made[len(taken) :]:
            if matcher.is_accepting() and (matcher.is_stopped() or token in self.ends):
                return True
            if not matcher.consume_token(token):
                return False
            taken.append(token)
        return bool(matcher.is_stopped()) and bool(matcher.is_accepting()) and not matcher.is_error()

    @property
    def fault(self) -> str | None:
        """The reason why the text cannot continue, if it reached a limit of the grammar; else None."""
        why = reason(self._matcher) if self._matcher.is_error() else None
        if self.clock.over:
            why = "following this grammar takes too much time"
        if self._stuck:
            why = "this grammar needs a token that ends texts"
        self.grammar.failed = self.grammar.failed or why is not None
        return None if why is None else f"structured output: {why}"


class Grammars:
    """Compiles grammars for one model.

    Args:
        tokenizer: The model's tokenizer.
        size: The model's number of token ids.
        ends: Tokens that end a text.
        apart: Whether a grammar is first tried in a process of its own, where its time and memory are limited.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, size: int, ends: frozenset[int], apart: bool = False
    ) -> None:
        self.tokenizer, self.size, self.ends, self.apart = tokenizer, size, ends, apart and possible()
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def kept(self, grammar: str) -> Compiled | None:
        """A grammar that was compiled before; None if it was not."""
        with self._lock:
            for old in [text for text, one in self._kept.items() if one.failed]:
                del self._kept[old]
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def compile(self, grammar: str, parts: Sequence[str] = (), quick: bool = False) -> Compiled:
        """Compile a grammar; an invalid or too complex grammar is a `GrammarError`, which names the part of the grammar
        that is to blame, if one is. With `quick`, one that takes long is a `LateError`."""
        if (before := self.kept(grammar)) is not None:
            return before
        words = self.words
        tried = self._tried(grammar, parts, quick) if self.apart else self._attempted(grammar, parts)
        matcher, mask = matcher_of(words, tried.grammar)
        first = unpacked(mask, self.size, [*self._never, *(() if matcher.is_accepting() else self.ends)])
        if not bool(first.any()):
            raise SettingsError("no text follows this grammar")
        made = Compiled(matcher, first, tried.bytes)
        with self._lock:
            self._kept[grammar] = made
            while sum(one.bytes for one in self._kept.values()) > KEPT:
                self._kept.popitem(last=False)
        return made

    def begin(self, grammar: Compiled, clock: MatcherClock | None = None) -> Constraint:
        """A new constraint for one text under a compiled grammar; the texts of a request share a clock."""
        return Constraint(grammar, self.ends, clock or MatcherClock(), self._never)

    @property
    def _never(self) -> list[int]:
        """Tokens that are never allowed: for a model without an end token, those that llguidance takes for the end."""
        return [] if self.ends else self.words.eos_tokens

    def pieces(self, text: str) -> str:
        """A text in Lark's notation, in which special tokens are written by their ids."""
        names = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items()}
        names = {name: i for name, i in names.items() if name in text and self.words.is_special_token(i)}
        if not names:
            return json.dumps(text) if text else ""
        parts = re.split(f"({any_of(names).pattern})", text)
        return " ".join(f"<[{names[part]}]>" if part in names else json.dumps(part) for part in parts if part)

    @cached_property
    def words(self) -> LLTokenizer:
        """The vocabulary in llguidance's form; building it takes a second."""
        return self._vocabulary.words()

    def _tried(self, grammar: str, parts: Sequence[str], quick: bool) -> Tried:
        """Compile a grammar in a helper process; grammars that take long have a second process, started when it is
        needed."""
        return self._trial.run(grammar, parts, QUICK) if quick else self._long_trial.run(grammar, parts)

    @cached_property
    def _trial(self) -> GrammarTrial:
        return GrammarTrial(self._vocabulary)

    @cached_property
    def _long_trial(self) -> GrammarTrial:
        return GrammarTrial(self._vocabulary)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        if not self.tokenizer.is_fast:
            raise SettingsError("structured output needs a fast tokenizer (tokenizer.json); this model has none")
        content = json.loads(self.tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
        return Vocabulary(json.dumps(content), max(self.size, len(self.tokenizer)), sorted(self.ends))

    def _attempted(self, grammar: str, parts: Sequence[str]) -> Tried:
        text = attempt(self.words, grammar, parts)
        return Tried(text, GUESSED * len(text))


def unpacked(mask: bytes, size: int, never: Iterable[int] = ()) -> Tensor:
    """llguidance's bit mask of allowed tokens as a boolean tensor `[V]`, without the tokens that are never allowed."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:size]
    bits[list(never)] = 0
    return torch.from_numpy(bits).bool()
