"""Ouro: a Llama with norms before and after sub-layers, whose stack runs several times with the final norm in between.

A gate chooses the iteration after which each token is read out; the released threshold of 1 always takes the last.

The gate is in `models/recurrences/exit_gate.py`.
"""

from __future__ import annotations

from fathom.checkpoints.families.family import Values, known_as, windows
from fathom.checkpoints.families.llama import QWEN2
from fathom.checkpoints.families.published import Published
from fathom.checkpoints.families.tensor_names import renamed

READ = ("total_ut_steps", "early_exit_threshold", "early_exit_step")
RULES = (
    renamed("model.layers.{i}.input_layernorm_2.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    renamed("model.layers.{i}.post_attention_layernorm.weight", "model.layers.{i}.pre_feedforward_layernorm.weight"),
    renamed("model.layers.{i}.post_attention_layernorm_2.weight", "model.layers.{i}.post_feedforward_layernorm.weight"),
    renamed("model.early_exit_gate.weight", "model.recurrence.exit_gate.weight"),
    renamed("model.early_exit_gate.bias", "model.recurrence.exit_gate.bias"),
)
"""Four norms of a layer, two of them under names that mean others here, and the gate."""


def configuration(config: Values) -> Values:
    """The values of Fathom's configuration: Llama's, Qwen2's sliding windows if any, and Ouro's norms, loop and exit
    gate."""
    if config.get("early_exit_step") is not None:
        raise ValueError(
            f"early_exit_step={config['early_exit_step']}: delete it from config.json and call the model with max_trips"
        )
    base, ours = known_as(QWEN2, config, READ)
    trips, threshold = config.get("total_ut_steps"), config.get("early_exit_threshold")
    loop = {
        "trips": 4 if trips is None else int(trips),
        "norm_between": "final",
        "exit": "joint",
        "exit_threshold": 1.0 if threshold is None else float(threshold),
    }
    switches = {"qk_norm": "none", "norm_placement": "both", "recurrence": "loop", "recurrence_options": loop}
    return {**ours, **windows(base), **switches}


OURO = Published(
    "ouro",
    configuration,
    RULES,
    opens="Ouro as a `loop` of four iterations with its exit gate",
    note="refused: `early_exit_step`; call the model with `max_trips`",
)
