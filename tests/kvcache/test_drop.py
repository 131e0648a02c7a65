"""Slicing is the matrix [0 | I], and the sinks that move are the base's."""

import torch

from fathom.kvcache.drop import Drop
from fathom.kvcache.method import Method
from fathom.kvcache.rope import Rope
from fathom.kvcache.schedule import Schedule

from .cases import model_of


def test_the_shortcut_is_the_round():
    drop = Drop(Schedule(64, 4, 28), Rope(model_of("qwen3").config))
    keys, values = torch.randn(2, 2, 2, 64, 16, dtype=torch.float64)
    short = drop.compress(keys, values, keys[:, :, :4], 0)
    whole = Method.compress(drop, keys, values, keys[:, :, :4], 0)
    for a, b in zip(short, whole, strict=True):
        assert a.shape[2] == 32
        assert (a - b).abs().max() < 1e-6  # the library's angles are float32


def test_survivors_keep_every_bit():
    drop = Drop(Schedule(64, 4, 28), Rope(model_of("qwen3").config))
    keys, values = torch.randn(2, 1, 2, 64, 16, dtype=torch.bfloat16)
    new_keys, new_values = drop.compress(keys, values, keys[:, :, :4], 5)
    assert torch.equal(new_keys[:, :, 4:], keys[:, :, -28:])
    assert torch.equal(new_values[:, :, 4:], values[:, :, -28:])
