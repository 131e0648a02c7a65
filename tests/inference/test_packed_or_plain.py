"""Packed, plain or eight-bit weights by the time that they take here; times are planted by layers that sleep."""

import time

import pytest
import torch
from torch import nn

from fathom.checkpoints.int8 import Int8Linear, quantise
from fathom.errors import SettingsError
from fathom.inference import packed_or_plain
from fathom.inference.packed import PackedLinear, available
from fathom.inference.packed_or_plain import Layout, lay_out, sample

packs = pytest.mark.skipif(not available(), reason="this torch has no packed weights")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 8))


def slow(monkeypatch, kind, seconds=0.003):
    """Layers of a kind take so much longer."""
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, given: (time.sleep(seconds), forward(self, given))[1])


@packs
@pytest.mark.parametrize(("slower", "chosen"), [(PackedLinear, "plain"), (nn.Linear, "packed")])
def test_the_faster_is_chosen(slower, chosen, model, monkeypatch):
    slow(monkeypatch, slower)
    drawn = torch.get_rng_state()
    found = lay_out(model)
    assert found.name == chosen and set(found.ratios) == set(packed_or_plain.ROWS) and chosen in str(found)
    assert all((ratio > 1) == (chosen == "plain") for ratio in found.ratios.values())
    kinds = [type(one) for one in model]
    assert kinds == [PackedLinear if chosen == "packed" else nn.Linear] * 2 + [nn.Linear]
    assert torch.equal(torch.get_rng_state(), drawn)


@packs
def test_a_busy_machine_is_timed_for_longer(model, monkeypatch):
    """While packed turns differ, more are timed, and one ratio beyond all measure does not decide."""
    turns = iter([*[0.9, 0.5, 0.7, 0.3, 0.6, 0.8], *[0.01] * 99])
    forward = PackedLinear.forward
    layers = [one for one in model if isinstance(one, nn.Linear)][:1]
    packed = [PackedLinear(one) for one in layers]
    now = [0.0]
    monkeypatch.setattr(packed_or_plain.time, "perf_counter", lambda: now[0])

    def later(kind, seconds):
        before = kind.forward
        monkeypatch.setattr(
            kind, "forward", lambda self, x: (now.__setitem__(0, now[0] + seconds()), before(self, x))[1]
        )

    later(nn.Linear, lambda: 0.02)
    later(PackedLinear, lambda: next(turns))
    assert packed_or_plain.compared(layers, packed) == pytest.approx(dict.fromkeys(packed_or_plain.ROWS, 0.5))
    monkeypatch.setattr(PackedLinear, "forward", forward)
    monkeypatch.setattr(
        packed_or_plain, "compared", lambda *layers: dict(zip(packed_or_plain.ROWS, (43.0, 0.5, 0.5), strict=True))
    )
    assert lay_out(model).name == "packed"


@packs
@pytest.mark.parametrize(("wanted", "slower"), [("packed", PackedLinear), ("plain", nn.Linear)])
def test_a_layout_that_was_named_is_not_timed(wanted, slower, model, monkeypatch):
    slow(monkeypatch, slower)
    monkeypatch.setattr(packed_or_plain, "compared", lambda *layers: pytest.fail("timed"))
    assert lay_out(model, wanted) == Layout(wanted)


@pytest.mark.slow
def test_eight_bits_that_are_slower_are_refused(model, monkeypatch):
    """With the ratio; and served for their memory if a layout is named."""
    quantise(model)
    with monkeypatch.context() as planted:
        slow(planted, nn.Linear, 0.01)
        found = lay_out(model)
        assert found.name == "int8" and found.ratios["a token"] < 0.5
    slow(monkeypatch, Int8Linear)
    with pytest.raises(SettingsError, match=r"weights=int8: on this processor a token takes \d+\.\d\d times"):
        lay_out(model)
    assert lay_out(model, "plain") == Layout("int8")


def test_what_has_no_layers_to_pack_is_plain():
    assert lay_out(nn.Sequential(nn.Linear(8, 8))) == Layout("plain")
    with pytest.raises(SettingsError, match="layout=fast: allowed: auto, packed, plain"):
        lay_out(nn.Sequential(), "fast")


def test_a_sample_is_of_the_whole_model(monkeypatch):
    layers = [nn.Linear(16, 16) for _ in range(12)]
    monkeypatch.setattr(packed_or_plain, "SAMPLE", 4 * 1024)
    places = [next(i for i, layer in enumerate(layers) if layer is one) for one in sample(layers)]
    assert len(places) == 4 and max(places) > 8
    monkeypatch.setattr(packed_or_plain, "SAMPLE", 10)
    assert len(sample(layers)) == 1
