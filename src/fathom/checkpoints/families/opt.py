"""OPT, the family of Galactica: learned positions with an offset of 2, LayerNorms, a plain MLP, queries scaled first.

Its dropout is not applied.

`models/modeling.py` (`_positions`) refuses texts longer than its learned positions, and does not count padding.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import RELATIVES, Family, Values
from fathom.checkpoints.families.tensor_names import renamed
from fathom.models import FathomConfig

KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("attention_dropout", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)
READ = (
    *("ffn_dim", "activation_function", "enable_bias", "layer_norm_elementwise_affine", "init_std"),
    *("word_embed_proj_dim", "do_layer_norm_before", "_remove_final_layer_norm"),
)
IGNORED = ("dropout", "activation_dropout", "layerdrop", "learned_embeddings", "output_projection")
OFF = {"scale_embeddings": "the class in transformers does not scale embeddings"}
OFFSET = 2


def switches(theirs: PreTrainedConfig) -> Values:
    """The switches by which OPT differs from Llama, which are nearly all of them."""
    if theirs.word_embed_proj_dim != theirs.hidden_size:
        raise ValueError(
            f"word_embed_proj_dim={theirs.word_embed_proj_dim}: Fathom's decoder does not project embeddings"
        )
    if not theirs.do_layer_norm_before or theirs._remove_final_layer_norm:
        raise ValueError("do_layer_norm_before=false, as in OPT-350m: Fathom's decoder normalizes before sub-layers")
    return {
        "norm": "layer" if theirs.layer_norm_elementwise_affine else "layer_plain",
        "qk_norm": "none",
        "positions": "learned",
        "position_offset": OFFSET,
        "gated_mlp": False,
        "attention_bias": theirs.enable_bias,
        "mlp_bias": theirs.enable_bias,
        "scale_queries": True,
        "hidden_act": theirs.activation_function,
        "rms_norm_eps": 1e-5,
        "intermediate_size": theirs.ffn_dim,
        "num_key_value_heads": theirs.num_attention_heads,
        "head_dim": theirs.hidden_size // theirs.num_attention_heads,
        "initializer_range": theirs.init_std,
    }


def back(config: FathomConfig) -> Values:
    """The keys of a Fathom configuration under OPT's names."""
    return {
        "layer_norm_elementwise_affine": config.norm == "layer",
        "enable_bias": config.attention_bias,
        "activation_function": config.hidden_act,
        "ffn_dim": config.intermediate_size,
        "init_std": config.initializer_range,
    }


TOP, OURS = "[model.]decoder.", "model.layers.{i}."
NAMES = {
    **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}
RULES = (
    renamed(f"{TOP}embed_tokens.weight", "model.embed_tokens.weight"),
    renamed(f"{TOP}embed_positions.weight", "model.embed_positions.weight"),
    *(renamed(f"{TOP}final_layer_norm.{kind}", f"model.norm.{kind}") for kind in ("weight", "bias")),
    *(
        renamed(f"{TOP}layers.{{i}}.{name}.{kind}", f"{OURS}{ours}.{kind}")
        for name, ours in NAMES.items()
        for kind in ("weight", "bias")
    ),
)

OPT = Family(
    "opt",
    switches,
    back,
    RULES,
    (),
    KEYS,
    None,
    READ,
    (*RELATIVES, *IGNORED),
    OFF,
    opens="OPT, Galactica",
    note="OPT-350M is refused: it norms after sub-layers and projects its embeddings",
)
