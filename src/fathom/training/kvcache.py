"""Train under a compressed cache: set the recipe's policy in the model's attention and configuration.

`kvcache/attention.py` computes the attention, also for held-out losses (`heldout.py`). `optimizer.py` decides which
weights train (`freeze`), by default all of them; with `lora` it is `adapters.py`. `recipe.py` demands
`data.packing=windows` and sequences longer than the window. An export keeps the policy in its `config.json`.
"""

from __future__ import annotations

from fathom.errors import SettingsError
from fathom.kvcache import METHODS, compress_in_training
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import Recipe


def compress(model: FathomForCausalLM, recipe: Recipe) -> None:
    """Make the model attend under the recipe's cache policy, and record the policy in its configuration."""
    if recipe.kvcache.method == "full":
        if getattr(model.config, "kvcache", None):
            model.config.kvcache = None  # the checkpoint's policy no longer applies
        return
    policy = dict(vars(recipe.kvcache))
    try:
        compress_in_training(model, **policy)
    except ValueError as error:
        raise SettingsError(f"kvcache.method={recipe.kvcache.method}: {error}") from error
    model.config.kvcache = policy


def compressions(recipe: Recipe) -> int:
    """Number of compressions of the cache per sequence."""
    kvcache = recipe.kvcache
    if kvcache.method == "full" or kvcache.window is None:
        return 0
    schedule = METHODS[kvcache.method].schedule_for(kvcache.window, kvcache.sinks, kvcache.ratio, kvcache.kept)
    return schedule.compressions(recipe.data.sequence_length)
