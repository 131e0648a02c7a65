"""What a training step keeps for its backward pass, by `benchmarks/saved.py`: near theory, and exact gradients."""

import pytest
import torch
from benchmarks.saved import ARMS, config_of, measure, saved_bytes
from torch.autograd import gradcheck
from transformers import DynamicCache

from fathom.models import FathomForCausalLM, modeling
from fathom.models.cost import kept_visits, training_visits
from fathom.models.registry import MECHANISMS
from fathom.models.residuals import attention_residuals, hyper_connections
from fathom.models.residuals.attention_residuals import pool
from fathom.models.residuals.hyper_connections import balance, balance_gradient, sinkhorn
from fathom.models.trips.walk import Interleaved
from tests.gpu.watch import Calls
from tests.tiny import seeded

BOUNDS = {"attention_residuals": 1.2, "hyper_connections": 1.6}


def test_every_mechanism_has_a_row():
    assert {name for name, _ in ARMS.values()} == {*MECHANISMS, "vanilla"} - {"none", "plain", "once"}


@pytest.mark.slow
@pytest.mark.parametrize("arm", [arm for arm in ARMS if ARMS[arm][0] in BOUNDS])
def test_residuals_keep_their_inputs_and_scalars(arm):
    assert measure(arm, torch.bfloat16, 64).times <= BOUNDS[ARMS[arm][0]]


@pytest.mark.slow
@pytest.mark.parametrize("arm", BOUNDS)
def test_the_measure_sees_what_the_plain_form_keeps(arm, monkeypatch):
    """The same model by autograd alone."""
    ids = torch.arange(3, 67).unsqueeze(0)
    model = FathomForCausalLM(config_of(arm, layers=2)).bfloat16().train()
    kept = saved_bytes(model, ids)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert saved_bytes(model, ids) > 1.3 * kept


def sources(count, *, bias):
    generator = seeded(0)
    made = [torch.randn(2, 3, 5, dtype=torch.float64, generator=generator) for _ in range(count)]
    query = torch.randn(5, dtype=torch.float64, generator=generator)
    return [x.requires_grad_() for x in (query, *made, *[torch.tensor([0.7], dtype=torch.float64)] * bias)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_pool_and_its_gradient(count, bias):
    query, *rest = sources(count, bias=bias)
    recency = rest.pop() if bias else None

    def call(query, recency, *made):
        return attention_residuals._Pool.apply(query, recency, 1e-6, *made)

    assert torch.allclose(call(query, recency, *rest)[0], pool(rest, query, 1e-6, recency), rtol=0, atol=1e-13)
    assert gradcheck(call, (query, recency, *rest))


def test_what_nothing_reads_gets_no_gradient_of_zeros():
    query, *rest = sources(3, bias=True)
    recency = rest.pop()
    pooled, *through = attention_residuals._Pool.apply(query, recency, 1e-6, *rest)
    with Calls() as calls:
        found = torch.autograd.grad(pooled.sum() + through[1].sum(), (query, recency, *rest), retain_graph=True)
    wanted = torch.autograd.grad(pool(rest, query, 1e-6, recency).sum() + rest[1].sum(), (query, recency, *rest))
    assert not calls.counts["zeros"]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(found, wanted, strict=True))
    unread = torch.autograd.grad(through[0].sum(), (query, recency, *rest), allow_unused=True)
    assert [x is None for x in unread] == [True, True, False, True, True] and unread[2].eq(1).all()


def balanced(logits, iterations, grad):
    """`sinkhorn` along the last dimension, and its gradient, by hand."""
    matrix = logits.detach().clone()
    floored, totals = balance(matrix, iterations)
    made, grad = matrix.clone(), grad.clone()
    balance_gradient(grad, matrix, floored, totals)
    return made, grad


@pytest.mark.parametrize("n,iterations", [(1, 1), (2, 1), (3, 4), (4, 20)])
def test_balance_is_sinkhorn(n, iterations):
    generator = seeded(n)
    logits, grad = torch.randn(2, n, n, 5, dtype=torch.float64, generator=generator)
    expected = sinkhorn(logits.requires_grad_().movedim(-1, 0), iterations).movedim(0, -1)
    (wanted,) = torch.autograd.grad(expected, logits, grad)
    made, found = balanced(logits, iterations, grad)
    assert (made - expected).abs().max() < 1e-13 and (found - wanted).abs().max() < 1e-13
    turned = balanced(logits.transpose(0, 1), iterations, grad.transpose(0, 1))[1].transpose(0, 1)
    assert n == 1 or (turned - wanted).abs().max() > 1e-7, "columns first"


@pytest.mark.parametrize(
    "logits", [[[-1e4, -1e4], [-1e4, -1e4]], [[0.0, -1e4], [-1e4, 0.0]], [[0.0, 0.0], [-1e4, -1e4]]]
)
def test_balance_survives_extreme_logits(logits):
    extreme, grad = torch.tensor(logits).unsqueeze(-1), torch.zeros(2, 2, 1)
    grad[0, 0, 0] = 1
    made, found = balanced(extreme, 20, grad)
    assert torch.allclose(made[..., 0], sinkhorn(extreme[..., 0], 20), atol=1e-6)
    assert found.isfinite().all()


@pytest.mark.parametrize("n,iterations", [(1, 3), (3, 0), (3, 5)])
def test_streams_and_their_gradients(n, iterations):
    generator = seeded(1)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    def read(streams, norm, weight, *affine):
        return hyper_connections._Read.apply(streams, norm, weight, 1e-6, iterations, *affine)

    affine = drawn(1), drawn(1), drawn(1), drawn(n), drawn(n), drawn(n, n)
    assert gradcheck(read, (drawn(2, 2, n, 3), drawn(3 * n), drawn(n * n + 2 * n, 3 * n), *affine))
    assert gradcheck(
        hyper_connections._Write.apply, (drawn(2, 2, n, 3), drawn(2, 2, n), drawn(2, 2, n, n), drawn(2, 2, 3))
    )


def test_an_adapter_on_the_projection_is_called():
    """What stands around a weight would be left out by reading the weight alone."""
    model = FathomForCausalLM(config_of("hyper_connections", layers=1)).train()
    module, ids = model.model.layers[0].attn_residual, torch.arange(3, 9).unsqueeze(0)
    plain, called = model(ids, labels=ids).loss, []
    module.projection.register_forward_hook(lambda *_: called.append(1))
    assert not module.bare and torch.allclose(model(ids, labels=ids).loss, plain, atol=1e-5) and called == [1]


# --- trips that read one another --------------------------------------------------------------------------------------

SEVERAL = ["loop", "latent_cot", "ponder3", "ponder", "adaponder", "ponder2"]


@pytest.mark.quick("loop", "latent_cot")
@pytest.mark.parametrize("arm", SEVERAL)
def test_passes_keep_what_vanilla_keeps(arm):
    assert measure(arm, torch.bfloat16, 64).per_pass <= 1.15


def masked(self, x, turns, tags):
    """The bias of dead and fading thoughts added to a mask, as one would write it down."""
    return self.masks(tags, tags), self.inputs.positions.repeat_interleave(len(turns), 1)


@pytest.mark.slow
def test_a_mask_with_a_gradient_is_seen(monkeypatch):
    """In 14 passes as in 30: right forms keep at most 1.15 of vanilla's in both."""
    few = {"jacobi_train": [1, 1]}
    assert measure("ponder3", torch.bfloat16, 64, **few).per_pass <= 1.15
    monkeypatch.setattr(Interleaved, "_own_masks", masked)
    monkeypatch.setattr(Interleaved, "_own_bias", lambda self, tags: None)
    assert measure("ponder3", torch.bfloat16, 64, **few).per_pass > 1.3


@pytest.mark.parametrize("arm", ["ponder3", "latent_cot"])
def test_attention_stays_in_the_flash_kernel(arm, monkeypatch):
    """Every pass of every layer; a mask with a gradient drops to products of whole matrices."""
    model = FathomForCausalLM(config_of(arm, layers=2, width=128)).train()
    ids = torch.arange(3, 19).unsqueeze(0)
    with Calls() as calls:
        model.model(ids, use_cache=False, head=model.lm_head)
    kernels = {name: count for name, count in calls.counts.items() if "attention" in name}
    passes = {"ponder3": 3 + 6, "latent_cot": 4}[arm]
    assert kernels == {"_scaled_dot_product_flash_attention_for_cpu": 2 * passes} and not calls.counts["bmm"]
    if arm == "ponder3":
        monkeypatch.setattr(Interleaved, "_own_masks", masked)
        monkeypatch.setattr(Interleaved, "_own_bias", lambda self, tags: None)
        with Calls() as calls:
            model.model(ids, use_cache=False, head=model.lm_head)
        assert calls.counts["bmm"]


@pytest.mark.slow
def test_copied_history_is_seen(monkeypatch):
    def beside(attend, earlier, module, query, key, value, mask, **kwargs):
        keys, values = torch.cat((*earlier[::2], key), 2), torch.cat((*earlier[1::2], value), 2)
        return attend(module, query, keys, values, mask, **kwargs)

    monkeypatch.setattr(modeling, "attend_beside", beside)
    assert measure("latent_cot", torch.bfloat16, 64).per_pass > 1.15


@pytest.mark.parametrize("padded", [False, True])
def test_recomputed_passes_write_no_cache(padded):
    """A call of training that says nothing of a cache, as many trainers make it: none is written twice."""
    ids = torch.arange(3, 11).view(2, 4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]) if padded else None
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = FathomForCausalLM(config_of("loop", layers=2, width=128, recompute=recompute)).double().train()
        out = model(ids, attention_mask=mask)
        out.logits.square().mean().backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad)
        assert (out.past_key_values is None) == recompute
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
    cache = model(ids, use_cache=True, past_key_values=DynamicCache()).past_key_values
    model(ids, use_cache=True, past_key_values=cache).logits.square().mean().backward()
    assert cache.get_seq_length() == 8, "one that is given is kept, and such a call is not recomputed"


@pytest.mark.slow
@pytest.mark.parametrize("arm", SEVERAL)
def test_recomputed_passes_keep_their_inputs_and_all_gradients(arm):
    ids = torch.arange(3, 35).unsqueeze(0)
    losses, grads, kept = [], [], []
    for recompute, of_layers in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        model = FathomForCausalLM(config_of(arm, layers=2, width=128, recompute=recompute)).double().train()
        if of_layers:
            model.gradient_checkpointing_enable()
        model.set_step(5000, 5001)
        kept.append(saved_bytes(model, ids))
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for loss, again in zip(losses, grads, strict=True):
        assert torch.equal(loss, losses[0]) and again.keys() == grads[0].keys()
        assert all(torch.allclose(again[name], grads[0][name], rtol=0, atol=1e-12) for name in again)
    assert any(grad.abs().max() > 1e-4 for grad in grads[0].values())
    assert kept[1] < 0.4 * kept[0]


def solved(arm, cut=0, **options):
    """Loss and gradients after one round of two trips, four passes in all; of the first `cut`, what is fed on and what
    keys are biased with is cut off by hand."""
    torch.manual_seed(0)
    trips = {"trips": 3, "jacobi_train": [1, 1], **options}
    model = FathomForCausalLM(config_of(arm, layers=2, width=128, **trips)).double().train()
    recurrence, made = model.model.recurrence, []

    def cutting(method):
        def call(*arguments):
            result = method(*arguments)
            return result.detach() if result is not None and len(made) <= cut else result

        return call

    recurrence.feed, recurrence.key_bias = cutting(recurrence.feed), cutting(recurrence.key_bias)
    one = Interleaved.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interleaved, "__call__", lambda self, *arguments: (made.append(1), one(self, *arguments))[1])
        ids = torch.arange(3, 35).unsqueeze(0)
        loss = model(ids, labels=ids).loss
    assert len(made) == 4
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.quick("ponder3")
@pytest.mark.parametrize("arm", ["ponder2", "ponder3"])
def test_gradients_flow_through_the_last_passes_alone(arm):
    loss, whole = solved(arm)
    for kept in (1, 2, 4):
        found, grads = solved(arm, gradient_passes=kept)
        _, wanted = solved(arm, cut=4 - kept)
        assert torch.equal(found, loss)
        assert all(torch.allclose(grads[name], wanted[name], rtol=0, atol=1e-12) for name in wanted)
        same = [torch.allclose(grads[name], whole[name], rtol=0, atol=1e-9) for name in whole]
        assert all(same) == (kept == 4), "another gradient, unless it is all passes"


@pytest.mark.slow
def test_passes_without_gradients_keep_nothing():
    ids, kept = torch.arange(3, 67).unsqueeze(0), []
    for passes in (0, 1):
        model = FathomForCausalLM(config_of("ponder3", layers=2, width=128, gradient_passes=passes)).train()
        kept.append(saved_bytes(model, ids))
        assert training_visits(model.config)[1] == 2 * 30
        assert kept_visits(model.config) == 2 * (4 if passes else 30)
    assert kept[1] / kept[0] == pytest.approx(4 / 30, rel=0.1)
