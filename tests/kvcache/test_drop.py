"""Slicing keeps what a selection of the last would, and the sinks that move are the base's."""

import torch

from fathom.kvcache.drop import Drop
from fathom.kvcache.method import Held, Selection
from fathom.kvcache.rope import Rope
from fathom.kvcache.schedule import Schedule

from .cases import model_of


class Sliced(Selection):
    """The same by the scores of a selection."""

    def scores(self, held):
        return torch.arange(64.0).expand(*held.keys.shape[:2], -1)


def test_the_shortcut_is_a_selection():
    drop, sliced = (kind(Schedule(64, 4, 28), Rope(model_of("qwen3").config)) for kind in (Drop, Sliced))
    keys, values = torch.randn(2, 2, 2, 64, 16, dtype=torch.float64)
    short, whole = (method.compress(Held(keys, values), keys[:, :, :4], 0) for method in (drop, sliced))
    for a, b in zip(short, whole, strict=True):
        assert a.shape[2] == 32
        assert (a - b).abs().max() < 1e-6  # the library's angles are float32


def test_survivors_keep_every_bit():
    drop = Drop(Schedule(64, 4, 28), Rope(model_of("qwen3").config))
    keys, values = torch.randn(2, 1, 2, 64, 16, dtype=torch.bfloat16)
    new_keys, new_values = drop.compress(Held(keys, values), keys[:, :, :4], 5)
    assert torch.equal(new_keys[:, :, 4:], keys[:, :, -28:])
    assert torch.equal(new_values[:, :, 4:], values[:, :, -28:])
