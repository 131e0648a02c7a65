"""`latent_cot`: the mass of a token is split among the thoughts it has, and nothing is lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.models.axes.roles import View
from fathom.models.axes.visit import Out
from fathom.models.recurrences import latent_cot
from fathom.models.trips import reading, walk
from fathom.models.trips.slots import TokenSubset, sweep
from tests.tiny import seeded

from .cases import config_of, tokens
from .slot_oracle import Decoder, thinker
from .test_pondering import error, logits, oracle, stepwise

WIDTH = 6


@settings(max_examples=40)
@given(
    depth=st.integers(0, 5),
    tau=st.floats(1e-6, 0.99),
    bias=st.floats(-12, 12),
    seed=st.integers(0, 10**6),
    pick=st.sampled_from([None, TokenSubset.pick, TokenSubset.pack]),
    budget=st.integers(1, 6),
)
def test_shares_sum_to_one(depth, tau, bias, seed, pick, budget):
    """Whoever stops where: the first coordinate of every thought is 1, and so is that of every readout."""
    options = {"trips": depth + 1, "tau": tau}
    policy = latent_cot.LatentCot(config_of("latent_cot", hidden_size=WIDTH, recurrence_options=options)).double()
    generator = seeded(seed)
    with torch.no_grad():
        policy.router.weight.normal_(0, 2, generator=generator)
        policy.router.weight[:, 0] = bias
        policy.router.bias.zero_()
        last = min(depth, budget - 1)
        thoughts = torch.randn(last + 1, 3, 4, WIDTH, generator=generator, dtype=torch.float64)
        thoughts[..., 0] = 1

        def make(turn):
            return Out(turn.tokens.take(thoughts[turn.trip]), lambda r: r, trip=turn.trip, last=turn.trip == last)

        state, _ = sweep(policy, thoughts[0], make, last + 1, pick=pick)
    assert (policy.readout(state)[..., 0] - 1).abs().max() < 1e-6


def test_zero_length_chains_say_what_vanilla_says():
    model, ids, _, halt = oracle("latent_cot")
    plain = logits(model, ids, max_trips=1)
    first = halt[:, 0] == 0
    assert (halt == 0).any()
    whole = logits(model, ids)
    assert torch.equal(whole[:, :1][first], plain[:, :1][first])
    assert torch.equal(whole[halt == 0], plain[halt == 0]), "trip 0 reads trips 0 only"


# --- the penalty ------------------------------------------------------------------------------------------------------


def penalty(step=0, **options):
    model, ids = thinker("latent_cot", **options).train(), tokens(2, 9)
    model.set_step(step)
    return model, ids, model(ids, labels=ids).aux_losses["penalty"]


def charges(model, ids, beta):
    """p^β R of every token `[B, T]`, summed over its trips, from decoding."""
    decoder, found = Decoder.of(model), torch.zeros(ids.shape, dtype=torch.float64)
    with torch.no_grad():
        for b, row in enumerate(ids):
            decoder.truth(row)
            for t in range(len(row) - 1):
                reach = 1.0
                for k in range(min(decoder.halt[t], 2) + 1):
                    h = decoder.h[t, k]
                    reach = reach * model.model.recurrence.router(h).sigmoid().item()
                    found[b, t] += (h @ model.lm_head.weight.T).softmax(-1)[row[t + 1]] ** beta * reach
    return found


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_penalty_is_the_equation(beta):
    model, ids, found = penalty(penalty_token_fraction=1.0, penalty_beta=beta, penalty=0.2, tau=1e-4)
    assert found.item() == pytest.approx(0.2 * charges(model, ids, beta).sum().item() / 16, rel=1e-12)


def test_penalty_looks_at_a_sample():
    """Another one every step; over all of them, every token as often, the end of a row too."""
    drawn, policy = [0] * 9, thinker("latent_cot", penalty_token_fraction=1 / 3).model.recurrence
    for step in range(300):
        policy.set_step(step)
        columns = policy.sample(9).tolist()
        assert len(set(columns)) == 3
        for column in columns:
            drawn[column] += 1
    assert min(drawn) > 60, "each of nine tokens about a hundred times"

    model, ids, found = penalty(7, penalty_token_fraction=1 / 3, tau=1e-4)
    columns = model.model.recurrence.sample(9)
    truth = charges(model, ids, 1.0)
    assert found.item() == pytest.approx(0.05 * 3 * truth[:, columns].sum().item() / 16, rel=1e-12)


def test_no_gradient_through_the_probability():
    model, _, found = penalty(penalty_token_fraction=1.0)
    found.backward()
    assert model.lm_head.weight.grad is None
    assert model.model.recurrence.router.bias.grad.item() > 0, "going on costs"


# --- faults that must be seen -----------------------------------------------------------------------------------------


def test_a_mixture_of_predictions_is_another_model(monkeypatch):
    """The head is linear, so only what comes after it tells: Σ q softmax(W h) is not softmax(W Σ q h)."""
    model, ids, truth, _ = oracle("latent_cot")
    head = model.lm_head.weight.T.double()

    def faulty(before, mass, hidden):
        term = mass.unsqueeze(-1) * (hidden @ head).softmax(-1)
        return term if before is None else before + term

    monkeypatch.setattr(latent_cot, "spread", faulty)
    with torch.no_grad():
        mixed = model.model(ids, head=model.lm_head, use_cache=False).last_hidden_state
    assert (mixed.sum(-1) - 1).abs().max() < 1e-12
    assert (mixed.log() - truth.log_softmax(-1)).abs().max() > 0.05


def test_deeper_thoughts_leaking_in(monkeypatch):
    """With ALL in the cache's masks, trips could no longer be made at once."""
    model, ids, truth, _ = oracle("latent_cot")
    assert error(stepwise(model, ids), truth) < 1e-12
    mask = reading.read_mask
    monkeypatch.setattr(walk, "read_mask", lambda view, *rest: mask(View.ALL, *rest))
    assert error(stepwise(model, ids), truth) > 1e-2
    assert View.DUO.depth_parallel and not View.ALL.depth_parallel
