"""Texts that follow a grammar, whatever the model: alone, in company, with drafts, and where tokens halt."""

import json
import random
import re
from types import SimpleNamespace

import pytest
import torch

from fathom.errors import RequestError, SettingsError
from fathom.inference import structure
from fathom.inference.control import special_names
from fathom.inference.engine import Engine
from fathom.inference.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from fathom.inference.sampling import Choice
from fathom.inference.shape import Shapes
from fathom.inference.structure import Grammars
from fathom.models import FathomForCausalLM
from tests.inference.test_engine import Collected
from tests.tiny import in_pieces, tiny_config, tiny_tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed (the extra serve brings it)")
END = 0
NEW = 220
BUDGET = 1 << 27
WHOLE = {"type": "integer", "minimum": -20, "maximum": 9}
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-F0-9]{4}$"},
        'a "b"': {"type": "string", "minLength": 1, "maxLength": 6},
        "ключ": {"enum": ['a "quoted" word', "é", None, 2.5]},
        "deep": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"anyOf": [{"type": "boolean"}, WHOLE]}},
    },
    "required": ["id", "deep"],
    "additionalProperties": False,
}
CASES = {
    "one trip": ({}, None),
    "halting": ({"recurrence": "adaponder", "mixer": "none"}, None),
    "drafts": ({"recurrence": "loop", "recurrence_options": {"trips": 3}, "mixer": "none"}, 1),
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 400, frozenset({END}))


def model_of(fields):
    torch.manual_seed(0)
    return FathomForCausalLM(tiny_config(vocab_size=400, initializer_range=0.3, **fields)).eval()


def texts(model, tokenizer, asked, drafts=None, temperature=1.0):
    """What an engine makes of matchers that are given at once: each text, and why it ended."""
    engine, collected = Engine(model, BUDGET, draft_trips=drafts), []
    for i, constraint in enumerate(asked):
        choice = Choice(temperature, seed=i, ends=frozenset({END}), constraint=constraint)
        collected.append(Collected([5 + i % 50, 7], NEW, choice, stops=frozenset({END})))
    try:
        engine.submit([one.job for one in collected])
        whys = [one.wait() for one in collected]
    finally:
        engine.join(10)
    return [
        (tokenizer.decode(one.tokens, skip_special_tokens=True), why) for one, why in zip(collected, whys, strict=True)
    ]


def follows(value):
    """Whether a value follows SCHEMA, by a check that reads no schema."""
    known = set(value) <= {"id", 'a "b"', "ключ", "deep"} and re.fullmatch("[A-F0-9]{4}", value["id"])
    known = known and 1 <= len(value.get('a "b"', "x")) <= 6
    known = known and value.get("ключ") in ('a "quoted" word', "é", None, 2.5) and 1 <= len(value["deep"]) <= 3
    return known and all(one in (True, False) or -20 <= one <= 9 for one in value["deep"])


@pytest.mark.quick("one trip-8")
@pytest.mark.parametrize(("case", "count"), [("one trip", 8), ("halting", 6), ("drafts", 6)])
def test_texts_follow_a_schema(case, count, tokenizer, grammars):
    fields, drafts = CASES[case]
    constraints = [grammars.begin(grammars.compile(json_grammar(SCHEMA))) for _ in range(count)]
    made = texts(model_of(fields), tokenizer, constraints, drafts)
    ended = [json.loads(text) for text, why in made if why == "stop"]
    assert len(ended) >= 0.7 * count and all(map(follows, ended)), made
    assert len({text for text, _ in made}) == count


@pytest.mark.slow
def test_without_a_grammar_no_text_is_json(tokenizer):
    """The model is random: what the test above finds is the grammars' doing."""
    for text, _ in texts(model_of({}), tokenizer, [None] * 8):
        with pytest.raises(ValueError):
            json.loads(text)


def test_a_constraint_is_a_function_of_the_tokens(tokenizer, grammars):
    """In whatever order it is asked, as drafts that are not kept do."""
    matcher = grammars.compile(json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}}))
    made = tokenizer.encode('{"a": 120}', add_special_tokens=False)
    fresh = [grammars.begin(matcher).allowed(made[:n]) for n in range(len(made) + 1)]
    chance, one = random.Random(0), grammars.begin(matcher)
    for _ in range(60):
        n = chance.randint(0, len(made))
        other = [*made[:n], *chance.choices(fresh[n].nonzero()[:, 0].tolist(), k=1)] if n < len(made) else [*made, END]
        one.allowed(other)
        assert torch.equal(one.allowed(made[:n]), fresh[n])
    assert not one.complete(made[:-1]) and not one.fault
    assert one.complete([*made, END]) and one.allowed([*made, END, 9, 9]).all()


def test_least_tokens_give_way_to_a_text_that_is_complete(grammars):
    """Where the grammar allows no more, `min_tokens` cannot ask for more."""
    constraint = grammars.begin(grammars.compile(choice_grammar(["a"])))
    choice = Choice(0.0, min_tokens=9, ends=frozenset({END}), constraint=constraint)
    scores = choice.scores(torch.zeros(400), [1], [])
    assert scores.isfinite().sum() == 1
    letter = int(scores.argmax())
    assert constraint.complete([letter])
    longer = Choice(
        0.0, min_tokens=9, ends=frozenset({END}), constraint=grammars.begin(grammars.compile(regex_grammar("a+")))
    )
    assert not longer.scores(torch.zeros(400), [1], [letter])[END].isfinite()


@pytest.mark.parametrize(
    "grammar",
    [
        lambda: json_grammar({"type": "object", "properties": 5}),
        lambda: json_grammar({"not": {"type": "string"}, "x-guidance": {"lenient": True}}),
        lambda: json_grammar({"$ref": "http://example.com/schema.json"}),
        lambda: json_grammar({"type": "integer", "minimum": 5, "maximum": 3}),
        lambda: json_grammar("[1]"),
        lambda: regex_grammar("[a-z"),
        lambda: lark_grammar("start: nothing_of_that_name"),
        lambda: lark_grammar(""),
        lambda: lark_grammar("start: start start"),
        lambda: regex_grammar(r"[^\s\S]"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(grammar, grammars):
    with pytest.raises(SettingsError) as found:
        grammars.compile(grammar())
    assert "\n" not in str(found.value) and 5 < len(str(found.value)) <= 300
    assert "<state>" not in str(found.value)


def test_a_grammar_that_is_too_complex_later_is_the_requests_fault(tokenizer, grammars):
    constraint = grammars.begin(grammars.compile(regex_grammar(r"((.|\n){0,90}[a-z]){0,90}")))
    ((_, why),) = texts(model_of({}), tokenizer, [constraint])
    assert isinstance(why, RequestError) and why.code == "grammar_too_complex" and "<state>" not in str(why)


def test_a_grammar_that_grows_too_complex_ends_its_own_text_alone(tokenizer, grammars):
    bad, good = (grammars.begin(grammars.compile(regex_grammar("[0-9]{4}"))) for _ in range(2))
    given_up = {"is_error": True, "is_stopped": True, "is_accepting": False, "consume_token": False}
    given_up["get_error"] = "too\ncomplex\n<state>\nTokens: 0"
    bad._matcher = SimpleNamespace(**{name: lambda *_, value=value: value for name, value in given_up.items()})
    (_, why), (text, end), _ = texts(model_of({}), tokenizer, [bad, good, None])
    assert isinstance(why, RequestError) and str(why) == "structured output: too complex"
    assert re.fullmatch("[0-9]{4}", text) and end == "stop"


def test_compiled_grammars_are_kept_up_to_so_many_bytes(grammars, monkeypatch):
    one = grammars.compile(regex_grammar("once"))
    monkeypatch.setattr(structure, "KEPT", 4 * one.bytes)
    assert grammars.compile(regex_grammar("once")) is one
    for i in range(1000, 1005):
        grammars.compile(regex_grammar(f"{i}"))
    assert grammars.compile(regex_grammar("once")) is not one
    assert sum(kept.bytes for kept in grammars._kept.values()) <= structure.KEPT


def test_a_grammar_that_failed_in_a_text_is_not_kept(tokenizer, grammars):
    grammar = regex_grammar(r"((.|\n){0,80}[a-z]){0,80}")
    failing, sound = grammars.compile(grammar), grammars.compile(regex_grammar("sound"))
    texts(model_of({}), tokenizer, [grammars.begin(failing)])
    assert grammars.kept(grammar) is None and grammars.kept(regex_grammar("sound")) is sound


def test_the_first_mask_is_that_of_all_texts(tokenizer, grammars):
    """The engine's thread finds none: eight texts of a letter need none but the first."""
    compiled = grammars.compile(regex_grammar("[xyz]"))
    constraints, masks = [grammars.begin(compiled) for _ in range(8)], []
    for one in constraints:
        whole = one._matcher
        counted = {"compute_bitmask": lambda whole=whole: masks.append(1) or whole.compute_bitmask()}
        names = ("is_error", "is_stopped", "is_accepting", "consume_token", "rollback")
        one._matcher = SimpleNamespace(**counted, **{name: getattr(whole, name) for name in names})
    assert {text for text, why in texts(model_of({}), tokenizer, constraints) if why == "stop"} <= set("xyz")
    assert not masks


def test_a_server_reads_the_vocabulary_before_it_is_asked(tokenizer):
    """One that cannot is started nevertheless, and those who ask for a grammar are told why."""
    shapes, other = Shapes(tokenizer, 400, frozenset({END})), Shapes(SimpleNamespace(is_fast=False), 400, frozenset())
    for one in (shapes, other):
        one.prepare()
    assert "words" in vars(shapes.grammars) and "words" not in vars(other.grammars)


def test_a_requests_masks_have_so_much_time(tokenizer, grammars):
    """All texts of a request together; another request's go on."""
    compiled, clock = grammars.compile(regex_grammar("[a-z]{40}")), structure.MatcherClock()
    slow, other = [grammars.begin(compiled, clock) for _ in range(2)], grammars.begin(compiled)
    clock.seconds = structure.FREE + 30 * structure.EACH
    (_, one), (_, two), (text, why) = texts(model_of({}), tokenizer, [*slow, other])
    assert {one.code, two.code} == {"grammar_too_complex"} and "too much time" in str(one)
    assert why == "stop" and len(text) == 40
    clock.seconds = structure.FREE / 2
    assert [why for _, why in texts(model_of({}), tokenizer, [grammars.begin(compiled, clock)])] == ["stop"]


@pytest.mark.parametrize("make", [tiny_tokenizer, in_pieces])
def test_a_text_stops_where_its_grammar_accepts(make):
    """Names of special tokens in the grammar, in two kinds of tokenizers: every mask before the end forbids the end."""
    tokenizer = make()
    names = special_names(tokenizer)
    ends = frozenset(tokenizer.convert_tokens_to_ids(names))
    own, chance = Grammars(tokenizer, len(tokenizer), ends), random.Random(0)
    assert names
    for grammar in (choice_grammar([f"a{name}b" for name in names]), json_grammar({"enum": names})):
        made, constraint = list[int](), own.begin(own.compile(grammar))
        while not constraint.complete(made):
            may = constraint.allowed(made).nonzero()[:, 0].tolist()
            made.append(chance.choice(may))
            assert not ends & set(made[:-1]), "an end token ends the text"
        text = tokenizer.decode([token for token in made if token not in ends]).strip()
        assert text in {f"a{name}b" for name in names} | {f'"{name}"' for name in names}


def test_a_model_without_an_end_ends_where_the_grammar_does(tokenizer):
    endless = Grammars(tokenizer, 400, frozenset())
    constraints = [endless.begin(endless.compile(regex_grammar(text))) for text in ("abc", "a+")]
    assert texts(model_of({}), tokenizer, constraints) == [("abc", "stop"), ("a" * NEW, "length")]
