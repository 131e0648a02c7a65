"""`fathom.testing` on two outside mechanisms, the examples, and on faults that it must see."""

import importlib.util
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from fathom.models import FathomConfig, FathomForCausalLM, FathomModel
from fathom.models.axes.roles import Cost
from fathom.models.cost import flops_per_token
from fathom.models.registry import MECHANISMS
from fathom.testing import Conformance

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(path):
    """A file of the examples as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = example(EXAMPLES / "gated_mean.py")
DELTA = example(EXAMPLES / "delta" / "outside_delta.py")
THEIRS = example(EXAMPLES / "delta" / "test_outside_delta.py").TestOutsideDelta


@pytest.fixture(autouse=True)
def left_out_afterwards():
    yield
    for name in ("gated_mean", "outside_delta"):
        MECHANISMS.pop(name, None)


class TestGatedMean(Conformance):
    """An author's test file; what takes a process or a compiler is slow."""

    mechanism = EXAMPLE.GATED_MEAN
    shape: ClassVar = {**Conformance.shape, "num_hidden_layers": 2}

    @pytest.mark.slow
    def test_an_export_opens_without_fathom(self):
        super().test_an_export_opens_without_fathom()

    @pytest.mark.slow
    def test_it_compiles_in_one_graph(self):
        super().test_it_compiles_in_one_graph()


class TestOutsideDelta(THEIRS):
    """The package's own tests."""

    @pytest.mark.slow
    def test_an_export_opens_without_fathom(self):
        super().test_an_export_opens_without_fathom()

    @pytest.mark.slow
    def test_it_compiles_in_one_graph(self):
        super().test_it_compiles_in_one_graph()


def test_the_package_is_the_variant_delta():
    """Two implementations of one equation: the same logits and the same FLOPs."""
    author = THEIRS()
    model = author.model()
    ours = FathomConfig(**author.shape, residual="attention_residuals", residual_options={"variant": "delta"})
    twin = FathomForCausalLM(ours).eval().double()
    values = {name.replace(".query", ".pseudo_query"): p for name, p in model.state_dict().items()}
    gates = {name for name in values if name.endswith(".gate")}
    with torch.no_grad():
        for name in gates:
            values[name].fill_(1.0)  # the variant has none
    missing, further = twin.load_state_dict(values, strict=False)
    assert set(further) == gates and all(name.endswith("residual.norm.weight") for name in missing)
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        off = (model(ids).logits - twin(ids).logits).abs().max()
        for p in (p for name, p in model.named_parameters() if name.endswith(".query")):
            p.zero_()
        other = (model(ids).logits - twin(ids).logits).abs().max()
    assert off < 1e-11 < 1e-3 < other
    assert flops_per_token(model.config, 8) == flops_per_token(ours, 8)


class WithDepthAttention(Conformance):
    """A mixer that scores queries and keys."""

    mechanism = MECHANISMS["depth_attention"]


def test_scores_that_see_positions_are_seen(monkeypatch):
    """Rotated queries and keys of layers of which only some rotate."""
    author = WithDepthAttention()
    author.test_all_positions_may_move()
    monkeypatch.setattr(FathomConfig, "mixes_unrotated", False)
    with pytest.raises(AssertionError, match=r"no_rope_layers=\[1, 0"):
        author.test_all_positions_may_move()


def test_positions_that_count_padding_are_seen(monkeypatch):
    """Keys that are normed after rotation show a mixer where they are."""
    monkeypatch.setattr(WithDepthAttention, "shape", {**Conformance.shape, "k_norm_position": "after_rope"})
    author, count = WithDepthAttention(), FathomModel._positions
    author.test_padded_rows_are_single_rows()
    monkeypatch.setattr(FathomModel, "_positions", lambda self, seen, x, mask: count(self, seen, x, None))
    with pytest.raises(AssertionError, match="off by"):
        author.test_padded_rows_are_single_rows()


def without_the_stream(self, state):
    """Loses what the layers below wrote."""
    h, state, context = DELTA.Residual.read(self, state)
    return (torch.stack(state[1:]).mean(0) if self.adds else h), state, context


def test_other_mathematics_is_seen(monkeypatch):
    author = THEIRS()
    author.test_each_call_computes_your_numpy()
    monkeypatch.setattr(DELTA.OutsideDelta, "read", without_the_stream)
    with pytest.raises(AssertionError, match="off by"):
        author.test_each_call_computes_your_numpy()


def test_a_scalar_that_cannot_be_sharded_is_seen(monkeypatch):
    def build(self, config, layer_idx):
        super(EXAMPLE.GatedMean, self).__init__(config, layer_idx)
        self.gate = nn.Parameter(torch.empty(())) if layer_idx else None

    monkeypatch.setattr(EXAMPLE.GatedMean, "__init__", build)
    with pytest.raises(ValueError, match="scalar"):
        TestGatedMean().test_sharding_changes_no_gradient()
    assert not torch.distributed.is_initialized()


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


@pytest.mark.slow
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
