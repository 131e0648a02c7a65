"""`adaponder`: who halts keeps keys, values and output, and never comes back."""

import itertools
import math

import pytest
import torch

from fathom.models import FathomForCausalLM, modeling
from fathom.models.trips import walk
from fathom.models.trips.slots import TokenSubset

from .cases import config_of, tokens
from .slot_oracle import Decoder, thinker
from .test_pondering import error, logits, oracle


def test_nobody_comes_back(monkeypatch):
    """A gate that would open again stays shut, and trip 0 is for all."""
    turns, sweep = [], walk.sweep

    def watched(*args, **kwargs):
        state, made = sweep(*args, **kwargs)
        turns.append((state, made))
        return state, made

    monkeypatch.setattr(walk, "sweep", watched)
    model, ids, _, halt = oracle("adaponder")
    logits(model, ids)
    state, made = turns[0]
    alive = [turn.tokens.alive for turn in made]
    assert alive[0] is None
    assert all((~after | before).all() for before, after in itertools.pairwise(alive[1:]))
    assert torch.equal(sum(a.long() for a in alive[1:]), halt)
    gates = torch.stack([state[f"gate{k}"] for k in range(3)], -1)
    assert all((gates[halt < k][..., k] == 0).all() for k in (1, 2)), "who has halted has no gate"
    assert (gates[halt == 0][..., 0] < 0.55).all()


@pytest.mark.parametrize("mixer", ["", "+depth_attention"], ids=["", "depth_attention"])
def test_halted_tokens_are_frozen(mixer):
    """A budget that ends right after a token halts reads the same from it as no budget at all."""
    model, ids, _, halt = oracle("adaponder", mixer)
    whole = logits(model, ids)
    for trips in (1, 2, 3):
        cut = logits(model, ids, max_trips=trips)
        done = halt < trips
        assert torch.equal(cut[done], whole[done])
        assert (cut[~done] - whole[~done]).abs().max() > 1e-2


def test_gates_start_open():
    torch.manual_seed(0)
    model = FathomForCausalLM(config_of("adaponder", num_hidden_layers=2, recurrence_options={"trips": 4}))
    state = model.model(tokens(2, 8), head=model.lm_head, use_cache=False).recurrence_state
    for k in range(3):
        assert (state[f"gate{k}"] - torch.tensor(2.0).sigmoid()).abs().max() < 0.01


# --- the penalty ------------------------------------------------------------------------------------------------------


def penalty(step=100, **options):
    model, ids = thinker("adaponder", **options).train(), tokens(2, 7)
    model.set_step(step, 100)
    out = model(ids, labels=ids)
    return model, ids, out.aux_losses["penalty"]


@pytest.mark.parametrize("over", ["row", "batch"])
@pytest.mark.parametrize("on", ["sigmoid", "logit"])
def test_penalty_is_the_lowest_gates(over, on):
    """Restated from decoding; tokens that have halted count as shut."""
    model, ids, found = penalty(penalty_fraction=0.6, penalty_over=over, penalty_on=on)
    decoder, rows = Decoder.of(model), []
    with torch.no_grad():
        for row in ids:
            decoder.truth(row)
            gate = {
                (t, k): model.model.recurrence.gates[k](h).sigmoid().item() for (t, k), h in decoder.h.items() if k < 3
            }
            rows.append([gate.get((t, k), 0.0) for t in range(6) for k in range(3)])
    if on == "logit":
        clipped = [[min(max(g, 0.55), 1 - 1e-6) for g in row] for row in rows]
        rows = [[math.log(g / (1 - g)) for g in row] for row in clipped]
    if over == "batch":
        rows = [rows[0] + rows[1]]
    means = []
    for row in rows:
        count, ordered = 0.6 * len(row), sorted(row)
        edge = math.floor(count)
        means.append((sum(ordered[:edge]) + (count - edge) * ordered[edge]) / count)
    assert found.item() == pytest.approx(0.1 * sum(means) / len(means), rel=1e-6)  # the fraction is kept in float32


def test_fraction_grows_over_the_window():
    policy = thinker("adaponder").model.recurrence
    found = []
    for step in (0, 10, 20, 30, 100):
        policy.set_step(step, 100)
        found.append(round(policy.fraction.item(), 6))
    assert found == [0, 0, 0.05, 0.1, 0.1]
    assert penalty(0)[2] == 0


def test_a_penalty_pushes_gates_shut():
    model, _, found = penalty(penalty_fraction=1.0, tau=1e-4)
    found.backward()
    assert all(gate.down.bias.grad.item() > 0 for gate in model.model.recurrence.gates)


def test_the_penalty_rests_once_its_fraction_is_shut():
    """The second gate shuts: with the third, which a halted token no longer asks, two gates of three are."""
    found = {}
    for q in (0.3, 0.6, 0.7, 0.9):
        model, ids = thinker("adaponder", penalty_fraction=q).train(), tokens(2, 7)
        with torch.no_grad():
            model.model.recurrence.gates[0].down.bias.fill_(9.0)
            model.model.recurrence.gates[1].down.bias.fill_(-50.0)
        model.set_step(100, 100)
        penalty = model(ids, labels=ids).aux_losses["penalty"]
        (slope,) = torch.autograd.grad(penalty, model.model.recurrence.gates[0].down.bias)
        found[q] = penalty.item(), slope.item()
    assert all(abs(x) < 1e-12 for q in (0.3, 0.6) for x in found[q])
    assert all(x > 1e-9 for q in (0.7, 0.9) for x in found[q])


# --- faults that must be seen -----------------------------------------------------------------------------------------


def test_outputs_computed_again_after_halting(monkeypatch):
    """Frozen inputs among fresher neighbours: wrong for who halted, unseen by who did not."""
    model, ids, _, halt = oracle("adaponder")
    truth, put_all = logits(model, ids), TokenSubset.put_all

    def faulty(self, old, new):
        return put_all(self, old, new) | {"hidden": new["hidden"]}

    monkeypatch.setattr(TokenSubset, "put_all", faulty)
    off = (logits(model, ids) - truth).abs().amax(-1)
    assert off[halt == 3].max() == 0
    assert off[halt < 3].max() > 0.5


@pytest.mark.parametrize("forgotten", [(0, 1), (0,), (1,)], ids=["both", "keys", "values"])
def test_keys_and_values_computed_again(monkeypatch, forgotten):
    """The others read what a halted token left, not what it would make now."""
    model, ids, _, _ = oracle("adaponder")
    truth, where, calls = logits(model, ids), torch.where, itertools.count()

    def faulty(condition, new, old):
        if isinstance(new, torch.Tensor) and new.ndim == 4 and next(calls) % 2 in forgotten:  # [B, H_kv, T, D]
            return new
        return where(condition, new, old)

    monkeypatch.setattr(modeling.torch, "where", faulty)
    assert error(logits(model, ids), truth) > 1e-2
