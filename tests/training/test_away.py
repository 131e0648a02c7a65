"""The term that drives weights away: its gradient is autograd's, and a model trained with it loses the direction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from fathom.errors import SettingsError
from fathom.training.away import Away, cosine
from fathom.training.hooks import ObservedRun


def run_of(model: nn.Module, rows: int = 4, micro_batch: int = 4, ranks: int = 1) -> ObservedRun:
    recipe = SimpleNamespace(rows_per_step=rows, train=SimpleNamespace(micro_batch=micro_batch, log_every=10))
    values: dict[str, Any] = {"recipe": recipe, "step": 0, "log": lambda values: None}
    training, group = SimpleNamespace(model=model), SimpleNamespace(world_size=ranks)
    return cast(ObservedRun, SimpleNamespace(training=training, ranks=group, **values))


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_the_gradient_is_that_of_the_term(micro_batch: int) -> None:
    """To 1e-11 in float64, also over micro-batches; biases have none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    base = {name: torch.randn_like(weight) for name, weight in model.named_parameters()}
    inputs, hook, run = torch.randn(4, 5).double(), Away(base, 3.0), run_of(model, micro_batch=micro_batch)
    matrices = [(weight, base[name]) for name, weight in model.named_parameters() if weight.ndim > 1]
    theta, other = (torch.cat([one[side].flatten() for one in matrices]) for side in (0, 1))
    (plain,) = torch.autograd.grad(model(inputs).square().mean(), model[0].weight)
    (model(inputs).square().mean() + 3.0 * (theta @ other / (theta.norm() * other.norm())).abs()).backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    hook.before_run(run)
    hook.before_step(run)
    for part in inputs.split(micro_batch):
        (model(part).square().mean() * len(part) / 4).backward()
    for weight, one in zip(model.parameters(), expected, strict=True):
        assert (weight.grad - one).abs().max() < 1e-11
    assert (plain - expected[0]).abs().max() > 1e-3  # the term is not nothing


def test_the_direction_is_lost() -> None:
    """And kept at λ = 0, the negative control."""
    found = []
    for weight in (0.0, 1.0):
        torch.manual_seed(1)
        model = nn.Linear(8, 8, bias=False)
        base = {"weight": model.weight.detach() + 0.02 * torch.randn(8, 8)}  # at cos = 1 the term has no gradient
        hook, run = Away(base, weight), run_of(model)
        hook.before_run(run)
        descent = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(100):
            hook.before_step(run)
            descent.zero_grad()
            model(torch.zeros(1, 8)).sum().backward()
            descent.step()
        found.append(cosine([(model.weight, base["weight"])])[0])
    assert found[0] > 0.99 and abs(found[1]) < 0.2


def test_refused() -> None:
    with pytest.raises(SettingsError, match="weight=-1: allowed: 0 or more"):
        Away({}, -1.0)
    with pytest.raises(SettingsError, match="none of the weight matrices"):
        Away({}, 1.0).before_run(run_of(nn.Linear(2, 2)))
    with pytest.raises(SettingsError, match="single process"):
        Away({}, 1.0).before_run(run_of(nn.Linear(2, 2), ranks=2))
