"""The exit gate of `loop` against its equations: readouts, both losses, and the threshold."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy, cross_entropy

from fathom.models import FathomForCausalLM
from fathom.models.axes.numerics import IGNORE
from fathom.models.decoder import loss as losses
from fathom.models.decoder.loss import shifted, weighted_lm_loss
from fathom.models.recurrences.exit_gate import log_exits, threshold_for
from tests.tiny import seeded

from .cases import build, config_of, tokens

TRIPS = 3


def model_of(**options):
    keys = {"trips": TRIPS, "norm_between": "final", "exit": "joint", **options}
    return build(config_of("loop", num_hidden_layers=2, recurrence_options=keys), dtype=torch.float64)


def by_hand(model, ids):
    """Logits of every trip, λ of every trip, and p, one product after another."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        inner, hidden = model.model, []
        for trips in range(1, TRIPS + 1):
            hidden.append(inner(ids, max_trips=trips, use_cache=False).last_hidden_state)
        gate = inner.recurrence.exit_gate
        gates = [torch.sigmoid(h @ gate.weight[0] + gate.bias) for h in hidden]
        left, p = torch.ones_like(gates[0]), []
        for k, rate in enumerate(gates):
            p.append(left if k == TRIPS - 1 else left * rate)
            left = left * (1 - rate)
        return [model.lm_head(h) for h in hidden], gates, p


def token_loss(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE).view_as(
        targets
    )


def agree(model, ids, expected, **labels):
    """The loss in training, and the gradients of all parameters."""
    model.zero_grad()
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    out = model.train()(ids, **labels)
    out.loss.backward()
    assert abs(out.loss.item() - expected.item()) < 1e-12
    for name, p in model.named_parameters():
        found = torch.zeros_like(p) if p.grad is None else p.grad
        assert (found - wanted.get(name, torch.zeros_like(p))).abs().max() < 1e-11, name
    return out


def targets_of(ids):
    """Labels of which some are left out."""
    labels = ids.clone()
    labels[:, 4] = IGNORE
    return labels, shifted(labels)


def test_the_joint_loss_is_the_double_sum():
    model, ids = model_of(exit_entropy=0.3), tokens(2, 9)
    labels, targets = targets_of(ids)
    logits, _, p = by_hand(model, ids)
    here, count = targets != IGNORE, (targets != IGNORE).sum()
    expected = sum((w * token_loss(z, targets)).sum() for w, z in zip(p, logits, strict=True)) / count
    entropy = -sum(w * w.log() for w in p)
    out = agree(model, ids, expected - 0.3 * entropy[here].sum() / count, labels=labels)
    assert set(out.aux_losses) == {"exit_entropy"}


def test_a_new_gate_is_half_open_and_a_saved_one_stays(tmp_path):
    """Its parameters sit in a child of the recurrence, which has none of its own."""
    config = config_of("loop", num_hidden_layers=2, recurrence_options={"exit": "joint"})
    new = FathomForCausalLM(config)
    gate = new.model.recurrence.exit_gate
    assert not gate.weight.any() and not gate.bias.any()
    with torch.no_grad():
        gate.weight.fill_(0.5)
    new.save_pretrained(tmp_path)
    assert (FathomForCausalLM.from_pretrained(tmp_path).model.recurrence.exit_gate.weight == 0.5).all()


def test_the_mean_of_logits_is_another_loss():
    """The negative control: the public code takes the cross-entropy of Σ p_k logits_k."""
    model, ids = model_of(exit_entropy=0.0), tokens(2, 9)
    logits, _, p = by_hand(model, ids)
    mixed = sum(w.unsqueeze(-1) * z for w, z in zip(p, logits, strict=True))
    theirs = token_loss(mixed, shifted(ids)).sum() / (shifted(ids) != IGNORE).sum()
    assert abs(model.train()(ids, labels=ids).loss - theirs) > 1e-3


def test_the_gates_own_loss():
    """With targets that get no gradient, beside the last trip's loss."""
    model, ids = model_of(exit="gate"), tokens(2, 9)
    labels, targets = targets_of(ids)
    logits, gates, _ = by_hand(model, ids)
    count, ce = (targets != IGNORE).sum(), [token_loss(z, targets) for z in logits]
    own = 0
    for k in range(1, TRIPS):
        wanted = torch.sigmoid(50 * ((ce[k - 1] - ce[k]).clamp(min=0) - 0.005)).detach()
        each = binary_cross_entropy(1 - gates[k], wanted, reduction="none")
        own = own + each[targets != IGNORE].sum() / count / (TRIPS - 1)
    agree(model, ids, ce[-1].sum() / count + own, labels=labels)


def test_a_threshold_of_one_is_the_loop_without_a_gate():
    model, ids = model_of(), tokens(2, 9)
    plain = build(config_of("loop", num_hidden_layers=2, recurrence_options={"trips": TRIPS, "norm_between": "final"}))
    plain = plain.double()
    plain.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
        assert not torch.equal(model_of(exit_threshold=0.5)(ids).logits, plain(ids).logits)


def test_probabilities_add_up_however_sure_the_gates_are():
    logits = [torch.tensor([-200.0, -30.0, 0.0, 30.0, 200.0]).roll(k) for k in range(4)]
    log_p = torch.stack(log_exits(logits))
    assert (log_p.exp().sum(0) - 1).abs().max() < 1e-6
    assert torch.isfinite(log_p.exp() * log_p).all()


def test_the_weighted_loss_does_not_depend_on_chunks(monkeypatch):
    made = seeded(0)
    head = torch.nn.Linear(8, 13, bias=False).double()
    readouts = [
        (torch.randn(2, 6, 8, generator=made, dtype=torch.float64), torch.rand(2, 6, generator=made)) for _ in range(2)
    ]
    targets = torch.randint(0, 13, (2, 6), generator=made)
    whole = weighted_lm_loss(readouts, head, targets)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 5)
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", dict.fromkeys(("cpu", "cuda"), 1))
    assert abs(weighted_lm_loss(readouts, head, targets) - whole) < 1e-12
    assert abs(weighted_lm_loss(readouts, head, targets, 24) - whole / 2) < 1e-12


@pytest.mark.parametrize("trips", [1.0, 1.7, 2.5, 4.0])
def test_a_threshold_keeps_the_mean_of_trips(trips):
    """The largest that does: the next larger one of all that differ makes more."""
    p = torch.rand(50, 4, generator=seeded(0)).softmax(1)
    reached = p.double().cumsum(1)[:, :-1]

    def mean(threshold):
        return 1 + (reached < threshold).sum(1).double().mean().item()

    threshold = threshold_for(p, trips)
    assert mean(threshold) <= trips
    larger = [x for x in reached.flatten().tolist() if x > threshold]
    assert not larger or mean(min(larger) + 1e-12) > trips


def test_a_threshold_holds_for_tokens_that_are_all_alike():
    """The gate multiplies in float32 what is summed here: by rounding alone all of them would make another trip."""
    logit, ids = torch.tensor(0.1).logit(), tokens(1, 8)
    threshold = threshold_for(torch.stack([p.exp() for p in log_exits([logit.expand(8)] * TRIPS)], 1), 1.0)
    model = model_of(exit_threshold=threshold).float().eval()
    with torch.no_grad():
        model.model.recurrence.exit_gate.weight.zero_()
        model.model.recurrence.exit_gate.bias.fill_(logit)
        assert torch.equal(model(ids).logits, model(ids, max_trips=1).logits)


def test_a_mean_that_no_threshold_keeps_is_refused():
    with pytest.raises(ValueError, match="trips=1: no threshold"):
        threshold_for(torch.tensor([[0.0, 1.0]]), 1)
