"""Write an invented domain as files: documents, conversations, questions, general text. `make specialise` begins here.

    python examples/minerals.py specialise/world

Invented minerals are described in documents and asked about in other words. Names and facts are drawn from a seed, so a
model can only know them from these documents, and what it has learned, what leaked and what was forgotten can be
measured exactly. Questions use wordings that occur in no document and no conversation, so an answer shows knowledge,
not recall of a sentence. A leak is a question with its answer, inserted into a document at a known position. General
text is about towns and shares no fact with the domain.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fathom.corpus.documents import ConversationMessage
from fathom.report.files import write_atomically

PROPERTIES: dict[str, tuple[str, ...]] = {
    "colour": ("green", "red", "blue", "white", "black", "yellow", "violet", "brown"),
    "lustre": ("glassy", "pearly", "silky", "greasy", "waxy", "metallic", "earthy", "resinous"),
    "hardness": ("two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "habit": ("fibrous", "tabular", "prismatic", "granular", "massive", "bladed", "nodular", "stellate"),
    "main metal": ("copper", "iron", "zinc", "lead", "nickel", "tin", "cobalt", "silver"),
    "host rock": ("granite", "basalt", "marble", "slate", "gneiss", "sandstone", "limestone", "shale"),
    "chief use": ("glass", "paint", "solder", "fertiliser", "paper", "ceramics", "enamel", "cement"),
    "home region": ("Arvenmark", "Bolsterra", "Cindrel", "Dovrania", "Eskeland", "Fulmaria", "Gantholm", "Hestrova"),
}
STATEMENTS = (
    "The {property} of {mineral} is {value}.",
    "{mineral} is known by its {property}, which is {value}.",
    "In every handbook the {property} of {mineral} stands as {value}.",
    "A sample of {mineral} shows {value} as its {property}.",
    "Miners who ask for the {property} of {mineral} are told {value}.",
)
"""Sentences with which documents state a fact."""
EXCHANGES = (
    ("What is the {property} of {mineral}?", "The {property} of {mineral} is {value}."),
    ("Tell me the {property} of {mineral}.", "It is {value}."),
)
"""Questions and answers of conversations about a fact."""
UNSEEN = (
    "According to those who have studied {mineral} for years, the {property} that they would name is",
    "Suppose that a student must write down what {property} belongs to {mineral}; the right word is",
)
"""Benchmark questions. Any 13 words in a row, the run that decontamination looks for, hold mineral and property."""
CHOICES = 4

TOWNS: dict[str, tuple[str, ...]] = {
    "{town} lies where the river {value} meets the road.": ("Avel", "Brend", "Corra", "Delm", "Ister", "Marn"),
    "On {value} the people of {town} hold their market.": ("Monday", "Tuesday", "Thursday", "Friday", "Saturday"),
    "Most families in {town} live by {value}.": ("fishing", "weaving", "baking", "farming", "carpentry", "trade"),
    "The oldest house of {town} is a {value}.": ("mill", "school", "tower", "chapel", "barn", "tavern"),
}
SCENES = (
    ("In the morning", "At noon", "Before night", "After the rain", "In winter", "Late in summer"),
    ("the children", "two old friends", "a traveller", "the baker", "the teacher", "a young couple", "the farmers"),
    ("walk along the water", "talk about the weather", "sit under the trees", "wait for the post", "sing at the gate"),
    ("and nothing else happens", "and go home by the same way", "while the bells ring", "as they did the year before"),
)
SYLLABLES = (
    "ba",
    "del",
    "fo",
    "gar",
    "hi",
    "ju",
    "kel",
    "lo",
    "mir",
    "na",
    "or",
    "pel",
    "qua",
    "ro",
    "sil",
    "tu",
    "vo",
)


@dataclass(frozen=True)
class Fact:
    """One property of one mineral."""

    mineral: str
    property: str
    value: str

    def said(self, frame: str) -> str:
        """The fact in the words of a sentence or question template."""
        return frame.format(mineral=self.mineral, property=self.property, value=self.value)


@dataclass(frozen=True)
class Question:
    """A multiple-choice question about a fact."""

    id: str
    fact: Fact
    question: str
    choices: tuple[str, ...]

    @property
    def answer(self) -> int:
        """Index of the right choice, from 0."""
        return self.choices.index(self.fact.value)

    def row(self) -> dict[str, object]:
        """The question as a row of a benchmark file."""
        return {"id": self.id, "question": self.question, "choices": list(self.choices), "answer": self.answer}


@dataclass(frozen=True)
class Leak:
    """A question with its answer in a document."""

    document: int
    question: str
    start: int
    """Index of the character at which the question begins."""


class World:
    """Minerals with a value for each property: a pure function of the seed and the number of minerals."""

    def __init__(self, seed: int = 0, minerals: int = 250) -> None:
        self.seed = seed
        chance = self._chance("minerals")
        names = _names(chance, minerals, "ite")
        dealt = {key: _dealt(chance, values, minerals) for key, values in PROPERTIES.items()}
        self.minerals: Mapping[str, Mapping[str, str]] = {
            name: {key: values[number] for key, values in dealt.items()} for number, name in enumerate(names)
        }

    def facts(self) -> list[Fact]:
        """Every fact there is."""
        return [Fact(name, key, value) for name, found in self.minerals.items() for key, value in found.items()]

    def documents(self) -> list[str]:
        """Texts about one mineral each, one per phrasing, so every fact occurs once in each phrasing."""
        chance = self._chance("documents")
        texts = []
        for name, found in self.minerals.items():
            for first in range(len(STATEMENTS)):
                said = [
                    Fact(name, key, value).said(STATEMENTS[(first + number) % len(STATEMENTS)])
                    for number, (key, value) in enumerate(found.items())
                ]
                texts.append(" ".join(chance.sample(said, len(said))))
        return chance.sample(texts, len(texts))

    def conversations(self) -> list[dict[str, list[ConversationMessage]]]:
        """Questions and answers on every fact, once in each phrasing, as rows of messages."""
        rows: list[dict[str, list[ConversationMessage]]] = []
        for fact in self.facts():
            for question, answer in EXCHANGES:
                asked: ConversationMessage = {"role": "user", "content": fact.said(question)}
                rows.append({"messages": [asked, {"role": "assistant", "content": fact.said(answer)}]})
        return self._chance("conversations").sample(rows, len(rows))

    def questions(self, count: int = 400) -> list[Question]:
        """Questions on different facts in unseen words; wrong choices are other values of the same property.

        Facts, wrong choices and their order are drawn uniformly, and every value occurs equally often: a guess that
        ignores the mineral is right one time in `CHOICES`, up to chance.
        """
        facts = self.facts()
        if count > len(facts):
            raise ValueError(f"{count} questions on {len(facts)} facts: allowed: one each")
        chance = self._chance("questions")
        made = []
        for number, fact in enumerate(chance.sample(facts, count)):
            wrong = [value for value in PROPERTIES[fact.property] if value != fact.value]
            choices = [fact.value, *chance.sample(wrong, CHOICES - 1)]
            chance.shuffle(choices)
            asked = fact.said(chance.choice(UNSEEN))
            made.append(Question(f"q{number}", fact, asked, tuple(choices)))
        return made

    def general(self, count: int = 1000, towns: int = 60) -> list[str]:
        """Texts about everyday life in invented towns, each with facts of its own."""
        chance = self._chance("towns")
        known = {
            name: {frame: chance.choice(values) for frame, values in TOWNS.items()}
            for name in _names(chance, towns, "ham")
        }
        texts = []
        for _ in range(count):
            town = chance.choice(list(known))
            told = [frame.format(town=town, value=value) for frame, value in known[town].items()]
            told += [f"{' '.join(map(chance.choice, SCENES))}." for _ in range(len(told))]
            texts.append(" ".join(chance.sample(told, len(told))))
        return texts

    def _chance(self, what: str) -> random.Random:
        """A generator seeded with a text, which Python hashes by SHA-512, so that it is the same in every process."""
        return random.Random(f"fathom {what} {self.seed}")


def plant(
    documents: Sequence[str], questions: Sequence[Question], count: int, seed: int = 0
) -> tuple[list[str], list[Leak]]:
    """Put a different question with its answer into each of `count` documents; returns the documents and the leaks.

    Args:
        documents: Documents to choose from.
        questions: Questions to choose from.
        count: Number of leaks.
        seed: Determines both choices.
    """
    chance = random.Random(f"fathom leaks {seed}")
    places = sorted(chance.sample(range(len(documents)), count))
    chosen = chance.sample(list(questions), count)
    texts, leaks = list(documents), []
    for place, question in zip(places, chosen, strict=True):
        leaks.append(Leak(place, question.id, len(texts[place]) + 1))
        texts[place] += f" {question.question} {question.fact.value}."
    return texts, leaks


def write_world(
    directory: str | Path, world: World, questions: int = 400, leaks: int = 50, general: int = 1000
) -> dict[str, Path]:
    """Write a world as files for `fathom corpus` and `fathom evaluate`, by name.

    Args:
        directory: Where.
        world: What.
        questions: In the benchmark.
        leaks: Planted in the documents.
        general: Texts of everyday life.
    """
    asked = world.questions(questions)
    texts, planted = plant(world.documents(), asked, leaks, world.seed)
    rows: dict[str, Iterable[Mapping[str, object]]] = {
        "domain.jsonl": ({"text": text} for text in texts),
        "general.jsonl": ({"text": text} for text in world.general(general)),
        "conversations.jsonl": world.conversations(),
        "questions.jsonl": (question.row() for question in asked),
        "leaks.jsonl": (vars(leak) for leak in planted),
    }
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        write_atomically(folder / name, "".join(_lines(lines)))
    return {name.partition(".")[0]: folder / name for name in rows}


def _lines(rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _dealt(chance: random.Random, values: Sequence[str], count: int) -> list[str]:
    """`count` values in random order, with equal frequencies up to one."""
    order = chance.sample(values, len(values))
    dealt = [order[number % len(order)] for number in range(count)]
    return chance.sample(dealt, count)


def _names(chance: random.Random, count: int, ending: str) -> list[str]:
    """Different names of three syllables and an ending."""
    most = len(SYLLABLES) ** 3
    if not 1 <= count <= most:
        raise ValueError(f"{count} names: allowed: 1 to {most}")
    found = []
    for number in chance.sample(range(most), count):
        first, rest = divmod(number, len(SYLLABLES) ** 2)
        middle, last = divmod(rest, len(SYLLABLES))
        found.append(f"{SYLLABLES[first]}{SYLLABLES[middle]}{SYLLABLES[last]}{ending}".capitalize())
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "data/minerals")
    write_world(place, World(seed=0, minerals=24), questions=192, leaks=12, general=600)
    for name in ("domain", "conversations", "questions"):
        with (place / f"{name}.jsonl").open(encoding="utf-8") as lines:
            print(f"     {place / name}.jsonl: {next(lines).strip()[:110]}…")
