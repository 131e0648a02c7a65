"""GPT-NeoX, the family of Pythia: LayerNorms, biases, attention and MLP in parallel, a quarter of each head rotated.

Queries, keys and values are one matrix, interleaved by head. Its dropout is not applied.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import ONE_PRODUCT, RELATIVES, SHARED, Family, Values, padding
from fathom.checkpoints.families.tensor_names import interleaved, renamed
from fathom.models import FathomConfig

KEYS = tuple(key for key in SHARED if key not in ("num_key_value_heads", "head_dim", "rms_norm_eps", "mlp_bias"))


def switches(theirs: PreTrainedConfig) -> Values:
    """The switches by which GPT-NeoX differs from Llama: norms, biases and the order of sub-layers."""
    head = theirs.hidden_size // theirs.num_attention_heads
    if getattr(theirs, "head_dim", None) not in (None, head):
        raise ValueError(
            f"head_dim={theirs.head_dim}: must be hidden_size / num_attention_heads ({head}) in a gpt_neox model, or "
            "RoPE would rotate a different part of each head"
        )
    return {
        "norm": "layer",
        "qk_norm": "none",
        "parallel_residual": theirs.use_parallel_residual,
        "gated_mlp": False,
        "mlp_bias": True,
        "rms_norm_eps": theirs.layer_norm_eps,
        "num_key_value_heads": theirs.num_attention_heads,
        "head_dim": head,
        **padding(theirs),
    }


def back(config: FathomConfig) -> Values:
    """The keys of a Fathom configuration under GPT-NeoX's names."""
    return {"use_parallel_residual": config.parallel_residual, "layer_norm_eps": config.rms_norm_eps}


L, OURS = "[gpt_neox.]layers.{i}.", "model.layers.{i}."
QKV = tuple(f"{OURS}self_attn.{name}_proj." for name in "qkv")
RULES = (
    renamed("[gpt_neox.]embed_in.weight", "model.embed_tokens.weight"),
    renamed("embed_out.weight", "lm_head.weight"),
    *(renamed(f"[gpt_neox.]final_layer_norm.{kind}", f"model.norm.{kind}") for kind in ("weight", "bias")),
    *(
        rule
        for kind in ("weight", "bias")
        for rule in (
            interleaved(f"{L}attention.query_key_value.{kind}", [f"{name}{kind}" for name in QKV]),
            renamed(f"{L}attention.dense.{kind}", f"{OURS}self_attn.o_proj.{kind}"),
            renamed(f"{L}mlp.dense_h_to_4h.{kind}", f"{OURS}mlp.up_proj.{kind}"),
            renamed(f"{L}mlp.dense_4h_to_h.{kind}", f"{OURS}mlp.down_proj.{kind}"),
            renamed(f"{L}input_layernorm.{kind}", f"{OURS}input_layernorm.{kind}"),
            renamed(f"{L}post_attention_layernorm.{kind}", f"{OURS}post_attention_layernorm.{kind}"),
        )
    ),
)
UNREAD = (r"attention\.(masked_)?bias\Z", r"rotary_emb\.inv_freq\Z")

GPT_NEOX = Family(
    "gpt_neox",
    switches,
    back,
    RULES,
    UNREAD,
    KEYS,
    ONE_PRODUCT,
    further=("use_parallel_residual", "layer_norm_eps", "rotary_pct", "rotary_emb_base", "head_dim"),
    ignored=(*RELATIVES, "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "num_steps"),
    rotates="parts",
    opens="Pythia, GPT-NeoX",
)
