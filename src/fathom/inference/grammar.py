"""Grammars of structured output: their text, in llguidance's Lark notation, and their compilation under limits.

No grammar forces a canonical tokenisation. llguidance would then tokenise forced text by itself, so `<|im_end|>` in an
enum would become the token that ends texts, and a pattern that forces a million letters would be parsed at once.

`structure.py` computes from a grammar which tokens may come next. `grammar_trial.py` limits the time and memory of
compiling it. `shape.py` names the request's field of a grammar that is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fathom.errors import SettingsError, to_install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"( |\n[ \t]{0,32})?"
"""Between the parts of JSON: a space, or a new line and its indent. A model that has lost its way writes blanks without
end."""
ANY_OBJECT: Mapping[str, object] = {"type": "object"}
LIMITS = {"step_lexer_fuel": 50_000, "step_max_items": 20_000, "max_lexer_states": 20_000}
"""llguidance's limits, where they are tighter than its own: work and items for one mask, and states of a text's
lexer."""
END = '\n%llguidance {"no_forcing": true}\n'
"""The last line of every grammar."""
_APPENDED = re.compile(r"<state>|<non-verbose/>|^ *\d+ \| ", re.MULTILINE)


def with_options(schema: Mapping[str, Any], whitespace: str | None, **more: object) -> dict[str, Any]:
    """A JSON schema with llguidance's options added; options that the schema itself contains are removed.

    Keywords that llguidance cannot follow, such as `not`, become errors (`lenient`).

    Args:
        schema: A JSON schema.
        whitespace: A pattern for the text between tokens; None for no white space.
        more: Further options.
    """
    how: dict[str, object] = {"lenient": False, "coerce_one_of": False, **more}
    how |= {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
    return {**schema, "x-guidance": how}


def json_grammar(schema: Mapping[str, Any] | str, whitespace: str | None = WHITESPACE) -> str:
    """The grammar of JSON that follows a schema (an object, or its text); `whitespace` is as in `with_options`."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(found, Mapping):
            raise SettingsError("a JSON schema must be a JSON object")
        return f"start: %json {json.dumps(with_options(found, whitespace))}{END}"
    except RecursionError:
        raise SettingsError("the schema is nested too deeply") from None
    except ValueError as error:
        raise SettingsError(one_line(str(error))) from error


def regex_grammar(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches as a whole."""
    (made,) = json.loads(_llguidance().LLMatcher.grammar_from_regex(pattern))["grammars"]
    return f"{made['lark_grammar']}{END}"


def choice_grammar(texts: Sequence[str]) -> str:
    """The grammar that allows exactly the given texts."""
    return f"start: {' | '.join(map(json.dumps, texts))}{END}"


def lark_grammar(text: str) -> str:
    """A grammar in Lark's notation, converted if it is in GBNF, which llama.cpp and vLLM's xgrammar read."""
    if text.endswith(END):
        return text
    try:
        return f"{_llguidance().grammar_from('grammar', text)}{END}"
    except (ValueError, IndexError, RecursionError) as error:
        raise SettingsError(one_line(str(error))) from error


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens, as llguidance reads them."""

    tokenizer: str
    """The contents of `tokenizer.json`."""
    size: int
    """The model's number of token ids."""
    ends: Sequence[int]
    """Tokens that end a text."""

    def words(self) -> LLTokenizer:
        """The vocabulary in llguidance's form; building it takes a second."""
        library = _llguidance()
        try:
            return library.LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.ends) or None)
        except ValueError as error:
            raise SettingsError(f"llguidance cannot read this tokenizer: {one_line(str(error))}") from error


def matcher_of(words: LLTokenizer, grammar: str) -> tuple[LLMatcher, bytes]:
    """A grammar's matcher, and the mask of tokens that may come first; an invalid or too complex grammar is a
    `SettingsError`."""
    library = _llguidance()
    limits = library.LLParserLimits(**LIMITS, verbose_errors=False)
    made = library.LLMatcher(words, grammar, log_level=0, limits=limits)
    mask = b"" if made.is_error() else made.compute_bitmask()  # a grammar that allows no first token fails here
    if made.is_error():
        raise SettingsError(reason(made))
    return made, mask


def reason(matcher: LLMatcher) -> str:
    """The reason why a matcher failed, without the state and the grammar excerpt that llguidance appends."""
    said = one_line(_APPENDED.split(matcher.get_error())[0])
    said = re.sub(r'^at \d+\(\d+\): failed to (compile JSON schema|parse "%json"): ', "", said)
    if said.startswith("panic:"):
        return "too complex"
    if said.startswith("Failed to generate regex"):  # of numbers within bounds
        return "a bound of a number has too many digits (at most 18)"
    return "no text follows this grammar" if said == "NoExtensionBias" else said


def one_line(message: str) -> str:
    """A message of several lines, joined to one line."""
    return " ".join(message.split())[:300]


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise SettingsError(f"llguidance is not installed: {to_install('serve')}") from error
    return llguidance
