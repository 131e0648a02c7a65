"""Small keys stay."""

import torch

from fathom.kvcache.method import Held

from .cases import cache_of, model_of


def kept(keys):
    method = cache_of(model_of("qwen3"), "key_norm").method
    return method.choose(method.scores(Held(keys, keys))[..., 4:])


def test_the_smallest_norms_stay_in_order():
    keys = torch.randn(1, 2, 64, 16)
    keys = keys / keys.norm(dim=-1, keepdim=True) * (1 + torch.randperm(64)).view(1, 1, 64, 1)
    for head in range(2):
        norms = keys[0, head, 4:].norm(dim=-1)
        assert kept(keys)[0, head].tolist() == sorted(norms.argsort()[:28].tolist())


def test_norms_are_not_rounded():
    """Norms that bfloat16 cannot tell apart are still ordered, as in the paper and in kvpress."""
    keys = torch.ones(1, 2, 64, 16) * (1 - 1e-4 * torch.arange(64.0)).view(1, 1, 64, 1)
    assert kept(keys)[0, 0].tolist() == list(range(32, 60))


def test_equal_words_do_not_win_by_rounding():
    keys = torch.ones(1, 2, 64, 16) * (1 + 1e-6 * torch.rand(1, 2, 64, 1))
    assert kept(keys)[0, 0].tolist() == list(range(28))
