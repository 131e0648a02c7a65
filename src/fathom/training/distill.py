"""Distillation: the loss also includes the KL divergence to a frozen model, the teacher.

    L = (1 - w) CE + w τ² KL( softmax(z_T / τ) ‖ softmax(z / τ) )        mean over the targets of the step

z are the logits, z_T the teacher's, which are computed live. The forward KL covers all modes of the teacher. Its
gradient by z is w τ (softmax(z / τ) - softmax(z_T / τ)) / N; it is computed in the forward pass, some rows at a time,
so that the only tensors of this size are the two models' logits and the gradient.

`deepen/heal.py` chooses w = ½ for deepened models. `estimate.py` counts the teacher's memory for `--dry-run`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fathom.checkpoints.runs import config_of, is_source
from fathom.data.batches import Batch
from fathom.data.shards import TokenDataset
from fathom.errors import SettingsError
from fathom.models.axes.numerics import IGNORE, widen
from fathom.models.decoder.loss import chunk_rows, shifted
from fathom.models.modeling import FathomCausalLMOutput, FathomForCausalLM
from fathom.recipe import Distill, Recipe
from fathom.training.parallel import Ranks, parallelize
from fathom.training.results import CROSS_ENTROPY, DIVERGENCE
from fathom.training.same_tokenizer import require_same_tokenizer
from fathom.training.source import model_of, source_of


def open_teacher(recipe: Recipe, ranks: Ranks) -> FathomForCausalLM | None:
    """The teacher that a recipe names, sharded like the model; None if the recipe names no teacher."""
    if recipe.distill.teacher is None:
        return None
    teacher, _ = model_of(recipe.distill.teacher, "distill.teacher")
    teacher.requires_grad_(False).eval().to(ranks.device)
    teacher.set_attn_implementation(recipe.train.attention)
    parallelize(teacher, ranks, recipe)
    return teacher


def teacher_of(recipe: Recipe) -> str | None:
    """The name of the recipe's teacher, checked to be a model or a run; None if the recipe has no teacher."""
    name = recipe.distill.teacher
    if name is not None and not is_source(name):
        raise SettingsError(f"distill.teacher={name}: neither a directory with a config.json nor a run")
    return name


def check_teacher(recipe: Recipe, data: TokenDataset, vocabulary: int) -> None:
    """Reject a teacher that the model cannot learn from; no weights are read.

    Args:
        recipe: What is trained.
        data: The corpus, whose tokenizer the teacher must have.
        vocabulary: Tokens that the model scores.
    """
    if (name := teacher_of(recipe)) is None:
        return
    key = f"distill.teacher={name}"
    source_of(name, "distill.teacher")
    config = config_of({"from_pretrained": name})
    require_same_tokenizer(name, key, recipe, data)
    if config.vocab_size != vocabulary:
        raise SettingsError(f"{key}: the teacher has vocab_size={config.vocab_size}, but the model {vocabulary}")
    if recipe.data.sequence_length > (longest := config.max_position_embeddings):
        raise SettingsError(
            f"data.sequence_length={recipe.data.sequence_length}: allowed: at most {longest}, the context of {key}"
        )


def distilled(
    out: FathomCausalLMOutput, teacher: FathomForCausalLM, batch: Batch, settings: Distill
) -> FathomCausalLMOutput:
    """A step's output in which the distillation loss L replaces the cross-entropy; penalties stay in the loss.

    Args:
        out: The model's, with logits.
        teacher: Its predictions count where the batch has a target.
        batch: What both read, on their device.
        settings: w and τ.
    """
    with torch.no_grad():
        theirs = teacher(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    assert out.logits is not None and out.loss is not None
    targets = shifted(batch.labels)
    divergence = forward_kl(out.logits, theirs, targets, settings.temperature) / batch.num_targets
    others = dict(out.aux_losses or {})
    penalties = sum(others.values()) if others else torch.zeros_like(out.loss)
    cross_entropy, w = out.loss - penalties, settings.weight
    out.loss = (1 - w) * cross_entropy + w * divergence + penalties
    out.aux_losses = {**others, CROSS_ENTROPY: cross_entropy, DIVERGENCE: divergence}  # for the log, unweighted
    return out


def forward_kl(logits: Tensor, theirs: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """τ² KL(softmax(z_T / τ) ‖ softmax(z / τ)), summed over the positions whose target is not -100.

    Args:
        logits: z, `[B, T, V]`.
        theirs: z_T, without a gradient.
        targets: `[B, T]`
        temperature: τ.
    """
    return cast(Tensor, _ForwardKL.apply(logits, theirs, targets, temperature))


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, theirs: Tensor, targets: Tensor, temperature: float) -> Tensor:
        rows, other = logits.flatten(0, -2), theirs.flatten(0, -2)
        counted = (targets != IGNORE).flatten().unsqueeze(1)
        grad = torch.empty_like(rows)
        total = widen(rows.new_zeros(()))
        size = chunk_rows(len(rows), rows.shape[-1], rows.device.type)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            own = (widen(rows[part]) / temperature).log_softmax(-1)
            goal = (widen(other[part]) / temperature).log_softmax(-1)
            p = goal.exp()
            total = total + (p * (goal - own)).sum(-1, keepdim=True).where(counted[part], 0).sum()
            grad[part] = ((own.exp() - p) * temperature).where(counted[part], 0)
        ctx.save_for_backward(grad.view_as(logits))
        return total * temperature**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (widen(slopes) * grad).to(slopes.dtype), None, None, None
