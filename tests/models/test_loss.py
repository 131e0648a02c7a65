"""The chunked cross-entropy against `F.cross_entropy` on logits that exist."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fathom.models.decoder import loss as module
from fathom.models.decoder.loss import chunk_rows, linear_cross_entropy
from tests.tiny import seeded

from .cases import build, config_of, tokens


def causal_lm_loss(hidden, head, labels, items=None):
    return module.causal_lm_loss(hidden, head, module.shifted(labels), items)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two rows, so that a test meets their edges."""
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 2 * 37)
    monkeypatch.setattr(module, "CHUNK_ROWS", 1)
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cuda", 2 * 50_000)  # the bound of a wrapped head


def problem(rows, dtype=torch.float64, width=8, vocabulary=37, ignored=0.3, seed=0):
    generator = seeded(seed)
    x = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    y = torch.randint(vocabulary, (rows,), generator=generator)
    y[torch.rand(rows, generator=generator) < ignored] = -100
    return x, w, y


def truth_of(x, w, y, factor=1.0):
    """Loss and both gradients in float64, from the values as they are stored."""
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    total = F.cross_entropy(x @ w.T, y, ignore_index=-100, reduction="sum") * factor
    return total, *torch.autograd.grad(total, (x, w))


def near(found, wanted, tolerance):
    return (found.double() - wanted).abs().max() <= tolerance * max(1e-3, wanted.abs().max())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40), most=st.integers(1, 45), ignored=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 99)
)
def test_value_and_gradients_at_every_chunk_edge(rows, most, ignored, seed):
    x, w, y = problem(rows, ignored=ignored, seed=seed)
    wanted = truth_of(x, w, y, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.CHUNK_ELEMENTS, "cpu", most * 37)
        patch.setattr(module, "CHUNK_ROWS", 1)
        total = linear_cross_entropy(x, w, y) * 0.5
    found = total, *torch.autograd.grad(total, (x, w))
    assert all(near(a, b, 1e-12) for a, b in zip(found, wanted, strict=True))


@settings(max_examples=200, deadline=None)
@given(count=st.integers(0, 10_000), vocabulary=st.integers(1, 300_000), device=st.sampled_from(["cpu", "cuda", "mps"]))
def test_chunks_cover_every_row_and_stay_small(count, vocabulary, device):
    size = chunk_rows(count, vocabulary, device)
    assert size >= 1
    limit = module.CHUNK_ELEMENTS.get(device, module.CHUNK_ELEMENTS["cuda"])
    assert size <= module.CHUNK_ROWS or size * vocabulary <= limit
    if count:
        chunks = -(-count // size)
        assert (chunks - 1) * size < count <= chunks * size


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_precisions(dtype, small_chunks):
    x, w, y = problem(64, dtype)
    factor = 1 / 641  # what bfloat16 cannot hold
    total = linear_cross_entropy(x, w, y) * factor
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    found = total, *torch.autograd.grad(total, (x, w))
    assert [g.dtype for g in found[1:]] == [dtype, dtype]
    wanted = truth_of(x, w, y, factor)
    assert all(near(a, b, TOLERANCE[dtype]) for a, b in zip(found, wanted, strict=True))


def test_half_precision_gradients_keep_their_scale():
    """1 / num_items rounded to bfloat16 would scale all hidden states' gradients alike, and the head's not."""
    x, w, y = problem(256, torch.bfloat16, ignored=0)
    items = min(range(500, 1000), key=lambda n: torch.tensor(1 / n).bfloat16().item() * n)
    assert 1 - torch.tensor(1 / items).bfloat16().item() * items > 3e-3
    gradient = torch.autograd.grad(linear_cross_entropy(x, w, y) / items, x)[0].double()
    wanted = truth_of(x, w, y, 1 / items)[1]
    scale = (gradient * wanted).sum() / wanted.square().sum()
    assert abs(scale - 1) < 1e-3


def test_a_second_derivative_is_refused():
    x, w, y = problem(4)
    (gradient,) = torch.autograd.grad(linear_cross_entropy(x, w, y).square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("which", ["rows", "weight"])
def test_a_frozen_side_gets_no_gradient(which):
    x, w, y = problem(6)
    frozen, free = (x, w) if which == "rows" else (w, x)
    frozen.requires_grad_(False)
    total = linear_cross_entropy(x, w, y)
    total.backward()
    assert frozen.grad is None
    wanted = truth_of(x, w, y)
    assert near(free.grad, wanted[2 if which == "rows" else 1], 1e-12)


# --- the loss of a model ----------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A head with a low-rank adapter, as PEFT would leave it."""

    def __init__(self, head, rank=2):
        super().__init__()
        torch.manual_seed(5)
        self.base = head
        self.a = nn.Parameter(torch.randn(rank, head.in_features, dtype=head.weight.dtype))
        self.b = nn.Parameter(torch.randn(head.out_features, rank, dtype=head.weight.dtype))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def head_of(kind, dtype=torch.float64, width=8, vocabulary=37):
    torch.manual_seed(4)
    head = nn.Linear(width, vocabulary, bias=kind == "biased", dtype=dtype)
    return Wrapped(head) if kind == "wrapped" else head


def batch(dtype=torch.float64, rows=3, length=7):
    torch.manual_seed(3)
    hidden = torch.randn(rows, length, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(37, (rows, length))
    labels[0, :3] = labels[1, -1] = -100
    return hidden, labels


def plain_loss(hidden, head, labels, items=None):
    """transformers' own: shift, cross-entropy, mean or sum over the number of items."""
    logits = head(hidden)[:, :-1].flatten(0, 1)
    total = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return total / ((labels[:, 1:] != -100).sum() if items is None else items)


@pytest.mark.parametrize("kind", ["linear", "biased", "wrapped"])
@pytest.mark.parametrize("items", [None, 17, torch.tensor(17)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("shifted", [False, True])
def test_causal_loss(kind, items, shifted, small_chunks):
    head, (hidden, labels) = head_of(kind), batch()
    parameters = [hidden, *head.parameters()]
    wanted = plain_loss(hidden, head, labels, items)
    if shifted:
        moved = torch.full_like(labels, -100)
        moved[:, :-1] = labels[:, 1:]
        found = module.causal_lm_loss(hidden, head, moved, items)
    else:
        found = causal_lm_loss(hidden, head, labels, items)
    assert near(found, wanted, 1e-12)
    for a, b in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True):
        assert near(a, b, 1e-12)
    assert not near(causal_lm_loss(hidden, head, labels.roll(1), items), wanted, 1e-3)


def test_labels_of_another_shape_are_refused():
    head, (hidden, labels) = head_of("linear"), batch()
    with pytest.raises(ValueError, match=r"labels have shape \[3, 6\], but the input has shape \[3, 7\]"):
        module.causal_lm_loss(hidden, head, labels[:, 1:])


def test_a_hooked_or_offloaded_head_is_called():
    """Reading the weight behind a hook's back would read what is not there (offloading) or skip what somebody asked."""
    head, (hidden, labels) = head_of("linear"), batch()
    wanted, seen = causal_lm_loss(hidden, head, labels), []
    head.register_forward_pre_hook(lambda *_: seen.append(1))
    assert near(causal_lm_loss(hidden, head, labels), wanted, 1e-12) and seen
    replaced, plain = copy.deepcopy(head_of("linear")), nn.Linear.forward
    replaced.forward = lambda x: (seen.clear(), plain(replaced, x))[1]
    assert near(causal_lm_loss(hidden, replaced, labels), wanted, 1e-12) and not seen


@pytest.mark.parametrize("kind", ["linear", "wrapped"])
def test_nothing_to_predict_is_zero_and_finite(kind):
    head, (hidden, _) = head_of(kind), batch()
    found = causal_lm_loss(hidden, head, torch.full((3, 7), -100))
    assert found.item() == 0
    for gradient in torch.autograd.grad(found, [hidden, *head.parameters()]):
        assert not gradient.any()


def test_parts_of_a_batch_sum_to_its_mean():
    """Gradient accumulation: every part divided by the targets of all of them."""
    head, (hidden, labels) = head_of("linear"), batch()
    items = (labels[:, 1:] != -100).sum()
    parts = [causal_lm_loss(h, head, y, items) for h, y in zip(hidden.split(1), labels.split(1), strict=True)]
    assert near(sum(parts), causal_lm_loss(hidden, head, labels), 1e-12)
    means = [causal_lm_loss(h, head, y) for h, y in zip(hidden.split(1), labels.split(1), strict=True)]
    assert not near(sum(means) / 3, causal_lm_loss(hidden, head, labels), 1e-3), "the mean of means is another number"


@pytest.mark.parametrize("kind", ["linear", "wrapped"])
def test_autocast(kind):
    """As autocast would have it: a half-precision product, a single-precision softmax, single-precision gradients."""
    head, (hidden, labels) = head_of(kind, torch.float32), batch(torch.float32)
    parameters = [hidden, *head.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        found = causal_lm_loss(hidden, head, labels)
        wanted = F.cross_entropy(head(hidden)[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
    assert found.dtype == torch.float32
    assert near(found, wanted, 1e-6)
    assert not near(found, plain_loss(hidden, head, labels), 1e-6), "autocast must have done something"
    for a, b in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True):
        assert a.dtype == torch.float32
        assert near(a, b.double(), 2e-2)


# --- what it does not do ----------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """The largest tensor that anything creates, and how many matrix products were taken."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        self.products += function.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        return out


@pytest.mark.parametrize("kind", ["linear", "wrapped"])
def test_logits_of_a_batch_never_exist(kind, small_chunks):
    head, (hidden, labels) = head_of(kind), batch(rows=8, length=16)
    whole = 8 * 16 * 37
    with Watch() as chunked:
        causal_lm_loss(hidden, head, labels).backward()
    assert chunked.largest <= 8 * 16 * 8, "nothing larger than the hidden states"
    with Watch() as plain:
        plain_loss(hidden, head, labels).backward()
    assert plain.largest >= whole, "the watch must see them"


def test_logits_never_exist_in_a_training_step(small_chunks):
    model, ids = build(config_of("vanilla", vocab_size=500)), tokens(4, 16)
    for train, seen in ((True, False), (False, True)):
        model.train(train)
        with Watch() as watch:
            model(ids, labels=ids, use_cache=False).loss.backward()
        assert (watch.largest >= 4 * 16 * 500) == seen


def test_the_training_loss_is_three_products():
    x, w, y = problem(12)
    with Watch() as watch:
        linear_cross_entropy(x, w, y).backward()
    assert watch.products == 3
    x.requires_grad_(False)
    with Watch() as watch:
        linear_cross_entropy(x, w, y).backward()
    assert watch.products == 2


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["linear", "wrapped"])
def test_evaluation_pays_for_no_gradient(off, kind):
    head, (hidden, labels) = head_of(kind), batch()
    wanted = causal_lm_loss(hidden, head, labels).detach()
    with off(), Watch() as watch:
        found = causal_lm_loss(hidden, head, labels)
    assert not found.requires_grad
    assert torch.equal(found, wanted)
    if off is torch.no_grad:  # inference mode hides products from a watch
        assert watch.products == (1 if kind == "linear" else 3)


@pytest.mark.slow  # the fast suite compiles it with a model, in test_mechanisms
@pytest.mark.parametrize("kind", ["linear", "biased", "wrapped"])
def test_compiled_in_one_graph(kind, small_chunks):
    torch._dynamo.reset()
    head, (hidden, labels) = head_of(kind), batch()
    twin, other = copy.deepcopy(head), hidden.detach().clone().requires_grad_()
    whole = torch.compile(lambda h, y: causal_lm_loss(h, twin, y), backend="aot_eager", fullgraph=True)
    for i in (1, 2):  # a second call must not need a second graph
        eager, compiled = causal_lm_loss(hidden, head, labels), whole(other, labels)
        assert near(compiled, eager, 1e-12)
        eager.backward()
        compiled.backward()
        assert near(other.grad, hidden.grad, 1e-12), i
        for a, b in zip(twin.parameters(), head.parameters(), strict=True):
            assert near(a.grad, b.grad, 1e-12)
    with torch.no_grad():
        assert near(whole(other, labels), causal_lm_loss(hidden, head, labels), 1e-12)
