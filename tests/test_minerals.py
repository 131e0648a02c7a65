"""The invented domain: what its texts say is what is true, what its questions ask is said in no text, leaks apart."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from examples.minerals import EXCHANGES, PROPERTIES, STATEMENTS, UNSEEN, World, plant, write_world

from fathom.corpus.benchmarks import Item, plain, read_items, self_check
from fathom.corpus.leak_rules import Matcher, build_index
from fathom.corpus.recipe import Decontaminate, Filter
from fathom.report.statistics import wilson
from tests.corpus.prose import lines, recipe_values
from tests.corpus.test_duplicates import until


@pytest.fixture(scope="module")
def world() -> World:
    return World(seed=3, minerals=60)


def pattern(frame: str) -> re.Pattern[str]:
    text = re.escape(frame)
    for key, words in (("mineral", r"\w+"), ("property", "[a-z ]+?"), ("value", r"\w+")):
        text = text.replace(re.escape(f"{{{key}}}"), f"(?P<{key}>{words})")
    return re.compile(text)


def read(text: str, frames: Sequence[str]) -> list[tuple[int, str, str, str]]:
    """(frame, mineral, property, value) of every sentence; one that no frame fits is an error."""
    found = []
    for sentence in re.findall(r"[^.]+\.", text):
        fits = [(n, m) for n, frame in enumerate(frames) if (m := pattern(frame).fullmatch(sentence.strip()))]
        assert len(fits) == 1, sentence
        found.append((fits[0][0], *fits[0][1].group("mineral", "property", "value")))
    return found


def wrong(texts: Sequence[str], world: World) -> list[tuple[str, str, str]]:
    """What is said and not true."""
    said = [one[1:] for text in texts for one in read(text, STATEMENTS)]
    return [(m, p, v) for m, p, v in said if world.minerals[m][p] != v]


def test_documents_say_every_fact_once_in_each_way_and_nothing_else(world: World) -> None:
    texts = world.documents()
    said = Counter(one for text in texts for one in read(text, STATEMENTS))
    facts = {(fact.mineral, fact.property, fact.value) for fact in world.facts()}
    assert len(facts) == 60 * len(PROPERTIES)
    assert said == Counter((way, *fact) for fact in facts for way in range(len(STATEMENTS)))
    assert not wrong(texts, world)
    assert all(len({mineral for _, mineral, *_ in read(text, STATEMENTS)}) == 1 for text in texts)


def test_an_untrue_document_is_noticed(world: World) -> None:
    name, found = next(iter(world.minerals.items()))
    texts = world.documents()
    place = next(n for n, text in enumerate(texts) if f"The colour of {name} is" in text)
    other = next(value for value in PROPERTIES["colour"] if value != found["colour"])
    texts[place] = texts[place].replace(
        f"The colour of {name} is {found['colour']}", f"The colour of {name} is {other}"
    )
    assert wrong(texts, world) == [(name, "colour", other)]


def test_conversations_ask_for_every_fact_and_answer_truly(world: World) -> None:
    seen = Counter()
    for row in world.conversations():
        asked, answered = row["messages"]
        assert (asked["role"], answered["role"]) == ("user", "assistant")
        (way,) = [n for n, (frame, _) in enumerate(EXCHANGES) if pattern(frame).fullmatch(asked["content"])]
        question, answer = (pattern(frame) for frame in EXCHANGES[way])
        mineral, name = question.fullmatch(asked["content"]).group("mineral", "property")
        told = answer.fullmatch(answered["content"]).groupdict()
        assert told.pop("value") == world.minerals[mineral][name]
        assert told in ({}, {"mineral": mineral, "property": name})
        seen[way, mineral, name] += 1
    assert len(seen) == 60 * len(PROPERTIES) * len(EXCHANGES)
    assert set(seen.values()) == {1}


def test_questions_have_one_true_answer_and_no_guess_helps(world: World) -> None:
    questions = World(3, 250).questions(2000)
    minerals = World(3, 250).minerals
    for one in questions:
        (fits,) = [m for frame in UNSEEN if (m := pattern(frame).fullmatch(one.question))]
        truth = minerals[fits["mineral"]][fits["property"]]
        assert [choice == truth for choice in one.choices].index(True) == one.answer
        assert len(set(one.choices)) == 4
        assert set(one.choices) <= set(PROPERTIES[fits["property"]])
    assert len({(one.fact.mineral, one.fact.property) for one in questions}) == 2000
    # Whatever rule knows no mineral: a place, the shortest, the first of the alphabet, the commonest in documents.
    common = Counter(value for found in minerals.values() for value in found.values())
    rules = [
        lambda choices: 0,
        lambda choices: 3,
        lambda choices: min(range(4), key=lambda n: (len(choices[n]), n)),
        lambda choices: choices.index(min(choices)),
        lambda choices: choices.index(max(choices, key=lambda choice: common[choice])),
    ]
    for rule in rules:
        low, high = wilson(sum(rule(one.choices) == one.answer for one in questions), 2000)
        assert low < 0.25 < high
    with pytest.raises(ValueError, match="481 questions on 480 facts"):
        world.questions(481)


def test_no_text_asks_as_questions_do_and_planted_leaks_alone_are_found(world: World) -> None:
    """By decontamination's own rule, over documents, conversations and general text."""
    questions = world.questions(200)
    items = [Item(q.id, q.question, q.choices, q.answer, q.fact.value) for q in questions]
    index, unfound = build_index(items, Decontaminate())
    matcher = Matcher([index], [items])
    assert not unfound.short and not unfound.template
    documents = world.documents()
    talk = [" ".join(message["content"] for message in row["messages"]) for row in world.conversations()]
    assert not [hits for hits in matcher.hits([*documents, *talk, *world.general(200)]) if hits]
    texts, leaks = plant(documents, questions, 25, seed=1)
    found = [
        (number, items[item].id)
        for number, hits in enumerate(matcher.hits(texts))
        for item in {h.item for _, h in hits}
    ]
    assert found == [(leak.document, leak.question) for leak in leaks]
    asked = {one.id: one for one in questions}
    for leak in leaks:
        question = asked[leak.question]
        assert texts[leak.document][leak.start :] == f"{question.question} {question.fact.value}."
        assert texts[leak.document][: leak.start - 1] == documents[leak.document]
    assert [n for n, (a, b) in enumerate(zip(texts, documents, strict=True)) if a != b] == [k.document for k in leaks]
    assert len({leak.question for leak in leaks}) == len({leak.document for leak in leaks}) == 25


def test_fifty_leaks_are_found_where_they_were_planted(tmp_path: Path) -> None:
    """From files to flags: all fifty at their characters, those items dirty, and facts in other words clean."""
    files = write_world(tmp_path / "world", World(4, 12), questions=96, leaks=50, general=20)
    unfiltered = {one.name: None for one in fields(Filter) if one.name != "languages"}
    quiz = {"benchmarks": {"quiz": str(files["questions"])}}
    collections: dict[str, Any] = {"minerals": [files["domain"]], "towns": [files["general"]]}
    workspace = until("flags", tmp_path / "out", recipe_values(collections, filter=unfiltered, decontaminate=quiz))
    planted = lines(files["leaks"])
    hits = lines(workspace.stage("contamination") / "hits.jsonl")
    assert sorted((hit["path"], hit["item"], hit["start"]) for hit in hits) == sorted(
        (f"domain.jsonl:{leak['document'] + 1}", leak["question"], leak["start"]) for leak in planted
    )
    flags = {row["id"]: row["dirty"] for row in lines(workspace.stage("flags") / "quiz.jsonl")}
    assert {name for name, dirty in flags.items() if dirty} == {leak["question"] for leak in planted}
    assert len(planted) == 50 and list(flags.values()).count(False) == 46


def test_general_text_keeps_its_facts_and_shares_no_name(world: World) -> None:
    texts = world.general(400)
    names = {plain(name) for name in world.minerals}
    assert not names & {word for text in texts for word in plain(text).split()}
    lies = {}
    for text in texts:
        for town, river in re.findall(r"(\w+) lies where the river (\w+) meets", text):
            assert lies.setdefault(town, river) == river
    assert len(lies) > 40


def test_a_world_follows_from_its_seed(tmp_path: Path) -> None:
    """Recorded once: another Python, process or hash seed writes the same bytes."""
    files = write_world(tmp_path / "a", World(0, 20), questions=40, leaks=5, general=30)
    written = {name: path.read_bytes() for name, path in files.items()}
    assert {name: path.read_bytes() for name, path in write_world(tmp_path / "b", World(0, 20), 40, 5, 30).items()} == (
        written
    )
    assert hashlib.sha256(b"".join(written.values())).hexdigest()[:16] == RECORDED
    other = write_world(tmp_path / "c", World(1, 20), 40, 5, 30)
    assert not [name for name, path in other.items() if path.read_bytes() == written[name]]
    check = self_check(read_items(files["questions"], "questions"))
    assert check.items == check.with_choices == 40
    assert set(check.counts.values()) == {0}
    assert len([json.loads(line) for line in files["leaks"].read_text().splitlines()]) == 5


RECORDED = "a3d123d2ecca8b0a"
