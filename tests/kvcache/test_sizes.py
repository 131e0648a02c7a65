"""Real sizes: what a compression and a training step allocate grows with the window and the text, not with squares."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fathom.kvcache import METHODS, attention, build_cache, compress_in_training, memory
from fathom.kvcache.average import Average
from fathom.kvcache.freqkv import FreqKV
from fathom.kvcache.matrix import Fixed
from fathom.kvcache.method import Held
from fathom.kvcache.rope import Rope
from fathom.kvcache.schedule import Schedule

from .cases import SCHEDULE, F, N, cached, model_of, tokens

LARGE = 32_768
DENSE = [name for name, made in METHODS.items() if getattr(made, "reduce", None) is Fixed.reduce]
QUADRATIC = ("learned", *DENSE)  # what it learns is a matrix; a matrix of a reader's own is multiplied with


class Allocated(TorchDispatchMode):
    """The largest tensor, in numbers, and the types of all."""

    def __init__(self):
        super().__init__()
        self.largest, self.types = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
                self.types.add(x.dtype)
        return out


@pytest.fixture(scope="module")
def rope():
    return Rope(model_of("qwen3").config)


@torch.no_grad()
def compression(method, window, rope, **options):
    """What one compression of a window allocates."""
    made = METHODS[method]
    kept = window // 2 - 4 if method == "sinks" else None
    one = made(made.schedule_for(window, 4, 0.5, kept), rope, **options)
    keys, values, queries = torch.randn(3, 1, 2, window, 16)
    noted = one.note(None, queries[:, :, -64:].repeat(1, 2, 1, 1), window - 64, rope.plan[0]) if one.observed else None
    with Allocated() as seen:
        keys, values = one.compress(Held(keys, values, noted), keys[:, :, :4], 0)
    assert keys.shape[2] == values.shape[2] == one.schedule.survivors
    return seen


@pytest.mark.quick("freqkv", "sinks", "snapkv")
@pytest.mark.parametrize("method", [name for name in METHODS if name not in QUADRATIC])
def test_a_compression_needs_memory_as_its_window_does(method, rope):
    """No dense product and no float64, which some accelerators lack."""
    small, large = compression(method, LARGE // 4, rope), compression(method, LARGE, rope)
    assert large.largest < 4.1 * small.largest
    assert large.types.isdisjoint({torch.float64, torch.complex128})


def test_a_dense_product_would_be_seen(rope):
    """The control; and no method here is left out for its matrix."""
    assert {"freqkv", "average"}.isdisjoint(DENSE)
    small, large = (compression("freqkv", window, rope, transform="matrix") for window in (512, 2048))
    assert large.largest > 15 * small.largest
    assert torch.float64 in compression("freqkv", 516, rope, transform="matrix").types  # the matrix is built in it


@pytest.mark.parametrize("kind", [FreqKV, Average])
def test_a_large_window_against_rows_of_its_matrix(kind):
    """In float32, beside rows of C in float64."""
    schedule = Schedule.at(LARGE, 4, 0.5)
    x = torch.randn(1, 1, schedule.compressed, 3, generator=torch.Generator().manual_seed(0))
    i = torch.tensor([0, 1, 4095, 4096, 10_000, schedule.kept - 1])
    truth = kind.rows(i, schedule.kept, schedule.compressed) @ x[0, 0].double()
    found = kind(schedule, None).reduce(x)[0, 0]
    assert (found[i] - truth).abs().max() < 2e-6
    assert (found[i + 1 - 2 * (i > 0).long()] - truth).abs().max() > 0.1  # each beside its neighbour


def step(length, **options):
    """What a training step allocates; without options it is one without compression."""
    model, ids = model_of("qwen3", attn_implementation="sdpa" if options else "eager").train(), tokens(1, length)
    run = compress_in_training(model, **options) if options else None
    with Allocated() as seen:
        model(ids, labels=ids).loss.backward()
    if run is not None:
        run.stop()
    return seen.largest


def test_training_needs_memory_as_its_text_does():
    """Neither scores nor masks of T × T; the control makes them."""
    assert step(512, window=64) < 4.1 * step(128, window=64)
    assert step(512) > 15 * step(128)


@pytest.mark.parametrize("method", ["freqkv", "tova"])
def test_a_group_without_a_mask(method, monkeypatch):
    """Queries of zeros before a group make it causal without a mask, to the last bit of each gradient."""
    ids, found = tokens(2, 150), []
    for largest in (attention.LARGEST_MASK, 0):
        monkeypatch.setattr(attention, "LARGEST_MASK", largest)
        model = model_of("qwen3").train()
        with compress_in_training(model, method, **SCHEDULE) as run:
            model(ids, labels=ids).loss.backward()
        assert bool(run._masks) == (largest > 0)
        found.append([parameter.grad for parameter in model.parameters()])
    assert max((a - b).abs().max() for a, b in zip(*found, strict=True)) < 1e-6


def test_prompts_of_large_windows_are_read_in_small_chunks(monkeypatch):
    """A first chunk needs no mask; later ones are cut, without a difference."""
    model, ids = model_of("qwen3"), tokens(1, 150)
    truth = cached(model, ids, build_cache(model, **SCHEDULE))
    cache = build_cache(model, **SCHEDULE)
    assert cache.memory.cuts(150) == [N, F, F, 22]
    monkeypatch.setattr(memory, "LARGEST_MASK", 10 * N)
    assert cache.memory.cuts(150) == [N, 10, 10, 10, 2, 10, 10, 10, 2, 10, 10, 2]
    assert (cached(model, ids, cache) - truth).abs().max() < 1e-5
