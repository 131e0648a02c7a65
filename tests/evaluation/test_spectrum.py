"""The share of energy that a compression keeps: known signals, and keys seen without their rotation."""

from __future__ import annotations

import pytest
import torch

from fathom.evaluation.spectrum import share, spectrum
from fathom.kvcache import Schedule
from tests.inference.tiny import tiny_config

from fathom.models import FathomForCausalLM  # isort: skip

SCHEDULE = Schedule.at(64, 4, 0.5)


def test_known_signals() -> None:
    n = torch.arange(64, dtype=torch.float64)
    constant = torch.ones(1, 1, 64, 2)
    assert share(constant, SCHEDULE) == pytest.approx(1)
    alternating = ((-1) ** n).view(1, 1, 64, 1)
    assert share(alternating, SCHEDULE) < 0.01
    torch.manual_seed(0)
    noise = torch.randn(4, 8, 64, 64)
    assert share(noise, SCHEDULE) == pytest.approx(28 / 60, abs=0.005)
    # The sinks are not compressed, so what they hold does not count.
    alternating[:, :, 4:] = 1
    assert share(alternating, SCHEDULE) == pytest.approx(1)


@pytest.fixture(scope="module")
def model() -> FathomForCausalLM:
    torch.manual_seed(0)
    return FathomForCausalLM(tiny_config(initializer_range=0.3)).eval()


def test_keys_are_seen_before_their_rotation(model: FathomForCausalLM) -> None:
    """One token over and over has one key, which rotation turns into something that is not constant."""
    found = spectrum(model, torch.full((2, 64), 7), SCHEDULE)
    assert min(found.keys) > 1 - 1e-6 and min(found.values) > 1 - 1e-6
    with torch.no_grad():
        cache = model(torch.full((1, 64), 7), use_cache=True).past_key_values
    assert share(cache.layers[0].keys, SCHEDULE) < 1 - 1e-4


def test_values_before_and_after_the_mixer(model: FathomForCausalLM) -> None:
    ids = torch.randint(0, 384, (2, 80), generator=torch.Generator().manual_seed(0))
    found = spectrum(model, ids, SCHEDULE)
    assert found.white == 28 / 60 and len(found.keys) == len(found.values) == 4
    assert found.unmixed_values is not None
    assert found.unmixed_values[0] == pytest.approx(found.values[0])  # the first layer has nothing to mix
    assert found.unmixed_values[-1] != pytest.approx(found.values[-1], abs=1e-4)
    plain = FathomForCausalLM(tiny_config(mixer="none", initializer_range=0.3)).eval()
    assert spectrum(plain, ids, SCHEDULE).unmixed_values is None
    assert spectrum(model, ids[:, :64], SCHEDULE) == found  # more than a window is not read
