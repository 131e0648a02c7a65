"""Items of every maker in one form, and a benchmark's own faults: all planted, no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fathom.corpus.benchmarks import item_of, read_items, self_check
from fathom.errors import DataError

FORMS: list[tuple[dict[str, Any], tuple[str, tuple[str, ...], int | None, str]]] = [
    ({"question": "Q", "choices": ["a", "b"], "answer": 1}, ("Q", ("a", "b"), 1, "b")),
    ({"question": "Q", "choices": ["a", "b"], "answer": "B"}, ("Q", ("a", "b"), 1, "b")),
    (
        {"question": "Q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"},
        ("Q", ("a", "b"), 1, "b"),
    ),
    (
        {"question": "Q", "choices": {"text": ["a", "b", "c"], "label": [1, 2, 3]}, "answerKey": 2},
        ("Q", ("a", "b", "c"), 1, "b"),
    ),
    (
        {
            "question": {"stem": "Q", "choices": [{"text": "a", "label": "A"}, {"text": "b", "label": "B"}]},
            "answerKey": "A",
        },
        ("Q", ("a", "b"), 0, "a"),
    ),
    ({"query": "Q", "choices": ["a", "b", "c"], "gold": 2}, ("Q", ("a", "b", "c"), 2, "c")),
    ({"goal": "Q", "sol1": "a", "sol2": "b", "label": 0}, ("Q", ("a", "b"), 0, "a")),
    ({"premise": "Q", "choice1": "a", "choice2": "b", "label": 1}, ("Q", ("a", "b"), 1, "b")),
    ({"sentence": "Q", "option1": "a", "option2": "b", "answer": "2"}, ("Q", ("a", "b"), 1, "b")),
    ({"question": "Q", "correct_answer": "r", "distractor1": "a", "distractor2": "b"}, ("Q", ("r", "a", "b"), 0, "r")),
    ({"question": "Q", "A": "a", "B": "b", "answer": "A"}, ("Q", ("a", "b"), 0, "a")),
    (
        {"question": "Which? Choose from: A. one B. two C. three", "answer": "C"},
        ("Which?", ("one", "two", "three"), 2, "three"),
    ),
    (
        {"question": "Which? A. one C. three B. two", "answer": "C"},  # options in another order
        ("Which?", ("one", "two", "three"), 2, "three"),
    ),
    (
        {"question": "Where is (E. coli in B. it?) A. one B. two", "answer": "B"},
        ("Where is (E. coli in B. it?)", ("one", "two"), 1, "two"),
    ),
    ({"question": "Which? A. one A. two", "answer": "A"}, ("Which? A. one A. two", (), None, "A")),
    ({"question": "Ice is a mineral.", "answer": "True."}, ("Ice is a mineral.", ("True", "False"), 0, "True")),
    ({"question": "Is ice a mineral?", "answer": "no"}, ("Is ice a mineral?", ("Yes", "No"), 1, "No")),
    ({"question": "is ice a mineral?", "answer": False}, ("is ice a mineral?", ("Yes", "No"), 1, "No")),
    ({"question": "Ice is a mineral", "answer": True}, ("Ice is a mineral", ("True", "False"), 0, "True")),
    ({"question": "Who sang it?", "answer": ["True", "Gold"]}, ("Who sang it?", (), None, "True")),
    ({"question": "Q", "answer": "free text"}, ("Q", (), None, "free text")),
    ({"text": "only a text"}, ("only a text", (), None, "")),
    ({"question": "Q", "choices": ["a", "b"], "answer": 7}, ("Q", ("a", "b"), None, "")),
]


@pytest.mark.parametrize(("row", "expected"), FORMS)
def test_forms(row: dict[str, Any], expected: tuple[str, tuple[str, ...], int | None, str]) -> None:
    item = item_of(row, 0)
    assert (item.stem, item.choices, item.answer, item.gold) == expected


def test_files(tmp_path: Path) -> None:
    rows = [{"id": "x", "question": "one", "answer": "1"}, {"question": "two", "answer": "2"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    columns = {"question": ["one", "two"], "answer": ["1", "2"]}
    (tmp_path / "c.json").write_text(json.dumps({"qa": columns, "other": {"question": ["three"]}}))
    stems = [[item.stem for item in read_items(tmp_path / name, "t")] for name in ("a.jsonl", "b.json", "c.json#qa")]
    assert stems == [["one", "two"]] * 3
    assert [item.id for item in read_items(tmp_path / "a.jsonl", "t")] == ["x", "1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no item"),
        ("{bad", "benchmarks.t"),
        ("[1]", "item 1 is list, not a JSON object"),
        ('{"x": 1}', "item 1: no question: name the field of the question; the fields are x"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "n.json").write_text("3")
    with pytest.raises(DataError, match=r"benchmarks\.t: .*expected a list of items, or columns"):
        read_items(tmp_path / "n.json", "t")
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError) as raised:
        read_items(tmp_path / "a.jsonl", "t")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_all_planted_faults_and_no_others() -> None:
    good = [
        {
            "id": f"good{number}",
            "question": f"What is thing {number}?",
            "choices": ["p", "q", "r"],
            "answer": number % 3,
        }
        for number in range(30)
    ]
    planted = [
        {"id": "same", "question": "what is THING 3", "choices": ["x", "y", "z"], "answer": 0},  # other options
        {
            "id": "contrary",
            "question": "What is thing 4?",
            "choices": ["r", "q", "p"],
            "answer": 0,
        },  # r, where p was... q
        {"id": "twice", "question": "Repeated?", "choices": ["a", "A ", "b"], "answer": 2},
        {"id": "hollow", "question": "Empty?", "choices": ["a", "", "b"], "answer": 0},
        {"id": "beyond", "question": "Out?", "choices": ["a", "b"], "answer": 5},
        {"id": "letters", "question": "Letters? A. p B. q E. r E. s", "answer": "E"},
        {"id": "lone", "question": "Alone?", "choices": ["a"], "answer": 0},
        {"id": "signs", "question": "Signs?", "choices": ["+", "-"], "answer": 0},  # no words, yet not the same
    ]
    check = self_check([item_of(row, number) for number, row in enumerate([*good, *planted])])
    assert check.faults == {
        "duplicate_stems": [["good3", "same"], ["good4", "contrary"]],
        "contradictory": [["good4", "contrary"]],
        "repeated_options": ["twice"],
        "empty_options": ["hollow"],
        "answer_out_of_range": ["beyond"],
        "unread_options": ["letters"],
    }
    assert check.left_out == {"with an empty option": 1, "with fewer than 2 or more than 26 options": 1}
    assert check.letters == {"A": 15, "B": 10, "C": 11} and check.majority_score == round(15 / 37, 6)
    clean = self_check([item_of(row, number) for number, row in enumerate(good)])
    assert not any(clean.counts.values())


@pytest.mark.parametrize("key", ["question", "id", "choices", "context"])
def test_half_a_character_is_named_with_its_item(key: str, tmp_path: Path) -> None:
    good = {"id": "1", "question": "What?", "choices": ["a", "b"], "answer": 0, "context": "so \U0001d11e"}
    bad = {**good, key: ["\ud800", "b"] if key == "choices" else "half \ud800"}
    (tmp_path / "q.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    said = r"benchmarks\.quiz: .*q\.jsonl: item 2: '\\ud800' is half a character"
    with pytest.raises(DataError, match=said) as raised:
        read_items(tmp_path / "q.jsonl", "quiz")
    assert raised.value.exit_code == 2


def test_open_answers_in_other_words_are_no_contradiction() -> None:
    rows = [
        {"question": "Define the Clark value.", "answer": text} for text in ("mean abundance", "share in the crust")
    ]
    rows += [{"question": "Sure?", "choices": ["yes", "no"], "answer": number} for number in (0, 1)]
    check = self_check([item_of({"id": "same", **row}, number) for number, row in enumerate(rows)])
    assert check.faults["contradictory"] == [["same (item 3)", "same (item 4)"]], "each by an address of its own"


def test_marks_are_true_or_false_where_all_answers_are(tmp_path: Path) -> None:
    rows = [{"question": f"Claim {number} holds.", "answer": "TF"[number % 2]} for number in range(4)]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    items = read_items(path, "quiz")
    assert [(one.choices, one.answer, one.gold) for one in items] == [
        (("True", "False"), number % 2, ("True", "False")[number % 2]) for number in range(4)
    ]
    assert items[0].accepted == ("T", "Yes") and items[1].accepted == ("F", "No")
    path.write_text("\n".join(map(json.dumps, [*rows, {"question": "Which letter is the time?", "answer": "hour"}])))
    assert not any(one.choices for one in read_items(path, "quiz")), "T is a letter like any other there"
