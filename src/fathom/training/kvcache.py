"""Training under a compressed cache: the recipe's policy, put into the model's attention and into its configuration."""

from __future__ import annotations

from fathom.kvcache import METHODS, compress_in_training
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import Recipe, RecipeError


def compress(model: FathomForCausalLM, recipe: Recipe) -> None:
    """Let the model attend under the recipe's cache policy; an export's config.json then says which."""
    if recipe.kvcache.method == "full":
        if getattr(model.config, "kvcache", None):
            model.config.kvcache = None  # of the checkpoint that this run continues, and whose habit it breaks
        return
    schedule = recipe.kvcache.schedule()
    try:
        compress_in_training(model, **schedule)
    except ValueError as error:
        raise RecipeError(f"kvcache.method={recipe.kvcache.method}: {error}") from error
    model.config.kvcache = schedule


def compressions(recipe: Recipe) -> int:
    """How often the memory of a row is compressed."""
    kvcache = recipe.kvcache
    if kvcache.method == "full" or kvcache.window is None:
        return 0
    schedule = METHODS[kvcache.method].plan(kvcache.window, kvcache.sinks, kvcache.ratio, None)
    return schedule.compressions(recipe.data.sequence_length)
