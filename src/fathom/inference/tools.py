"""Tool calls in the chat template's own notation: detects the notation, makes a grammar of answers with calls, and
parses them.

A template is asked: it renders a conversation with a call of a made-up tool, and what stands around the call's JSON is
the notation. That covers `<tool_call>` of Hermes and Qwen, and the bare JSON of Llama 3. Answers are held to the
notation and to each tool's schema, so reading them back cannot fail but where an answer is cut off.

`answers.py` puts calls into an answer, and decides whether `finish_reason` is `tool_calls`; the Responses API has
`responses.py` for it. `api.py` decides what `tool_choice` allows, and reads the arguments of earlier calls; `server.py`
refuses earlier calls if the template writes none.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fathom.errors import FathomError, SettingsError
from fathom.inference.control import special_names
from fathom.inference.grammar import WHITESPACE, with_options
from fathom.inference.prompt import written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "probe_of_notation"
Tools = Sequence[Mapping[str, Any]]
"""The tools as templates take them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Notation:
    """The notation in which a chat template writes tool calls: `before {"name": ..., "KEY": {...}} after`."""

    key: str
    """Key of the arguments: `arguments` or `parameters`."""
    before: str = ""
    after: str = ""
    between: str | None = None
    """The text between two calls of one message; None if a message has at most one call."""

    def head(self, name: str) -> str:
        """The text of a tool call up to its arguments."""
        return f'{self.before}{{"name": {json.dumps(name)}, "{self.key}": '

    @property
    def tail(self) -> str:
        """The text after the arguments."""
        return "}" + self.after


def notation(tokenizer: PreTrainedTokenizerBase) -> Notation:
    """The notation in which a tokenizer's chat template writes tool calls; a `SettingsError` if the notation cannot be
    parsed."""
    if "tools" not in str(tokenizer.chat_template):
        raise SettingsError("this model's chat template does not support tools")
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
    except FathomError:  # one call per message
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
    """A test conversation with `count` tool calls and messages after them: some templates write the last message
    differently."""
    function = {"name": PROBE, "arguments": {"at": "-"}}
    made = [{"id": f"call0000{i}", "type": "function", "function": function} for i in range(count)]
    results = [{"role": "tool", "tool_call_id": one["id"], "name": PROBE, "content": "-"} for one in made]
    return [{"role": "assistant", "content": "", "tool_calls": made}, *results, {"role": "user", "content": "-"}]


def _after(opening: str, whole: str) -> str:
    """The rendered text of a conversation after the part that it shares with `opening`."""
    return whole[_same(opening, whole) :]


def _same(one: str, other: str) -> int:
    """The number of equal characters at the beginning of two texts."""
    pairs = zip(one, other, strict=False)
    return next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(other)))


def _object(text: str, start: int) -> tuple[int, int, str] | None:
    """The position of the first tool call's JSON in a text: its start, its end, and the key of its arguments."""
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


def schema_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, with the white space that `tojson` writes in chat templates."""
    schema = {"type": "object", **(tool["function"].get("parameters") or NO_ARGUMENTS)}
    return with_options(schema, None, item_separator=", ", key_separator=": ")


def tool_grammar(
    tools: Tools,
    how: Notation,
    pieces: Callable[[str], str],
    required: bool = False,
    several: bool = True,
    content: Mapping[str, Any] | None = None,
) -> str:
    """The grammar, in Lark's notation, of answers that may call tools.

    Args:
        tools: The tools that may be called.
        how: The chat template's notation.
        pieces: Converts a text to Lark's notation, with special tokens by name.
        required: Whether the answer must be calls, not text.
        several: Whether it may make several calls.
        content: A JSON schema for the text; None for any text.
    """
    opening, rest = how.before.rstrip(), how.before[len(how.before.rstrip()) :]
    mark = opening.lstrip()  # behind a text, which ends in any white space
    lines = ["%llguidance {}"]
    bodies = []
    for i, tool in enumerate(tools):
        function = tool["function"]
        text = json.dumps(schema_of(tool))
        head = rest + how.head(function["name"])[len(how.before) :]
        lines.append(f"call_{i}: {pieces(head)} %json {text} {pieces(how.tail)}")
        bodies.append(f"call_{i}")
    lines.append(f"call: {' | '.join(bodies)}")
    again = ""
    if several and how.between is not None:
        lines.append(f"more: {pieces(how.between + opening)} call")
        again = " more*"
    calls = f"{pieces(opening)} call{again}"
    if required:
        start = calls
    elif content is not None and not opening:
        raise SettingsError("this model writes tool calls as bare JSON: tools and response_format exclude each other")
    elif content is not None:
        start = f"{calls} | %json {json.dumps(with_options(content, WHITESPACE))}"
    elif pieces(mark).startswith("<"):
        lines.append(r"TEXT: /(.|\n)*/")
        start = f"TEXT {pieces(mark)} call{again} | TEXT"
    elif not any(map(str.isalnum, mark)):  # as `[`, which texts have too: a call is the whole answer
        lines.append(rf"TEXT: /([^{re.escape(mark[:1] or '{')} \n](.|\n)*)?/")
        start = f"{calls} | TEXT"
    else:
        lines += [r"TEXT: /(.|\n)*/", f"opening[lazy]: TEXT {pieces(mark)}"]
        start = f"opening call{again} | TEXT"
    return "\n".join([*lines, f"start: {start}", ""])


@dataclass
class Call:
    """A tool call that was parsed, perhaps incompletely."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass
class Heard:
    """What one piece of an answer adds to the text and to the tool calls."""

    content: str = ""
    calls: list[tuple[int, Call | None, str]] = field(default_factory=list)
    """The call's index, the call itself at its beginning, and the new part of its arguments."""


class CallReader:
    """Separates an answer's text from its tool calls while the answer is generated.

    Args:
        how: The notation.
        names: Names of the tools.
    """

    def __init__(self, how: Notation, names: Sequence[str]) -> None:
        self.how, self.calls, self.content = how, list[Call](), ""
        self._opening = how.before.strip()  # white space before a call is not part of the text
        self._heads = {how.head(name).lstrip().removeprefix(self._opening): name for name in names}
        self._rest = ""
        """What is not yet known to be text or call."""
        self._depth, self._quoted, self._escaped, self._inside = 0, False, False, False

    def hear(self, text: str, last: bool = False) -> Heard:
        """Process a piece of the answer; `last` marks the final piece."""
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
        """Whether the answer has tool calls, and the arguments of the last one are complete."""
        return bool(self.calls) and not self._inside

    def _listen(self, heard: Heard, last: bool) -> bool:
        """Process text, or a tool call up to its arguments; returns whether there may be more to process."""
        rest, opening = self._rest, self._opening
        at = rest.find(opening) if opening else -1 if self.content or self.calls else 0
        if at >= 0:
            behind = rest[at + len(opening) :].lstrip() if not opening else rest[at + len(opening) :]
            for head, name in self._heads.items():
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
        held = "" if last or not opening else may_begin(rest, [opening])
        sure = rest[: len(rest) - len(held)]
        kept = len(sure) if last else len(sure.rstrip())  # white space before a call is not part of the text
        heard.content += sure[:kept]
        self._rest = sure[kept:] + held
        return False

    def _argue(self, heard: Heard) -> bool:
        """Process the arguments of a tool call, up to the end of their JSON; returns whether there may be more to
        process."""
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


def may_begin(text: str, strings: Sequence[str]) -> str:
    """The longest suffix of a text that is a prefix of one of these strings; the strings are sorted."""
    # If any string begins with `end`, so does the first one that does not sort before `end`.
    ends = (text[-n:] for n in range(min(len(text), max(map(len, strings), default=0)), 0, -1))
    places = ((end, bisect_left(strings, end)) for end in ends)
    return next((end for end, at in places if at < len(strings) and strings[at].startswith(end)), "")
