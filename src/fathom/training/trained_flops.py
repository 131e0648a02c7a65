"""FLOPs of training a part of a model, and of distillation: what frozen weights and adapters save, measured with
torch's FLOP counter, and what a teacher costs.

`models/cost.py` counts a step that trains every weight. A frozen weight needs no gradient of its own, and the gradient
of its input only if something trains before it; an adapter adds products. Which of these are made depends on autograd,
so a step of the model is made on the meta device, where nothing is computed or allocated, and counted.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from fathom.checkpoints.runs import config_of
from fathom.models.cost import flops_per_token, training_flops_range
from fathom.models.decoder.arithmetic import head_flops
from fathom.models.decoder.head import is_called
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import Recipe
from fathom.training.adapters import adapt
from fathom.training.distill import teacher_of
from fathom.training.optimizer import freeze

_shares: dict[str, float] = {}
"""Shares by all that they depend on: a budget asks for them again and again."""


def step_flops(recipe: Recipe) -> float:
    """Mean FLOPs per token of a training step, forward and backward, of the parameters that the recipe trains, and of a
    teacher's forward pass."""
    return step_flops_range(recipe)[1]


def step_flops_range(recipe: Recipe) -> tuple[float, float, float]:
    """Minimum, mean and maximum FLOPs per token of a training step, over the random draws of loop iterations."""
    share, taught = trained_share(recipe), _distill_flops(recipe)
    least, mean, most = training_flops_range(recipe.config(), recipe.data.sequence_length)
    return share * least + taught, share * mean + taught, share * most + taught


def _distill_flops(recipe: Recipe) -> float:
    """FLOPs per token of distillation: the teacher's forward pass, and the model's logits with their gradients, which
    the divergence needs in addition to those of the cross-entropy."""
    if (name := teacher_of(recipe)) is None:
        return 0.0
    teacher = config_of({"from_pretrained": name})
    return flops_per_token(teacher, recipe.data.sequence_length) + _head_products(recipe) * head_flops(recipe.config())


def _head_products(recipe: Recipe) -> int:
    """Products with the head: forward, and the gradients of its weight and of its input, where something needs them."""
    if not recipe.optim.only and recipe.lora.rank is None:
        return 3
    with torch.device("meta"):
        model = FathomForCausalLM(recipe.config())
    freeze(model, recipe.optim.only)
    adapt(model, recipe)
    head = model.lm_head.weight
    return 1 + head.requires_grad + any(p.requires_grad for p in model.parameters() if p is not head)


def trained_share(recipe: Recipe) -> float:
    """The FLOPs of a training step, divided by those of a step that trains every weight and has no adapters. It is 1,
    too much, for a model whose step depends on its numbers, as that of routed experts does."""
    if not recipe.optim.only and recipe.lora.rank is None:
        return 1.0
    key = repr((vars(recipe.config()), recipe.optim.only, recipe.lora, recipe.data.sequence_length))
    if key not in _shares:
        try:
            _shares[key] = _counted(recipe, whole=False) / _counted(recipe, whole=True)
        except NotImplementedError:  # the meta device has no numbers
            _shares[key] = 1.0
    return _shares[key]


def _counted(recipe: Recipe, whole: bool) -> int:
    """FLOPs of a training step on one sequence. Attention is eager, which makes every score; with half the tokens they
    are as many for each token as the causal ones."""
    config = recipe.config()
    if "skip_dead_rows" in config.recurrence_options:  # tokens that halt count as if they did not
        config.recurrence_options["skip_dead_rows"] = False
    with torch.device("meta"):
        model = FathomForCausalLM(config)
    model.set_attn_implementation("eager")
    if not whole:
        freeze(model, recipe.optim.only)
        adapt(model, recipe)
    model.train()
    model.set_step(0, recipe.train.steps)
    ids = torch.zeros(1, (recipe.data.sequence_length + 1) // 2, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if is_called(model.config):
        return counter.get_total_flops()
    # On the meta device a loss makes its logits twice, as for a head that is offloaded.
    losses = model.model.recurrence.drawn_trips if config.recurrence_options.get("early_loss") else 1
    return counter.get_total_flops() - losses * ids.numel() * round(head_flops(model.config))
