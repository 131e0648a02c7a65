"""A small copy of a `config.json`: sizes and lengths are scaled down, and every other key stays as it is.

The context shrinks from thousands of tokens to dozens. The sliding window and the original context of a scaled RoPE
shrink with it, so that a text of a few dozen tokens crosses both. Lists with an entry for each layer keep all kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from fathom.checkpoints.families.family import Values

VOCABULARY, HEADS, LAYERS, INNER, WINDOW = 97, 4, 3, 72, 7
SHORT = 24
"""Tokens of a text, and of a context that is not scaled."""
ORIGINAL, BEYOND = 28, 12
"""The original context of a scaled RoPE, where llama3's high and low frequencies both occur, and tokens after it."""
BY_LAYER = ("layer_types", "no_rope_layers", "layers_block_type", "mlp_layer_types")
"""Lists with an entry for each layer, which some classes derive from a period."""
DEEPEST = 12
"""Layers of a small copy whose kinds of layers are derived."""
LARGEST = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "n_shared_experts", "num_shared_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_chunk_size": 8, "mamba_n_groups": 1, "rotary_dim": 8},
}
"""Further sizes and counts, and the largest value of each in a small copy."""

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Small:
    """A scaled-down copy of a configuration, and how long its test texts must be."""

    config: Values
    tokens: int
    """The length of a text that crosses the window and the original context."""
    crossed: tuple[str, ...]
    """The bounds that the text crosses, in words."""


def shrink(config: Values) -> Small:
    """A small copy of a `config.json` of a type that transformers knows."""
    full = read_as_class(config)
    full.allow_global_per_layer_attribute_access = True  # Gemma 4's heads differ; those of most layers are meant
    sizes = {**_shapes(full), **_lengths(full)}
    layers = sizes["num_hidden_layers"] = _layers(config, full)
    if isinstance(last := getattr(full, "max_window_layers", None), int):
        sizes["max_window_layers"] = 0 if last < 1 else layers if last >= full.num_hidden_layers else 1
    small = {**config, **_one_of_each_kind(config, full.num_hidden_layers, layers)}
    for key, size in sizes.items():
        for name in _names(key, config, full):
            small[name] = size
    share = sizes["head_dim"] / _head_dim(full)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(key), dict):
            small[key] = _rope(config[key], share, sizes)
    named = [key for key in config if key.endswith(("_token_id", "_token_ids"))]
    for key in dict.fromkeys((*named, *TOKENS)):
        if (token := getattr(full, key, None)) is not None:
            small[key] = _token(token, full.vocab_size)
    original = sizes.get("original_max_position_embeddings")
    return Small(small, SHORT if original is None else original + BEYOND, tuple(_crossed(full, sizes)))


def read_as_class(config: Values) -> PreTrainedConfig:
    """A `config.json` parsed by transformers' configuration class, which fills in defaults for missing keys."""
    arguments = {key: value for key, value in config.items() if key != "model_type"}
    read: PreTrainedConfig = CONFIG_MAPPING[config["model_type"]](**arguments)
    return read


def _names(key: str, config: Values, full: PreTrainedConfig) -> list[str]:
    """The names under which a small copy sets a size: those in `config.json`, else the class's own.

    A size that the class derives from others, because it is missing or null, stays derived.
    """
    own = full.attribute_map.get(key, key)
    given = [name for name in {own: 0, key: 0} if name in config]
    default = getattr(type(full), own, None)
    return [name for name in given if config[name] is not None] if given else [own] if default is not None else []


def _head_dim(full: PreTrainedConfig) -> int:
    return getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads


def _shapes(full: PreTrainedConfig) -> dict[str, int]:
    """The small copy's sizes of tensors, under transformers' common names such as `hidden_size`. Those that are equal,
    or divide one another, still do."""
    hidden, heads, head = full.hidden_size, full.num_attention_heads, _head_dim(full)
    kv_heads = getattr(full, "num_key_value_heads", None) or heads
    few = min(HEADS - 1 if hidden % heads else HEADS, heads)  # 3 do not divide the width, and 4 do
    small = _small_head(full, head)
    width = few * small
    if heads * head != hidden:  # the heads are together wider or narrower than the model
        width += 8 if heads * head < hidden else -8
    sizes = {
        "vocab_size": min(VOCABULARY, full.vocab_size),
        "hidden_size": width,
        "num_attention_heads": few,
        "num_key_value_heads": {heads: few, 1: 1}.get(kv_heads, few - 1 if heads % kv_heads else few // 2),
        "head_dim": small,
    }
    for key in ("intermediate_size", "ffn_dim", "n_inner"):
        if isinstance(inner := getattr(full, key, None), int):
            sizes[key] = 4 * width if inner == 4 * hidden else min(INNER, inner)
    for key, most in LARGEST.items():
        if isinstance(size := getattr(full, key, None), int):
            sizes[key] = min(most, size)
    if isinstance(getattr(full, "mamba_n_heads", None), int):
        sizes |= {"mamba_n_heads": few, "mamba_d_head": full.mamba_expand * width // few}
    projected = getattr(full, "word_embed_proj_dim", None)
    return {**sizes, "word_embed_proj_dim": width if projected == hidden else width // 2}


def _small_head(full: PreTrainedConfig, head: int) -> int:
    """The width of a small head, such that RoPE rotates at least eight channels, and an even number if it does in the
    model."""
    shares = [1.0, *(rope.get("partial_rotary_factor") or 1.0 for rope in _ropes(full))]
    for small in range(8, head, 8):
        turned = [(int(small * share), int(head * share)) for share in shares]
        if all(few >= min(8, many) and few % 2 == many % 2 for few, many in turned):
            return small
    return head


def _ropes(full: PreTrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters as a list: empty, one set, or one set for each type of layer."""
    given = getattr(full, "rope_parameters", None)
    if not isinstance(given, dict) or not given:
        return []
    return list(given.values()) if all(isinstance(part, dict) for part in given.values()) else [given]


def _original_context(full: PreTrainedConfig) -> int | None:
    """The context before RoPE was scaled; None if it never was."""
    for rope in _ropes(full):
        if isinstance(length := rope.get("original_max_position_embeddings"), int):
            return length
        if rope.get("rope_type") == "dynamic":
            return int(full.max_position_embeddings)
    return getattr(full, "original_max_position_embeddings", None)


def _lengths(full: PreTrainedConfig) -> dict[str, int]:
    """The small copy's lengths: the context, the context before RoPE scaling, and the sliding window. If the class has
    no such key, a window that is at least as long as the context is not shortened."""
    context, original, lengths = full.max_position_embeddings, _original_context(full), {}
    if original is None:
        lengths["max_position_embeddings"] = min(SHORT, context)
    else:
        small = lengths["original_max_position_embeddings"] = min(ORIGINAL, original)
        lengths["max_position_embeddings"] = round(context * small / original)
    has = hasattr(type(full), "sliding_window")
    for window in (getattr(full, "sliding_window", None), getattr(type(full), "sliding_window", None)):
        if isinstance(window, int) and (has or window < context):
            lengths.setdefault("sliding_window", min(WINDOW, window))
    return lengths


def _layers(config: Values, full: PreTrainedConfig) -> int:
    """The small copy's number of layers, enough to have every kind of layer."""
    derived = [getattr(full, key, None) for key in BY_LAYER if key not in config]
    last = [max(map(kinds.index, kinds)) + 1 for kinds in derived if isinstance(kinds, list) and kinds]
    enough = [layers for layers in last if layers <= DEEPEST]
    return min(full.num_hidden_layers, max(LAYERS, *enough, len(set(_kinds(config, full.num_hidden_layers)))))


def _by_layer(config: Values, layers: int) -> list[str]:
    """The keys of `config.json` whose value is a list with an entry for each layer."""
    return [key for key, value in config.items() if isinstance(value, list) and len(value) == layers and "layer" in key]


def _kinds(config: Values, layers: int) -> list[str]:
    """The kind of each layer: its entries in the per-layer lists of `config.json`, as one string."""
    return list(map(str, zip(*(config[key] for key in _by_layer(config, layers)), strict=True)))


def _one_of_each_kind(config: Values, layers: int, few: int) -> Values:
    """The per-layer lists, shortened: the first layer of each kind is kept, then other layers from the start, in
    order."""
    kinds = _kinds(config, layers)
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept = sorted(list(dict.fromkeys([*first, *range(layers)]))[:few])
    return {key: [config[key][layer] for layer in kept] for key in _by_layer(config, layers)}


def _rope(given: Values, share: float, sizes: dict[str, int]) -> Values:
    """RoPE parameters for a small head: the original context is scaled, and lists of factors per channel pair are
    thinned."""
    small: Values = {}
    for key, value in given.items():
        if isinstance(value, dict):
            small[key] = _rope(value, share, sizes)
        elif isinstance(value, list) and value:
            many = max(1, round(len(value) * share))
            small[key] = [value[i * len(value) // many] for i in range(many)]
        else:
            small[key] = sizes.get(key, value)
    return small


def _token(given: Any, vocabulary: int) -> Any:
    """A token id moved into the small vocabulary; an id beyond the model's vocabulary stays as far beyond the small
    one."""
    if isinstance(given, list):
        return [_token(one, vocabulary) for one in given]
    if not isinstance(given, int) or given < VOCABULARY <= vocabulary:
        return given
    small = min(VOCABULARY, vocabulary)
    return small + given - vocabulary if given >= vocabulary else min(given, small - 1)


def _crossed(full: PreTrainedConfig, sizes: dict[str, int]) -> list[str]:
    pairs = (
        ("a sliding window", "sliding_window", getattr(full, "sliding_window", None)),
        ("RoPE's original context", "original_max_position_embeddings", _original_context(full)),
    )
    return [f"{what} of {sizes[key]} tokens ({given:,})" for what, key, given in pairs if given and key in sizes]
