"""`torch.export` with a free length."""

from __future__ import annotations

import pytest
import torch

from tests.models.cases import build, config_of, tokens


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vanilla", "depth_attention", "denseformer", "loop", "ponder"])
def test_an_export_takes_any_length(case: str) -> None:
    model = Logits(build(config_of(case)).eval())
    length = torch.export.Dim("length", min=4, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (tokens(2, 12),), dynamic_shapes={"ids": {1: length}}, strict=False)
        ids = tokens(2, 21)
        torch.testing.assert_close(program.module()(ids), model(ids))
