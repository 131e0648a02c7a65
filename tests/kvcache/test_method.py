"""One round: what stays, what moves, and what a constant signal becomes."""

import pytest
import torch

from fathom.kvcache import METHODS

from .cases import F, L, N, S, cache_of, model_of


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3")


def rounds(method, keys, values, count):
    """So many rounds on a memory that constant tokens fill up again."""
    first, key, value = keys[:, :, :S], keys[:, :, :1], values[:, :, :1]
    for i in range(count):
        keys, values = method.compress(keys, values, first, i)
        new = method.rope.turn(key.expand(-1, -1, method.schedule.freed, -1), N + i * method.schedule.freed)
        keys = torch.cat([keys, new], 2)
        values = torch.cat([values, value.expand(-1, -1, method.schedule.freed, -1)], 2)
    return keys, values


@pytest.mark.parametrize("name", [name for name in METHODS if name != "snapkv"])
def test_one_word_said_forever_stays_that_word(model, name):
    """Constant content is a fixed point of 100 rounds, wherever its entries are moved to."""
    method = cache_of(model, name).method
    key, value = torch.randn(2, 1, 2, 1, 16, dtype=torch.float64).expand(-1, -1, -1, N, -1)
    keys, values = rounds(method, method.rope.turn(key, 0), value.contiguous(), 100)
    assert keys.shape[2] == N
    moved = method.schedule.freed * 100
    assert (method.rope.turn(keys, -moved, -1) - key).abs().max() < 1e-3  # float32 angles of thousands
    assert (values - value).abs().max() < 1e-5


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_shapes_types_and_sinks(model, name, dtype):
    method = cache_of(model, name).method
    keys, values = torch.randn(2, 3, 2, N, 16, dtype=dtype)
    queries = torch.randn(3, 4, method.observed, 16, dtype=dtype) if method.observed else None
    new_keys, new_values = method.compress(keys, values, keys[:, :, :S], 0, queries)
    assert new_keys.shape == new_values.shape == (3, 2, method.schedule.survivors, 16)
    assert new_keys.dtype == new_values.dtype == dtype
    assert torch.equal(new_values[:, :, :S], values[:, :, :S])
    back = method.rope.turn(new_keys[:, :, :S].double(), -method.schedule.freed, 0)
    assert (back - keys[:, :, :S]).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-5)


def test_the_schedule_of_the_toy(model):
    schedule = cache_of(model).schedule
    assert (schedule.window, schedule.sinks, schedule.kept, schedule.freed) == (N, S, L, F)
