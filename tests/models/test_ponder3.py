"""`ponder3`: the router decides beforehand, thoughts fade before they are cut, and both teach it."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from fathom.models.recurrences import ponder3
from fathom.models.trips import walk
from fathom.models.trips.slot_table import SlotTable

from .cases import tokens
from .slot_oracle import Decoder, thinker
from .test_ponder2 import climbs_the_staircase, decoded, prefilled, solved
from .test_pondering import error, logits, stepwise


@pytest.mark.quick("1-0.45", "2-0.0001")
@pytest.mark.parametrize("tau", [0.45, 1e-4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_staircase_with_the_key_bias(depth, tau):
    """Slot by slot, as without a router: its output is replaced in every round."""
    climbs_the_staircase(thinker("ponder3", trips=depth + 1, tau=tau), tokens(1, 6))


def test_chunked_prefill():
    model, ids = thinker("ponder3", trips=3), tokens(2, 9)
    _, truth = decoded(model, ids)
    assert error(prefilled(model, ids, 3, 4), truth) < 1e-12


def test_a_damped_router_never_arrives():
    """0.1 of what a round found: the staircase breaks, and the rest decays like 0.9^n."""
    ids, left = tokens(1, 8), {}
    for damping in (1.0, 0.1):
        model = thinker("ponder3", trips=4, tau=1e-4, router_damping=damping)
        _, truth = decoded(model, ids)
        left[damping] = error(solved(model, ids, 21)[0], truth[0])
    assert left[1.0] < 1e-12 and left[0.1] > 1e-4
    with pytest.raises(AssertionError):
        climbs_the_staircase(thinker("ponder3", trips=3, router_damping=0.1), tokens(1, 6))


def test_tail_mass_never_rises():
    model, ids = thinker("ponder3", trips=4), tokens(2, 9)
    with torch.no_grad():
        state = model.model(ids, head=model.lm_head, use_cache=False).recurrence_state
    tail, share = state["tail"], state["share"]
    assert (tail[..., 0] - 1).abs().max() < 1e-15
    assert (tail.diff(dim=-1) < 0).all()
    assert (tail[..., :-1] - tail[..., 1:] - share[..., :-1]).abs().max() < 1e-15


def test_cut_or_faded():
    """Thoughts below τ are not had; had they been, hardly anything would change."""
    found = []
    for tau in (1e-4, 1e-30):
        model, ids = thinker("ponder3", trips=4, tau=tau), tokens(2, 12)
        with torch.no_grad():
            model.model.recurrence.router.weight.mul_(6)
        cache = DynamicCache(config=model.config)
        found.append((stepwise(model, ids, cache=cache), cache.layers[0].table.halt))
    (hard, halt), (soft, whole) = found
    assert (whole == 3).all() and set(halt.flatten().tolist()) >= {0, 3}
    assert 0 < error(hard, soft) <= 1e-3


def router_gradient(monkeypatch, way):
    """Of the cross-entropy, where the readout Σ s_k h_k lets it through to s, to h (and so to log w), or to both."""
    model, ids = thinker("ponder3", penalty="none", tau=1e-4), tokens(2, 5)
    spread, bias = ponder3.spread, ponder3.Ponder3.key_bias
    with monkeypatch.context() as patch:
        if way == "shares":
            patch.setattr(ponder3, "spread", lambda before, mass, h: spread(before, mass, h.detach()))
        if way == "thoughts":
            patch.setattr(ponder3, "spread", lambda before, mass, h: spread(before, mass.detach(), h))
        if way == "no bias":
            patch.setattr(ponder3.Ponder3, "key_bias", lambda self, state, k: bias(self, state, k).detach())
        model(ids, labels=ids).loss.backward()
    return model.model.recurrence.router.weight.grad


def test_two_ways_to_the_router(monkeypatch):
    shares, thoughts, both, deaf = (router_gradient(monkeypatch, w) for w in ("shares", "thoughts", "both", "no bias"))
    assert all(g.abs().max() > 1e-3 for g in (shares, thoughts, deaf))
    assert (shares + thoughts - both).abs().max() < 1e-14
    assert (deaf - both).abs().max() > 1e-3, "attention's part"


# --- the penalty ------------------------------------------------------------------------------------------------------


def penalty(step=0, **options):
    model, ids = thinker("ponder3", trips=3, tau=1e-4, jacobi_train=[10, 10], **options).train(), tokens(2, 6)
    model.set_step(step)
    return model, ids, model(ids, labels=ids).aux_losses["penalty"].item()


def test_expected_trips():
    model, ids, found = penalty(penalty="expected_trips", penalty_steps=[0, 0])
    decoder, total = Decoder.of(model), 0.0
    with torch.no_grad():
        for row in ids:
            decoder.truth(row)
            total += sum(math.exp(b) for (t, k), b in decoder.bias.items() if k and t < 5)
    assert found == pytest.approx(0.1 * total / 10, rel=1e-12)


def lowest(values, count):
    """Mean of the `count` lowest, the last of them in part; less than one is that part of the lowest."""
    parts = [(min(1.0, count - rank), value) for rank, value in enumerate(sorted(values)) if rank < count]
    return sum(part * value for part, value in parts) / max(count, 1.0)


@pytest.mark.parametrize("over", ["row", "batch"])
def test_a_readout_that_is_good_for_nothing_costs_nothing(over):
    """A head that knows nothing guesses one word in 61: its quality is σ(-36), and the penalty as small."""
    model, ids, before = penalty(penalty_steps=[0, 0], penalty_token_fraction=1.0, penalty_over=over)
    assert before > 0
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert 0 <= model(ids, labels=ids).aux_losses["penalty"] < 1e-12


def test_the_penalty_does_not_train_the_head():
    model, ids, _ = penalty(penalty_steps=[0, 0], penalty_token_fraction=1.0)
    found = model(ids, labels=ids).aux_losses["penalty"]
    weights = [model.lm_head.weight, model.model.recurrence.router.weight]
    head, router = torch.autograd.grad(found, weights, allow_unused=True)
    assert head is None and router.abs().max() > 0


def test_prefix_quality():
    """λ Σ_k mean of the lowest ρ_k of w_k: restated row by row from decoding."""
    model, ids, found = penalty(penalty_steps=[0, 0], penalty_token_fraction=1.0)
    decoder, total = Decoder.of(model), 0.0
    with torch.no_grad():
        for row in ids:
            decoder.truth(row)
            tail = torch.tensor(
                [[math.exp(decoder.bias[t, k]) for k in range(3)] for t in range(5)], dtype=torch.float64
            )
            share = -F.pad(tail, (0, 1)).diff(dim=1)
            h = torch.stack([torch.stack([decoder.h[t, k] for k in range(3)]) for t in range(5)])
            before = 0.0
            for k in (1, 2):
                prefix = (share[:, :k, None] * h[:, :k]).sum(1)
                ce = F.cross_entropy(prefix @ model.lm_head.weight.T, row[1:], reduction="none")
                rho = 1 - (10 * (ce - 0.5)).sigmoid().mean().item()
                total += 5 * lowest(tail[:, k].tolist(), 5 * max(rho - before, 0))
                before = rho
    assert found == pytest.approx(0.1 * total / 10, rel=1e-9, abs=1e-15) and found > 0


def test_penalty_grows_from_nothing():
    values = [penalty(step, penalty="expected_trips")[2] for step in (0, 1000, 2500, 4000, 9000)]
    assert values[0] == values[1] == 0 and values[3] == values[4] > 0
    assert values[2] == pytest.approx(values[3] / 2, rel=1e-6)  # λ is kept in float32


# --- faults that must be seen -----------------------------------------------------------------------------------------


def test_dead_slots_left_visible(monkeypatch):
    model, ids = thinker("ponder3"), tokens(1, 9)
    truth = logits(model, ids)
    monkeypatch.setattr(walk, "_both", lambda live, alive: live)
    assert error(logits(model, ids), truth) > 1e-2


def test_a_bias_forgotten_by_the_cache(monkeypatch):
    model, ids = thinker("ponder3"), tokens(1, 9)
    truth, tags = stepwise(model, ids), SlotTable.tags

    def faulty(self, placement):
        found = tags(self, placement)
        found.bias = None
        return found

    monkeypatch.setattr(SlotTable, "tags", faulty)
    assert error(stepwise(model, ids), truth) > 1e-3
