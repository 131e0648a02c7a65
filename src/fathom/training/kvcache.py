"""Training under a compressed cache: the recipe's policy, put into the model's attention and into its configuration."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom.kvcache import METHODS, compress_in_training
from fathom.kvcache.lora import with_lora
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from peft import PeftModel


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


def adapt(model: FathomForCausalLM, recipe: Recipe, world_size: int) -> PeftModel | None:
    """Put adapters into the model, if the recipe says so, and freeze what the paper freezes."""
    rank = recipe.kvcache.lora_rank
    if rank is None:
        return None
    if world_size > 1:
        raise RecipeError(f"kvcache.lora_rank={rank}: allowed in one process, here are {world_size}")
    torch.manual_seed(recipe.train.seed)  # adapters start at random: the same run starts at the same
    try:
        return with_lora(model, rank, alpha=2 * rank)
    except (ImportError, ValueError) as error:
        raise RecipeError(f"kvcache.lora_rank={rank}: {error}") from error


def merged(adapters: PeftModel) -> dict[str, Tensor]:
    """The weights by their ordinary names, adapters added in."""
    plain = copy.deepcopy(adapters).merge_and_unload()
    return {name: parameter.detach() for name, parameter in plain.named_parameters()}


def compressions(recipe: Recipe) -> int:
    """How often the memory of a row is compressed."""
    kvcache = recipe.kvcache
    if kvcache.method == "full" or kvcache.window is None:
        return 0
    schedule = METHODS[kvcache.method].plan(kvcache.window, kvcache.sinks, kvcache.ratio, None)
    return schedule.compressions(recipe.data.sequence_length)
