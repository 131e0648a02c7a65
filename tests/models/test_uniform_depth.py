"""The uniform average against a loop over sources, and the paper's coefficients."""

import pytest
import torch

from fathom.models.depth_attention import DepthAttention
from fathom.models.slots import plan
from fathom.models.uniform_depth import UniformDepth

from .cases import build, config_of, tokens
from .oracle import Oracle, agree, unrolled


def average(query, key, value, sources):
    total = value.clone()
    for _, mixed in sources:
        total = total + mixed
    return total / (1 + len(sources))


@pytest.mark.parametrize("stride,window", [(1, 0), (2, 0), (3, 1), (5, 0), (5, 4)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equations(stride, window, kv_heads):
    options = {"stride": stride, "recent_layers": window}
    config = config_of("uniform_depth", num_hidden_layers=5, num_key_value_heads=kv_heads, mixer_options=options)
    model, ids = build(config, dtype=torch.float64), tokens(2, 6)
    oracle = Oracle(model)

    def sources(layer):
        return {i for i in range(layer) if i % stride == 0 or i >= layer - window}

    agree(model, ids, unrolled(oracle, ids, range(5), sources, average), oracle)


def test_the_oracle_sees_raw_sources():
    """The recursion matters: averaging raw values instead of mixed ones is another function."""
    model, ids = build(config_of("uniform_depth"), dtype=torch.float64), tokens(1, 6)
    oracle, raw = Oracle(model), {}

    def average_raw(layer, query, key, value):
        raw[layer] = value
        return sum([raw[i] for i in range(0, layer, 2)], value) / (len(range(0, layer, 2)) + 1)

    x = oracle.embedding[ids]
    for i in range(4):
        x = oracle.block(i, x, average_raw)
    with torch.no_grad():
        assert (oracle.logits(x) - model(ids).logits).abs().max() > 1e-3


def coefficients(layers, stride):
    """What one-hot raw values become, layer after layer."""
    config = config_of("uniform_depth", num_hidden_layers=layers, mixer_options={"stride": stride})
    mixed = []
    for visit in plan(config)[0]:
        value = torch.eye(layers, dtype=torch.float64)[visit.layer].view(1, 1, 1, -1)
        sources = tuple(t for i in visit.sources for t in (value, mixed[i]))
        mixed.append(UniformDepth(config, visit.layer)(None, None, value, sources))
    return torch.cat(mixed).view(layers, layers)


def test_coefficients_of_raw_values():
    truth = torch.tensor([[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 2, 0, 1 / 2, 0], [1 / 2, 0, 1 / 6, 1 / 3]]).double()
    assert torch.allclose(coefficients(4, 2), truth)
    deep = coefficients(48, 24)
    assert torch.allclose(deep.sum(1), torch.ones(48).double())
    for layer in range(25, 48):
        assert deep[layer, [0, 24, layer]].tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 3])


def test_nothing_to_average_returns_the_same_tensor():
    value = torch.randn(1, 2, 3, 8)
    assert UniformDepth(config_of("uniform_depth"), 0)(None, None, value, ()) is value


def test_schedule_is_that_of_depth_attention():
    for stride in range(1, 7):
        for window in range(7):
            options = {"stride": stride, "recent_layers": window}
            uniform = config_of("uniform_depth", num_hidden_layers=6, mixer_options=options)
            attending = config_of("depth_attention", num_hidden_layers=6, mixer_options=options)
            for i in range(6):
                assert UniformDepth.source_layers(uniform, i) == DepthAttention.source_layers(attending, i)


def test_no_parameters_and_no_self_bias():
    assert not list(UniformDepth(config_of("uniform_depth"), 1).parameters())
    with pytest.raises(ValueError, match="self_bias is not an option of uniform_depth"):
        config_of("uniform_depth", mixer_options={"self_bias": 1.0})
