"""The share of energy that a compression keeps: known signals, and keys seen without their rotation."""

from __future__ import annotations

import pytest
import torch

from fathom.evaluation.caches.spectrum import Shares, shares, spectrum
from fathom.kvcache import Schedule
from tests.kvcache import test_states as states
from tests.tiny import tiny_config

from fathom.models import FathomForCausalLM  # isort: skip

SCHEDULE = Schedule.at(64, 4, 0.5)


def test_known_signals() -> None:
    n = torch.arange(64, dtype=torch.float64)
    constant = torch.ones(1, 1, 64, 2)
    assert shares([constant], SCHEDULE) == Shares([pytest.approx(1)], [1.0])
    alternating = ((-1) ** n).view(1, 1, 64, 1)
    found = shares([alternating], SCHEDULE)
    assert found.mean[0] < 1e-6 and found.kept[0] < 0.01
    torch.manual_seed(0)
    noise = torch.randn(4, 8, 64, 64)
    assert shares([noise], SCHEDULE).kept[0] == pytest.approx(27 / 59, abs=0.005)
    # The sinks are not compressed, so what they hold does not count.
    alternating[:, :, 4:] = 1
    assert shares([alternating], SCHEDULE).mean[0] == pytest.approx(1)


def test_an_offset_is_no_structure() -> None:
    """A mean that every method keeps raises its own share, and leaves that of the rest as it was."""
    torch.manual_seed(0)
    noise = torch.randn(4, 8, 64, 64)
    found = shares([noise, noise + 2], SCHEDULE)
    assert found.kept == [pytest.approx(27 / 59, abs=0.005)] * 2
    assert found.mean == [pytest.approx(1 / 60, abs=0.002), pytest.approx((4 + 1 / 60) / 5, abs=0.01)]


@pytest.fixture(scope="module")
def model() -> FathomForCausalLM:
    torch.manual_seed(0)
    return FathomForCausalLM(tiny_config(initializer_range=0.3)).eval()


def test_keys_are_seen_before_their_rotation(model: FathomForCausalLM) -> None:
    """One token over and over has one key, which rotation turns into something that is not constant."""
    found = spectrum(model, torch.full((2, 64), 7), SCHEDULE)
    assert min(found.keys.mean) > 1 - 1e-6 and min(found.values.mean) > 1 - 1e-6
    with torch.no_grad():
        cache = model(torch.full((1, 64), 7), use_cache=True).past_key_values
    assert shares([cache.layers[0].keys], SCHEDULE).mean[0] < 1 - 1e-4


def test_keys_of_a_loop_are_those_of_their_layers() -> None:
    """Iterations after the prelude do not begin with the first layer, which alone does not rotate here."""
    options = {"recurrence": "loop", "recurrence_options": {"trips": 3, "prelude": 1}}
    looped = FathomForCausalLM(tiny_config(no_rope_layers=[0, 1, 1, 1], initializer_range=0.3, **options)).eval()
    found = spectrum(looped, torch.full((1, 64), 7), SCHEDULE)
    assert len(found.keys.mean) == 1 + 3 * 3 and min(found.keys.mean) > 1 - 1e-6


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_layers_with_a_state_have_no_keys(name: str) -> None:
    """A convolution alone is left out; attention beside a state is not."""
    theirs = states.model_of(name)
    found = spectrum(theirs, torch.arange(64).unsqueeze(0) % 50 + 3, SCHEDULE)
    attends = [kind in ("full_attention", "hybrid") for kind in theirs.config.layer_types]
    assert len(found.keys.mean) == len(found.values.mean) == sum(attends) > 0


def test_values_before_and_after_the_mixer(model: FathomForCausalLM) -> None:
    ids = torch.randint(0, 384, (2, 80), generator=torch.Generator().manual_seed(0))
    found = spectrum(model, ids, SCHEDULE)
    assert found.white == 27 / 59 and len(found.keys.kept) == len(found.values.kept) == 4
    assert found.unmixed_values is not None
    projected, cached = found.unmixed_values.kept, found.values.kept
    assert projected[0] == pytest.approx(cached[0])  # the first layer has nothing to mix
    assert projected[-1] != pytest.approx(cached[-1], abs=1e-4)
    plain = FathomForCausalLM(tiny_config(mixer="none", initializer_range=0.3)).eval()
    assert spectrum(plain, ids, SCHEDULE).unmixed_values is None
    assert spectrum(model, ids[:, :64], SCHEDULE) == found  # more than a window is not read


def test_keys_that_cannot_be_turned_back_are_refused() -> None:
    turned = FathomForCausalLM(tiny_config(k_norm_position="after_rope")).eval()
    with pytest.raises(ValueError, match="after_rope"):
        spectrum(turned, torch.zeros(1, 64, dtype=torch.long), SCHEDULE)
