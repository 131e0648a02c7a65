"""Families whose layers Fathom runs as transformers' own modules: their `config.json` in Fathom's keys.

The family's own class reads what its layers compute, so every key that the class knows is followed as the class follows
it. Other keys are refused by name, but for bookkeeping and for those that published files carry (`PUBLISHED`).

`layouts.py` lists the families, has `add_family`, and says why other types do not open (`CLOSED`). `text_of` takes the
text model's keys from a file with a vision tower. `models/loading.py` leaves out multi-token-prediction layers (`mtp`),
and refuses weights stored as `mxfp4` or `fp8` blocks. `models/hosts/refusals.py` refuses mechanisms that these layers
cannot have.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import cache
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_utils,
)

from fathom.checkpoints.families.family import ROPE, Values, kept
from fathom.checkpoints.families.keys import BACKEND, Keys
from fathom.checkpoints.families.layouts import HOSTS, SINCE
from fathom.models import FathomConfig

SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "initializer_range", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys that mechanisms, caches and tools read, with one meaning there and here."""
ANY = object()
Fits = Callable[[Any, Values], bool]
"""Whether a key's value says what the class computes anyway, from the value and the whole file."""


def each_of(*allowed: object) -> Fits:
    """A check for a key whose value is a list with one entry per layer: every entry must be among `allowed`."""
    return lambda value, theirs: isinstance(value, list) and all(one in allowed for one in value)


def as_is(key: str, default: object = None) -> Fits:
    """A check that a key's value, or every entry of it if it is a list, equals the value of another key that the class
    reads."""

    def fits(value: Any, theirs: Values) -> bool:
        return all(one == theirs.get(key, default) for one in (value if isinstance(value, list) else [value]))

    return fits


DEEPSEEK = {
    **dict.fromkeys(("ep_size", "num_nextn_predict_layers", "seq_aux", "aux_loss_alpha", "pretraining_tp"), (ANY,)),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
SHORT = (
    *("block_dim", "conv_dim", "conv_dim_out", "block_mlp_init_scale", "block_out_init_scale", "block_norm_eps"),
    *("block_use_xavier_init", "conv_use_xavier_init", "num_heads", "full_attn_idxs"),
)
QWEN: Mapping[str, tuple[object, ...]] = {
    **{"attn_output_gate": (True,), "mlp_only_layers": ([],), "mamba_ssm_dtype": ("float32",)},
    **dict.fromkeys(("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), (ANY,)),
}
NO_EXPERT_GROUPS: Mapping[str, tuple[object, ...]] = dict.fromkeys(
    ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1,)
)
HUNYUAN: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("*_id", "*_start_id", "*_end_id", "vit_*", "anyres_*", "org_vocab_size", "dense_list"), (ANY,)),
    **dict.fromkeys(("class_num", "pool_type", "cla_share_factor", "num_media_embeds", "skip_cls_token"), (ANY,)),
    **dict.fromkeys(("use_cla", "use_mla", "mlp_bias", "position_embedding_xdrope", "group_limited_greedy"), (False,)),
    **dict.fromkeys(("add_classification_head", "moe_drop_tokens", "moe_random_routing_dropped_token"), (False,)),
    **dict.fromkeys(("use_qk_norm", "use_rotary_pos_emb", "use_mixed_mlp_moe", "norm_topk_prob"), (True,)),
    **dict.fromkeys(("xdrope_section", "max_video_pos", "kv_lora_rank", "q_lora_rank", "v_head_dim"), (None,)),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), (None,)),
    **dict.fromkeys(("n_group", "topk_group"), (False, None)),
    **{
        "norm_type": ("rms",),
        "routed_scaling_factor": (1.0,),
        "moe_layer_num_skipped": (0,),
        "capacity_factor": (ANY,),
    },
    **{"attention_head_dim": (as_is("head_dim"),), "num_shared_expert": (1, each_of(1))},
    "moe_intermediate_size": (as_is("intermediate_size"),),
}
GRANITE: Mapping[str, tuple[object, ...]] = {"init_method": (ANY,), "normalization_function": ("rmsnorm",)}
PUBLISHED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v2": {key: DEEPSEEK[key] for key in ("ep_size", "seq_aux", "aux_loss_alpha", "pretraining_tp")}
    | {"scoring_func": ("softmax",), "moe_layer_freq": (1,)},
    "glm4_moe": {"num_nextn_predict_layers": (ANY,)},
    "gpt_oss": {"experts_per_token": (ANY,), "initial_context_length": (ANY,), "swiglu_limit": (7.0,)},
    "qwen3_moe": {"max_window_layers": (ANY,)},
    "qwen3_next": {"full_attention_interval": (ANY,), "max_window_layers": (ANY,), "use_sliding_window": (False,)},
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "kimi_linear": {
        **{"mla_use_nope": (True,), "moe_layer_freq": (1,), "moe_router_activation_func": ("sigmoid",)},
        **{"num_nextn_predict_layers": (ANY,), "use_grouped_topk": (True,)},
    },
    "gemma4_text": {
        "per_layer_config": (ANY,),
        "use_bidirectional_attention": ("vision",),  # among the tokens of an image
        "expert_intermediate_size": (None,),
    },
    "dots1": {
        **{"moe_layer_freq": (1,), "scoring_func": ("noaux_tc", "sigmoid"), "topk_method": ("noaux_tc",)},
        "use_sliding_window": (False,),
    },
    "glm4_moe_lite": {
        **{"num_nextn_predict_layers": (ANY,), "first_k_dense_replace": (1,), "topk_method": ("noaux_tc",)},
        "scoring_func": ("sigmoid",),
    },
    "solar_open": {"first_k_dense_replace": (0,), "use_qk_norm": (False,)},
    "minimax_m2": {
        **dict.fromkeys(("num_mtp_modules", "mtp_transformer_layers", "use_mtp", "mlp_intermediate_size"), (ANY,)),
        **dict.fromkeys(("layernorm_full_attention_beta", "layernorm_linear_attention_beta"), (1.0,)),
        **{"layernorm_mlp_beta": (1.0,), "attn_type_list": (each_of(1),), "scoring_func": ("sigmoid",)},
        **{"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "use_routing_bias": (True,)},
        **{"shared_intermediate_size": (0,), "shared_moe_mode": (ANY,), "sliding_window": (None,)},
    },
    "phimoe": {"hidden_dropout": (0.0,)},
    "afmoe": {
        **NO_EXPERT_GROUPS,
        **{"score_func": ("sigmoid",), "route_norm": (True,), "load_balance_coeff": (ANY,), "use_grouped_mm": (ANY,)},
    },
    "apertus": {"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,), "hidden_dropout": (0.0,)},
    "cohere": {"pretraining_tp": (ANY,)},
    "cohere2": {
        **{"layer_switch": (as_is("sliding_window_pattern", 4),), "order_of_interleaved_layers": ("local_attn_first",)},
        **{"position_embedding_type": ("rope_gptj",), "rotary_pct": (1.0,), "use_parallel_embedding": (ANY,)},
        **dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), (True,)),
    },
    "ernie4_5_moe": {
        **dict.fromkeys(("moe_capacity", "num_nextn_predict_layers"), (ANY,)),
        **{"moe_gate": ("topk",), "moe_gate_act": ("softmax",), "moe_use_aux_free": (True,)},
    },
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "olmo": {"pretraining_tp": (ANY,)},
    "starcoder2": {
        **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), (ANY,)),
        **{"activation_function": (ANY,), "layer_norm_epsilon": (as_is("norm_epsilon", 1e-5),)},
        **{"norm_type": ("layer_norm",), "mlp_type": ("default",), "scale_attn_weights": (True,)},
    },
    "llama4_text": {"for_llm_compressor": (ANY,)},
    "nemotron": {
        **{"rope_percent": (as_is("partial_rotary_factor", 0.5),), "kv_channels": (as_is("head_dim"),)},
        "lm_head_bias": (False,),
    },
    "nemotron_h": {
        **{"attention_head_dim": (as_is("head_dim", 128),), "time_step_rank": (ANY,)},
        **dict.fromkeys(("rms_norm_eps", "norm_eps"), (as_is("layer_norm_epsilon", 1e-5),)),
    },
    "bamba": {"attn_rotary_emb": (64,)},
    "jamba": {
        **dict.fromkeys(("calc_logits_for_entire_prompt", "num_logits_to_keep", "n_ctx"), (ANY,)),
        **{"mamba_inner_layernorms": (True,), "using_mamba_kernels": (ANY,), "sliding_window": (None,)},
    },
    "lfm2": dict.fromkeys(SHORT, (ANY,))
    | {"block_use_swiglu": (True,), "use_pos_enc": (True,), "theta": (as_is("rope_theta", 1e6),)},
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granitemoehybrid": GRANITE,
}
"""Keys that published files carry and the family's class does not know, by name or pattern, with the values, or what
`Fits`, that say what the class computes anyway."""


WHOLE = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", *BACKEND)
"""Keys of a multimodal file that hold for its text model."""


@cache
def known_keys(kind: str) -> frozenset[str]:
    """The keys that a family's classes know: fields, aliases, keyword arguments, and attributes that the layers
    read."""
    cls = CONFIG_MAPPING[kind]
    settings = "".join(inspect.getsource(one) for one in cls.__mro__ if issubclass(one, PreTrainedConfig))
    modules = {inspect.getmodule(one) for one in MODEL_MAPPING[cls].__mro__ if issubclass(one, PreTrainedModel)}
    layers = "".join(inspect.getsource(one) for one in modules if one is not None and one is not modeling_utils)
    taken = re.findall(r"""kwargs\.(?:pop|get)\(\s*["'](\w+)""", settings)
    read = re.findall(r"""(?:\bconfig\.|\bself\.|getattr\((?:self\.)?config, ["'])(\w+)""", settings)
    read += re.findall(r"""(?:\bconfig\.|getattr\((?:self\.)?config, ["'])(\w+)""", layers)
    return frozenset({*cls.__dataclass_fields__, *cls.attribute_map, *cls.attribute_map.values(), *taken, *read, *ROPE})


def require_known(theirs: Values) -> None:
    """Refuse keys of `config.json` that may ask for a computation other than the one the family's class makes."""
    kind = str(theirs["model_type"])
    ignored = [key for key in theirs if _says_nothing(key, theirs)]
    Keys(kind, known_keys(kind), ignored).meaningful({key: theirs[key] for key in theirs if key not in ROPE})


def _says_nothing(key: str, theirs: Values) -> bool:
    """Whether a key in published files changes nothing, because its value states what the class computes anyway."""
    carried = PUBLISHED.get(str(theirs["model_type"]), {})
    allowed = carried.get(key, next((values for name, values in carried.items() if fnmatch(key, name)), ()))
    value = theirs[key]
    return ANY in allowed or value in allowed or any(callable(one) and one(value, theirs) for one in allowed)


def text_of(theirs: Values) -> Values:
    """The text model's keys in a `config.json` with a vision tower, if transformers opens both with the same class."""
    text = theirs.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    outer = theirs.get("model_type")
    if inner not in HOSTS or outer not in CONFIG_MAPPING or _class_of(outer) is not _class_of(inner):
        return theirs
    return {**{key: theirs[key] for key in WHOLE if key in theirs}, **dict(text or {})}


def _class_of(kind: object) -> object:
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], kind)


def configuration(theirs: Values) -> Values:
    """The values of Fathom's configuration for a `config.json`, which is kept whole in `native` for the layers to
    read."""
    kind, here = str(theirs["model_type"]), transformers.__version__
    if (first := SINCE.get(kind)) is not None and tuple(map(int, here.split(".")[:2])) < first:
        raise ValueError(f"{kind} models need transformers {'.'.join(map(str, first))} or newer; installed is {here}")
    require_known(theirs)
    read = CONFIG_MAPPING[str(theirs["model_type"])].from_dict(dict(theirs))
    read.allow_global_per_layer_attribute_access = True  # Gemma 4's heads differ; those of most layers are named
    host, window = HOSTS[read.model_type], getattr(read, "sliding_window", None)
    types = (
        getattr(read, "layer_types", None)
        or ["full_attention" if window is None else "sliding_attention"] * read.num_hidden_layers
    )
    return {
        **{key: getattr(read, key) for key in SAME if hasattr(read, key)},
        "intermediate_size": getattr(read, "intermediate_size", None) or read.hidden_size,
        "num_key_value_heads": getattr(read, "num_key_value_heads", None) or read.num_attention_heads,
        "head_dim": getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads,
        "layer_types": list(types),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "attention_dropout": getattr(read, "attention_dropout", None) or 0.0,
        **host.switches(read),
        **kept(theirs),
        "model_type": FathomConfig.model_type,
        "host": read.model_type,
        "host_layouts": [{key: _lists(value) for key, value in vars(layout).items()} for layout in host.layouts],
        "native": dict(theirs),
    }


def _lists(value: object) -> object:
    """Convert tuples to lists, since JSON has no tuples."""
    return list(value) if isinstance(value, tuple) else value
