"""`ponder2`: decoding defines it, the Jacobi solver climbs to it slot by slot."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from fathom.models.trips import walk
from fathom.models.trips.slots import sweep
from fathom.models.trips.walk import Interleaved, Stored

from .cases import set_options, tokens
from .slot_oracle import Decoder, thinker
from .test_pondering import error, logits, stepwise

EXACT = 1e-12


def decoded(model, ids):
    decoder = Decoder.of(model)
    with torch.no_grad():
        return decoder, decoder.truths(ids)


def solved(model, ids, rounds):
    """Logits `[T, V]` and the input of every slot, by trip, after n rounds."""
    set_options(model, prefill="jacobi", jacobi_eval=rounds)
    with torch.no_grad():
        out = model.model(ids, head=model.lm_head, use_cache=False, output_hidden_states=True)
        return model.lm_head(out.last_hidden_state)[0], out.hidden_states[: -1 : model.config.num_hidden_layers]


def climbs_the_staircase(model, ids):
    """Slot (t, j) is exact from n = (t - 1) K + j on, what token t says from n = t K on."""
    (decoder, truth), depth, length = decoded(model, ids), model.model.recurrence.trips - 1, ids.shape[1]
    for n in range((length - 1) * depth + 1):
        found, inputs = solved(model, ids, n)
        for (t, j), x in decoder.x.items():
            if t == 0 or j == 0 or n >= (t - 1) * depth + j:
                assert (inputs[j][0, t] - x).abs().max() < EXACT * 10, (n, t, j)
        said = n // depth + 1
        assert (found[:said] - truth[0, :said]).abs().max() < EXACT * truth.abs().max(), n


@pytest.mark.quick("1-", "2-depth_attention")
@pytest.mark.parametrize("mixer", ["", "+depth_attention"], ids=["", "depth_attention"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_staircase(depth, mixer):
    climbs_the_staircase(thinker("ponder2", mixer, trips=depth + 1), tokens(1, 6))


def test_error_falls_with_every_round():
    model, ids = thinker("ponder2", trips=3), tokens(1, 8)
    _, truth = decoded(model, ids)
    errors = [(solved(model, ids, n)[0] - truth[0]).square().mean().sqrt().item() for n in range(0, 16, 2)]
    assert all(b < a for a, b in itertools.pairwise(errors))
    assert errors[0] > 0.3 and errors[-1] < 1e-13


def prefilled(model, ids, size, rounds):
    set_options(model, prefill="jacobi", jacobi_prefill=rounds)
    return stepwise(model, ids, size)


@pytest.mark.parametrize("depth,size", [(1, 4), (2, 3), (3, 4)])
def test_chunked_prefill(depth, size):
    """Exact from (m - 1) K rounds on, whatever came before; and no earlier than it must be."""
    model, ids = thinker("ponder2", trips=depth + 1), tokens(2, 11)
    _, truth = decoded(model, ids)
    assert error(prefilled(model, ids, size, (size - 1) * depth), truth) < EXACT
    assert error(prefilled(model, ids, size, 1), truth) > 1e-4
    assert error(prefilled(model, ids, 1, 0), truth) < EXACT


def test_exact_prefill_costs_no_rounds_it_does_not_need():
    """Evaluation stops once a round changes nothing."""
    model, ids, seen = thinker("ponder2", trips=2), tokens(1, 4), []
    model.model.layers[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    logits(model, ids)
    assert seen == [4, 8, 8, 8, 8]  # grow, three rounds, final


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_share_weights_make_the_same_passes(monkeypatch, ranks):
    """Where no slot reads another the first round changes nothing: one process stops there, several may not, since the
    others' tokens may need more."""
    model, ids, seen = thinker("ponder2", trips=2), tokens(1, 8), []
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.v_proj.weight)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    model.model.layers[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    logits(model, ids)
    rounds = 1 if ranks == 1 else 7
    assert seen == [8, *[16] * (rounds + 1)]


# --- faults that must be seen -----------------------------------------------------------------------------------------


def test_a_sweep_trip_by_trip(monkeypatch):
    """A token's first trip would not see its predecessors' thoughts."""

    def faulty(recurrence, x, through, trips, rounds, live=None, until_still=False):
        return sweep(recurrence, x, Stored(through.model, through.inputs, x, through.store), trips)[0]

    model, ids = thinker("ponder2", trips=2, prefill="jacobi"), tokens(1, 12)
    _, truth = decoded(model, ids)
    monkeypatch.setattr(walk, "jacobi", faulty)
    with torch.no_grad():
        wrong = model.model(ids, past_key_values=DynamicCache(config=model.config)).last_hidden_state
        right = torch.linalg.solve(model.lm_head.weight.T @ model.lm_head.weight, model.lm_head.weight.T @ truth[0].T).T
    assert (wrong[0] - right)[1:].square().mean().sqrt() > 0.5, "of hidden states of size one"


def at_zero(token):
    return token == 0


def at_repeats(token):
    return torch.nn.functional.pad(token.diff(dim=1) == 0, (1, 0))


@pytest.mark.parametrize("borders", [at_zero, at_repeats])
def test_documents_inferred_from_positions(monkeypatch, borders):
    """Every token owns K + 1 slots at its position, and none of them starts a document."""

    def faulty(self, x, turns, tags):
        tags = replace(tags, document=borders(tags.token).long().cumsum(1))
        return self.masks(tags, tags), tags.token

    model, ids = thinker("ponder2", trips=2), tokens(1, 8)
    truth = logits(model, ids)
    monkeypatch.setattr(Interleaved, "_own_masks", faulty)
    off = (logits(model, ids) - truth)[0].abs().amax(-1)
    assert off.min() > 0.01 and off.max() > 0.08


def padded(model, row, pad=3, new=1):
    ids = torch.nn.functional.pad(row, (pad, 0))
    cache, mask = DynamicCache(config=model.config), (ids != 0).long()
    with torch.no_grad():
        model(ids[:, :-new], attention_mask=mask[:, :-new], past_key_values=cache)
        return model(ids[:, -new:], attention_mask=mask, past_key_values=cache).logits[0, -1]


def test_left_padding_counted_in_slots(monkeypatch):
    """Masks over tokens and a cache of slots: what the public code confuses."""
    model, row = thinker("ponder2", trips=3), tokens(1, 6)
    # Positions are counted from the mask, so the length of the cache does not matter.
    alone = logits(model, row)[0, -1]
    assert error(padded(model, row), alone) < 1e-6
    with monkeypatch.context() as patch:
        patch.setattr(walk.Inputs, "live", None)
        assert error(padded(model, row), alone) > 1e-3
