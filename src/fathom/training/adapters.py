"""LoRA adapters (by peft): added to the model, saved next to checkpoints, merged at the end.

`recipe.py` has the default target names (`lora.targets`): the projections of attention and MLP, so routers and experts
that are stacked in one parameter get no adapter. `loop.py` exports the merged model at the end of a run.
"""

from __future__ import annotations

import copy
import fnmatch
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from fathom.checkpoints.file_names import ADAPTER, ADAPTER_WEIGHTS
from fathom.checkpoints.runs import load_tensors, model_directory
from fathom.errors import SettingsError, to_install
from fathom.models.axes.roles import MechanismModule
from fathom.models.loading import kept_buffers
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import Lora, Recipe
from fathom.report.files import as_usual
from fathom.training.checkpoint import UNFINISHED, publish
from fathom.training.hooks import Hook, ObservedRun
from fathom.training.parallel import whole as gathered

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


WRAPPED = "base_model.model."
"""The prefix that peft gives to the name of every parameter."""


def require_peft(recipe: Recipe) -> None:
    """Refuse adapters where peft is not installed."""
    if recipe.lora.rank is None:
        return
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise SettingsError(f"lora.rank={recipe.lora.rank}: LoRA needs peft: {to_install('lora')}") from error


def adapt(model: FathomForCausalLM, recipe: Recipe) -> PeftModel | None:
    """Add adapters to the model if the recipe asks for them, and freeze its other parameters.

    Args:
        model: Changed in place; its parameters get peft's names.
        recipe: With its `lora`.
    """
    lora, rank = recipe.lora, recipe.lora.rank
    if rank is None:
        return None
    require_peft(recipe)
    from peft import LoraConfig, get_peft_model

    # Adapters are initialised at random, with the same seed in each run and on each rank.
    torch.manual_seed(recipe.train.seed)
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if lora.targets == Lora().targets:  # the default names every projection, but a plain MLP has no gate
        lora = replace(lora, targets=tuple(name for name in lora.targets if name in leaves))
    for key, names in (("targets", lora.targets), ("whole", lora.whole)):
        if missing := [name for name in sorted(names) if not fnmatch.filter(leaves, name)]:
            raise SettingsError(f"lora.{key}: this model has no module {missing[0]}")
    whole = sorted({leaf for name in lora.whole for leaf in fnmatch.filter(leaves, name)})
    require_adaptable(model, lora.targets)
    if model.config.tie_word_embeddings and "lm_head" in (*lora.targets, *whole):
        raise SettingsError(
            "lora: lm_head shares its weight with the input embedding: name embed_tokens in lora.whole instead"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=cast("int", 2 * rank if lora.alpha is None else lora.alpha),  # a float works too
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        modules_to_save=whole or None,
        ensure_weight_tying=bool(model.config.tie_word_embeddings) and "embed_tokens" in whole,
        task_type="CAUSAL_LM",
    )
    wrapped = cast("PeftModel", get_peft_model(cast("PreTrainedModel", model), config))
    for module in model.modules() if lora.mechanisms else ():
        if isinstance(module, MechanismModule):
            module.requires_grad_(True)
    return wrapped


def require_adaptable(model: nn.Module, targets: Sequence[str]) -> None:
    """Refuse targets that adapters do not reach: experts stacked in one parameter, and routers."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets and not isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d)):
            raise SettingsError(
                f"lora.targets: {name} is no linear layer, so it gets no adapter (experts are stacked in one parameter)"
            )


def merged(adapters: PeftModel) -> dict[str, Tensor]:
    """The weights by their ordinary names, with the adapters merged."""
    from peft import get_peft_model

    # Merge into another model: this one continues to train, and a sharded model can be neither copied nor merged.
    copied = get_peft_model(FathomForCausalLM(adapters.config), copy.deepcopy(adapters.peft_config["default"]))
    with torch.no_grad():
        for (name, own), (same, trained) in zip(copied.named_parameters(), adapters.named_parameters(), strict=True):
            assert name == same
            own.copy_(gathered(trained))
        for name, buffer in kept_buffers(copied).items():
            buffer.copy_(adapters.get_buffer(name))
    alone = copied.merge_and_unload()
    return {name: tensor.detach() for name, tensor in (*alone.named_parameters(), *kept_buffers(alone).items())}


class AdapterFiles(Hook):
    """Writes the adapters of every checkpoint to `RUN/adapter`, atomically, in peft's format."""

    def after_save(self, run: ObservedRun, checkpoint: Path) -> None:
        """Read the adapters from the saved checkpoint, because the model in memory may have taken further steps. Only
        the first rank does."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        adapters = run.training.adapters
        assert adapters is not None
        trained = {name: p for name, p in run.training.model.named_parameters() if p.requires_grad}
        tensors = {name: torch.empty(p.shape, dtype=torch.float32) for name, p in trained.items()}
        load_tensors(checkpoint, {f"model.{name}": tensor for name, tensor in tensors.items()}, alone=True)
        # A head tied to a trained embedding: peft expects both names, a checkpoint has the first.
        shared = {id(p): tensors[name] for name, p in trained.items()}
        every = run.training.model.named_parameters(remove_duplicate=False)
        wrapped = {WRAPPED + name: shared[id(p)] for name, p in every if id(p) in shared}
        found = get_peft_model_state_dict(adapters, state_dict=wrapped, save_embedding_layers=False)
        new = run.run_dir / f"{UNFINISHED}{ADAPTER}"
        shutil.rmtree(new, ignore_errors=True)
        config = copy.copy(adapters.peft_config["default"])
        source = run.recipe.model.get("from_pretrained")
        config.base_model_name_or_path = str(source if source is None else model_directory(source) or source)
        config.inference_mode = True
        config.save_pretrained(str(new))
        save_file(
            {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()},
            new / ADAPTER_WEIGHTS,
        )
        as_usual(new / ADAPTER_WEIGHTS)
        publish(new, run.run_dir / ADAPTER)
