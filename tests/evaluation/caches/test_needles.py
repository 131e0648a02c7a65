"""Needles: where they are planted, when they are asked for, and what counts as found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fathom.errors import SettingsError
from fathom.evaluation.caches.needles import Needles, Recall, Rows, enough, plant, recall
from fathom.kvcache import Schedule
from fathom.report.statistics import wilson

SCHEDULE = Schedule.at(64, 4, 0.5)
FIRST, LAST = 8, 8 + 4 + 6 + 24  # 8 fillers; 4 values, 6 keys, 24 needles


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def needles(width: int) -> Needles:
    if width == 1:
        return Needles.synthetic(keys=6, values=4, first=FIRST)
    return Needles.drawn(torch.arange(FIRST, LAST), generator(), keys=20, values=4, length=width - 1)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("within", [64, None])
def test_what_is_planted_is_asked_for_afterwards(width: int, within: int | None) -> None:
    kinds, text = needles(width), torch.zeros(50, 320, dtype=torch.long)
    rows = plant(text, kinds, 3, generator(), within)
    changed = 0
    for row in range(50):
        keys = set()
        for value, planted, asked in zip(rows.value[row], rows.planted[row], rows.asked[row], strict=True):
            found = rows.ids[row, planted + 1 - width : planted + 1]
            (key, held), *_ = (kinds.planted == found).all(-1).nonzero().tolist()
            assert held == value
            keys.add(key)
            question = kinds.asked[key]
            assert torch.equal(rows.ids[row, asked + 1 - len(question) : asked + 1], question)
            assert planted < asked + 1 - len(question)
            assert within is None or planted < 48 < asked + 1
            changed += width + len(question)
        assert len(keys) == 3
    assert (rows.ids != 0).sum() == changed
    assert not text.any()


@pytest.mark.parametrize("within", [64, None])
def test_sinks_are_left_alone(within: int | None) -> None:
    """A needle there would be found whatever happens to the rest."""
    kinds, text = needles(3), torch.zeros(50, 320, dtype=torch.long)
    assert (plant(text, kinds, 3, generator(), within).planted - 2 < 4).any()
    assert (plant(text, kinds, 3, generator(), within, after=4).planted - 2 >= 4).all()


def test_no_answer_is_ever_read() -> None:
    kinds = needles(1)
    rows = plant(torch.zeros(50, 320, dtype=torch.long), kinds, 4, generator())
    assert not torch.isin(rows.ids, kinds.answers).any()


def test_compressions_are_those_between_needle_and_answer() -> None:
    planted, asked = torch.tensor([[0, 0, 0, 70, 63, 64]]), torch.tensor([[63, 64, 96, 95, 64, 96]])
    rows = Rows(torch.zeros(1, 100, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long), planted, asked)
    # The token at 64 is the first that finds a full memory; the one at 96 the second.
    assert rows.compressions(SCHEDULE).tolist() == [[0, 1, 2, 0, 1, 1]]


def test_a_needle_is_in_the_memory_with_its_last_token() -> None:
    """The round at token 64 finds two of its three tokens, and the question comes before the next compression."""
    kinds, generator = needles(3), torch.Generator().manual_seed(0)
    rows = plant(torch.zeros(4000, 96, dtype=torch.long), kinds, 1, generator)
    across = (rows.planted == 65) & (rows.asked < 96)
    assert across.any() and not rows.compressions(SCHEDULE)[across].any()


@pytest.mark.parametrize("within", [64, None])
def test_every_number_of_compressions_gets_its_questions(within: int | None) -> None:
    kinds, source = needles(1), generator()
    text = torch.zeros(10, 64 + 4 * 32, dtype=torch.long)
    drawn = 0

    def draw() -> Rows:
        nonlocal drawn
        drawn += 10
        return plant(text, kinds, 2, source, within)

    rows = enough(draw, SCHEDULE, range(5), 20)
    counts = torch.bincount(rows.compressions(SCHEDULE).flatten(), minlength=5)
    assert (counts >= 20).all() and len(rows.ids) < drawn
    last = rows.asked.max(1).values
    assert torch.equal(last, last.sort().values)
    early = rows.pick(slice(0, 5)).cut()
    assert early.ids.shape[1] == early.asked.max() + 1 < 64 + 4 * 32
    # What never comes up is not waited for.
    assert len(enough(draw, SCHEDULE, range(10), 1).ids) > 0


def test_intervals_are_wilsons_where_something_was_asked() -> None:
    assert Recall([0, 5], [0, 5]).intervals == [None, wilson(5, 5)]


def remembering(kinds: Needles, tokens: int):
    """A reader that looks up the last so many tokens, and otherwise says the first value."""

    def score(ids: Tensor, answers: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, len(answers))
        for row, at in (ids < FIRST + 4 + 6).logical_and(ids >= FIRST + 4).nonzero().tolist():
            for held in range(max(0, at - tokens), at):
                key, value = divmod(int(ids[row, held]) - FIRST - 10, 4)
                if ids[row, held] >= FIRST + 10 and key == ids[row, at] - FIRST - 4:
                    logits[row, at, value] = 1.0
        return logits

    return score


def test_a_whole_memory_finds_all_and_a_short_one_the_latest() -> None:
    kinds = needles(1)
    batches = [plant(torch.zeros(40, 160, dtype=torch.long), kinds, 4, generator(), 64)]
    whole = recall(remembering(kinds, 160), batches, kinds, SCHEDULE, 3)
    assert whole.accuracy == [1.0] * 4 and sum(whole.asked) == 160
    short = recall(remembering(kinds, 32), batches, kinds, SCHEDULE, 3).accuracy
    assert short[0] is not None and short[0] > 0.6
    assert max(a for a in short[2:] if a is not None) < 0.45  # chance is a quarter


def test_more_compressions_than_are_counted_are_left_out() -> None:
    found = Recall.of(torch.tensor([True, True, False]), torch.tensor([0, 3, 1]), 2)
    assert (found.right, found.asked, found.accuracy) == ([1, 0, 0], [1, 1, 0], [1.0, 0.0, None])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SettingsError, match="7 needles of 1 tokens"):
        plant(torch.zeros(1, 320, dtype=torch.long), needles(1), 7, generator())
    with pytest.raises(SettingsError, match="do not fit into 8 tokens"):
        plant(torch.zeros(1, 320, dtype=torch.long), needles(3), 3, generator(), 8)
    with pytest.raises(SettingsError, match="too few"):
        Needles.drawn(torch.arange(10), generator())


def test_questions_of_one_vocabulary_differ() -> None:
    kinds = Needles.drawn(torch.arange(300), generator())
    assert len(set(map(tuple, kinds.asked.tolist()))) == 64
    assert kinds.chance == 1 / 16 and len(kinds.answers.unique()) == 16
