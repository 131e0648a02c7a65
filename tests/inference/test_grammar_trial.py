"""Grammars that take too long or too much memory are stopped, and the others are none the worse."""

import resource
import time

import pytest

from fathom.inference.grammar import Vocabulary, choice_grammar, json_grammar, lark_grammar, matcher_of, regex_grammar
from fathom.inference.grammar_trial import GrammarError, GrammarTrial, LateError, attempt
from tests.tiny import tiny_tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed (the extra serve brings it)")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
SOUND = {
    "schema": json_grammar(SCHEMA),
    "pattern": regex_grammar("[a-f]{4}(-[0-9]+)?"),
    "choice": choice_grammar(["yes", 'no "never"']),
    "gbnf": 'root ::= "a" | "b" root',
}
LONG = {
    "allOf": json_grammar({"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(1, 60)]}),
    "gbnf": "root ::= a0\n" + "\n".join(f'a{i} ::= "x{i}" | a{i + 1}' for i in range(9000)) + '\na9000 ::= "y"',
    "properties": json_grammar({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(6000)}}),
}


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(tiny_tokenizer().backend_tokenizer.to_str(), 400, [0])


@pytest.fixture(scope="module")
def tries(vocabulary):
    return GrammarTrial(vocabulary)


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_grammar_passes(tries, vocabulary, kind):
    found = tries.run(SOUND[kind])
    assert found.grammar == attempt(vocabulary.words(), SOUND[kind]) and found.bytes < 1 << 24


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
def test_one_that_takes_too_long_is_stopped(tries, kind):
    """At its limit of processor time or of memory; the next one is tried as before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(GrammarError, match=r"takes more than|too complex"):
        tries.run(LONG[kind])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.5, "not in this process"
    assert tries.run(SOUND["schema"]).bytes


@pytest.mark.slow
def test_limits_stop_a_fork_alone(vocabulary, monkeypatch, tmp_path):
    """A grammar whose compilation never ends, and one that takes all memory."""
    shared = GrammarTrial(vocabulary)
    code = tmp_path / "sitecustomize.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    code.write_text(
        "from fathom.inference import grammar\n"
        "whole = grammar.matcher_of\n"
        "def matcher_of(words, text):\n"
        "    while 'endless' in text: pass\n"
        "    held = [bytes(1 << 24) for _ in range(1 << 10 if 'greedy' in text else 0)]\n"
        "    return whole(words, text)\n"
        "grammar.matcher_of = matcher_of\n"
    )
    began = time.time()
    for seconds in (0.05, 1.0):
        with pytest.raises(LateError, match=r"more than 1 s"):
            shared.run(choice_grammar(["endless"]), seconds=seconds)
    with pytest.raises(GrammarError, match=r"MiB of memory"):
        shared.run(choice_grammar(["greedy"]))
    assert shared.run(SOUND["choice"]) and time.time() - began < 60


def test_an_error_names_its_part(tries, vocabulary):
    bad = json_grammar({"not": {}})
    whole = lark_grammar(f'start: "a" | {bad.partition("start: ")[2].splitlines()[0]}')
    for run in (tries.run, lambda *asked: attempt(vocabulary.words(), *asked)):
        with pytest.raises(GrammarError, match="Unimplemented") as caught:
            run(whole, [SOUND["schema"], bad])
        assert caught.value.part == 1 and "\n" not in str(caught.value)
        with pytest.raises(GrammarError) as caught:
            run(whole, [SOUND["schema"]])
        assert caught.value.part is None


def test_a_process_that_was_killed_is_started_again(tries):
    assert tries.run(SOUND["pattern"])
    tries._process.kill()
    tries._process.wait()
    with pytest.raises(GrammarError, match="could not be compiled"):
        tries.run(SOUND["pattern"])
    assert tries.run(SOUND["pattern"])


def test_the_limits_are_above_ordinary_grammars(vocabulary):
    """A schema of a thousand required properties, a choice of a thousand texts, and formats."""
    words, names = vocabulary.words(), [f"p{i}" for i in range(1000)]
    many = {"type": "object", "properties": {name: {"type": "number"} for name in names}, "required": names}
    formats = {"type": "array", "prefixItems": [{"type": "string", "format": "date-time"}] * 50}
    for grammar in (json_grammar(many), json_grammar(formats), choice_grammar(names)):
        assert matcher_of(words, grammar)[1]
