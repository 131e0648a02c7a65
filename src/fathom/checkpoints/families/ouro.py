"""Ouro: a Llama with norms before and after sub-layers, whose stack runs several times, the final norm between.

A gate chooses the trip after which each token is read out; the released threshold of 1 always takes the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from fathom.checkpoints.families.family import SHARED, Values, windows
from fathom.checkpoints.families.published import Published
from fathom.checkpoints.families.tensors import read_tensors, renamed
from fathom.models import FathomConfig

READ = ("total_ut_steps", "early_exit_threshold")
RULES = (
    renamed("model.layers.{i}.input_layernorm_2.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    renamed("model.layers.{i}.post_attention_layernorm.weight", "model.layers.{i}.pre_feedforward_layernorm.weight"),
    renamed("model.layers.{i}.post_attention_layernorm_2.weight", "model.layers.{i}.post_feedforward_layernorm.weight"),
    renamed("model.early_exit_gate.weight", "model.recurrence.exit_gate.weight"),
    renamed("model.early_exit_gate.bias", "model.recurrence.exit_gate.bias"),
)
"""Four norms of a layer, two of them under names that mean others here, and the gate."""


def owns(config: Values) -> bool:
    """Whether a `config.json` is Ouro's."""
    return config.get("model_type") == "ouro"


def configuration(config: Values) -> Values:
    """A Llama's values, with Qwen2's windows if any, and the norms, the loop and the gate."""
    if config.get("early_exit_step") is not None:
        raise ValueError(f"early_exit_step={config['early_exit_step']}: call the model with max_trips instead")
    base = AutoConfig.for_model(**{**{k: v for k, v in config.items() if k not in READ}, "model_type": "qwen2"})
    ours = {key: getattr(base, key) for key in SHARED if hasattr(base, key)} | windows(base)
    ours["head_dim"] = config.get("head_dim") or base.hidden_size // base.num_attention_heads
    trips, threshold = config.get("total_ut_steps"), config.get("early_exit_threshold")
    loop = {
        "trips": 4 if trips is None else int(trips),
        "norm_between": "final",
        "exit": "joint",
        "exit_threshold": 1.0 if threshold is None else float(threshold),
    }
    kept: Values = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    switches = {"qk_norm": "none", "norm_placement": "both", "recurrence": "loop", "recurrence_options": loop}
    return {**ours, **kept, **switches, "model_type": FathomConfig.model_type}


def tensors(directory: Path, config: FathomConfig) -> Mapping[str, Any]:
    """The norms and the gate under Fathom's names."""
    return read_tensors(directory, RULES, (), config)


OURO = Published(("ouro",), owns, configuration, tensors)
