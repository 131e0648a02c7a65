"""DenseFormer: its start, its weights and their cost; test_equations.py has the equations."""

import pytest
import torch

from fathom.models import FathomForCausalLM
from fathom.models.registry import mechanism
from fathom.models.residuals.denseformer import DenseFormer
from fathom.models.trips.slots import plan

from .cases import config_of, tokens


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


def test_only_the_block_end_has_weights_and_decay_spares_them():
    for sublayer in range(9):
        module = DenseFormer(config_of("denseformer"), sublayer)
        parameters = list(module.parameters())
        assert len(parameters) == (sublayer % 2 == 1 and sublayer < 8)
        assert all(p.ndim == 1 for p in parameters)


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
