"""Seeded edits of a `config.json`, of the kinds that people and tools make.

`draw` makes one edit of a known kind. Whether it changes what the family's class in transformers computes is not known
here: a test compares the class with the edit, the class without it, and the reader under test.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING

Config = dict[str, Any]

BOOKKEEPING: Config = {
    **{"_name_or_path": "org/name", "transformers_version": "4.41.2", "torch_dtype": "float32", "use_cache": False},
    **{"architectures": ["SomethingForCausalLM"], "auto_map": {"AutoConfig": "configuration.Config"}},
    **{"unsloth_version": "2025.1.5", "unsloth_fixed": True, "_commit_hash": "0a1b", "tokenizer_class": "Tokenizer"},
    **{
        "max_length": 40,
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": True,
        "num_beams": 2,
        "repetition_penalty": 1.1,
    },
    **{"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": None, "output_hidden_states": False},
    **{"bos_token_id": 3, "eos_token_id": [2, 5], "sep_token_id": 4, "decoder_start_token_id": 3, "torchscript": False},
    **{"gradient_checkpointing": False, "return_dict": True, "task_specific_params": None, "finetuning_task": None},
    **{
        "_attn_implementation_autoset": True,
        "transformers.js_config": {"dtype": "q4"},
        "cache_implementation": "hybrid",
    },
}
"""Keys that say who wrote a file, how to generate with the model, or what to return."""
UNDECLARED: Config = {
    **{"recurrent_model": True, "num_latent_thoughts": 3, "use_qk_norm": True, "num_loops": 2, "scale_embeds": True},
    **{"is_causal": False, "use_bidirectional_attention": True, "attention_chunk_size": 4, "kv_sharing_modes": None},
    **{"per_layer_config": {"0": {"intermediate_size": 8}}, "text_config": {"hidden_size": 8}, "num_experts": 4},
    **{"logit_scale": 0.5, "clip_qkv": 8.0, "lora_rank": 8, "residual_scale": 2.0, "my_new_switch": False},
}
"""Keys that no class of these families declares; some name another computation."""
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")
SIZES = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("ffn_dim", "n_embd", "n_layer"),
}
"""Keys that are never dropped: the defaults are those of models with billions of parameters."""
TYPES = ("full_attention", "sliding_attention")
ABSENT: Config = {"sliding_window": 4, "head_dim": 8, "n_inner": 60, "final_logit_softcapping": 3.0, "pad_token_id": 1}
"""A legal value of keys that are null or that a small configuration leaves out."""
ROPES: tuple[Config, ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "truncate": False},
    {
        **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    },
    {
        **{"rope_type": "longrope", "short_factor": [1.0], "long_factor": [3.0], "factor": 2.0},
        "original_max_position_embeddings": 8,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
)
UNREAD: Config = {"beta_fast": 8.0, "factor": 5.0, "low_freq_factor": 2.0, "mscale": 0.7, "partial_rotary_factor": 0.5}
"""Keys of rotary parameters that some types read, and others do not."""


@dataclass(frozen=True)
class Edit:
    """One edit of a configuration."""

    kind: str
    """One of `KINDS`."""
    words: str
    """What was done."""
    config: Config


def draw(config: Config, seed: int, kind: str | None = None) -> Edit:
    """One edit of a `config.json` with a `model_type` that transformers knows; the argument is not changed.

    Args:
        config: The configuration.
        seed: The same seed gives the same edit.
        kind: One of `KINDS`; drawn if it is None.
    """
    chance = random.Random(seed)
    kind = kind or chance.choice(sorted(KINDS))
    edited = copy.deepcopy(config)
    words = KINDS[kind](edited, chance)
    return Edit(kind, words, edited)


def declared(config: Config) -> list[str]:
    """The keys that the family's configuration class declares."""
    cls = CONFIG_MAPPING[config["model_type"]]
    return sorted({field.name for field in dataclasses.fields(cls)} - {"transformers_version", "dtype"})


def _dropped(config: Config, chance: random.Random) -> str:
    key = chance.choice(sorted(set(config) - SIZES))
    del config[key]
    return f"without {key}"


def _changed(config: Config, chance: random.Random) -> str:
    key = chance.choice(declared(config))
    default = getattr(CONFIG_MAPPING[config["model_type"]], key, None)
    config[key] = another(key, config.get(key, default), config, chance)
    return f"{key}={json.dumps(config[key])}"


def another(key: str, value: object, config: Config, chance: random.Random) -> object:
    """Another value of a declared key, legal by its type."""
    layers: int = config.get("num_hidden_layers") or config.get("n_layer") or 3
    if key.endswith("token_id"):
        return chance.randrange(2, 90)
    if key in ("hidden_act", "hidden_activation", "activation_function"):
        return chance.choice(ACTIVATIONS)
    if key == "layer_types":
        return [chance.choice(TYPES) for _ in range(layers)]
    if key == "no_rope_layers":
        return [chance.randrange(2) for _ in range(layers)]
    if key == "rope_parameters":
        return {"rope_theta": chance.choice((500.0, 1e5)), **rotation(config, chance)}
    if key == "id2label":
        return {"0": "A", "1": "B", "2": "C"}
    if value is None:
        return copy.deepcopy(ABSENT.get(key))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice([n for n in (value // 2, value * 2, value + 1, 1, 2, 3, 4, 6) if 0 < n != value])
    if isinstance(value, float):
        return value * chance.choice((0.5, 2.0, 3.0)) or 0.1
    return value


def rotation(config: Config, chance: random.Random) -> Config:
    """Parameters of one type of rotary embedding, without its base."""
    rope = copy.deepcopy(chance.choice(ROPES))
    heads: int = config.get("num_attention_heads") or 1
    width: int = config.get("hidden_size") or heads
    half = (config.get("head_dim") or width // heads) // 2
    for key in ("short_factor", "long_factor"):
        if key in rope:
            rope[key] = rope[key] * half
    return rope


def _undeclared(config: Config, chance: random.Random) -> str:
    key = chance.choice(sorted(UNDECLARED))
    config[key] = UNDECLARED[key]
    return f"{key}={json.dumps(config[key])}"


def _bookkeeping(config: Config, chance: random.Random) -> str:
    keys = chance.sample(sorted(BOOKKEEPING), chance.randint(1, 4))
    config.update({key: copy.deepcopy(BOOKKEEPING[key]) for key in keys})
    return ", ".join(keys)


def _order(config: Config, chance: random.Random) -> str:
    keys = list(config)
    chance.shuffle(keys)
    for key in keys:
        config[key] = config.pop(key)
    return "keys in another order"


def _null(config: Config, chance: random.Random) -> str:
    key = chance.choice(declared(config))
    config[key] = None
    return f"{key}=null"


def _rope(config: Config, chance: random.Random) -> str:
    """Another rotation, in the new spelling or the old one, and sometimes a key more, a key less, or both spellings."""
    rope = rotation(config, chance)
    if chance.random() < 0.3:
        key = chance.choice(sorted(UNREAD))
        rope[key] = UNREAD[key]
    if chance.random() < 0.1:
        rope["my_new_rope_key"] = 2
    if chance.random() < 0.1 and len(rope) > 1:
        del rope[chance.choice(sorted(set(rope) - {"rope_type"}))]
    top: Config = {"partial_rotary_factor": 0.5} if chance.random() < 0.2 else {}
    theta = {"rope_theta": chance.choice((500.0, 1e4, 1e5))}
    spelling = chance.choice(("rope_parameters", "rope_scaling", "both", "by type"))
    if spelling != "both":
        config.pop("rope_parameters", None)
    if spelling == "rope_parameters":
        top["rope_parameters"] = {**rope, **theta}
    elif spelling == "by type":
        top["rope_parameters"] = {kind: {**rotation(config, chance), **theta} for kind in TYPES}
    else:
        rope[chance.choice(("type", "rope_type"))] = rope.pop("rope_type")
        top |= {"rope_scaling": rope, **theta}
    config.update(top)
    return json.dumps(top)


KINDS: dict[str, Callable[[Config, random.Random], str]] = {
    **{"drop": _dropped, "value": _changed, "undeclared": _undeclared, "bookkeeping": _bookkeeping},
    **{"order": _order, "null": _null, "rope": _rope},
}
"""How each kind of edit changes a configuration in place; the result says what was done."""
