"""A matrix that starts as the average, learns through the attention function, and serves in a cache."""

import torch

from fathom.kvcache import build_cache, compress_in_training

from .cases import SCHEDULE, cache_of, cached, model_of, tokens


@torch.no_grad()
def test_it_starts_as_the_average():
    model, ids = model_of("qwen3"), tokens(1, 150)
    a, b = (cached(model, ids, cache_of(model, method)) for method in ("average", "learned"))
    assert (a - b).abs().max() < 1e-5


def test_training_it_alone_and_using_it():
    model, ids = model_of("qwen3").requires_grad_(False), tokens(4, 160)
    run = compress_in_training(model, "learned", **SCHEDULE)
    start = run.method.weight.detach().clone()
    optimizer = torch.optim.Adam(run.method.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        trained = model(ids).logits
    run.stop()
    assert not torch.equal(run.method.weight, start)
    assert "weight" in run.method.state_dict()
    assert not any("kvcache" in name for name in model.state_dict())  # the model's own checkpoint stays as it is
    assert (cached(model, ids, build_cache(model, run.method)) - trained).abs().max() < 1e-5
    assert (cached(model, ids, cache_of(model, "learned")) - trained).abs().max() > 1e-3  # the untrained one


def test_its_gradient_through_cache_and_function():
    model, ids = model_of("qwen3", torch.float64), tokens(1, 120)
    run = compress_in_training(model, "learned", **SCHEDULE)
    through_function = torch.autograd.grad(model(ids).logits.square().sum(), run.method.weight)[0]
    run.stop()
    cache = build_cache(model, run.method)
    logits = torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(32, 1)], 1)
    through_cache = torch.autograd.grad(logits.square().sum(), run.method.weight)[0]
    scale = through_cache.abs().max()
    assert scale > 0
    assert (through_function - through_cache).abs().max() < 1e-6 * scale.clamp(min=1)
