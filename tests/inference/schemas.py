"""Random JSON schemas, as clients may send them, and hostile ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

Schema = dict[str, Any]
KEYS = [
    "id",
    'a "b"',
    "ключ",
    "名",
    "é",
    "a\\b",
    "x/y~z",
    "$ref",
    "",
    "end",
    "two words",
    "🙂",
    "<|im_end|>",
    "tab\there",
]
WORDS = ["a", "deep", "é", "🙂 sea", 'quo"ted', "new\nline", "back\\slash", "</s>", "", " ", "null", "12", "\u2028"]
PATTERNS = ["^[A-F0-9]{4}$", "^[a-z]+-[0-9]{1,3}$", "[aeiou]{2}", "^(yes|no|<s>)$", "^.{1,3}$", "^[^a-z]{2}$", "^é+$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname"]


def random_schema(chance: random.Random, names: Sequence[str], depth: int = 3) -> Schema:
    """A schema whose enums may hold the names of special tokens."""
    made = _any(chance, [*WORDS, *names], depth)
    if chance.random() < 0.2:
        made = {"$defs": {"part": _any(chance, WORDS, 1)}, **_object(chance, [*WORDS, *names], 1)}
        made["properties"]["part"] = {"$ref": "#/$defs/part"}
        made["required"] = ["part"]
    return made


def _any(chance: random.Random, words: Sequence[str], depth: int) -> Schema:
    flat: list[Callable[..., Schema]] = [_text, _text, _number, _number, _enum, _enum, _literal]
    deep: list[Callable[..., Schema]] = [_object, _object, _object, _array, _union, _all]
    return chance.choice(deep if depth > 0 and chance.random() < 0.75 else flat)(chance, words, depth)


def _object(chance: random.Random, words: Sequence[str], depth: int) -> Schema:
    keys = chance.sample([*KEYS, *words[len(WORDS) :]], chance.randint(0, 4))
    made: Schema = {"type": "object", "properties": {key: _any(chance, words, depth - 1) for key in keys}}
    if chance.random() < 0.7:
        made["required"] = [key for key in keys if chance.random() < 0.6]
    if chance.random() < 0.6:
        made["additionalProperties"] = chance.choice([False, False, {"type": "integer"}, {"enum": [*words]}])
    if chance.random() < 0.1:
        made["patternProperties"] = {"^n_": {"type": "number"}}
    if chance.random() < 0.1:
        made["minProperties"] = chance.randint(0, 2)
    if chance.random() < 0.1:
        made["maxProperties"] = chance.randint(2, 5)
    return made


def _array(chance: random.Random, words: Sequence[str], depth: int) -> Schema:
    made: Schema = {"type": "array", "items": _any(chance, words, depth - 1)}
    if chance.random() < 0.7:
        least = chance.randint(0, 2)
        made |= {"minItems": least, "maxItems": least + chance.randint(0, 3)}
    if chance.random() < 0.2:
        made["prefixItems"] = [_any(chance, words, 0) for _ in range(chance.randint(1, 2))]
    return made


def _union(chance: random.Random, words: Sequence[str], depth: int) -> Schema:
    kinds = [_any(chance, words, depth - 1) for _ in range(chance.randint(1, 3))]
    return {chance.choice(["anyOf", "anyOf", "oneOf"]): kinds}


def _all(chance: random.Random, words: Sequence[str], depth: int) -> Schema:
    if chance.random() < 0.5:
        return {"allOf": [_object(chance, words, depth - 1), _object(chance, words, depth - 1)]}
    return {"allOf": [{"type": "integer", "minimum": chance.randint(-9, 9)}, {"maximum": chance.randint(0, 99)}]}


def _text(chance: random.Random, words: Sequence[str], depth: int) -> Schema:
    made: Schema = {"type": "string"}
    kind = chance.random()
    if kind < 0.3:
        least = chance.randint(0, 5)
        made |= {"minLength": least, "maxLength": least + chance.randint(0, 9)}
    elif kind < 0.6:
        made["pattern"] = chance.choice(PATTERNS)
    elif kind < 0.7:
        made["format"] = chance.choice(FORMATS)
    else:
        made["maxLength"] = chance.randint(0, 12)
    return made


def _number(chance: random.Random, words: Sequence[str], depth: int) -> Schema:
    made: Schema = {"type": chance.choice(["integer", "number"])}
    low = chance.choice([-1000, -7, -0.5, 0, 0.25, 3, 10**9])
    if chance.random() < 0.7:
        made[chance.choice(["minimum", "exclusiveMinimum"])] = low
    if chance.random() < 0.7:
        made[chance.choice(["maximum", "exclusiveMaximum"])] = low + chance.choice([1, 2.5, 40, 10**6])
    if chance.random() < 0.15:
        made["multipleOf"] = chance.choice([1, 2, 5, 0.5])
    return made


def _enum(chance: random.Random, words: Sequence[str], depth: int) -> Schema:
    values: list[object] = [None, True, False, 0, -3, 2.5, 1e3, [1, "a"], {"k": None}]
    return {"enum": [*chance.sample([*words], min(len(words), chance.randint(1, 6))), *chance.sample(values, 2)]}


def _literal(chance: random.Random, words: Sequence[str], depth: int) -> Schema:
    return chance.choice([{"const": chance.choice([*words])}, {"type": "boolean"}, {"type": ["string", "null"]}, {}])


def hostile_schemas() -> list[Schema]:
    """A hundred schemas made to cost time or memory, or to match no text."""
    made: list[Schema] = []
    for n in (20, 60, 200, 1000, 5000, 20000):
        letters = {"type": "string", "pattern": "^(" + "a?" * min(n, 2000) + "){9}$"}
        deep: Schema = {"type": "integer"}
        for _ in range(min(n, 900)):
            deep = {"type": "array", "items": deep}
        fan = {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}, "required": [f"k{i}"]} for i in range(n)]}
        made += [
            letters,
            deep,
            fan,
            {"enum": [f"word {i}" * 3 for i in range(n)]},
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}},
            {"type": "string", "minLength": n, "maxLength": n + 1},
            {"type": "array", "items": {"type": "null"}, "minItems": n, "maxItems": n},
            {"allOf": [{"type": "string", "pattern": f"a{{{i},{i + 9}}}b"} for i in range(min(n, 200))]},
            {"type": "string", "pattern": f"((a{{0,{n}}}){{0,{n}}}){{0,{n}}}z"},
            {"type": "integer", "minimum": -(10**n) if n < 4000 else -9, "maximum": 10 ** min(n, 4000)},
            {"oneOf": [{"type": "integer", "multipleOf": i + 2} for i in range(min(n, 500))]},
            {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}, "$ref": "#/$defs/d0"},
            {"type": "number", "multipleOf": 1 / (n * 7 + 3)},
        ]
    made += [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"enum": []},
        {"anyOf": []},
        {"const": "\ud800"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": r"(a)\1"},
        {"type": "string", "pattern": "["},
        {"type": "string", "minLength": 10**12},
        {"type": "string", "minLength": 9, "maxLength": 3},
        {"type": "string", "format": "no-such"},
        {"type": "nothing"},
        {"type": []},
        {"properties": []},
        {"required": "a"},
        {"additionalProperties": {"not": {}}},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"maxLength": 3}},
        {"patternProperties": {"(": {}}},
    ]
    return made
