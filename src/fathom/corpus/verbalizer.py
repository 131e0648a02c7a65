"""Converts table records into questions and answers: several questions for each value; missing values are skipped.

`ingest.py` (`_pairs`) reads the rows, and takes the collection's own `templates`, if it has any, instead of
`TEMPLATES`. `duplicates.py` compares rows of a table for equality alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from fathom.corpus.documents import ConversationMessage
from fathom.errors import DataError

TEMPLATES: tuple[tuple[str, str], ...] = (
    ("What is the {key} of {entity}?", "The {key} of {entity} is {value}."),
    ("{entity}: which {key}?", "{value}"),
    ("Tell me the {key} of {entity}.", "{entity} has the {key} {value}."),
    ("I am looking for the {key} of {entity}. What is it?", "It is {value}."),
    ("Which {key} does {entity} have?", "Its {key} is {value}."),
)
"""Questions and their answers; a recipe may name others."""
NOTHING = ("", "-", "–", "na", "n/a", "none", "null", "nan", "unknown")
"""Values that mean that a cell is empty, in any case; `Na` is sodium."""


def pairs_of(
    record: Mapping[str, object], entity_field: str, templates: Sequence[tuple[str, str]] = TEMPLATES
) -> Iterator[list[ConversationMessage]]:
    """Yields one question-answer exchange for each value and template.

    Args:
        record: Keys and values; a list becomes one value.
        entity_field: The key whose value names what the record is about.
        templates: Questions and answers with {entity}, {key} and {value} in them.
    """
    entity = said(record.get(entity_field))
    if not entity:
        raise DataError(f"no {entity_field!r}: it has {', '.join(map(str, record)) or 'none'}")
    for key, given in record.items():
        value = said(given)
        if key == entity_field or not value:
            continue
        words = {"entity": entity, "key": " ".join(str(key).replace("_", " ").split()), "value": value}
        for question, answer in templates:
            yield [
                {"role": "user", "content": _filled(question, words)},
                {"role": "assistant", "content": _filled(answer, words)},
            ]


def said(value: object) -> str:
    """A value as text; empty if it is missing."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, (list, tuple)):
        parts = [text for text in map(said, value) if text]
        return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)
    if isinstance(value, Mapping):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = " ".join(str(value).split())
    return "" if text.lower() in NOTHING and text != "Na" else text


def _filled(template: str, words: Mapping[str, str]) -> str:
    """A template with {entity}, {key} and {value} filled in; any other braces, also those inside values, are kept."""
    return re.sub(r"\{(entity|key|value)\}", lambda field: words[field[1]], template)
