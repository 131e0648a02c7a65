"""The paper's cheap tuning: LoRA on attention, plus full training of embeddings and norms (needs the extra `lora`).

Low-rank attention alone does not adapt to the new distances. Together with embeddings and norms it does (arXiv
2309.12307).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from fathom.errors import to_install

if TYPE_CHECKING:
    from peft import PeftModel

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def with_lora(model: PreTrainedModel, rank: int = 8, alpha: int = 16) -> PeftModel:
    """`model` with adapters of this rank. Its embeddings and norms are trained too, and saved with the adapters.

    Train it inside `compress_in_training(…)`. `merge_and_unload()` afterwards gives an ordinary model again.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError(f"LoRA needs peft: {to_install('lora')}") from error
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    missing = sorted(set(PROJECTIONS) - leaves)
    if missing:
        raise ValueError(f"{model.config.model_type} has no {missing[0]}: LoRA here needs separate projections")
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=PROJECTIONS,
        modules_to_save=sorted(leaf for leaf in leaves if leaf.endswith("norm") or leaf == "embed_tokens"),
        ensure_weight_tying=bool(model.config.tie_word_embeddings),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
