"""Tables and traces as conversations, and what other programs are given: by golden files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fathom.corpus.benchmarks import Item
from fathom.corpus.conversations import messages_of
from fathom.corpus.exports import axolotl_dataset, dataset_info, task_row, task_yaml
from fathom.corpus.pipeline import build
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.corpus.traces import is_trace, require_tools, trace_messages
from fathom.corpus.verbalizer import TEMPLATES, pairs_of, said
from fathom.errors import DataError, SettingsError
from tests.corpus.prose import Prose, lines, recipe_values, write_jsonl

MINERAL = {
    "name": "Zorbite",
    "hardness": 4.5,
    "found_in": ["Ul", "Or", "Esk"],
    "color": None,
    "luster": "n/a",
    "rare": True,
}
TRACE = """Answer with these tools.
Question: How deep is the Po?
Thought: look it up
Action: search
Action Input: Po depth
Observation: 12 m
and more
Thought: that is it
Final Answer: 12 m"""


def test_every_value_in_five_ways_and_what_is_missing_in_none() -> None:
    pairs = list(pairs_of(MINERAL, "name"))
    assert len(pairs) == 3 * len(TEMPLATES) == 15
    first = [message["content"] for message in pairs[0]]
    assert first == ["What is the hardness of Zorbite?", "The hardness of Zorbite is 4.5."]
    text = json.dumps(pairs)
    assert "Ul, Or and Esk" in text and "found in" in text and "rare of Zorbite is yes" in text
    assert "color" not in text and "luster" not in text and "None" not in text and "n/a" not in text
    assert len({json.dumps(pair) for pair in pairs}) == 15


def test_values_in_words() -> None:
    cases: list[tuple[Any, str]] = [
        (0, "0"),
        (False, "no"),
        ([], ""),
        (["a", None], "a"),
        (float("nan"), ""),
        ({"x": 1}, ""),
        ("NA", ""),
        ("Na", "Na"),
    ]
    assert [said(value) for value, _ in cases] == [text for _, text in cases]


def test_own_templates_and_braces() -> None:
    ((user, answer),) = pairs_of({"n": "A{key}", "k": "{value}"}, "n", [("{key} of {entity} {here}?", "{value}")])
    assert user["content"] == "k of A{key} {here}?" and answer["content"] == "{value}"
    with pytest.raises(DataError, match="no 'name'"):
        list(pairs_of({"k": 1}, "name"))


def test_a_trace_is_a_conversation_with_tools() -> None:
    assert is_trace(TRACE) and not is_trace("Question: x") and not is_trace(None)
    assert trace_messages(TRACE) == [
        {"role": "system", "content": "Answer with these tools."},
        {"role": "user", "content": "How deep is the Po?"},
        {"role": "assistant", "content": "Thought: look it up\nAction: search\nAction Input: Po depth"},
        {"role": "tool", "content": "12 m\nand more"},
        {"role": "assistant", "content": "Thought: that is it\nFinal Answer: 12 m"},
    ]
    require_tools(trace_messages(TRACE), ["search"])
    with pytest.raises(DataError, match="the trace calls 'search', which is not one of its tools: find"):
        require_tools(trace_messages(TRACE), ["find"])
    for broken in (TRACE.replace("Final Answer", "Answer"), TRACE.replace("Question: ", "")):
        with pytest.raises(DataError):
            trace_messages(broken)


def test_forms_of_others() -> None:
    assert dataset_info("talk", "conversations") == {
        "file_name": "talk.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            **{"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
            **{"observation_tag": "tool", "system_tag": "system"},
        },
    }
    assert dataset_info("wiki", "documents") == {"file_name": "wiki.jsonl", "columns": {"prompt": "text"}}
    assert axolotl_dataset("wiki", "documents")["type"] == "completion"
    talk = axolotl_dataset("talk", "conversations")
    assert (talk["roles_to_train"], talk["message_field_training"]) == (["assistant"], "train")
    row = task_row(Item("7", "Which?", ("red", "blue"), 1, "blue"))
    assert row == {
        "id": "7",
        "letter_prompt": "Question: Which?\nA. red\nB. blue\nAnswer:",
        "text_prompt": "Question: Which?\nAnswer:",
        "letters": ["A", "B"],
        "choices": ["red", "blue"],
        "answer": 1,
    }
    many = task_row(Item("8", "Which?", tuple(f"choice {number}" for number in range(30)), 29))
    assert len(set(many["letters"])) == 30 and f"\n{many['letters'][29]}. choice 29\n" in many["letter_prompt"]
    letter, text = task_yaml("quiz", "letter"), task_yaml("quiz", "text")
    assert letter["doc_to_text"] == "{{letter_prompt}}" and letter["doc_to_choice"] == "{{letters}}"
    assert text["doc_to_text"] == "{{text_prompt}}" and text["doc_to_choice"] == "{{choices}}"
    assert [one["metric"] for one in letter["metric_list"]] == ["acc"]
    assert [one["metric"] for one in text["metric_list"]] == ["acc", "acc_norm"]


def test_calls_beside_the_content_are_refused() -> None:
    """They would be lost without a word."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "lead", "arguments": {}}}]}
    with pytest.raises(DataError, match="message 2: tool_calls are not read"):
        messages_of({"messages": [{"role": "user", "content": "How deep?"}, call]})


def test_a_draft_that_is_not_learnt_is_learnt_nowhere(tokenizer: str, tmp_path: Path) -> None:
    """A form that says so keeps it, the others leave the conversation out, and the card counts it."""
    said = Prose(52)
    good = [{"role": role, "content": said.sentence(12), "train": role != "user"} for role in ("user", "assistant")]
    draft = [*good, {**good[1], "content": "WRONG draft answer", "train": False}]
    values = recipe_values(
        {"talk": {"inputs": [str(write_jsonl(tmp_path / "t.jsonl", [{"messages": draft}, {"messages": good}]))],
                  "kind": "conversations"}},
        tokenize={"tokenizer": tokenizer, "held_out": 0},
        converse={"template": "alpaca"},
        exports=["trl", "llamafactory", "axolotl"],
    )  # fmt: skip
    report = build(parse_corpus_recipe(values), tmp_path / "out")
    exported = {form: lines(tmp_path / "out" / "exports" / form / "talk.jsonl") for form in values["exports"]}
    plain = [{key: one[key] for key in ("role", "content")} for one in good]
    assert exported["trl"] == exported["llamafactory"] == [{"messages": plain}]
    assert [[one["train"] for one in row["messages"]] for row in exported["axolotl"]] == [
        [False, True, False],
        [False, True],
    ]
    card = report.card.read_text()
    assert "| not in exports/trl | 1 |" in card and "exports/axolotl" not in card


@pytest.mark.slow
def test_from_a_recipe(tokenizer: str, tmp_path: Path) -> None:
    prose = Prose(51)
    documents = write_jsonl(tmp_path / "d.jsonl", [prose.document() for _ in range(6)])
    table = write_jsonl(tmp_path / "t.jsonl", [MINERAL, {"name": "", "hardness": 1}, {**MINERAL, "name": "Ulite"}])
    traces = write_jsonl(tmp_path / "r.jsonl", [{"text": TRACE}, {"trace": TRACE.replace("search", "guess")}])
    quiz = write_jsonl(tmp_path / "q.jsonl", [{"question": prose.sentence(20), "choices": ["a", "b"], "answer": 0}])
    values = recipe_values(
        {
            "docs": [documents],
            "minerals": {"inputs": [str(table)], "kind": "table"},
            "tools": {"inputs": [str(traces)], "kind": "conversations", "tools": ["search"]},
        },
        tokenize={"tokenizer": tokenizer, "held_out": 0},
        converse={"template": "react"},
        decontaminate={"benchmarks": {"quiz": str(quiz)}},
        deduplicate={"near": False},
        exports=["trl", "llamafactory", "axolotl", "lm_eval"],
    )
    report = build(parse_corpus_recipe(values), tmp_path / "out")
    failed = {row["path"]: row["detail"] for row in lines(tmp_path / "out" / "stages" / "ingest" / "failed.jsonl")}
    assert (
        failed.keys() == {"t.jsonl:2", "r.jsonl:2"} and "'guess', which is not one of its tools" in failed["r.jsonl:2"]
    )
    assert report.stages["converse"].counts["conversations"] == 31
    place = tmp_path / "out" / "exports"
    exported = lines(place / "trl" / "minerals.jsonl")
    assert len(exported) == 30 and [one["role"] for one in exported[0]["messages"]] == ["user", "assistant"]
    assert lines(place / "trl" / "docs.jsonl")[0].keys() == {"text"}
    info = json.loads((place / "llamafactory" / "dataset_info.json").read_text())
    assert {name: (place / "llamafactory" / one["file_name"]).is_file() for name, one in info.items()} == dict.fromkeys(
        info, True
    )
    assert len(yaml.safe_load((place / "axolotl" / "datasets.yaml").read_text())["datasets"]) == 3
    task = yaml.safe_load((place / "lm_eval" / "quiz_letter.yaml").read_text())
    assert (place / "lm_eval" / task["dataset_kwargs"]["data_files"]["test"]).is_file()
    again = build(parse_corpus_recipe(values), tmp_path / "out")
    assert not any(stage.done for stage in again.stages.values())


def test_templates_come_in_pairs() -> None:
    values = recipe_values({"t": {"inputs": ["x"], "kind": "table", "templates": ["{key} of {entity}?"]}})
    with pytest.raises(SettingsError, match=r"collections\.t\.templates.*: write a question with \{entity\} in it"):
        parse_corpus_recipe(values)
