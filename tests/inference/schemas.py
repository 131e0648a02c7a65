"""Random JSON schemas, each with a check of its own, a Python function that reads no schema."""

import re

PATTERNS = (r"^[a-z]{2,5}$", r"^\d{3}-\d{2}$", r"^(foo|ba[rz])+$", r"^[A-F0-9]{4}$", r"^x?y?z$")
WORDS = ("north", "south", 'a "quoted" word', "back\\slash", "é", "", "0")


def is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def random_schema(chance, depth=3):
    """A schema, and a function that says whether a value follows it."""
    kinds = [string, pattern, whole, number, enum, boolean, nothing]
    kinds += [array, record, record, either] * (depth > 0)
    return chance.choice(kinds)(chance, depth)


def random_record(chance):
    """As `random_schema`, of an object."""
    return record(chance, 3)


def string(chance, depth):
    least = chance.randint(0, 3)
    most = least + chance.randint(0, 6)
    schema = {"type": "string", "minLength": least, "maxLength": most}
    return schema, lambda value: isinstance(value, str) and least <= len(value) <= most


def pattern(chance, depth):
    given = chance.choice(PATTERNS)
    whole = re.compile(given)
    schema = {"type": "string", "pattern": given, "maxLength": 12}
    return schema, lambda value: isinstance(value, str) and len(value) <= 12 and bool(whole.search(value))


def whole(chance, depth):
    least = chance.randint(-50, 50)
    most = least + chance.randint(0, 1000)
    if chance.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": least, "maximum": most + 1}, (
            lambda value: is_whole(value) and least < value <= most + 1
        )
    return {"type": "integer", "minimum": least, "maximum": most}, (
        lambda value: is_whole(value) and least <= value <= most
    )


def number(chance, depth):
    least = round(chance.uniform(-9, 9), 2)
    most = round(least + chance.uniform(0.5, 90), 2)
    schema = {"type": "number", "minimum": least, "maximum": most}
    return (
        schema,
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most,
    )


def enum(chance, depth):
    values = chance.sample([*WORDS, 1, None, True, 2.5], chance.randint(1, 4))
    return {"enum": values}, lambda value: any(value == one and type(value) is type(one) for one in values)


def boolean(chance, depth):
    return {"type": "boolean"}, lambda value: isinstance(value, bool)


def nothing(chance, depth):
    return {"type": "null"}, lambda value: value is None


def array(chance, depth):
    inner, check = random_schema(chance, depth - 1)
    least = chance.randint(0, 2)
    most = least + chance.randint(0, 2)
    schema = {"type": "array", "items": inner, "minItems": least, "maxItems": most}
    return schema, lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(check, value))


def record(chance, depth):
    names = chance.sample(["id", "name", "a b", "ключ", "type", "items", "$x", 'q"'], chance.randint(0, 4))
    parts = {name: random_schema(chance, depth - 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    schema = {"type": "object", "properties": {name: part for name, (part, _) in parts.items()}}
    schema |= {"required": required, "additionalProperties": False}

    def check(value):
        known = isinstance(value, dict) and set(required) <= set(value) <= set(parts)
        return known and all(parts[name][1](one) for name, one in value.items())

    return schema, check


def either(chance, depth):
    some = [random_schema(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    return {"anyOf": [schema for schema, _ in some]}, lambda value: any(check(value) for _, check in some)
