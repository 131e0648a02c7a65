"""The mixture of word embeddings against `probs @ table`, forward and in every gradient."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fathom.models.recurrences import vocabulary_mixture as module
from fathom.models.recurrences.vocabulary_mixture import mixture

VOCABULARY, WIDTH = 41, 8
HOW = [(0, 1.0), (0, 0.7), (2, 1.0), (2, 1.6), (5, 1.0), (VOCABULARY, 1.3)]
every_way = pytest.mark.parametrize("top_k,temperature", HOW)


def setting(dtype=torch.float64, rows=(2, 7)):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
    table = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    hidden = (2 * torch.randn(*rows, WIDTH, dtype=dtype)).requires_grad_()
    return hidden, head, table


def reference(hidden, head, table, top_k, temperature):
    z = head(hidden) / temperature
    if top_k:
        z = z.masked_fill(z < z.topk(top_k)[0][..., -1:], -torch.inf)
    return z.softmax(-1) @ table


def results(function, hidden, head, table, *args):
    mixed = function(hidden, head, table, *args)
    weights = torch.linspace(-1, 1, mixed.numel(), dtype=mixed.dtype).view_as(mixed)
    return mixed, *torch.autograd.grad((mixed * weights).sum(), (hidden, head.weight, table))


def worst(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@every_way
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_equals_probabilities_times_table(monkeypatch, top_k, temperature, chunk):
    monkeypatch.setattr(module, "chunk_rows", lambda *_: chunk)
    monkeypatch.setattr(module, "_word_rows", lambda *_: chunk)
    given = setting()
    assert worst(results(mixture, *given, top_k, temperature), results(reference, *given, top_k, temperature)) < 1e-12


@every_way
def test_in_single_precision(top_k, temperature):
    given = setting(torch.float32)
    assert worst(results(mixture, *given, top_k, temperature), results(reference, *given, top_k, temperature)) < 1e-5


@pytest.mark.parametrize("top_k", [1, 2, 7])
def test_word_by_word_is_dense(top_k):
    hidden, head, table = setting()
    rows, weight = hidden.flatten(0, 1), head.weight
    words = (rows @ weight.T).topk(top_k)[1]
    found = []
    for mixed in (
        module._Words.apply(rows, weight, table, words, 1.3),
        module._Dense.apply(rows, weight, table, top_k, 1.3),
    ):
        found.append((mixed, *torch.autograd.grad(mixed.square().sum(), (hidden, weight, table), retain_graph=True)))
    assert worst(*found) < 1e-12


def test_without_gradients_no_word_is_gathered():
    """The logits by which words were chosen are not made again; the mixture is the same."""
    hidden, head, table = setting()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixed = mixture(hidden, head, table, 2, 1.3)
    assert counter.get_total_flops() == 2 * hidden.numel() * VOCABULARY
    assert worst([mixed], [mixture(hidden, head, table, 2, 1.3)]) < 1e-12


def test_all_words_is_no_choice():
    given = setting()
    assert torch.equal(mixture(*given, VOCABULARY), mixture(*given, 0))


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_head_that_is_more_than_its_weight_is_called(top_k):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.weight = base, base.weight

        def forward(self, x):
            return self.base(x) + 0.5 * x.sum(-1, keepdim=True) * torch.arange(VOCABULARY)

    hidden, head, table = setting()
    head = Adapted(head)
    assert (
        worst(results(mixture, hidden, head, table, top_k, 1.1), results(reference, hidden, head, table, top_k, 1.1))
        < 1e-12
    )


@pytest.mark.parametrize("top_k", [0, 2])
def test_autocast(top_k):
    hidden, head, table = setting(torch.float32, rows=(1, 40))
    best = head(hidden).topk(3)[0]
    clear = (best[..., 1] - best[..., 2] > 0.1).nonzero(as_tuple=True)  # rounding may not choose another word
    given = hidden[clear].detach().requires_grad_(), head, table
    exact = results(mixture, *given, top_k, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = mixture(*given, top_k, 1.0)
    assert mixed.dtype == torch.bfloat16
    weights = torch.linspace(-1, 1, mixed.numel()).view_as(mixed)
    half = mixed, *torch.autograd.grad((mixed * weights).sum(), (given[0], given[1].weight, given[2]))
    for a, b in zip(half, exact, strict=True):
        assert (a - b).abs().max() < 0.05 * b.abs().max()
    assert [x.dtype for x in half[1:]] == [torch.float32] * 3


def test_the_probabilities_of_a_batch_never_exist():
    """What is kept for backward is the input and the two tables."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        mixture(*setting(rows=(1, 100)))
    assert max(kept) < 100 * VOCABULARY
