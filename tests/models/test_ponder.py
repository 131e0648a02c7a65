"""`ponder` against the ten lines of its paper."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fathom.models import FathomForCausalLM
from fathom.models.axes.roles import View
from fathom.models.trips import walk

from .cases import build, config_of, tokens
from .slot_oracle import thinker
from .test_pondering import error, logits, stepwise


def restated(model, ids, K, gain=1.0):
    """§3.1: a plain decoder run on embeddings, K + 1 times. (Qwen3 itself norms in single precision.)"""
    plain = FathomForCausalLM(config_of("vanilla", num_hidden_layers=2)).double().eval()
    plain.load_state_dict(model.state_dict())
    table = model.config.embedding_scale * plain.model.embed_tokens.weight
    x = table[ids]
    for _ in range(K):
        x = x + gain * plain(inputs_embeds=x).logits.softmax(-1) @ table
    z = plain(inputs_embeds=x).logits[:, :-1]
    return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten()), plain


@pytest.mark.parametrize("depth,gain", [(0, 1.0), (1, 1.0), (3, 0.4)])
def test_the_loss_is_the_papers(depth, gain):
    model, ids = thinker("ponder", trips=depth + 1, top_k=0, temperature=1.0, mixture_gain=gain).train(), tokens(2, 8)
    truth, plain = restated(model, ids, depth, gain)
    loss = model(ids, labels=ids).loss
    assert loss.item() == pytest.approx(truth.item(), rel=1e-12)
    loss.backward()
    truth.backward()
    theirs = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        assert (p.grad - theirs[name].grad).abs().max() < 1e-12, name


def test_training_draws_its_trips():
    model, ids = thinker("ponder", trips=3, trips_range=[2, 5]).train(), tokens(1, 5)
    losses, drawn = {}, set()
    for step in range(8):
        model.set_step(step)
        made = model.model.recurrence.drawn_trips
        drawn.add(made)
        losses.setdefault(made, set()).add(model(ids, labels=ids).loss.item())
    assert drawn == {2, 3, 4, 5}
    assert all(len(found) == 1 for found in losses.values()) and len(set.union(*losses.values())) == 4
    model.eval()
    assert error(logits(model, ids), logits(thinker("ponder"), ids)) == 0, "evaluation makes `trips` trips"
    deep = thinker("ponder", trips=5)
    assert error(logits(model, ids, max_trips=5), logits(deep, ids)) < 1e-12, "and may be asked for what was drawn"


def test_feed_and_view_are_independent():
    """Six models, each itself when decoding, and all different."""
    ids, found = tokens(1, 6), []
    for feed in ("mixture", "hidden"):
        for view in View:
            model = thinker("ponder", feed=feed, view=view.value, prefill="exact")
            assert model.model.recurrence.view is view
            found.append(logits(model, ids))
            assert error(stepwise(model, ids), found[-1]) < 1e-12
    assert all(error(a, b) > 1e-2 for i, a in enumerate(found) for b in found[:i])


# --- faults that must be seen -----------------------------------------------------------------------------------------


def test_a_mixture_that_does_not_accumulate(monkeypatch):
    """x_0 + μ_last, as the second paper's repository has it."""
    model, ids = thinker("ponder", top_k=0, temperature=1.0, mixture_gain=1.0), tokens(1, 8)
    truth, _ = restated(model, ids, 2)
    policy, feed, first = model.model.recurrence, model.model.recurrence.feed, []

    def faulty(x, out, state):
        first.append(x) if out.trip == 0 else None
        return first[-1] + feed(torch.zeros_like(x), out, state)

    monkeypatch.setattr(policy, "feed", faulty)
    assert abs(model(ids, labels=ids).loss.item() - truth.item()) > 1e-2


def test_inner_trips_without_a_cache(monkeypatch):
    """As the public code decodes."""
    model, ids = thinker("ponder"), tokens(1, 8)
    truth, make = logits(model, ids), walk.Banked.__call__

    def faulty(self, turn):
        cache, self.cache = self.cache, self.cache if turn.trip == self.inputs.trips - 1 else None
        try:
            return make(self, turn)
        finally:
            self.cache = cache

    assert error(stepwise(model, ids), truth) < 1e-12
    monkeypatch.setattr(walk.Banked, "__call__", faulty)
    assert error(stepwise(model, ids), truth) > 0.05


class Raised(nn.Module):
    """A table with an adapter, as peft wraps it: `weight` is the table's own."""

    def __init__(self, table):
        super().__init__()
        self.base_layer = table

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, ids):
        return self.base_layer(ids) + 0.5


@torch.no_grad()
@pytest.mark.parametrize("case", ["ponder", "adaponder"])
def test_the_mixture_is_of_an_adapted_table(case):
    """Merging the adapter changes nothing."""
    adapted, merged, ids = build(config_of(case)), build(config_of(case)), tokens(2, 5)
    adapted.set_input_embeddings(Raised(adapted.get_input_embeddings()))
    merged.get_input_embeddings().weight.add_(0.5)
    assert torch.equal(adapted(ids).logits, merged(ids).logits)
