"""Structured output: which tokens may come next, so that a text follows a JSON schema, a pattern or a grammar.

llguidance compiles the grammar and finds the tokens. A `Constraint` is a function of the tokens that were made, as a
`Choice` is: drafts that are not kept, and other texts of a batch, leave nothing behind in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fathom.errors import SettingsError, to_install
from fathom.inference.control import any_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

KEPT = 16
"""Grammars that stay compiled: an agent sends the same one with each request."""
WHITESPACE = r"[ \n\r\t]{0,64}"
"""Between the parts of JSON. A model that has lost its way would write blanks without end."""
ANY_OBJECT: Mapping[str, object] = {"type": "object"}


class Constraint:
    """The grammar of one text, and the parser's position in it.

    Args:
        matcher: llguidance's matcher in its initial state; it is modified.
        ends: Tokens that end a text.
        size: The model's number of token ids.
        never: Tokens that are never allowed.
    """

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], size: int, never: Sequence[int] = ()) -> None:
        self.ends, self.size, self._never, self._matcher = ends, size, list(never), matcher
        self._taken: list[int] = []  # the tokens that the matcher has consumed

    def allowed(self, made: Sequence[int]) -> Tensor:
        """Which tokens may follow these, `[V]`; all of them once the text is complete or the grammar has failed."""
        if self.complete(made) or self._matcher.is_error():
            return torch.ones(self.size, dtype=torch.bool)
        mask = self._matcher.compute_bitmask()  # a grammar that is too complex at this point becomes an error
        if self._matcher.is_error():
            return torch.ones(self.size, dtype=torch.bool)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self.size]
        bits[self._never] = 0
        return torch.from_numpy(bits).bool()

    def complete(self, made: Sequence[int]) -> bool:
        """Whether only the end can follow these tokens, or could before; the matcher advances over them."""
        taken, matcher = self._taken, self._matcher
        if list(made[: len(taken)]) != taken:
            pairs = zip(taken, made, strict=False)
            same = next((i for i, (ours, given) in enumerate(pairs) if ours != given), min(len(taken), len(made)))
            matcher.rollback(len(taken) - same)
            del taken[same:]
        for token in made[len(taken) :]:
            if matcher.is_stopped() or token in self.ends:
                return True
            if not matcher.consume_token(token):
                return False
            taken.append(token)
        return bool(matcher.is_stopped()) and not matcher.is_error()

    @property
    def fault(self) -> str | None:
        """Why the text cannot continue, if it reached the grammar's limits."""
        return f"structured output: {reason(self._matcher)}" if self._matcher.is_error() else None


class Grammars:
    """Compiles grammars for one model.

    Args:
        tokenizer: The model's tokenizer.
        size: The model's number of token ids.
        ends: Tokens that end a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, ends: frozenset[int]) -> None:
        self.tokenizer, self.size, self.ends = tokenizer, size, ends
        self.compile = lru_cache(KEPT)(self._compile)

    def _compile(self, grammar: str) -> LLMatcher:
        """A matcher to copy, from the output of `json_grammar` or others; an invalid grammar is a `SettingsError`."""
        made = _llguidance().LLMatcher(self.words, grammar, log_level=0)
        if not made.is_error():
            made.compute_bitmask()  # for the first token: a grammar that allows none
        if made.is_error():
            raise SettingsError(reason(made))
        return made

    def begin(self, matcher: LLMatcher) -> Constraint:
        """The constraint of another text for a compiled grammar."""
        guessed = [] if self.ends else self.words.eos_tokens  # llguidance's own, for a model without an end token
        return Constraint(matcher.deep_copy(), self.ends, self.size, guessed)

    def pieces(self, text: str) -> str:
        """A text in Lark's notation, in which a special token is written as its name."""
        names = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items()}
        names = {name: i for name, i in names.items() if name in text and self.words.is_special_token(i)}
        if not names:
            return json.dumps(text) if text else ""
        parts = re.split(f"({any_of(names).pattern})", text)
        return " ".join(f"<[{names[part]}]>" if part in names else json.dumps(part) for part in parts if part)

    @cached_property
    def words(self) -> LLTokenizer:
        """The vocabulary in llguidance's form; building it takes a second."""
        library = _llguidance()
        if not self.tokenizer.is_fast:
            raise SettingsError("structured output needs a fast tokenizer (tokenizer.json); this model has none")
        content = json.loads(self.tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
        size = max(self.size, len(self.tokenizer))
        return library.LLTokenizer(json.dumps(content), n_vocab=size, eos_token=sorted(self.ends) or None)


def with_options(schema: Mapping[str, Any], whitespace: str | None, **more: object) -> dict[str, Any]:
    """A JSON schema with llguidance's options; options in the schema itself are removed.

    Args:
        schema: A JSON schema.
        whitespace: A pattern for the text between tokens; None for no white space.
        more: Further options.
    """
    how: dict[str, object] = {"lenient": False, "coerce_one_of": False, **more}
    how |= {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
    return {**schema, "x-guidance": how}


def json_grammar(schema: Mapping[str, Any] | str, whitespace: str | None = WHITESPACE) -> str:
    """The grammar of JSON that follows a schema, an object or text; whitespace as `with_options` takes it."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(found, Mapping):
            raise SettingsError("a JSON schema is an object")
        return str(_llguidance().LLMatcher.grammar_from_json_schema(json.dumps(with_options(found, whitespace))))
    except (ValueError, RecursionError) as error:
        raise SettingsError(one_line(str(error))) from error


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that a pattern matches as a whole."""
    return str(_llguidance().LLMatcher.grammar_from_regex(pattern))


def choice_grammar(texts: Sequence[str]) -> str:
    """The grammar of a choice between texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(text) for text in texts))


def lark_grammar(text: str) -> str:
    """A grammar in Lark's notation, or in GBNF, which llama.cpp and vLLM's xgrammar read."""
    library = _llguidance()
    try:
        return str(library.grammar_from("grammar", text))
    except (ValueError, IndexError, RecursionError) as error:
        raise SettingsError(one_line(str(error))) from error


def reason(matcher: LLMatcher) -> str:
    """Why a matcher failed, without the state that llguidance appends."""
    said = one_line(matcher.get_error().partition("<state>")[0])
    return "no text follows this grammar" if said == "NoExtensionBias" else said


def one_line(message: str) -> str:
    """A message of several lines as one line."""
    return " ".join(message.split())[:300]


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise SettingsError(f"llguidance is not installed: {to_install('serve')}") from error
    return llguidance
