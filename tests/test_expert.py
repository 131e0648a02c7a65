"""Questions from documents: how a sentence of a held-out one goes on, among what else stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.expert import (
    CHOICES,
    conversation_of,
    documents_of,
    is_held_out,
    paragraphs,
    passage_of,
    questions_of,
    write_examination,
)

from fathom.errors import FathomError
from tests.corpus.prose import Prose, lines, write_jsonl


def document(number: int) -> str:
    prose = Prose(number)
    return "\n\n".join([f"Title {number}", *(" ".join(prose.sentence(18) for _ in range(3)) for _ in range(4))])


def test_a_question_is_a_sentence_of_its_document() -> None:
    text = document(1)
    flat = " ".join(text.split())
    made = list(questions_of("a", text, 6))
    assert [row["id"] for row in made] == [f"a-{number}" for number in range(6)]
    for row in made:
        choices = list(map(str, row["choices"]))  # type: ignore[call-overload]
        goes_on = [f"{row['question']} {choice}" in flat for choice in choices]
        assert goes_on.index(True) == row["answer"] and sum(goes_on) == 1
        assert len(set(choices)) == CHOICES and all(choice in flat for choice in choices)
    assert list(questions_of("a", text, 6)) == made, "the same every time"
    assert {row["answer"] for row in questions_of("a", text, 12)} == set(range(CHOICES))


def test_markup_is_no_prose() -> None:
    text = "Heading\n=======\n\n- a point. Another.\n\n    code = 1.\n\n.. note:: Look.\n\n"
    text += "One is prose.\nSo is two.\n\nNo end"
    assert list(paragraphs(text)) == [["One is prose.", "So is two."]]
    assert list(questions_of("a", text, 6)) == [], "too few sentences to choose among"


def test_a_conversation_asks_for_the_first_paragraph() -> None:
    text = document(2)
    row = conversation_of(text)
    assert row is not None and "Title 2" in row["messages"][0]["content"]  # type: ignore[index]
    assert row["messages"][1]["content"] == text.split("\n\n")[1]  # type: ignore[index]
    assert conversation_of("no paragraph") is None


def test_a_passage_ends_with_a_paragraph() -> None:
    assert passage_of("a" * 60 + "\n\n" + "b" * 60, 100) == "a" * 60
    assert passage_of("a" * 10 + "\n\n" + "b" * 200, 100) == "a" * 10 + "\n\n" + "b" * 88


@pytest.mark.slow
def test_what_is_held_out_is_not_read(tmp_path: Path) -> None:
    domain = write_jsonl(tmp_path / "domain.jsonl", [document(number) for number in range(80)])
    general = write_jsonl(tmp_path / "general.jsonl", [document(number) for number in range(100, 190)])
    texts = list(documents_of([str(domain)]))
    found = write_examination(tmp_path / "w", texts, documents_of([str(general)]), one_in=2, questions=30, replay=80)
    rows = {name: lines(tmp_path / "w" / f"{name}.jsonl") for name in found}
    assert {name: len(one) for name, one in rows.items()} == found and found["questions"] == 30
    read = {row["text"] for row in rows["domain"]}
    assert read == {text for text in texts if not is_held_out(text, 2)} and 20 <= 80 - len(read) <= 60
    assert len(rows["general"]) < 80 - 20 and len(rows["held-general"]) == 30
    for row in rows["questions"]:
        words = f"{row['question']} {row['choices'][row['answer']]}"
        assert not any(words in " ".join(text.split()) for text in read)
    assert len(rows["conversations"]) == len(read)
    again = write_examination(tmp_path / "v", texts[::-1], documents_of([str(general)]), one_in=2, questions=30)
    assert again["domain"] == found["domain"], "which are held out does not depend on their order"
    with pytest.raises(FathomError, match=r"^\d+ of 20 documents and \d+ of 90 of replay are held out; 20 are needed"):
        write_examination(tmp_path / "u", texts[:20], documents_of([str(general)]), one_in=2)


def test_the_recipes_fit() -> None:
    """Each run reads what the one before wrote, and the control trains as long as the expert."""
    from fathom.corpus.recipe import load_corpus_recipe
    from fathom.recipe import load_recipe

    recipes = Path(__file__).parents[1] / "recipes" / "expert"
    corpus = load_corpus_recipe(recipes / "corpus.yaml", ["tokenize.tokenizer=gpt2"])
    onward, tuned, control = (load_recipe(recipes / f"{name}.yaml") for name in ("continue", "tune", "control"))
    assert set(onward.data.mixture) == set(corpus.mix.shares) and set(control.data.mixture) == {"general"}
    assert control.train.steps == onward.train.steps + tuned.train.steps
    assert corpus.mix.tokens == onward.train.steps * onward.train.tokens_per_step
    assert corpus.converse.max_tokens == tuned.data.sequence_length == corpus.mix.block
    assert json.dumps(control.optim.lr) == json.dumps(onward.optim.lr)
