"""Request fields that constrain an answer: JSON schemas, patterns, grammars and tools.

`shape.py` chooses the grammar of a request, and names the field of one that is refused. `grammar.py` writes grammars,
and `tools.py` those of calls. `structure.py` computes which tokens may come next. `api.py` decides what `tool_choice`
allows (`ChatBody`), and `api_responses.py` refuses OpenAI's own tools in a request of the Responses API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fathom.inference.grammar import ANY_OBJECT, WHITESPACE, choice_grammar, json_grammar, regex_grammar


class Strict(BaseModel):
    """A request object that rejects unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        """The request object without null fields and with at most one unknown field, because each unknown field would
        be reported as an error."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        said = {key: given[key] for key in known if given.get(key) is not None}
        other = next((key for key, value in given.items() if value is not None and key not in known), None)
        return said if other is None else {**said, other: given[other]}


class _NamedSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Strict):
    """OpenAI's format for JSON answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @property
    def wanted(self) -> Mapping[str, object] | None:
        """The JSON schema of the answer; None if any text is allowed."""
        if self.type == "text":
            return None
        return ANY_OBJECT if self.json_schema is None else self.json_schema.schema_

    @model_validator(mode="after")
    def _with_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("json_schema", "type json_schema goes with a json_schema that holds a schema")
        return self


class StructuredOutputs(Strict):
    """vLLM's format for constrained answers: exactly one of JSON, a pattern, a list of texts or a grammar."""

    json_: dict[str, object] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        kinds = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(kind is not None for kind in kinds) != 1:
            raise PydanticCustomError("one", "use exactly one of json, json_object, regex, choice and grammar")
        return self

    def grammar_text(self) -> str:
        """The requested constraint as a grammar for `grammar.py`; GBNF is converted when the grammar is compiled."""
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.grammar is not None:
            return self.grammar
        between = WHITESPACE if self.whitespace_pattern is None else self.whitespace_pattern or None
        between = None if self.disable_any_whitespace else between
        return json_grammar(ANY_OBJECT if self.json_ is None else self.json_, between)


class _Function(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, object] | None = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, given: dict[str, object] | None) -> dict[str, object] | None:
        if given is not None and given.get("type", "object") != "object":
            raise PydanticCustomError("parameters", "a JSON schema of an object")
        return given


class Tool(BaseModel):
    """A tool that an answer may call; further fields that the client sends are ignored."""

    model_config = ConfigDict(strict=True)
    type: Literal["function"]
    function: _Function


class _Chosen(BaseModel):
    name: str


class NamedTool(BaseModel):
    """`tool_choice`: the tool to call."""

    type: Literal["function"]
    function: _Chosen


class _Allowed(BaseModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(BaseModel):
    """`tool_choice`: some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed
