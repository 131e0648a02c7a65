"""Reading through a cache: the same losses as without one where nothing is compressed, and costs that stop growing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import MambaConfig, MambaForCausalLM
from transformers.cache_utils import Cache

from fathom.evaluation.caches import measure as kvcache
from fathom.evaluation.caches.measure import Peak, loads, losses, read, scorer, stretches
from fathom.evaluation.clock import Clock
from fathom.kvcache import build_cache, compress_in_training
from fathom.models import FathomForCausalLM
from tests.kvcache import cases
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def model() -> FathomForCausalLM:
    torch.manual_seed(0)
    return FathomForCausalLM(tiny_config(initializer_range=0.3)).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 384, (1, 700), generator=torch.Generator().manual_seed(0))


def expected(model: FathomForCausalLM, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").double().numpy()


def test_a_whole_cache_gives_the_plain_losses(model: FathomForCausalLM, ids: torch.Tensor) -> None:
    assert np.allclose(losses(model, ids, build_cache(model, "full")), expected(model, ids), atol=1e-4)
    rows = ids.view(2, 350)
    assert np.allclose(losses(model, rows, build_cache(model, "full")), expected(model, rows), atol=1e-4)


def test_a_compressed_one_gives_those_of_its_training_form(model: FathomForCausalLM, ids: torch.Tensor) -> None:
    found = losses(model, ids[:, :200], build_cache(model, "freqkv", window=64))
    with compress_in_training(model, "freqkv", window=64):
        assert np.allclose(found, expected(model, ids[:, :200]), atol=1e-4)
    plain = expected(model, ids[:, :200])
    assert np.allclose(found[:, :64], plain[:, :64], atol=1e-4)
    assert not np.allclose(found[:, 64:], plain[:, 64:], atol=1e-2)


def test_a_scorer_returns_the_asked_logits(model: FathomForCausalLM, ids: torch.Tensor) -> None:
    rows, tokens = ids[:, :600].view(2, 300), torch.tensor([5, 3])
    found = scorer(model, partial(build_cache, model, "full"))(rows, tokens)
    with torch.no_grad():
        assert torch.allclose(found, model(rows, use_cache=False).logits[..., tokens], atol=1e-4)


def test_stretches_leave_a_short_one_out() -> None:
    assert stretches(np.arange(14.0).reshape(2, 7), 3) == [[3.0, 12.0], [24.0, 33.0]]


@pytest.mark.slow
def test_bytes_grow_only_without_compression(model: FathomForCausalLM, ids: torch.Tensor) -> None:
    """Each length has a cache of its own, so `full_static` has room for it and no more."""

    def new(method: str, room: int) -> Cache:
        return build_cache(model, method, window=room if method == "full_static" else 64)

    methods = ("freqkv", "full", "full_static")
    compressed, whole, static = (list(loads(model, ids, partial(new, m), [128, 64, 512], 8)) for m in methods)
    assert [load.entries for load in compressed] == [64] * 3
    assert len({load.cache_bytes for load in compressed[1:]}) == 1
    assert [load.entries for load in whole] == [64, 128, 512]
    assert whole[-1].cache_bytes == 8 * whole[0].cache_bytes
    assert [load.entries for load in static] == [72, 136, 520]
    for load in (*compressed, *whole):
        assert 0 < load.decode_ms["p50"] <= load.decode_ms["p90"] <= load.decode_ms["max"]
    if sys.platform == "linux":
        assert all(load.peak_bytes is not None for load in whole)


def test_a_state_that_several_tokens_would_overwrite(ids: torch.Tensor) -> None:
    """Mamba's class begins anew if it continues by several tokens."""
    torch.manual_seed(0)
    small = MambaConfig(vocab_size=384, hidden_size=16, num_hidden_layers=1, state_size=4, initializer_range=0.5)
    mamba, text = MambaForCausalLM(small).eval(), ids[:, :40]
    assert np.allclose(losses(mamba, text, build_cache(mamba, "full"), width=16), expected(mamba, text), atol=1e-4)
    cache = build_cache(mamba, "full")
    parts = [logits for part in text.split([25, 15], 1) for _, logits in read(mamba, part, cache, width=16)]
    assert np.allclose(torch.cat(parts, 1), mamba(text, use_cache=False).logits.detach(), atol=1e-4)


@pytest.mark.parametrize(("case", "method"), [("lfm2", "full"), ("lfm2", "drop"), ("gpt_oss", "full")])
def test_entries_of_the_layer_that_holds_most(case: str, method: str) -> None:
    """A first layer with a state holds none, and one with a window few."""
    changes = {"layer_types": ["conv", "full_attention", "full_attention"]} if case == "lfm2" else {}
    model = cases.model_of(case, **changes)  # the first layer of the other has a window
    new = partial(build_cache, model, method, **({"window": 64} if method == "drop" else {}))
    found = loads(model, cases.tokens(1, 84), lambda room: new(), [32, 80], 4)
    assert [load.entries for load in found] == ([32, 48] if method == "drop" else [32, 80])


class Ticks(Clock):
    """A thousand tokens a second, one by one or not."""

    def __init__(self) -> None:
        self.words, self.read = "ticks", 0.0

    def seconds(self, work: Callable[[], None]) -> float:
        before = self.read
        work()
        return (self.read - before) / 1000


def test_tokens_that_were_decoded_are_not_counted_as_prefilled(
    model: FathomForCausalLM, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, plain = Ticks(), kvcache.consume

    def counted(model: FathomForCausalLM, ids: torch.Tensor, cache: Cache, width: int) -> None:
        ticks.read += ids.numel()
        plain(model, ids, cache, width)

    monkeypatch.setattr(kvcache, "Clock", lambda device: ticks)
    monkeypatch.setattr(kvcache, "consume", counted)
    for rows in (ids, ids.view(2, 350)):
        found = loads(model, rows, lambda room: build_cache(model, "freqkv", window=64), [64, 128], 8)
        assert [load.prefill_tokens_per_second for load in found] == [pytest.approx(1000)] * 2


def test_memory_and_time_are_those_of_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda", 1), []
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: asked.append(given) or 5)
    model = SimpleNamespace(device=device)
    assert Peak(model).bytes() == 0
    Clock(device).seconds(lambda: None)
    assert asked == [(device,)] * 5


def test_pieces_are_no_wider_than_asked(model: FathomForCausalLM, ids: torch.Tensor) -> None:
    whole = build_cache(model, "full")
    assert {piece.shape[1] for piece, _ in read(model, ids, whole, width=50)} == {50}
    wide, narrow = (losses(model, ids[:, :200], build_cache(model, "freqkv", window=64), w) for w in (512, 10))
    assert np.allclose(wide, narrow, atol=1e-4)


def test_what_was_read_is_what_was_given(model: FathomForCausalLM, ids: torch.Tensor) -> None:
    pieces = [piece for piece, _ in read(model, ids, build_cache(model, "average", window=64), keep=1)]
    assert torch.equal(torch.cat(pieces, 1), ids) and [piece.shape[1] for piece in pieces[:3]] == [64, 32, 32]
