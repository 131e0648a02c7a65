"""Tokens that halt when they are sure: one rule for what later tokens read, and trips that are really saved."""

import pytest
import torch
from transformers import DynamicCache

from fathom.models.decoder.loss import top_probability

from .cases import build, config_of, tokens


def loop(confidence, prelude=0, dtype=torch.float64, trips=3, **options):
    keys = {"trips": trips, "prelude": prelude, "exit_confidence": confidence, **options}
    return build(config_of("loop", recurrence_options=keys), dtype=dtype)


@torch.no_grad()
@pytest.mark.parametrize("prelude", [0, 2])
def test_decoding_is_reading_at_once(prelude):
    """Whatever stops where, in chunks, token by token, and beside other rows."""
    model, ids = loop(0.2, prelude), tokens(3, 12)
    whole = model(ids, use_cache=False)
    assert set(whole.trips.flatten().tolist()) == {1, 2, 3}, "rows and tokens stop at different trips"
    for size in (1, 5, 12):
        cache = DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache) for part in ids.split(size, 1)]
        assert (torch.cat([part.logits for part in parts], 1) - whole.logits).abs().max() < 1e-12
        assert torch.equal(torch.cat([part.trips for part in parts], 1), whole.trips)
    for row in range(3):
        assert (model(ids[row : row + 1], use_cache=False).logits - whole.logits[row]).abs().max() < 1e-12
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), ids[:1]), 1)
    masked = model(padded, attention_mask=(torch.arange(16) >= 4).long().unsqueeze(0), use_cache=False)
    assert (masked.logits[0, 4:] - whole.logits[0]).abs().max() < 1e-12


@torch.no_grad()
def test_a_token_stops_where_it_is_sure():
    """The first token, which reads itself alone, against the readouts of loops with fewer trips."""
    ids, model, plain = tokens(40, 1), loop(0.3), loop(None)
    plain.load_state_dict(model.state_dict())
    each = [plain.model(ids, use_cache=False, max_trips=trips).last_hidden_state for trips in (1, 2, 3)]
    sure = torch.stack([top_probability(h, plain.lm_head)[:, 0] >= 0.3 for h in each])
    sure[-1] = True
    found = model(ids, use_cache=False)
    assert torch.equal(found.trips[:, 0], sure.int().argmax(0) + 1)
    expected = torch.stack(each)[sure.int().argmax(0), torch.arange(40)]
    assert (found.logits - plain.lm_head(expected)).abs().max() < 1e-12
    assert len(found.trips.unique()) == 3


@torch.no_grad()
def test_the_two_ends_of_the_rule():
    ids = tokens(2, 9)
    for confidence, trips in ((0.0, 1), (1.0, 3)):
        model, plain = loop(confidence), loop(None)
        plain.load_state_dict(model.state_dict())
        found = model(ids, use_cache=False)
        assert (found.logits - plain(ids, use_cache=False, max_trips=trips).logits).abs().max() < 1e-12
        assert (found.trips == trips).all()


@torch.no_grad()
def test_trips_are_really_saved():
    """The tokens that go through a layer, counted there, while a batch of texts is read and continued."""
    model, ids, seen = loop(0.2, dtype=torch.float32), tokens(3, 12), []
    layer = model.model.layers[1]
    layer.register_forward_pre_hook(lambda _, x: seen.append(x[0].shape[0] * x[0].shape[1]))
    made, cache = model(ids, use_cache=True), None
    assert made.trips.sum() <= sum(seen) < 3 * ids.numel(), "tokens are packed, in rectangles"
    cache, total = made.past_key_values, 0
    seen.clear()
    for _ in range(5):
        made = model(made.logits[:, -1:].argmax(-1), past_key_values=cache)
        total += int(made.trips.sum())
    assert sum(seen) == total < 3 * 5 * 3, "of single tokens, no more than the trips that they made"


def test_training_makes_every_trip():
    model, ids = loop(0.2).train(), tokens(2, 9)
    plain = loop(None).train()
    plain.load_state_dict(model.state_dict())
    losses = [m(ids, labels=ids).loss for m in (model, plain)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses, atol=1e-12)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad, other.grad, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{"exit_confidence": 1.5}, {"coda": 1}, {"damping": 0.5}, {"kv": "first"}, {"exit": "joint"}, {"blend": 0.5}],
)
def test_what_does_not_go_together_is_refused(options):
    with pytest.raises(ValueError, match=r"recurrence_options\.exit_confidence"):
        loop(**{"confidence": options.pop("exit_confidence", 0.5), **options})


@torch.no_grad()
def test_another_rule_for_the_keys_is_seen(monkeypatch):
    """The negative control: if later tokens read a halted token's first trip alone, logits are others."""
    from fathom.models.trips import reading

    model, ids = loop(0.2), tokens(2, 12)
    whole, own = model(ids, use_cache=True).logits, reading.reads

    def first_only(view, t, k, of, at, halt):
        return own(view, t, k, of, at, halt) & ((at == 0) | (of == t) | (halt == 2))

    monkeypatch.setattr(reading, "reads", first_only)
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in ids.split(1, 1)]
    assert (torch.cat(parts, 1) - whole).abs().max() > 1e-4
