"""Tool calls in the chat template's own notation: how it writes them, a grammar of such answers, and reading them back.

A template is asked: it renders a conversation with a call of a made-up tool, and what stands around the call's JSON is
the notation. That covers `<tool_call>` of Hermes and Qwen, and the bare JSON of Llama 3. Answers are held to the
notation and to each tool's schema, so reading them back cannot fail but where an answer is cut off.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fathom.errors import FathomError, SettingsError
from fathom.inference.control import special_names
from fathom.inference.prompt import written
from fathom.inference.structure import WHITESPACE, with_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "probe_of_notation"
Tools = Sequence[Mapping[str, Any]]
"""As templates take them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Notation:
    """How a chat template writes calls: `before {"name": ..., "KEY": {...}} after`."""

    key: str
    """Of the arguments: `arguments` or `parameters`."""
    before: str = ""
    after: str = ""
    between: str | None = None
    """What stands between two calls of one turn; None if there is one at most."""

    def head(self, name: str) -> str:
        """A call as far as its arguments."""
        return f'{self.before}{{"name": {json.dumps(name)}, "{self.key}": '

    @property
    def tail(self) -> str:
        """What follows the arguments."""
        return "}" + self.after


def notation(tokenizer: PreTrainedTokenizerBase) -> Notation:
    """The notation of a tokenizer's chat template; a `SettingsError` if it has none that is known here."""
    if "tools" not in str(tokenizer.chat_template):
        raise SettingsError("this model's chat template does not write tools")
    tools = [{"type": "function", "function": {"name": PROBE, "description": "-", "parameters": NO_ARGUMENTS}}]
    asks = [{"role": "user", "content": "-"}]
    try:
        opening = written(tokenizer, asks, tools=tools)
        one = _after(opening, written(tokenizer, [*asks, *_calls(1)], tools=tools))
    except FathomError as error:
        raise SettingsError(f"this model's chat template does not write a tool call: {error}") from error
    first = _object(one, 0)
    if first is None:
        raise SettingsError("this model's chat template writes tool calls in an unsupported notation")
    begin, end, key = first
    before, rest = one[:begin], one[end:]
    try:
        two = _after(opening, written(tokenizer, [*asks, *_calls(2)], tools=tools))
    except FathomError:  # one call at a time
        two = ""
    second = _object(two, end)
    middle = two[end : second[0]] if second is not None else ""
    if before and middle.endswith(before):
        middle = middle.removesuffix(before)
        after = rest[: _same(rest, middle)]
        return Notation(key, before, after, middle[len(after) :])
    ends = [at for token in (tokenizer.eos_token, *special_names(tokenizer)) if token and (at := rest.find(token)) >= 0]
    return Notation(key, before, rest[: min(ends, default=len(rest))])


def _calls(count: int) -> list[dict[str, Any]]:
    """A turn of calls, and what follows it: some templates write the last turn in another way."""
    function = {"name": PROBE, "arguments": {"at": "-"}}
    made = [{"id": f"call0000{i}", "type": "function", "function": function} for i in range(count)]
    results = [{"role": "tool", "tool_call_id": one["id"], "name": PROBE, "content": "-"} for one in made]
    return [{"role": "assistant", "content": "", "tool_calls": made}, *results, {"role": "user", "content": "-"}]


def _after(opening: str, whole: str) -> str:
    """What a conversation has behind its opening."""
    return whole[_same(opening, whole) :]


def _same(one: str, other: str) -> int:
    """How many letters two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(other)))


def _object(text: str, start: int) -> tuple[int, int, str] | None:
    """The first call's JSON: where it begins, where it ends, and its key for the arguments."""
    at = text.find("{", start)
    while at >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            found, end = None, at
        keys = list(found) if isinstance(found, dict) else []
        if len(keys) == 2 and keys[0] == "name" and found["name"] == PROBE and found[keys[1]] == {"at": "-"}:
            return at, end, keys[1]
        at = text.find("{", at + 1)
    return None


@dataclass(frozen=True)
class Wish:
    """Which calls an answer may make."""

    tools: Tools
    required: bool = False
    """Whether it must be calls, no text."""
    several: bool = True
    """Whether it may make more than one."""
    content: Mapping[str, Any] | None = None
    """A JSON schema that a text follows; None for any text."""


def schema_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, with blanks where `tojson` writes them in templates."""
    schema = {"type": "object", **(tool["function"].get("parameters") or NO_ARGUMENTS)}
    return with_options(schema, None, item_separator=", ", key_separator=": ")


def tool_grammar(wish: Wish, how: Notation, pieces: Callable[[str], str]) -> str:
    """The grammar, in Lark's notation, of answers that may call tools.

    Args:
        wish: Which.
        how: The chat template's notation.
        pieces: A text in Lark's notation; a special token's name is a token.
    """
    opening, rest = how.before.rstrip(), how.before[len(how.before.rstrip()) :]
    lines = ["%llguidance {}"]
    bodies = []
    for i, tool in enumerate(wish.tools):
        function = tool["function"]
        text = json.dumps(schema_of(tool))
        head = rest + how.head(function["name"])[len(how.before) :]
        lines.append(f"call_{i}: {pieces(head)} %json {text} {pieces(how.tail)}")
        bodies.append(f"call_{i}")
    lines.append(f"call: {' | '.join(bodies)}")
    again = ""
    if wish.several and how.between is not None:
        lines.append(f"more: {pieces(how.between + opening)} call")
        again = " more*"
    calls = f"{pieces(opening)} call{again}"
    if wish.required:
        start = calls
    elif wish.content is not None and not opening:
        raise SettingsError("this model writes calls as bare JSON, so tools and response_format exclude each other")
    elif wish.content is not None:
        start = f"{calls} | %json {json.dumps(with_options(wish.content, WHITESPACE))}"
    elif not opening:  # a call is all of the answer, and a text begins in another way
        lines.append(r"TEXT: /([^{ \n](.|\n)*)?/")
        start = f"{calls} | TEXT"
    elif pieces(opening).startswith("<"):
        lines.append(r"TEXT: /(.|\n)*/")
        start = f"TEXT {calls} | TEXT"
    else:
        lines += [r"TEXT: /(.|\n)*/", f"opening[lazy]: TEXT {pieces(opening)}"]
        start = f"opening call{again} | TEXT"
    return "\n".join([*lines, f"start: {start}", ""])


@dataclass
class Call:
    """A call that was read, perhaps not to its end."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass
class Heard:
    """What a piece of an answer adds."""

    content: str = ""
    calls: list[tuple[int, Call | None, str]] = field(default_factory=list)
    """Which call, the call itself where it begins, and what its arguments grow by."""


class CallReader:
    """An answer's text apart from its calls, as it comes.

    Args:
        how: The notation.
        names: Of the tools.
    """

    def __init__(self, how: Notation, names: Sequence[str]) -> None:
        self.how, self.calls, self.content = how, list[Call](), ""
        self._opening = how.before.rstrip()
        self._heads = [how.head(name).removeprefix(self._opening) for name in names]
        self._names = list(names)
        self._rest = ""
        """What is not yet known to be text or call."""
        self._depth, self._quoted, self._escaped, self._inside = 0, False, False, False

    def hear(self, text: str, last: bool = False) -> Heard:
        """Take a piece of the answer; `last` says that none follows."""
        self._rest += text
        heard = Heard()
        while self._rest and (self._argue(heard) if self._inside else self._listen(heard, last)):
            pass
        if last and not self.calls:
            heard.content += self._rest
            self._rest = ""
        self.content += heard.content
        return heard

    @property
    def complete(self) -> bool:
        """Whether there are calls, and the last one's arguments are whole."""
        return bool(self.calls) and not self._inside

    def _listen(self, heard: Heard, last: bool) -> bool:
        """Text, or a call as far as its arguments; returns whether there may be more to hear."""
        rest, opening = self._rest, self._opening
        at = rest.find(opening) if opening else -1 if self.content or self.calls else 0
        if at >= 0:
            behind = rest[at + len(opening) :].lstrip() if not opening else rest[at + len(opening) :]
            for head, name in zip(self._heads, self._names, strict=True):
                if behind.startswith(head):
                    heard.content += "" if self.calls else rest[:at].rstrip()
                    self.calls.append(Call(name))
                    heard.calls.append((len(self.calls) - 1, self.calls[-1], ""))
                    self._rest, self._inside, self._depth = behind[len(head) :], True, 0
                    return True
            if not last and any(head.startswith(behind) for head in self._heads):
                return False
            at = -1
        if self.calls:
            return False
        held = "" if last or not opening else _held(rest, opening)
        sure = rest[: len(rest) - len(held)]
        kept = len(sure) if last else len(sure.rstrip())  # blanks before a call are none of the text
        heard.content += sure[:kept]
        self._rest = sure[kept:] + held
        return False

    def _argue(self, heard: Heard) -> bool:
        """Arguments, up to where their JSON closes."""
        for i, letter in enumerate(self._rest):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._add(heard, self._rest[: i + 1])
                    self._rest = self._rest[i + 1 :]
                    self._inside = False
                    return True
        self._add(heard, self._rest)
        self._rest = ""
        return False

    def _add(self, heard: Heard, text: str) -> None:
        self.calls[-1].arguments += text
        heard.calls.append((len(self.calls) - 1, None, text))


def _held(text: str, opening: str) -> str:
    """The end of a text that may be the beginning of `opening`."""
    ends = (text[-n:] for n in range(min(len(text), len(opening) - 1), 0, -1))
    return next((end for end in ends if opening.startswith(end)), "")
