"""KVzip against attention weights that the model itself returns."""

import pytest
import torch

from fathom.kvcache import reconstruct
from tests.models.cases import build, config_of

from .cases import S, cached, model_of, tokens

T = 40


def oracle(model, ids, request, chunk, how=torch.amax):
    """Reconstruction scores of each layer, `[B, H_kv, T]`, from whole passes without a cache."""
    pieces, heads = [], model.config.num_key_value_heads
    for start in range(0, T, chunk):
        piece = ids[:, start : start + chunk]
        whole = torch.cat([ids, request.expand(len(ids), -1), piece], dim=1)
        weights = torch.stack(model(whole, output_attentions=True, use_cache=False).attentions)  # [layers, B, H, L, L]
        asked = weights[..., T:, :]
        read = [*range(min(S, start)), *range(start, start + piece.shape[1]), *range(T, whole.shape[1])]
        asked = asked / asked[..., read].sum(-1, keepdim=True)
        here = asked[..., start : start + piece.shape[1]].unflatten(2, (heads, -1))
        pieces.append(how(here, dim=(3, 4)))
    return torch.cat(pieces, dim=-1)


def chosen(scores, values, kept):
    """The values of the best entries and of the sinks, in their order."""
    scores = scores.clone()
    scores[..., :S] = torch.inf
    best = scores.topk(kept, dim=-1).indices.sort(-1).values
    return values.gather(2, best.unsqueeze(-1).expand(*best.shape, values.shape[-1]))


@torch.no_grad()
@pytest.mark.quick("40-qwen3", "16-llama")
@pytest.mark.parametrize("case", ["llama", "qwen3", "glm"])
@pytest.mark.parametrize("chunk", [T, 16])
def test_what_the_model_needs_to_repeat_its_context_stays(case, chunk):
    model, ids, request = model_of(case, attn_implementation="eager"), tokens(2, T, seed=3), tokens(1, 5, seed=9)
    cache = reconstruct(model, ids, request, ratio=0.5, sinks=S, chunk=chunk)
    assert (cache.seen, cache.entries, cache.compressions) == (T, 20, 1)
    full = model(ids).past_key_values
    right, wrong = (oracle(model, ids, request, chunk, how) for how in (torch.amax, torch.mean))
    other = 0
    for layer, whole, best, mean in zip(cache.layers, full.layers, right, wrong, strict=True):
        assert torch.allclose(layer.values, chosen(best, whole.values, 20), atol=1e-5)
        other += not torch.allclose(layer.values, chosen(mean, whole.values, 20), atol=1e-5)
    assert other  # a mean in place of the maximum is seen


@torch.no_grad()
def test_one_context_and_many_questions():
    model, ids, request = model_of("llama"), tokens(2, T), tokens(1, 5, seed=9)
    before = model(ids).logits
    cache = reconstruct(model, ids, request, ratio=0.9)
    assert torch.equal(model(ids).logits, before)
    question = tokens(2, 6, seed=4)
    first = model(question, past_key_values=cache.branch()).logits
    one_by_one = cached(model, question, cache.branch(), 1)
    assert (first - one_by_one).abs().max() < 1e-4
    whole = model(torch.cat([ids, question], 1)).logits[:, T:]
    assert (first - whole).abs().mean() < 0.3 * whole.std()
    none = model(question).logits
    assert (first - whole).abs().mean() < 0.5 * (none - whole).abs().mean()


@torch.no_grad()
def test_a_loop_is_the_deeper_model_that_it_unrolls_to():
    """Each iteration of a layer has scores and entries of its own."""
    looped = model_of("loop", num_hidden_layers=2, recurrence_options={"trips": 2})
    plain = model_of("fathom", num_hidden_layers=4)
    weights = looped.state_dict()
    again = {name.replace(f"layers.{i}.", f"layers.{i + 2}."): x for name, x in weights.items() for i in (0, 1)}
    plain.load_state_dict(again | weights)
    ids, request, question = tokens(1, T), tokens(1, 5, seed=9), tokens(1, 6, seed=4)
    a, b = (model(question, past_key_values=reconstruct(model, ids, request)).logits for model in (looped, plain))
    assert (a - b).abs().max() < 1e-5


@torch.no_grad()
def test_a_recurrence_that_reads_logits():
    """With half of the entries, reading a question changes little, as in a plain model."""
    model = build(config_of("ponder"))
    ids, request, question = tokens(1, T), tokens(1, 5, seed=9), tokens(1, 6, seed=4)
    found = model(question, past_key_values=reconstruct(model, ids, request, ratio=0.5)).logits
    whole, none = model(torch.cat([ids, question], 1)).logits[:, T:], model(question).logits
    assert (found - whole).abs().mean() < 0.5 * (none - whole).abs().mean()


def test_what_is_refused():
    request = tokens(1, 5)
    with pytest.raises(ValueError, match="kvzip needs layers that keep the whole context"):
        reconstruct(model_of("gemma3-window"), tokens(1, T), request)
    with pytest.raises(ValueError, match="ratio must lie between 0 and 1"):
        reconstruct(model_of("llama"), tokens(1, T), request, ratio=1.5)
