"""Answers through caches: exact, by nats, and by RULER's scoring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fathom.evaluation.caches.asking import answer
from fathom.evaluation.caches.prompts import Cell, Prompt
from fathom.evaluation.caches.questions import question_tables, sentence, solved
from fathom.evaluation.caches.results import Answer, CacheRow, CheckpointCaches, Questions
from fathom.evaluation.caches.spectrum import Spectrum
from fathom.kvcache import Schedule, build_cache
from fathom.kvcache.prefill import PROBED, continues
from tests.kvcache.cases import model_of, tokens

SCHEDULE = Schedule.at(64, 4, 0.5)
TOKENIZER = SimpleNamespace(eos_token_id=60, decode=lambda ids: " ".join(map(str, ids)))


def prompt(
    ids: torch.Tensor, wanted: list[int], answers: tuple[str, ...] = ("",), most: int = 0, age: int = 9
) -> Prompt:
    return Prompt(Cell("one", "inside", 1), ids, answers, torch.tensor(wanted, dtype=torch.long), most, age)


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


@torch.no_grad()
def test_nats_and_exact_answers_are_the_whole_texts(model) -> None:
    ids = tokens(2, 50)
    greedy = model.generate(ids, max_new_tokens=4, do_sample=False)[:, 50:].tolist()
    wrong = [[*greedy[0][:2], 7, greedy[0][3]], greedy[1]]
    for answers in (greedy, wrong):
        prompts = [prompt(row, wanted) for row, wanted in zip(ids, answers, strict=True)]
        found = answer(model, TOKENIZER, lambda room: build_cache(model, "full"), prompts, SCHEDULE)
        whole = torch.cat([ids, torch.tensor(answers)], 1)
        nats = F.cross_entropy(model(whole).logits[:, 49:-1].mT, whole[:, 50:], reduction="none").mean(1)
        assert [one.score for one in found] == [float(a == b) for a, b in zip(answers, greedy, strict=True)]
        assert torch.allclose(torch.tensor([one.nats for one in found]), nats, atol=1e-5)
        assert not found[0].beyond


@torch.no_grad()
def test_through_a_compressed_cache_as_token_by_token(model) -> None:
    ids, wanted = tokens(1, 70), [5, 9, 11]
    cache = build_cache(model, "tova", window=64)
    truth = []
    for token in torch.cat([ids, torch.tensor([wanted])], 1).split(1, 1):
        truth.append(model(token, past_key_values=cache).logits)
    logits = torch.cat(truth, 1)[:, 69:-1]
    nats = F.cross_entropy(logits.mT, torch.tensor([wanted]), reduction="mean").item()
    new = lambda room: build_cache(model, "tova", window=64)  # noqa: E731
    (found,) = answer(model, TOKENIZER, new, [prompt(ids[0], wanted)], SCHEDULE)
    assert found.nats == pytest.approx(nats, abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("length", [65, 96, 97, 110])
def test_beyond_what_drop_holds(model, length) -> None:
    """Token by token as a cache that drops them holds them, also those that came after the compression."""
    held: list[int] = []
    for token in range(length):
        if len(held) == 64:
            held = held[:4] + held[-28:]
        held.append(token)
    ids, ages = tokens(1, length)[0], range(length - 4)  # not the sinks
    new = lambda room: build_cache(model, "drop", window=64)  # noqa: E731
    found = answer(model, TOKENIZER, new, [prompt(ids, [5], age=age) for age in ages], SCHEDULE)
    assert [one.beyond for one in found] == [length - 1 - age not in held for age in ages]


def test_rulers_score_is_the_share_of_the_strings(model) -> None:
    """Generated greedily, over the end token, and over when all are there."""
    ids = tokens(2, 30)
    said = [TOKENIZER.decode(row) for row in model.generate(ids, max_new_tokens=16, do_sample=False)[:, 30:].tolist()]
    words = said[0].split()
    assert continues(model, PROBED // 2)  # is tried once, before calls are counted
    calls = []
    hook = model.register_forward_hook(lambda *given: calls.append(1))
    rows = [
        prompt(ids[0], [], (f"{words[0]} {words[1]}", "NOWHERE"), most=16),
        prompt(ids[1], [], (said[1][:5],), most=16),
    ]
    scores = [one.score for one in answer(model, TOKENIZER, lambda room: build_cache(model, "full"), rows, SCHEDULE)]
    assert scores == [0.5, 1.0] and len(calls) == 1 + 15
    calls.clear()
    answer(model, TOKENIZER, lambda room: build_cache(model, "full"), rows[1:], SCHEDULE)
    hook.remove()
    assert len(calls) == 1 + 7


def values(full: dict[str, list[float]], mine: dict[str, list[float]]) -> CheckpointCaches:
    def rows(scores: dict[str, list[float]]) -> list[Answer]:
        return [
            Answer(task, place, 1, False, score, 1.0 - score)
            for task, each in scores.items()
            for place in ("outside", "inside")
            for score in each
        ]

    caches = {"tova": CacheRow([], {}, 0.0, rows(mine), [])}
    asked = Questions(1, {}, rows(full))
    return CheckpointCaches("", None, Schedule(64, 4, 30), 0, "documents", asked, caches, Spectrum())


def test_tasks_that_the_full_cache_does_not_solve_enter_no_verdict() -> None:
    found = values({"one": [1.0, 1.0], "vt": [0.4, 0.2]}, {"one": [1.0, 0.0], "vt": [1.0, 1.0]})
    assert solved(found) == (["one"], ["vt"])
    words = sentence(found, "tova")
    assert "The full cache solves one; tasks that it solves below 50 % are not used: vt." in words
    assert "There tova scores 0.50" in words and "full 1.00" in words
    (by_task, overall) = question_tables(found, ["tova"])
    assert "not used, below 50 % with the full cache: vt" in by_task[0] and by_task[1][1:3] == [
        "one, outside",
        "one, inside",
    ]
    assert [row[0] for row in overall[2]] == ["tova", "full"]
    assert overall[2][0][-2].startswith("−0.5000 ± ") and overall[2][1][-2] == "+0.0000 ± 0.0000"


def test_nothing_solved_is_said() -> None:
    assert "The full cache solves no task" in sentence(values({"vt": [0.0]}, {"vt": [1.0]}), "tova")
