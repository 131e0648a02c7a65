"""Needles that are sentences in real text: a number is asked for by name, and answered digit by digit.

one        one needle
several    four needles about different cities
lookalike  one needle, two other numbers of the same city, and the same number's name for another city

`asking.py` scores the answers, and `prompts.py` places the question.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from .prompts import Parts

CITIES = (
    "Lima Oslo Cairo Quito Turin Porto Delhi Osaka Accra Dakar Perth Lyon Bern Riga Sofia Minsk Tunis "
    "Rabat Hanoi Seoul Milan Genoa Kyoto Davao Natal Leeds Essen Malmo Tampa Omaha Boise Fargo Akron "
    "Salem Provo Macon Derby Ghent Basel Graz"
)
OTHERS = ("lucky", "winning", "official", "hidden", "oldest")
TASKS = ("one", "several", "lookalike")


def sentences(texts: Sequence[str], draw: random.Random) -> Iterator[str]:
    """An endless supply of sentences: those of a random text from a random sentence on, then those of another random
    text."""
    while True:
        found = [part for part in re.split(r"(?<=[.!?])\s+", draw.choice(texts)) if len(part) > 1]
        start = draw.randrange(max(1, len(found) // 2))
        yield from found[start:] or ["…"]


def make(task: str, texts: Sequence[str], draw: random.Random) -> Parts:
    """One question of a task."""
    cities = draw.sample(CITIES.split(), 4)
    numbers = [str(draw.randrange(10_000, 100_000)) for _ in range(4)]
    asked = cities[0]
    planted = [f"The secret number of {asked} is {numbers[0]}."]
    if task == "several":
        planted += [f"The secret number of {city} is {n}." for city, n in zip(cities[1:], numbers[1:], strict=True)]
    elif task == "lookalike":
        kinds = draw.sample(OTHERS, 2)
        planted += [f"The {kind} number of {asked} is {n}." for kind, n in zip(kinds, numbers[1:3], strict=True)]
        planted.append(f"The secret number of {cities[1]} is {numbers[3]}.")
    draw.shuffle(planted)
    return Parts(
        before="Read this text and answer the question that follows it.",
        filler=sentences(texts, draw),
        planted=planted,
        question=f"What is the secret number of {asked}?",
        lead=f"The secret number of {asked} is",
        answers=(numbers[0],),
    )
