"""`torch.export` with a free length, of every mechanism, composition and kind of backbone."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

from fathom.models import FathomConfig
from tests.models.cases import BACKBONES, CASES, build, config_of, tokens

NAMES = [case for case in CASES if "@" not in case] + [f"vanilla@{backbone}" for backbone in BACKBONES]


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def config_that_solves(case: str, prefill: str, **shape: int) -> FathomConfig:
    """The case's configuration; mechanisms that solve for all tokens at once do so in a fixed number of rounds."""
    options = dict(CASES[case][1].get("recurrence", {}))
    if "prefill" in options:
        options |= {"prefill": prefill, "jacobi_eval": 2}
    return config_of(case, recurrence_options=options, **shape)


def exported(model: torch.nn.Module) -> ExportedProgram:
    """The graph for any length from 4 to 64, traced at 12."""
    return export(model, (tokens(2, 12),), dynamic_shapes={"ids": {1: Dim("length", min=4, max=64)}}, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMES)
@torch.no_grad()
def test_an_export_takes_any_length(case: str) -> None:
    layers = {"num_hidden_layers": 2} if case == "depth_attention" else {}  # tracing takes long
    model = Logits(build(config_that_solves(case, "jacobi", **layers)).eval())
    program = exported(model).module()
    for length in (5, 21, 64):
        ids = tokens(2, length)
        torch.testing.assert_close(program(ids), model(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", [case for case in ("ponder2", "ponder3", "ponder-all") if case in CASES])
@torch.no_grad()
def test_an_exact_prefill_is_exported_at_one_length(case: str) -> None:
    """The number of passes is the length's: a free length is refused by name."""
    model = Logits(build(config_that_solves(case, "exact")).eval())
    with pytest.raises(ValueError, match=r"prefill=exact .* set prefill=jacobi, or export one length"):
        exported(model)


@pytest.mark.slow
@torch.no_grad()
def test_one_length_of_an_exact_prefill_is_exported() -> None:
    model = Logits(build(config_that_solves("ponder2", "exact")).eval())
    ids = tokens(2, 6)
    program = export(model, (tokens(2, 6),), strict=False).module()
    torch.testing.assert_close(program(ids), model(ids), atol=1e-4, rtol=1e-4)
