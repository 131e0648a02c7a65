"""Keys in half precision: those that survive many compressions are as exact as those that survive one."""

import pytest
import torch

from fathom.kvcache import METHODS, build_cache, load_cache, save_cache
from fathom.kvcache.memory import Memory
from fathom.kvcache.method import Selection
from fathom.kvcache.rope import Rope, Turn

from .cases import MODELS, cache_of, cached, model_of, tokens

HALF = torch.bfloat16


class Oldest(Selection):
    """Keeps the oldest entries for ever."""

    name = "oldest"

    def scores(self, held):
        return -torch.arange(held.keys.shape[2], dtype=torch.float32).expand(held.keys.shape[:3])


def errors(dtype, compressions):
    """Relative errors of the oldest keys after compressions, against the same in float64; and bytes of an entry."""
    model = model_of("llama")
    half, exact = (build_cache(model, Oldest, window=16, sinks=2, kept=6) for _ in range(2))
    half.watched = exact.watched = True
    turn, draw, found = half.method.rope.plan[0], torch.Generator().manual_seed(0), {}
    for n in range(2 + max(compressions)):
        q = 16 if n == 0 else 8
        keys, values = torch.randn(2, 1, 2, q, 16, dtype=torch.float64, generator=draw).to(dtype)
        keys = turn.turn(keys.double(), exact.seen, 1).to(dtype)
        a, b = half.update(keys, values, 0)[0], exact.update(keys.double(), values.double(), 0)[0]
        found[half.compressions] = float((a[:, :, :8] - b[:, :, :8]).norm() / b[:, :, :8].norm())
    return [found[n] for n in compressions], half.layers[0]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_do_not_wear_down(dtype, monkeypatch):
    (once, often), layer = errors(dtype, (1, 200))
    assert once < 2 * torch.finfo(dtype).eps and often < 1.5 * once
    held = sum(x.numel() * x.element_size() for x in vars(layer).values() if isinstance(x, torch.Tensor))
    assert held == 2 * 2 * 2 * 16 * layer.entries  # keys and values of two bytes, and nothing else
    monkeypatch.setattr(Memory, "bares", False)
    assert errors(dtype, (200,))[0][0] > 5 * often


@torch.no_grad()
@pytest.mark.parametrize("case", ["glm", "gpt_neox", "gpt_oss", "llama", "phi", "cohere"])
def test_placed_as_the_family_rotates(case):
    """In halves or in pairs, whole heads or a part of them."""
    rope = Rope(model_of(case).config)
    x = torch.randn(1, 2, 9, MODELS[case][1].get("hidden_size", 64) // 4 if case == "gpt_neox" else 16)
    for turn in rope.turns.values():
        assert torch.allclose(turn.place(x, 5), turn.turn(x, 5), atol=1e-6)
        assert not torch.allclose(turn.place(x, 5), turn.turn(x, 6), atol=1e-2)


@pytest.fixture
def choices(monkeypatch):
    """What `Selection` chooses, as long as it is noted; then the same again, whatever the scores."""
    plain, noted, again = Selection.choose, [], []

    def choose(self, scores):
        if again:
            return again.pop(0)
        noted.append(plain(self, scores))
        return noted[-1]

    monkeypatch.setattr(Selection, "choose", choose)
    return noted, again


@torch.no_grad()
@pytest.mark.quick("snapkv")
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("sinks", "learned")])
def test_rows_padding_branches_and_files(method, tmp_path, choices):
    """What was compressed in half precision goes on as if nothing had happened to it.

    Rounding may change what a method chooses by its keys, so in single precision the same entries are chosen.
    """
    model, ids = model_of("llama", HALF), tokens(2, 130)
    after, mask = tokens(2, 50, seed=4), torch.ones(2, 130, dtype=torch.long)
    mask[1, :30] = 0
    whole = cache_of(model, method)
    cached(model, ids, whole)
    save_cache(whole, tmp_path / "cache")
    assert whole.compressions >= 2 and whole.layers[0].bare and whole.layers[0].first is None
    branches = whole.branch(), whole.branch()
    expected = model(after, past_key_values=whole).logits
    wide = wide_of(method, torch.cat([ids, after], 1), choices)
    assert (expected - wide).std() < 0.03 * wide.std()
    for again in (load_cache(model, tmp_path / "cache"), *branches):
        again.batch_select_indices(torch.tensor([1, 0]))
        swapped = model(after.flip(0), past_key_values=again).logits.flip(0)
        assert (swapped - expected).abs().max() < 0.1 * expected.std()
    padded = cache_of(model, method)
    together = model(ids, attention_mask=mask, past_key_values=padded).logits[1, -20:]
    alone = cached(model, ids[1:, 30:], cache_of(model, method))[0, -20:]
    assert (together - alone).abs().max() < 0.2 * alone.std()


def wide_of(method, ids, choices):
    """The last 50 logits in single precision, with the choices that were noted, all of them."""
    noted, again = choices
    again.extend(noted)
    exact = model_of("llama", HALF).float()
    wide = cached(exact, ids, cache_of(exact, method))[:, -50:]
    assert not again
    return wide


@torch.no_grad()
@pytest.mark.quick("drop")
@pytest.mark.parametrize("method", ["drop", "snapkv"])
def test_keys_that_are_placed_one_position_off_are_seen(method, choices, monkeypatch):
    """The fault that the bound of the test above must tell from rounding."""
    model, ids, place = model_of("llama", HALF), tokens(2, 180), Turn.place
    monkeypatch.setattr(Turn, "place", lambda self, x, start: place(self, x, start + 1))
    off = cached(model, ids, cache_of(model, method))[:, -50:]
    wide = wide_of(method, ids, choices)
    assert (off - wide).std() > 0.06 * wide.std()


@torch.no_grad()
def test_a_noisy_model_in_half_precision_is_not_refused():
    """A massive activation that appears at some positions only makes later tokens' keys differ by a third."""
    model = model_of("llama", HALF)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(60)
    rope = Rope(model.config)
    rope.ask(model.model)
    assert all(rope.plan)
