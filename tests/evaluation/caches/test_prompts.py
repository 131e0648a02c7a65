"""Prompts of exact length: the last compression comes just before the question, or just after it."""

from __future__ import annotations

import random
import re
from itertools import product
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fathom.errors import SettingsError
from fathom.evaluation.caches import natural, ruler
from fathom.evaluation.caches.asking import batches, make_prompts
from fathom.evaluation.caches.prompts import PLACES, Cell, Frame
from fathom.kvcache import Schedule
from tests.tiny import TEXT, export_tiny

SCHEDULE = Schedule.at(2048, 4, 0.5)  # of bytes
TEXTS = [" ".join(f"{line.capitalize()}." for line in TEXT)]
TEMPLATE = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> Frame:
    folder = tmp_path_factory.mktemp("tokenizer")
    export_tiny(folder)
    return Frame(AutoTokenizer.from_pretrained(folder))


def made(frame: Frame, tasks: tuple[str, ...], count: int, compressions: tuple[int, ...] = (1, 2)):
    return make_prompts(frame, SCHEDULE, tasks, compressions, TEXTS, count)


def text(frame: Frame, prompt) -> str:
    return str(frame.tokenizer.decode(prompt.ids.tolist()))


def test_where_the_last_compression_comes(frame: Frame) -> None:
    """Outside: everything after it is question and lead. Inside: only the prompt's last token comes after it."""
    prompts, left_out = made(frame, natural.TASKS, 24)
    assert not left_out and len(prompts) == 24
    for prompt in prompts:
        total, count = len(prompt.ids), prompt.cell.compressions
        assert SCHEDULE.compressions(total) == SCHEDULE.compressions(total + len(prompt.wanted) - 1) == count
        last = 2048 + (count - 1) * 1024
        after = frame.tokenizer.decode(prompt.ids[last:].tolist())
        if prompt.cell.place == "inside":
            assert total == last + 1
        else:
            assert after.lstrip().startswith("What is the secret number of") and after.endswith("is")
            assert SCHEDULE.compressions(last) == count - 1


def test_questions_are_spread_evenly_and_do_not_change(frame: Frame) -> None:
    prompts, _ = made(frame, natural.TASKS, 26)
    again, _ = made(frame, natural.TASKS, 26)
    counts = {cell: 0 for cell in product(natural.TASKS, PLACES, (1, 2))}
    for one, other in zip(prompts, again, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.answers == other.answers
        counts[one.cell.task, one.cell.place, one.cell.compressions] += 1
    assert sum(counts.values()) == 26 and set(counts.values()) == {2, 3}
    assert sum(len(part) for part in batches(prompts)) == 26
    for part in batches(prompts):
        assert len({(prompt.cell, len(prompt.ids)) for prompt in part}) == 1


@pytest.mark.parametrize("task", natural.TASKS)
def test_a_natural_question_has_one_answer_in_the_text(frame: Frame, task: str) -> None:
    prompts, _ = made(frame, (task,), 8)
    for prompt in prompts:
        whole = text(frame, prompt)
        asked = re.search(r"What is the secret number of (\w+)\?", whole)
        assert asked is not None
        found = re.findall(rf"The secret number of {asked[1]} is (\d+)\.", whole)
        assert found == [*prompt.answers]
        planted = re.findall(r"The \w+ number of \w+ is \d+\.", whole)
        assert len(planted) == {"one": 1, "several": 4, "lookalike": 4}[task]
        assert frame.tokenizer.decode(prompt.wanted.tolist()).strip() == prompt.answers[0]
        needle = f"The secret number of {asked[1]} is {prompt.answers[0]}."  # not one that looks like it
        end = len(frame.ids(whole[: whole.index(needle) + len(needle)]))
        assert prompt.age == len(prompt.ids) - end


def test_the_template_is_the_tokenizers(tmp_path: Path) -> None:
    export_tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = TEMPLATE
    (prompt,) = make_prompts(Frame(tokenizer), SCHEDULE, ("one",), (1,), TEXTS, 1)[0]
    shown = tokenizer.decode(prompt.ids.tolist())
    assert shown.startswith("<u>Read this text") and "?</u><a>The secret number of" in shown


@pytest.mark.parametrize("task", ruler.TASKS)
def test_every_answer_of_ruler_is_in_the_prompt(frame: Frame, task: str) -> None:
    prompts, left_out = made(frame, (task,), 4)
    assert not left_out
    wanted = {"vt": 5, "cwe": 10, "fwe": 3, "niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    for prompt in prompts:
        assert len(prompt.answers) == wanted and prompt.most == ruler.MOST.get(task, 128)
        assert all(answer in text(frame, prompt) for answer in prompt.answers)
        assert SCHEDULE.compressions(len(prompt.ids)) == prompt.cell.compressions


def test_the_commonest_words_are_the_answers(frame: Frame) -> None:
    for task, count in (("cwe", 10), ("fwe", 3)):
        for prompt in made(frame, (task,), 4)[0]:
            pattern = r"\d+\. (\w+)" if task == "cwe" else r"\b([a-z]{6})\b(?=[ .])"
            body = text(frame, prompt)
            times = {answer: len(re.findall(rf"\b{answer}\b", body)) for answer in prompt.answers}
            others = [word for word in re.findall(pattern, body) if word not in times]
            most = max((others.count(word) for word in set(others)), default=0)
            if task == "cwe":
                assert min(times.values()) > most and len(times) == count
            else:
                assert list(times.values()) == sorted(times.values(), reverse=True)


def test_what_does_not_fit_is_named(frame: Frame) -> None:
    small = Schedule.at(64, 4, 0.5)
    prompts, left_out = make_prompts(frame, small, ("several", "one"), (1,), TEXTS, 4)
    assert set(left_out) == {"several", "one"} and not prompts
    assert "give a larger window" in left_out["several"]
    with pytest.raises(SettingsError, match="one: the question needs"):
        frame.build(Cell("one", "inside", 1), small, natural.make("one", TEXTS, random.Random(0)), random.Random(0))
