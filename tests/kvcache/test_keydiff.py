"""Keys unlike the mean stay."""

import torch

from fathom.kvcache.method import Held

from .cases import cache_of, model_of


def test_the_least_like_the_mean_stay():
    method = cache_of(model_of("qwen3"), "keydiff").method
    keys = torch.ones(1, 2, 64, 16) + 0.1 * torch.randn(1, 2, 64, 16)
    odd = torch.arange(5, 60, 2)  # 28 entries
    keys[:, :, odd] = torch.randn(1, 2, 28, 16)
    scores = method.scores(Held(keys, keys))
    assert method.choose(scores[..., 4:])[0, 1].tolist() == (odd - 4).tolist()
    assert torch.allclose(method.scores(Held(3 * keys, keys)), scores, atol=1e-6)  # lengths do not matter
