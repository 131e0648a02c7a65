"""The recipe that trains a deepened model: the mechanisms are blended in, and the unchanged model is the teacher."""

from __future__ import annotations

from pathlib import Path

import yaml

from fathom.deepen.request import Request
from fathom.models.configuration import FathomConfig
from fathom.models.cost import mechanism_cost
from fathom.recipe import parse_recipe

HEAL = "heal.yaml"
STEPS = 600
"""Optimizer steps of the recipe. A step has 8,192 tokens, so about 5 million tokens in all."""
OPENING = 0.5
"""Share of the steps over which a mechanism is blended in."""
LONGEST = 1024
"""Maximum tokens in a sequence."""
ROWS = 8
"""Sequences per step."""

HEADER = """\
# Trains {directory}, {name}, further: the mechanisms are blended in over the first {opening} of {steps} steps.
#   fathom train {recipe} data.directory=SHARDS --run runs/healed
# The control is the same training of the base model:
#   fathom train {recipe} data.directory=SHARDS model=null model.from_pretrained={base} --run runs/control
# The report on both:
#   fathom evaluate {base} runs/healed runs/control --deepened --perplexity domain=TEXT other=TEXT --out report
# Replay against forgetting: 'data.mixture={{SHARDS: 0.8, GENERAL: 0.2}}'.
# All weights instead of LoRA: lora.rank=null optim.lr=2e-5
"""


def heal_recipe(directory: Path, base: str, config: FathomConfig, request: Request) -> str:
    """The recipe as YAML, with its usage in a header.

    Args:
        directory: Where the deepened model is.
        base: The base model, as named on the command line.
        config: The deepened model's configuration.
        request: What was added.
    """
    length = min(LONGEST, config.max_position_embeddings)
    values: dict[str, object] = {
        "model": {"from_pretrained": str(directory), **request.opening(round(OPENING * STEPS))},
        "data": {"sequence_length": length},
        "optim": {"lr": 2.0e-4, "warmup": 0.05, "floor": 0.1, "weight_decay": 0.0},
        "lora": {"rank": 16, "mechanisms": mechanism_cost(config).parameters > 0},
        "distill": {"teacher": base, "weight": 0.5},
        "train": {
            "steps": STEPS,
            "tokens_per_step": ROWS * length,
            "micro_batch": 1,
            "activation_checkpointing": config.recurrence == "once",
            "checkpoint_every": 50,
        },
        "evaluate": {"every": 100, "tokens": 65536},
    }
    parse_recipe(values)  # never write an invalid recipe
    words = {"directory": directory, "name": request.name, "recipe": directory / HEAL, "base": base}
    header = HEADER.format(**words, opening=round(OPENING * STEPS), steps=STEPS)
    return header + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
