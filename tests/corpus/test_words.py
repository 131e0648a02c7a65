"""Words as numbers, beside words as Python finds them."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from fathom.corpus import words as module
from fathom.corpus.stage import grouped
from fathom.corpus.words import run_numbers, words_of


def of_regex(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def found(text: str) -> list[str]:
    words = words_of([text])
    return [text[a:b].lower() for a, b in zip(words.starts, words.ends, strict=True)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "one",
        "Hello, World! x_y 12.5",
        "“naïve” — Ünïcode\r\nnext\ttab",
        "a-b-c",
        " leading and trailing ",
        "ΑΒΓ абв",
    ],
)
def test_the_same_words_as_a_regular_expression(text: str) -> None:
    assert found(text) == of_regex(text)


def test_scripts_without_blanks_and_marks() -> None:
    assert found("水深 is 漢字abc") == ["水", "深", "is", "漢", "字", "abc"]
    assert found("हिन्दी भाषा") == ["हिन्दी", "भाषा"]


def test_equal_numbers_for_equal_words_alone() -> None:
    texts = ["The Quick brown", "the\nquick; BROWN", "the quick brow n"]
    words = words_of(texts)
    first, second, third = (words.numbers[words.bounds[n] : words.bounds[n + 1]].tolist() for n in range(3))
    assert first == second and third[:2] == first[:2] and first[2] not in third
    chance = random.Random(0)
    many = {"".join(chance.choices("ab", k=chance.randint(1, 14))) for _ in range(20_000)}
    assert len(set(words_of([" ".join(sorted(many))]).numbers.tolist())) == len(many)


def test_runs_stay_within_a_text_and_know_order() -> None:
    words = words_of(["a b c d", "", "e f", "b c d a"])
    runs, bounds = words.runs(3)
    assert bounds.tolist() == [0, 2, 2, 2, 4]
    assert runs[1] == runs[2] and runs[0] != runs[3]  # b c d twice; a b c is not c d a
    assert run_numbers(words.numbers[:4], 4) != run_numbers(words_of(["d c b a"]).numbers, 4)


def test_long_texts_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    text = " ".join("".join(chance.choices("abcdé", k=chance.randint(1, 9))) for _ in range(3000))
    whole = words_of([text, "tail end"])
    monkeypatch.setattr(module, "BLOCK", 1000)
    pieces = words_of([text, "tail end"])
    for one, other in zip(vars(whole).values(), vars(pieces).values(), strict=True):
        assert np.array_equal(one, other)


def test_groups_lose_nothing() -> None:
    texts = ["x" * size for size in (5, 50, 3, 200, 0, 7)]
    groups = list(grouped(texts, len, 60))
    assert [text for group in groups for text in group] == texts
    assert all(len(group) == 1 or sum(map(len, group)) <= 60 for group in groups)
