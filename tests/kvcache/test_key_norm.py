"""Small keys stay."""

import torch

from .cases import cache_of, model_of


def test_the_smallest_norms_stay_in_order():
    method = cache_of(model_of("qwen3"), "key_norm").method
    keys = torch.randn(1, 2, 64, 16)
    keys = keys / keys.norm(dim=-1, keepdim=True) * (1 + torch.randperm(64)).view(1, 1, 64, 1)
    places = torch.arange(60.0).view(1, 1, 60, 1).expand(1, 2, 60, 1)
    chosen = method.reducer(keys, None)(places)[..., 0]
    for head in range(2):
        norms = keys[0, head, 4:].norm(dim=-1)
        assert chosen[0, head].tolist() == sorted(norms.argsort()[:28].tolist())


def test_equal_words_do_not_win_by_rounding():
    method = cache_of(model_of("qwen3"), "key_norm").method
    keys = torch.ones(1, 2, 64, 16) * (1 + 1e-6 * torch.rand(1, 2, 64, 1))
    places = torch.arange(60.0).view(1, 1, 60, 1).expand(1, 2, 60, 1)
    assert method.reducer(keys, None)(places)[0, 0, :, 0].tolist() == list(range(28))
