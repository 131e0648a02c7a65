"""Training without halted tokens: the same loss and gradients from fewer tokens."""

import pytest
import torch

from .cases import tokens
from .slot_oracle import thinker

HALTING = ("adaponder", "latent_cot")


def step(method, mixer, skip, ids, shape=(), chosen=None, **given):
    """Loss, gradients, and how many tokens went through the first layer."""
    options = {"mixer_options": {"across_trips": "same_layer"}} if mixer else {}
    model = thinker(method, mixer, shape=[*options.items(), *shape], skip_dead_rows=skip, **(chosen or {})).train()
    model.set_step(5000, 5001)
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2].numel()))
    real = given.get("attention_mask", torch.ones_like(ids)) == 1
    labels = ids.where(real & real.roll(1, 1), -100)  # padding says nothing
    out = model(ids, labels=labels, **given)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters()}, sum(seen)


def compare(*arguments, **given):
    (a, dense, all_tokens), (b, left, some) = (
        step(*arguments[:2], skip, *arguments[2:], **given) for skip in (False, True)
    )
    assert abs(a.loss - b.loss) < 1e-6 * abs(a.loss), "the loss itself is made in single precision"
    assert a.trips.tolist() == b.trips.tolist() and a.aux_losses.keys() == b.aux_losses.keys()
    for name in dense:
        size = dense[name].abs().max().clamp(min=1e-6)
        assert left[name] is not None and (dense[name] - left[name]).abs().max() < 1e-6 * size, name
    assert max(grad.abs().max() for grad in dense.values()) > 1e-3
    return all_tokens, some


@pytest.mark.parametrize("mixer", ["", "+depth_attention"])
@pytest.mark.parametrize("method", HALTING)
def test_fewer_tokens_and_the_same_gradients(method, mixer):
    every, some = compare(method, mixer, tokens(3, 9))
    assert some < every


@pytest.mark.parametrize("method", HALTING)
def test_padding_is_skipped_too(method):
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[1, 6:] = 0
    compare(method, "", tokens(3, 9), attention_mask=mask)


@pytest.mark.parametrize("method", HALTING)
def test_documents_and_windows(method):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    compare(method, "", tokens(2, 9), position_ids=positions)
    sliding = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    compare(method, "", tokens(2, 9), sliding.items())


@pytest.mark.parametrize("method", HALTING)
def test_a_trip_that_no_token_makes(method):
    """Its gates count as shut in the penalty, and its passes are made: ranks that share a model must all make them."""
    options = {"tau": 1 - 1e-9, **({"penalty_fraction": 0.5, "penalty_span": [0, 0]} if method == "adaponder" else {})}
    compare(method, "", tokens(3, 9), chosen=options)
    model, calls = thinker(method, skip_dead_rows=True, **options).train(), []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    model.model.layers[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    model(tokens(3, 9), labels=tokens(3, 9)).loss.backward()
    assert calls == [9, 1, 1, 1, *["backward"] * 4]


def test_evaluation_computes_all_of_them():
    model, ids, seen = thinker("latent_cot", skip_dead_rows=True), tokens(3, 9), []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model(ids, use_cache=False)
    assert seen == [9] * 4
