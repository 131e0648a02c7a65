"""StreamingLLM: per token by default, several at once through `kept`."""

from functools import partial

import torch

from .cases import N, cache_of, cached, model_of, tokens


def test_one_token_at_a_time():
    schedule = cache_of(model_of("qwen3"), "sinks").schedule
    assert (schedule.freed, schedule.kept) == (1, 59)


def test_hysteresis_is_drop():
    model, ids = model_of("qwen3"), tokens(1, 150)
    several = cached(model, ids, cache_of(model, "sinks", kept=28))
    assert torch.equal(several, cached(model, ids, cache_of(model, "drop")))


def test_it_forgets_what_left_the_window():
    """One layer deep nothing else than the sinks and the last entries can be seen."""
    model, ids = model_of("qwen3", num_hidden_layers=1), tokens(1, 150)
    changed = ids.clone()
    changed[:, 20] = 5 + ids[:, 20] % 3
    a, b = (cached(model, x, cache_of(model, "sinks")) for x in (ids, changed))
    last_seen = 20 + N - 4 - 1  # as the oldest of N − S
    assert torch.equal(a[:, last_seen + 1 :], b[:, last_seen + 1 :])
    assert not torch.equal(a[:, last_seen], b[:, last_seen])


def test_sinks_do_not_wear_down_in_half_precision():
    """Thousands of compressions move a sink from where it was, at once: one rounding, not thousands."""
    move = partial(cache_of(model_of("qwen3"), "sinks").method.rope.plan[0].turn, step=0)
    first = torch.randn(1, 2, 4, 16)
    half = first.bfloat16()
    one_step = half
    for _ in range(2000):
        one_step = move(one_step, 1)
    truth = move(half.double(), 2000)
    at_once = (move(half, 2000) - truth).norm() / truth.norm()
    step_by_step = (one_step - truth).norm() / truth.norm()
    assert at_once < 0.004 < 0.02 < step_by_step
