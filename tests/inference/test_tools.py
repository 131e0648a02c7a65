"""Tool calls: the notation of a chat template, answers that are held to it, and reading them back."""

import json
import random

import pytest

from fathom.errors import SettingsError
from fathom.inference.grammar import lark_grammar
from fathom.inference.structure import Grammars
from fathom.inference.tools import CallReader, Notation, notation, tool_grammar
from tests.inference.notations import ADD, HERMES, LLAMA, MARKED, NOW, SAY, TOOLS, XML
from tests.tiny import CHATML, tiny_tokenizer

HERMES_WRITES = Notation("arguments", "<tool_call>\n", "\n</tool_call>", "\n")
LLAMA_WRITES = Notation("parameters")
MARKED_WRITES = Notation("arguments", "<|call|>", "<|called|>", "\n")
BEHIND = MARKED.replace("assistant\n{% endif %}", "assistant{% endif %}")  # the answer begins with the new line
BEHIND_WRITES = Notation("arguments", "\n<|call|>", "<|called|>", "")
ALL = {"hermes": (HERMES, HERMES_WRITES), "llama": (LLAMA, LLAMA_WRITES), "marked": (MARKED, MARKED_WRITES)}
ALL |= {"behind": (BEHIND, BEHIND_WRITES)}
NAMES = [one["function"]["name"] for one in TOOLS]


def tokenizer_of(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    if template in (MARKED, BEHIND):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|called|>"]})
    return tokenizer


@pytest.mark.parametrize("name", ALL)
def test_a_template_says_how_it_writes_calls(name):
    template, how = ALL[name]
    assert notation(tokenizer_of(template)) == how


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML, "does not support tools"),
        (CHATML + "{{ '' if tools }}", "in an unsupported notation"),
        (XML, "in an unsupported notation"),
        ("{% if tools %}{{ messages[1].tool_calls.nothing.of_this }}{% endif %}", "does not write a tool call"),
    ],
)
def test_what_a_template_cannot_write(template, words):
    with pytest.raises(SettingsError, match=words):
        notation(tokenizer_of(template))


def test_a_template_that_treats_its_last_turn_in_another_way():
    """As Qwen3 does, which shows thoughts in the last turn alone: they are no part of the notation."""
    thinking = HERMES.replace(
        "{{ m.content }}{% endif %}",
        "{{ '<think></think>' if loop.last and m.role == 'assistant' }}{{ m.content }}{% endif %}",
    )
    assert thinking != HERMES and notation(tokenizer_of(thinking)) == HERMES_WRITES


def written_by(how, content, calls):
    """An answer as a model would write it."""
    parts = [how.head(name) + json.dumps(arguments) + how.tail for name, arguments in calls]
    between = how.between or ""
    return content + between.join(parts) if not content else content + "\n" + between.join(parts)


def allows(grammars, rules, how, text):
    """Whether the grammar takes a whole text."""
    constraint = grammars.begin(grammars.compile(lark_grammar(tool_grammar(how=how, pieces=grammars.pieces, **rules))))
    made = []
    for token in grammars.tokenizer.encode(text, add_special_tokens=False):
        if constraint.complete(made) or not constraint.allowed(made)[token]:
            return False
        made.append(token)
    return constraint.complete(made) or bool(constraint.allowed(made)[0])


GOOD = ("add", {"a": 1, "b": 22})
BAD = [("add", {"a": 1}), ("add", {"a": 1, "b": -2}), ("subtract", {"a": 1, "b": 2}), ("now", {"x": 1})]


@pytest.mark.parametrize("name", ALL)
def test_the_grammar_of_answers(name):
    pytest.importorskip("llguidance")
    template, how = ALL[name]
    tokenizer = tokenizer_of(template)
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({0}))
    auto, must, single = {"tools": TOOLS}, {"tools": TOOLS, "required": True}, {"tools": [ADD], "required": True}
    single["several"] = False
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    either = {"tools": TOOLS, "content": schema}
    one, two = written_by(how, "", [GOOD]), written_by(how, "", [GOOD, ("now", {})])
    if not how.before:
        with pytest.raises(SettingsError, match="exclude each other"):
            tool_grammar(how=how, pieces=grammars.pieces, **either)
    for rules in (auto, must, single, *([either] if how.before else [])):
        assert allows(grammars, rules, how, one)
        assert allows(grammars, rules, how, two) == (rules is not single and how.between is not None)
        assert allows(grammars, rules, how, "Some text.") == (rules is auto)
        assert allows(grammars, rules, how, '{"x": 5}') == (rules is either or (rules is auto and bool(how.before)))
        for call in BAD:
            assert not allows(grammars, rules, how, written_by(how, "", [call]))
        assert allows(grammars, rules, how, "") == (rules is auto)
    if how.before:
        assert allows(grammars, auto, how, written_by(how, "I add <them>.", [GOOD]))
        assert not allows(grammars, auto, how, written_by(how, "I add.", [BAD[0]]))


def test_a_bracket_in_a_text_is_no_call():
    """Where calls are a bare list, as xLAM writes them: `[` would force a call upon every text with a link."""
    pytest.importorskip("llguidance")
    tokenizer, how = tiny_tokenizer(), Notation("arguments", "[", "]")
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({0}))
    texts = {"See [1].": True, "[1]": False, written_by(how, "", [GOOD]): True, written_by(how, "", [BAD[0]]): False}
    assert {text: allows(grammars, {"tools": TOOLS}, how, text) for text in texts} == texts


def heard_in(how, pieces):
    """What a reader makes of pieces: content and calls, from what it hears and from what it keeps."""
    reader, content, calls = CallReader(how, NAMES), "", []
    for i, piece in enumerate(pieces):
        heard = reader.hear(piece, last=i == len(pieces) - 1)
        content += heard.content
        for index, begun, more in heard.calls:
            if begun is not None:
                calls.append([begun.name, ""])
            calls[index][1] += more
    assert content == reader.content and calls == [[call.name, call.arguments] for call in reader.calls]
    assert len({call.id for call in reader.calls}) == len(calls)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", ALL)
def test_answers_are_read_back_in_any_pieces(name):
    how, chance = ALL[name][1], random.Random(0)
    texts = ["", "Plain.", "a < b, {x}, <tool", "ends in a blank \n", '{"x": 1}', 'say "</tool_call>"']
    for _ in range(200):
        calls = [
            chance.choice(
                [GOOD, ("say", {"text": chance.choice(['"}{', "\\", "</tool_call>", "é"]), "loud": True}), ("now", {})]
            )
            for _ in range(chance.choice([0, 1, 1, 3] if how.between is not None else [0, 1]))
        ]
        content = chance.choice(texts) if how.before or not calls else ""
        whole = written_by(how, content, calls) if calls else content
        pieces, at = [], 0
        while at < len(whole):
            size = chance.choice([1, 1, 2, 5, 40])
            pieces.append(whole[at : at + size])
            at += size
        found = heard_in(how, [*pieces, ""])
        assert found == (content.rstrip() if calls else content, calls), whole


def test_a_call_that_is_cut_off_is_as_far_as_it_came():
    whole = written_by(HERMES_WRITES, "", [("say", {"text": "deep", "loud": True})])
    reader = CallReader(HERMES_WRITES, NAMES)
    reader.hear(whole[: whole.index("deep") + 2], last=True)
    assert [(call.name, call.arguments) for call in reader.calls] == [("say", '{"text": "de')]


def test_a_bare_call_behind_a_blank_is_read():
    assert heard_in(Notation("parameters", "\n"), ["\n", '{"name": "now", "parameters": {}}']) == ("", [("now", {})])


def test_what_looks_like_a_call_and_is_none_stays_text():
    for text in ('<tool_call>\n{"name": "dig", "arguments": {}}', "<tool_call>", "<tool_call>\n{"):
        assert heard_in(HERMES_WRITES, [text[:5], text[5:]]) == (text, [])
    assert SAY in TOOLS and NOW in TOOLS
