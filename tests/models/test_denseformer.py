"""DenseFormer against a direct sum over stored history."""

import pytest
import torch

from fathom.models import FathomForCausalLM
from fathom.models.cost import count_parameters
from fathom.models.denseformer import DenseFormer, num_weights
from fathom.models.registry import mechanism
from fathom.models.slots import plan

from .cases import build, config_of, tokens
from .oracle import Oracle, agree


def average(i, outputs, alpha, dilation, first=0):
    """Σ_j α_j X_j over j ≡ i + 1 (mod dilation), ascending; in a later trip only X_first and what follows exist."""
    reads = [j for j in range(i + 2) if j % dilation == (i + 1) % dilation]
    assert len(reads) == len(alpha)
    return sum(a * outputs[j] for a, j in zip(alpha, reads, strict=True) if j >= first)


def truth_of(oracle, ids, dilation=1, period=1, trips=((0, None),)):
    """`trips`: the first layer of each trip and the layer after its last."""
    x = oracle.embedding[ids]
    for start, stop in trips:
        outputs = {start: x}  # X_j by its index in the stack
        for i in range(start, oracle.c.num_hidden_layers if stop is None else stop):
            x = outputs[i + 1] = oracle.block(i, x)
            if (i + 1) % period == 0:
                alpha = oracle.w[f"model.layers.{i}.mlp_residual.alpha"]
                x = average(i, outputs, alpha, dilation, start)
    return oracle.logits(x)


@pytest.mark.parametrize("dilation,period", [(1, 1), (2, 1), (3, 1), (1, 2), (2, 3), (5, 5)])
def test_direct_sum(dilation, period):
    options = {"dilation": dilation, "period": period}
    model = build(config_of("denseformer", num_hidden_layers=5, residual_options=options), dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(2, 7)
    agree(model, ids, truth_of(oracle, ids, dilation, period), oracle)


def test_the_oracle_sees_mixed_history():
    """Remembering averages in place of raw block outputs is the fault to expect."""
    model = build(config_of("denseformer"), dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(1, 5)
    x = oracle.embedding[ids]
    outputs = [x]
    for i in range(4):
        outputs.append(oracle.block(i, x))
        x = outputs[-1] = average(i, outputs, oracle.w[f"model.layers.{i}.mlp_residual.alpha"], 1)
    assert (oracle.logits(x) - model(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("prelude,coda", [(0, 0), (2, 0), (1, 1)])
def test_history_starts_afresh_in_every_trip(dilation, prelude, coda):
    """A later trip's input stands where the output of the layer below the loop stood; what lies deeper is gone."""
    config = config_of(
        "loop+denseformer",
        num_hidden_layers=5,
        residual_options={"dilation": dilation},
        recurrence_options={"trips": 3, "prelude": prelude, "coda": coda},
    )
    model, ids = build(config, dtype=torch.float64), tokens(2, 6)
    oracle, stop = Oracle(model), 5 - coda
    trips = [(0, stop), (prelude, stop), (prelude, 5)]
    agree(model, ids, truth_of(oracle, ids, dilation, trips=trips), oracle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"period": 2}])
def test_plain_at_init_bitwise(dtype, options):
    torch.manual_seed(0)
    plain = FathomForCausalLM(config_of("vanilla")).eval()
    model = FathomForCausalLM(config_of("denseformer", residual_options=options)).eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    plain, model, ids = plain.to(dtype), model.to(dtype), tokens(2, 9)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    with torch.no_grad():
        model.model.layers[1].mlp_residual.alpha[0] = 0.5
    assert not torch.equal(model(ids).logits, plain(ids).logits)


def test_number_of_weights():
    big = config_of("denseformer", num_hidden_layers=48)
    assert sum(num_weights(big, i) for i in range(48)) == 1224
    small = config_of("denseformer", num_hidden_layers=4)
    found = [len(layer.mlp_residual.alpha) for layer in FathomForCausalLM(small).model.layers]
    assert found == [2, 3, 4, 5]
    assert count_parameters(small) - count_parameters(config_of("vanilla", num_hidden_layers=4)) == 14


def test_only_the_block_end_has_weights_and_decay_spares_them():
    for sublayer in range(9):
        module = DenseFormer(config_of("denseformer"), sublayer)
        parameters = list(module.parameters())
        assert len(parameters) == (sublayer % 2 == 1 and sublayer < 8)
        assert all(p.ndim == 1 for p in parameters)


@pytest.mark.parametrize("name,value", [("dilation", 0), ("period", 0), ("dilation", 5), ("period", 9)])
def test_bad_options_name_the_key(name, value):
    with pytest.raises(ValueError, match=rf"residual_options.{name} .* got {value}"):
        config_of("denseformer", residual_options={name: value})


@pytest.mark.parametrize("dilation,period", [(1, 1), (2, 1), (3, 2)])
def test_cost_counts_the_weights_that_are_read(dilation, period):
    """In a later trip the oldest outputs do not exist, and nothing is paid for them."""
    options = {"dilation": dilation, "period": period}
    loop = {"trips": 2, "prelude": 2, "coda": 1}
    config = config_of("loop+denseformer", num_hidden_layers=7, residual_options=options, recurrence_options=loop)
    visits = [visit for trip in plan(config) for visit in trip]
    reads = 0
    for start, stop in ((0, 6), (2, 7)):
        for i in range(start, stop):
            if (i + 1) % period == 0:
                reads += sum(j % dilation == (i + 1) % dilation for j in range(start, i + 2))
    assert mechanism("residual", "denseformer").cost(config, visits, 2).flops == 2 * config.hidden_size * reads
