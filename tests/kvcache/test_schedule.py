"""The arithmetic of compressions, against counting them one token at a time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.kvcache import Schedule

TOY = Schedule(64, 4, 28)


def counted(schedule, tokens):
    """Entries and compressions after so many tokens, by doing it."""
    entries = compressions = 0
    for _ in range(tokens):
        if entries == schedule.window:
            entries, compressions = schedule.survivors, compressions + 1
        entries += 1
    return entries, compressions


def test_published_table():
    seen = [63, 64, 65, 95, 96, 97, 98, 128, 129]
    assert [TOY.entries(t) for t in seen] == [63, 64, 33, 63, 64, 33, 34, 64, 33]


@pytest.mark.parametrize("kept,compressions", [(2046, [3, 7, 15, 31, 63, 127]), (2044, [2, 6, 14, 30, 62, 126])])
def test_published_compressions(kept, compressions):
    schedule = Schedule(4096, 4, kept)
    assert [schedule.compressions(2**k) for k in range(13, 19)] == compressions


@given(st.integers(2, 40), st.data())
def test_counting(window, data):
    sinks = data.draw(st.integers(0, window - 2))
    schedule = Schedule(window, sinks, data.draw(st.integers(1, window - sinks - 1)))
    seen = data.draw(st.integers(0, 4 * window))
    assert (schedule.entries(seen), schedule.compressions(seen)) == counted(schedule, seen)
    assert schedule.entries(seen) <= window
    length = data.draw(st.integers(0, 4 * window))
    at = seen
    for piece in schedule.cuts(seen, length):
        schedule.fit(at, piece)
        compressions = schedule.compressions(at + piece) - schedule.compressions(at)
        assert compressions == (at > 0 and schedule.entries(at) == window)  # at most one, and at the start
        at += piece
    assert at == seen + length
    with pytest.raises(ValueError, match="crosses"):
        schedule.fit(seen, schedule.room(seen) + 1)


def test_fixed_chunks_never_cross():
    assert TOY.chunk == 32 == math.gcd(64, 32)
    assert Schedule(4096, 4, 2044).chunk == 2048 and Schedule(4096, 4, 2046).chunk == 2
    for at in range(0, 10 * 64, TOY.chunk):
        TOY.fit(at, TOY.chunk)


def test_a_crossing_chunk_is_told_what_to_do():
    with pytest.raises(ValueError, match=r"48 tokens crosses .* token 64 \(16 left\); call prefill.* divide 32"):
        TOY.fit(48, 48)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((0, 4, 0.5), "window must be at least 1, got 0"),
        ((64, -1, 0.5), "sinks must not be negative, got -1"),
        ((3, 4, 0.5), "a window of 3 is too small for 4 sinks: 6 or more needed"),
        ((64, 32, 0.5), "can keep 1 to 31 other entries, not 0"),
        ((64, 4, 1.0), "ratio must lie between 0 and 1, got 1.0"),
        ((64, 4, 0.5, 2.5), "kept must be a whole number, got 2.5"),
        (("64", 4, 0.5), "window must be a whole number, got '64'"),
        ((64, 4.5, 0.5), "sinks must be a whole number, got 4.5"),
        ((64, True, 0.5), "sinks must be a whole number, got True"),
        ((64, 4, "half"), "ratio must lie between 0 and 1, got 'half'"),
        ((64, 4, 0.5, 60), "can keep 1 to 59 other entries, not 60"),
    ],
)
def test_impossible_schedules(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule.at(*arguments)


@pytest.mark.parametrize(
    "window,ratio,survivors", [(4096, 0.5, 2048), (100, 0.29, 29), (100, 0.57, 57), (64, 0.45, 28), (65, 0.5, 32)]
)
def test_a_share_that_binary_numbers_miss(window, ratio, survivors):
    """Whole entries, rounded down, unless the share is one but for its last digit."""
    assert Schedule.at(window, 4, ratio).survivors == survivors
