"""Small models of every mechanism, as an outsider gets them: exported directories with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fathom.checkpoints.export import export
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import ALL, DEFAULTS, VANILLA, parse_mechanism
from tests.tiny import tiny_tokenizer

SHAPE: dict[str, Any] = dict(
    vocab_size=384,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # the least that vLLM's attention on a CPU knows
    max_position_embeddings=512,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "loop": {"recurrence_options": {"trips": 2}},
    # As many Jacobi rounds in training as in evaluation, so that both are one function.
    "ponder2": {"recurrence_options": {"trips": 2, "jacobi_train": [4, 4], "jacobi_eval": 4}},
}
CLIENTS = ("vanilla", "depth_attention", "hyper_connections", "loop", "ponder2")
"""One of each kind: nothing, a mixer, a residual, trips that see only themselves, trips that see everything."""


def names(axes: tuple[str, ...]) -> list[str]:
    """Every mechanism of these axes but the first of each."""
    return [mechanism.name for mechanism in ALL if mechanism.axis in axes and mechanism.name not in DEFAULTS.values()]


ONE_TRIP = [VANILLA, *names(("mixer", "residual"))]
SEVERAL_TRIPS = names(("recurrence",))


def build(mechanism: str, seed: int = 0, **changes: Any) -> FathomForCausalLM:
    """A random model, each parameter away from where it starts, so that no mechanism is still the identity."""
    torch.manual_seed(seed)
    fields = {**SHAPE, **parse_mechanism(mechanism), **OPTIONS.get(mechanism, {}), **changes}
    model = FathomForCausalLM(FathomConfig(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "residual" in name or ".mixer." in name or ".recurrence." in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def exported(mechanism: str, directory: Path, form: str = "fathom", **changes: Any) -> Path:
    """The same as a directory."""
    return export(build(mechanism, **changes), directory / f"{mechanism}-{form}", tiny_tokenizer(), form)
