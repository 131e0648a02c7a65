"""The constraints of a request on its answers: a grammar for the engine, and a parser of tool calls in the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from fathom.errors import SettingsError
from fathom.inference.api import ApiError, ChatBody, CompletionBody, wrong
from fathom.inference.api_structure import NamedTool
from fathom.inference.control import special_names
from fathom.inference.structure import Constraint, Grammars, json_grammar, lark_grammar
from fathom.inference.tools import CallReader, Notation, notation, schema_of, tool_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Shape:
    """The constraints on the texts of one request."""

    grammars: Grammars
    matcher: LLMatcher
    how: Notation | None = None
    """How calls are written, if calls are allowed."""
    names: Sequence[str] = ()
    """Names of the tools."""

    @property
    def special(self) -> bool:
        """Whether special tokens mark calls; texts omit special tokens otherwise."""
        marks = "" if self.how is None else self.how.before + self.how.after
        return any(name in marks for name in special_names(self.grammars.tokenizer))

    def constraint(self) -> Constraint:
        """The constraint of one text."""
        return self.grammars.begin(self.matcher)

    def reader(self) -> CallReader | None:
        """The parser of one text that may call tools."""
        return None if self.how is None else CallReader(self.how, self.names)


class Shapes:
    """Builds the constraints for one model.

    Args:
        tokenizer: The model's tokenizer.
        size: The model's number of token ids.
        ends: Tokens that end a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, ends: frozenset[int]) -> None:
        self.tokenizer, self.grammars = tokenizer, Grammars(tokenizer, size, ends)

    @cached_property
    def notation(self) -> Notation:
        """How the chat template writes tool calls."""
        return notation(self.tokenizer)

    def of(self, body: CompletionBody | ChatBody) -> Shape | None:
        """The constraints of a request; None if any text is allowed. An unsupported value is an `ApiError` that names
        the field."""
        schema = None if body.response_format is None else body.response_format.wanted
        shape = None if schema is None else self._compiled("response_format", partial(json_grammar, schema))
        if body.structured_outputs is not None:
            shape = self._compiled("structured_outputs", body.structured_outputs.grammar_text)
        if isinstance(body, ChatBody) and body.callable_tools:
            return self._with_tools(body, schema)
        return shape

    def _compiled(self, field: str, grammar: Callable[[], str]) -> Shape:
        try:
            return Shape(self.grammars, self.grammars.compile(grammar()))
        except SettingsError as error:
            raise wrong(field, str(error)) from error

    def _with_tools(self, body: ChatBody, schema: Mapping[str, Any] | None) -> Shape:
        tools = [tool.model_dump(exclude_none=True) for tool in body.callable_tools]
        named = isinstance(body.tool_choice, NamedTool)
        required, several = named or body.tool_choice == "required", body.parallel_tool_calls and not named

        def grammar() -> str:
            how, pieces = self.notation, self.grammars.pieces
            return lark_grammar(tool_grammar(tools, how, pieces, required, several, schema))

        try:
            shape = self._compiled("tools", grammar)
        except ApiError:
            for i, tool in enumerate(tools):  # so that an error names its tool
                self._compiled(f"tools.{i}.function.parameters", partial(json_grammar, schema_of(tool)))
            raise
        return replace(shape, how=self.notation, names=[tool["function"]["name"] for tool in tools])
