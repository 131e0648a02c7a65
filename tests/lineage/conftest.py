from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fathom.lineage.weights import Weights, open_model
from tests.lineage.zoo import build, save, tiny_config


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Callable[..., Path]:
    """models("qwen3", seed=1, num_hidden_layers=2): a cached checkpoint directory."""
    made: dict[tuple, Path] = {}

    def make(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Path:
        key = (kind, seed, dtype, tuple(sorted(changes.items())))
        if key not in made:
            config = tiny_config(kind, **changes)
            made[key] = save(build(config, seed, dtype), tmp_path_factory.mktemp(kind), config.vocab_size)
        return made[key]

    return make


@pytest.fixture(scope="session")
def opened(models) -> Callable[..., Weights]:
    return lambda *args, **kwargs: open_model(models(*args, **kwargs))
