"""The constraints that a request puts on its answers: a grammar for the engine, and a parser of tool calls in the
text.

`api_structure.py` reads the fields, `tools.py` detects how a chat template writes calls, `structure.py` follows a
grammar, and `grammar_trial.py` limits its compilation. `server.py` expects no reasoning where the grammar has no room
for it (`Wanted.whole`): if the text itself is constrained, or if a tool must be called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fathom.errors import SettingsError
from fathom.inference.api import HALF, ChatBody, CompletionBody, wrong
from fathom.inference.api_structure import NamedTool
from fathom.inference.control import special_names
from fathom.inference.grammar import json_grammar, lark_grammar
from fathom.inference.grammar_trial import GrammarError, LateError
from fathom.inference.structure import Compiled, Constraint, Grammars, MatcherClock
from fathom.inference.tools import CallReader, Notation, notation, schema_of, tool_grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Wanted:
    """The grammar of a request, not compiled yet."""

    name: str
    """The request field that it comes from."""
    grammar: str
    parts: Mapping[str, str] = field(default_factory=dict)
    """The fields whose own grammar is a part of it, by name, so that an error names its field."""
    how: Notation | None = None
    """How calls are written, if calls are allowed."""
    tools: Sequence[str] = ()
    """Names of the tools."""
    whole: bool = True
    """Whether the grammar leaves no room for a thought before the answer."""


@dataclass(frozen=True)
class Shape:
    """The constraints on the texts of one request."""

    grammars: Grammars
    wanted: Wanted
    grammar: Compiled
    clock: MatcherClock = field(default_factory=MatcherClock)

    @property
    def special(self) -> bool:
        """Whether special tokens mark tool calls, so that the text must keep special tokens."""
        how = self.wanted.how
        marks = "" if how is None else how.before + how.after
        return any(name in marks for name in special_names(self.grammars.tokenizer))

    @property
    def whole(self) -> bool:
        """See `Wanted.whole`."""
        return self.wanted.whole

    def constraint(self) -> Constraint:
        """The constraint of one text."""
        return self.grammars.begin(self.grammar, self.clock)

    def reader(self) -> CallReader | None:
        """A parser of tool calls for one text; None if the request offers no tools."""
        return None if self.wanted.how is None else CallReader(self.wanted.how, self.wanted.tools)


class Shapes:
    """Builds the constraints on answers (grammars and tool calls) for one model.

    Args:
        tokenizer: The model's tokenizer.
        size: The model's number of token ids.
        ends: Tokens that end a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, ends: frozenset[int]) -> None:
        self.tokenizer, self.grammars = tokenizer, Grammars(tokenizer, size, ends, apart=True)

    @cached_property
    def notation(self) -> Notation:
        """The notation in which the chat template writes tool calls."""
        return notation(self.tokenizer)

    def prepare(self) -> None:
        """Load the vocabulary in advance: at the first grammar it would delay all clients of a server by a second."""
        with contextlib.suppress(SettingsError):  # said to those who ask for a grammar
            _ = self.grammars.words

    def wanted(self, body: CompletionBody | ChatBody) -> Wanted | None:
        """The grammar of a request; None if any text is allowed. An unsupported value is an `ApiError` that names the
        field."""
        name = "structured_outputs" if body.structured_outputs is not None else "response_format"
        try:
            if isinstance(body, ChatBody) and body.callable_tools:
                name = "tools"
                return self._with_tools(body)
            if body.structured_outputs is not None:
                grammar = body.structured_outputs.grammar_text()
                grammar.encode()
                return Wanted(name, grammar)
            schema = None if body.response_format is None else body.response_format.wanted
            return None if schema is None else Wanted(name, json_grammar(schema))
        except SettingsError as error:
            raise wrong(name, str(error)) from error
        except UnicodeError as error:
            raise wrong(name, HALF) from error

    def ready(self, wanted: Wanted) -> Shape | None:
        """The constraints of a request if its grammar is compiled already, else None."""
        kept = self.grammars.kept(wanted.grammar)
        return None if kept is None else Shape(self.grammars, wanted, kept)

    def compiled(self, wanted: Wanted, quick: bool = False) -> Shape:
        """The constraints of a request, with the grammar compiled; a grammar that is invalid or too complex is an
        `ApiError`. With `quick`, one that takes long is a `LateError`."""
        try:
            parts = list(wanted.parts.values())
            return Shape(self.grammars, wanted, self.grammars.compile(wanted.grammar, parts, quick))
        except SettingsError as error:
            if quick and isinstance(error, LateError):
                raise
            part = error.part if isinstance(error, GrammarError) else None
            raise wrong(wanted.name if part is None else list(wanted.parts)[part], str(error)) from error

    def _with_tools(self, body: ChatBody) -> Wanted:
        schema = None if body.response_format is None else body.response_format.wanted
        tools = [tool.model_dump(exclude_none=True) for tool in body.callable_tools]
        named = isinstance(body.tool_choice, NamedTool)
        required, several = body.must_call, body.parallel_tool_calls and not named
        whole = tool_grammar(tools, self.notation, self.grammars.pieces, required, several, schema)
        parts = {f"tools.{i}.function.parameters": json_grammar(schema_of(tool)) for i, tool in enumerate(tools)}
        if schema is not None:
            parts["response_format"] = json_grammar(schema)
        names = [tool["function"]["name"] for tool in tools]
        return Wanted("tools", lark_grammar(whole), parts, self.notation, names, required or schema is not None)
