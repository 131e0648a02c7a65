"""An answer that ends in `stop` follows its schema: twenty listed by hand, and 500 random ones."""

import json
import random
import re

import pytest

from fathom.errors import SettingsError
from fathom.inference.control import special_names
from fathom.inference.grammar import WHITESPACE, json_grammar
from fathom.inference.structure import Constraint, Grammars, MatcherClock
from tests.inference.schemas import hostile_schemas, random_schema
from tests.tiny import in_pieces, piece_tokenizer, tiny_tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed (the extra serve brings it)")
MAKERS = {"bytes": tiny_tokenizer, "pieces": in_pieces}
NAMES = sorted({name for make in (*MAKERS.values(), piece_tokenizer) for name in special_names(make())})
OTHERS = ["<s>", "<|eot_id|>", "[INST]", "<start_of_turn>"]
"""Special tokens of tokenizers that are not here."""
ACCEPTED = 0.83
"""Share of the random schemas that llguidance took without any limit of ours."""


def _one(key: str, schema: dict) -> dict:
    return {"type": "object", "properties": {key: schema}, "required": [key], "additionalProperties": False}


# Each with what an answer must be.
CASES = {
    "names of special tokens": ({"enum": [*NAMES, *OTHERS]}, lambda v: v in [*NAMES, *OTHERS]),
    "a name as a constant": ({"const": f"a{NAMES[0]}b"}, lambda v: v == f"a{NAMES[0]}b"),
    "a name as a key": (_one("<|im_end|>", {"type": "boolean"}), lambda v: isinstance(v["<|im_end|>"], bool)),
    "a name in a pattern": (
        {"type": "string", "pattern": r"^x<\|im_end\|>+y$"},
        lambda v: re.fullmatch(r"x<\|im_end\|>+y", v),
    ),
    "names in a union": ({"anyOf": [{"const": name} for name in NAMES]}, lambda v: v in NAMES),
    "a name within a name": ({"enum": ["<<s>s>", "</</s>s>"]}, lambda v: v in ("<<s>s>", "</</s>s>")),
    "a key in another script": (_one("ключ", {"enum": ["é", "🙂"]}), lambda v: v["ключ"] in ("é", "🙂")),
    "an empty key": (_one("", {"type": "null"}), lambda v: v == {"": None}),
    "quotes and backslashes": ({"enum": ['a"b', "a\\b", "a\nb"]}, lambda v: v in ('a"b', "a\\b", "a\nb")),
    "bounds": ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, lambda v: -3 <= v < 12),
    "bounds of numbers": ({"type": "number", "minimum": 0.25, "maximum": 0.75}, lambda v: 0.25 <= v <= 0.75),
    "a multiple": ({"type": "integer", "minimum": 0, "maximum": 50, "multipleOf": 5}, lambda v: v in range(0, 51, 5)),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, lambda v: 2 <= len(v) <= 3),
    "items": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        lambda v: 2 <= len(v) <= 3 and all(isinstance(one, bool) for one in v),
    ),
    "first items": (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": "a"}], "items": False, "minItems": 2},
        lambda v: v == [1, "a"],
    ),
    "all of two": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]}, lambda v: 3 <= v <= 6),
    "a reference": (
        {"$defs": {"b": {"type": "boolean"}}, **_one("a", {"$ref": "#/$defs/b"})},
        lambda v: isinstance(v["a"], bool),
    ),
    "a tree": (
        {
            "type": "object",
            "properties": {"sub": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["sub"],
            "additionalProperties": False,
        },
        lambda v: set(v) == {"sub"},
    ),
    "values beside the properties": (
        {"type": "object", "required": ["k"], "additionalProperties": {"enum": ["</s>", 4]}, "maxProperties": 1},
        lambda v: all(one in ("</s>", 4) for one in v.values()),
    ),
    "nothing else": ({"type": "object", "additionalProperties": False}, lambda v: v == {}),
}


@pytest.fixture(scope="module", params=MAKERS)
def grammars(request):
    tokenizer = MAKERS[request.param]()
    ends = frozenset(tokenizer.convert_tokens_to_ids(special_names(tokenizer)))
    return Grammars(tokenizer, len(tokenizer), ends)


def answer(grammars: Grammars, constraint: Constraint, seed: int, most: int = 300) -> tuple[str, str]:
    """What a model that knows nothing makes of a grammar, every allowed token as likely: the text, and why it ended."""
    chance, made, why = random.Random(seed), list[int](), ""
    while not why:
        allowed = constraint.allowed(made).nonzero()[:, 0].tolist()
        if constraint.fault is not None:
            why = constraint.fault
            break
        made.append(chance.choice(allowed))
        why = (
            "stop" if constraint.complete(made) or made[-1] in grammars.ends else "length" if len(made) == most else ""
        )
    kept = [token for token in made if token not in grammars.ends]
    return grammars.tokenizer.decode(kept, skip_special_tokens=True), why


@pytest.mark.parametrize("case", CASES)
def test_an_answer_follows_its_schema(case, grammars):
    schema, good = CASES[case]
    compiled = grammars.compile(json_grammar(schema))
    for seed in range(3):
        text, why = answer(grammars, grammars.begin(compiled), seed)
        assert why == "stop" and good(json.loads(text)), text


def test_an_early_end_is_seen(grammars, monkeypatch):
    """What these tests look for: an end token that is allowed where the grammar does not accept."""
    allowed = Constraint.allowed

    def early(constraint, made):
        mask = allowed(constraint, made).clone()
        mask[list(constraint.ends)] = True
        return mask

    compiled = grammars.compile(json_grammar(CASES["names of special tokens"][0]))
    monkeypatch.setattr(Constraint, "allowed", early)
    found = [answer(grammars, grammars.begin(compiled), seed) for seed in range(60)]
    assert any(text not in {json.dumps(name) for name in [*NAMES, *OTHERS]} for text, why in found if why == "stop")


@pytest.mark.parametrize("whitespace", [WHITESPACE, None])
def test_blanks_do_not_fill_an_answer(whitespace, grammars):
    """Under a schema of one field; every blank that is allowed is taken."""
    constraint = grammars.begin(grammars.compile(json_grammar(_one("a", {"type": "boolean"}), whitespace)))
    blanks = [token for token in range(grammars.size) if not grammars.tokenizer.decode([token]).strip()]
    blanks, made = [token for token in blanks if token not in grammars.ends], list[int]()
    while not constraint.complete(made):
        allowed = constraint.allowed(made)
        found = [token for token in blanks if allowed[token]] or allowed.nonzero()[:, 0].tolist()
        made.append(found[0])
        assert len(made) < 220
        if made[-1] in grammars.ends:
            break
    text = grammars.tokenizer.decode([token for token in made if token not in grammars.ends])
    assert set(json.loads(text)) == {"a"} and (whitespace is not None or len(text) <= len('{"a":false}'))


def _valid(schema: dict, text: str) -> bool:
    from jsonschema import Draft202012Validator

    try:
        return Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


@pytest.mark.slow
def test_answers_to_random_schemas_are_valid(grammars):
    pytest.importorskip("jsonschema", reason="jsonschema is not installed (the extra dev brings it)")
    chance, ended, accepted = random.Random(11), list[str](), 0
    for seed in range(500):
        schema = random_schema(chance, [*NAMES, *OTHERS])
        try:
            compiled = grammars.compile(json_grammar(schema))
        except SettingsError:
            continue
        accepted += 1
        clock = MatcherClock()
        clock.masks = 10**6  # time is another test's
        text, why = answer(grammars, grammars.begin(compiled, clock), seed)
        ended.append(why)
        assert why in ("stop", "length"), (schema, why)
        assert why != "stop" or _valid(schema, text), (schema, text)
    assert accepted >= 500 * ACCEPTED and ended.count("stop") > accepted / 2


@pytest.mark.slow
def test_hostile_schemas_end_or_are_refused():
    tokenizer, accepted = tiny_tokenizer(), 0
    schemas = hostile_schemas()
    assert len(schemas) >= 100
    own = Grammars(tokenizer, len(tokenizer), frozenset({0}), apart=True)
    for schema in schemas:
        try:
            compiled = own.compile(json_grammar(schema))
        except SettingsError as error:
            assert "\n" not in str(error) and len(str(error)) <= 300, schema
            continue
        accepted += 1
        answer(own, own.begin(compiled), 0)
    assert 20 < accepted < len(schemas)
