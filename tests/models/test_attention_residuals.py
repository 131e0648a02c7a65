"""Attention residuals: their sources, their start and their forms; test_equations.py has the equations."""

import math

import numpy as np
import pytest
import torch

from fathom.models import FathomForCausalLM
from fathom.models.cost import count_parameters
from fathom.models.residuals.attention_residuals import AttentionResiduals, Delta, pool, pool_stacked, source_counts
from fathom.models.trips.slots import plan
from tests.tiny import seeded

from . import oracle_numpy
from .cases import build, config_of, tokens
from .oracle import oracle_of, truth


def case(variant, block_size, layers=4, **keys):
    options = {"block_size": block_size, "variant": variant}
    return config_of("attention_residuals", num_hidden_layers=layers, residual_options=options, **keys)


def sources_of(config):
    return [sources for sources, _ in source_counts(config, [visit for trip in plan(config) for visit in trip])]


@pytest.mark.parametrize("variant,sublayers,final", [("block_sum", 520, 9), ("snapshot", 528, 10)])
def test_source_counts_at_three_billion(variant, sublayers, final):
    counts = sources_of(case(variant, 12, layers=48))
    assert len(counts) == 97
    assert (sum(counts[:-1]), counts[-1]) == (sublayers, final)
    rule = {
        "block_sum": [1 + i // 12 + (i % 12 > 0) for i in range(96)],
        "snapshot": [i // 12 + 2 for i in range(96)],
    }
    assert counts[:-1] == rule[variant]


@pytest.mark.parametrize("prelude,coda,parallel", [(0, 0, False), (1, 1, False), (2, 0, False), (1, 0, True)])
@pytest.mark.parametrize("variant", ["block_sum", "snapshot", "delta", "delta_block"])
def test_source_counts_are_the_states_that_are_read(variant, prelude, coda, parallel):
    """The declared number against what is pooled, in every trip of a loop; parallel sub-layers read before both."""
    loop = {"recurrence": "loop", "recurrence_options": {"trips": 3, "prelude": prelude, "coda": coda}}
    model, seen = build(case(variant, 3, layers=5, parallel_residual=parallel, **loop)), []
    for module in model.modules():
        if isinstance(module, AttentionResiduals):
            read = module.read
            module.read = lambda state, read=read: (seen.append(len(state)), read(state))[1]
        if isinstance(module, Delta):
            read = module.read
            module.read = lambda state, own=module, read=read: (seen.append(pooled_by(own, state)), read(state))[1]
    with torch.no_grad():
        model(tokens(1, 3))
    assert seen == sources_of(model.config)


def pooled_by(module, state):
    """Sources of a delta's read: what follows the stream, but for the open block's sum; none before the final norm."""
    return 0 if module.final or len(state) == 1 else len(state) - 1 - module.by_block


class Published(oracle_numpy.Delta):
    """The recurrence of the public code: from the third source on, the stream at a block's end less the source
    before."""

    def __init__(self, oracle, x):
        super().__init__(oracle, x)
        self.sources = []

    def write(self, sublayer, update):
        begun, x = len(self.blocks), self.x
        super().write(sublayer, update)
        if len(self.blocks) > begun:
            self.sources.append(x - self.sources[-1] if self.sources else x)

    def read(self, sublayer):
        if sublayer == 2 * self.o.layers or len(self.sources) < 2:
            return super().read(sublayer)
        query = self.weight(sublayer, "norm.weight") * self.weight(sublayer, "pseudo_query")
        sources = np.stack(self.sources)
        return self.x + oracle_numpy.softmax(self.o.unit(sources) @ query) @ sources


@pytest.mark.parametrize("layers,same", [(4, True), (5, False)])
def test_the_published_delta_block_has_other_sources_from_the_third_on(layers, same, monkeypatch):
    """With blocks of two layers the MLP of the fifth is the first to read a third source."""
    model, ids = build(case("delta_block", 4, layers=layers), dtype=torch.float64), tokens(1, 6)
    monkeypatch.setitem(oracle_numpy.STREAMS, "attention_residuals", Published)
    with torch.no_grad():
        off = (truth(oracle_of(model), ids) - model(ids).logits).abs().max()
    assert off < 1e-9 if same else off > 1e-3


def fresh(variant, block_size=12):
    torch.manual_seed(0)
    return FathomForCausalLM(case(variant, block_size)).eval()


@pytest.mark.parametrize("others,percent", [(1, 95.3), (8, 71.5), (9, 69.1)])
def test_initial_weight_of_the_running_stream(others, percent):
    """Of `others` + 1 sources; e³ / (e³ + N) restated, and read off the module with one-hot sources."""
    assert 100 * math.exp(3) / (math.exp(3) + others) == pytest.approx(percent, abs=0.06)
    module = fresh("snapshot").model.final_residual
    sources = tuple(torch.eye(others + 1, 32)[i].view(1, 1, 32) for i in range(others + 1))
    weights = module.read(sources)[0].flatten()[: others + 1]
    assert 100 * weights[-1].item() == pytest.approx(percent, abs=0.06)
    assert torch.allclose(weights[:-1], weights[0].expand(others))


def test_initial_bias_is_an_option():
    options = {"variant": "snapshot", "recency_bias": 0.0}
    module = FathomForCausalLM(config_of("attention_residuals", residual_options=options)).model.final_residual
    assert module.read((torch.zeros(1, 1, 32), torch.ones(1, 1, 32)))[0].flatten().tolist() == [0.5] * 32


@pytest.mark.parametrize("bias", [None, torch.tensor([1.5], dtype=torch.float64)])
@pytest.mark.parametrize("sources", [1, 4])
def test_a_stack_is_the_list(sources, bias):
    """What a decoded token takes on a CPU is what training takes."""
    made = seeded(sources)
    query, *states = (
        torch.randn(*shape, 8, generator=made, dtype=torch.float64) for shape in [()] + [(2, 3)] * sources
    )
    expected = pool(states, query, 1e-2, bias)
    assert (pool_stacked(states, query, 1e-2, bias) - expected).abs().max() < 1e-14
    if sources > 1:
        assert (pool_stacked(states, query, 1.0, bias) - expected).abs().max() > 1e-3


def test_gradients_of_sources_of_two_types():
    """Under autocast the embeddings are float32 and sums of updates bfloat16: each gets a gradient of its own."""
    module = build(case("block_sum", 3)).model.final_residual
    made = seeded(0)
    torch.nn.init.normal_(module.pseudo_query, generator=made)
    embeddings, *sums = (torch.randn(2, 3, 32, generator=made) for _ in range(3))
    sources = [embeddings, *(s.bfloat16() for s in sums)]
    wide = [s.clone().float() for s in sources]
    for those in (sources, wide):
        module.read(tuple(s.requires_grad_() for s in those))[0].square().sum().backward()
    for source, same in zip(sources, wide, strict=True):
        assert source.grad.dtype == source.dtype
        assert (source.grad.float() - same.grad).abs().max() < 2**-6 * same.grad.abs().max()


def test_half_precision_scores_are_wide():
    """Scores and softmax in float32: the weights of bf16 sources are those of the same sources widened."""
    model = build(case("snapshot", 3))
    module, half = model.model.final_residual, build(case("snapshot", 3), dtype=torch.bfloat16).model.final_residual
    module.load_state_dict(half.state_dict())
    sources = tuple(10 * torch.randn(1, 3, 32).bfloat16() for _ in range(4))
    wide, narrow = module.read(tuple(s.float() for s in sources))[0], half.read(sources)[0]
    assert narrow.dtype == torch.bfloat16
    assert (wide - narrow).abs().max() < 3 * 2**-8 * max(s.abs().max() for s in sources)


def test_only_reads_of_several_sources_have_a_query():
    """One for each sub-layer but the first; with blocks of three, for those after the second block has begun."""
    for variant, block_size, reads in (("delta", 1, 7), ("delta_block", 3, 4), ("delta_block", 12, 0)):
        assert count_parameters(case(variant, block_size)) - count_parameters(config_of("vanilla")) == reads * 2 * 32
