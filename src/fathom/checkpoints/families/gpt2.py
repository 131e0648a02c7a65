"""GPT-2: LayerNorms, learned positions, biases everywhere, a plain MLP; its matrices are transposed.

Its dropout is not applied.

`models/modeling.py` (`_positions`) refuses texts longer than its learned positions, and does not count padding.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import ONE_PRODUCT, RELATIVES, Family, Values, padding
from fathom.checkpoints.families.tensor_names import projections, renamed, stacked, transposed
from fathom.models import FathomConfig

KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)
READ = (
    *("n_embd", "n_layer", "n_head", "n_positions", "n_inner", "activation_function", "layer_norm_epsilon"),
    "scale_attn_weights",
)
IGNORED = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_type", "summary_use_proj", "summary_activation"),
    *("summary_proj_to_labels", "summary_first_dropout", "n_ctx", "n_special", "predict_special_tokens"),
    *("feed_forward_length", "apply_query_key_layer_scaling", "normalize_attention_scores"),
)
OFF = dict.fromkeys(
    ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"), "Fathom's decoder has no such attention"
)


def switches(theirs: PreTrainedConfig) -> Values:
    """The switches by which GPT-2 differs from Llama, which are nearly all of them."""
    return {
        "norm": "layer",
        "qk_norm": "none",
        "positions": "learned",
        "gated_mlp": False,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": theirs.activation_function,
        "rms_norm_eps": theirs.layer_norm_epsilon,
        "intermediate_size": theirs.n_inner or 4 * theirs.hidden_size,
        "num_key_value_heads": theirs.num_attention_heads,
        "head_dim": theirs.hidden_size // theirs.num_attention_heads,
        "attention_scale": None if theirs.scale_attn_weights else 1.0,
        "attention_dropout": 0.0,
        **padding(theirs),
    }


def back(config: FathomConfig) -> Values:
    """The keys of a Fathom configuration under GPT-2's names."""
    return {
        "activation_function": config.hidden_act,
        "layer_norm_epsilon": config.rms_norm_eps,
        "n_inner": None if config.intermediate_size == 4 * config.hidden_size else config.intermediate_size,
        "scale_attn_weights": config.attention_scale is None,
    }


L, OURS = "[transformer.]h.{i}.", "model.layers.{i}."
QKV = tuple(f"{OURS}self_attn.{name}_proj." for name in "qkv")
RULES = (
    renamed("[transformer.]wte.weight", "model.embed_tokens.weight"),
    renamed("[transformer.]wpe.weight", "model.embed_positions.weight"),
    *(renamed(f"[transformer.]ln_f.{kind}", f"model.norm.{kind}") for kind in ("weight", "bias")),
    *(
        rule
        for kind, flipped in (("weight", transposed), ("bias", renamed))
        for rule in (
            stacked(f"{L}attn.c_attn.{kind}", [f"{name}{kind}" for name in QKV], projections, flipped=True),
            flipped(f"{L}attn.c_proj.{kind}", f"{OURS}self_attn.o_proj.{kind}"),
            flipped(f"{L}mlp.c_fc.{kind}", f"{OURS}mlp.up_proj.{kind}"),
            flipped(f"{L}mlp.c_proj.{kind}", f"{OURS}mlp.down_proj.{kind}"),
            renamed(f"{L}ln_1.{kind}", f"{OURS}input_layernorm.{kind}"),
            renamed(f"{L}ln_2.{kind}", f"{OURS}post_attention_layernorm.{kind}"),
        )
    ),
)

UNREAD = (r"\.attn\.(masked_)?bias\Z",)

GPT2 = Family(
    "gpt2", switches, back, RULES, UNREAD, KEYS, ONE_PRODUCT, READ, (*RELATIVES, *IGNORED), OFF, opens="GPT-2"
)
