"""`fathom.testing` on the example of an outside mechanism, and on faults that it must see."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fathom.models.registry import MECHANISMS
from fathom.models.roles import Cost
from fathom.testing import Conformance

FILE = Path(__file__).parents[1] / "examples" / "gated_mean.py"
SPEC = importlib.util.spec_from_file_location("gated_mean", FILE)
EXAMPLE = sys.modules["gated_mean"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(EXAMPLE)


@pytest.fixture(autouse=True)
def left_out_afterwards():
    yield
    MECHANISMS.pop("gated_mean", None)


class TestGatedMean(Conformance):
    """An author's test file; what takes a process is slow."""

    mechanism = EXAMPLE.GATED_MEAN

    @pytest.mark.slow
    def test_an_export_opens_without_fathom(self):
        super().test_an_export_opens_without_fathom()


def next_tokens_value(self, query, key, value, sources):
    """Reads the token after its own."""
    return (value + sources[1].roll(-1, 2)) / 2 if sources else value


def detached(self, query, key, value, sources):
    """Loses the gradient to its gate."""
    return value.lerp(sources[1], self.gate.sigmoid().to(value.dtype).detach()) if sources else value


def past_averages(self, query, key, value, sources):
    """Depends on how the text is cut into calls."""
    return value.cumsum(2) if sources else value


FAULTS = {
    next_tokens_value: "test_later_tokens_change_nothing",
    detached: "test_every_parameter_gets_a_gradient",
    past_averages: "test_reading_in_parts_is_reading_at_once",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault, monkeypatch):
    getattr(TestGatedMean(), FAULTS[fault])()
    monkeypatch.setattr(EXAMPLE.GatedMean, "forward", fault)
    with pytest.raises(AssertionError):
        getattr(TestGatedMean(), FAULTS[fault])()


def branches(self, query, key, value, sources):
    """Looks at a value, which a graph cannot."""
    return sources[1] if sources and value.sum() > 0 else value


def test_a_branch_on_values_is_seen(monkeypatch):
    monkeypatch.setattr(EXAMPLE.GatedMean, "forward", branches)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        TestGatedMean().test_it_compiles_in_one_graph()


def test_values_that_nobody_sets_are_seen(monkeypatch):
    monkeypatch.setattr(EXAMPLE.GatedMean, "init_weights", lambda self, std: None)
    with pytest.raises(AssertionError, match="gate"):
        TestGatedMean().test_initial_values_are_set()


def test_a_cost_that_is_not_declared_is_seen(monkeypatch):
    monkeypatch.setattr("fathom.testing.mechanism_cost", lambda config, scalar: Cost())
    with pytest.raises(AssertionError):
        TestGatedMean().test_the_declared_cost_is_measured()
