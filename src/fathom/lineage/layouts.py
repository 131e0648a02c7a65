"""The table of parameter names: the role of each tensor in each family of decoders.

A scheme matches if every name it requires exists. If several match, the one that requires a strict superset of the
others wins; any other case is an ambiguity error. Roles: q k v o (attention), gate up down (feed-forward), attn_norm
ffn_norm post_attn_norm post_ffn_norm q_norm k_norm (gains), embed positions head final_norm (ends); `role_bias` is the
bias that goes with a role.

`why_not` says why a model is refused, such as one without attention. `weights.py` reads by these names, and refuses a
model whose layers pack attention in different ways (`add_layer`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fathom.errors import ModelError


@dataclass(frozen=True)
class Scheme:
    """One naming scheme for a part of a layer: for each role the module's name within the layer. `packing` says how
    roles are fused."""

    required: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    packing: str = ""


@dataclass(frozen=True)
class Stack:
    """One naming scheme for a model's stack: the names of the layers, the embedding, the final norm and the head."""

    layer: str
    embed: str
    final_norm: str
    optional: Mapping[str, str] = field(default_factory=dict)


PREFIXES = (
    "",
    "model.",
    "transformer.",
    "gpt_neox.",
    "model.decoder.",
    "decoder.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "llm.",
    "llm.model.",
    "thinker.model.",
    "model.text_model.",
    "text_model.",
)

STACKS = (
    Stack("layers.{}.", "embed_tokens", "norm"),
    Stack("layers.{}.", "embed_tokens", "final_layernorm"),
    Stack("layers.{}.", "embed_tokens", "embedding_norm"),
    Stack("layers.{}.", "embed_tokens", "final_layer_norm", {"positions": "embed_positions"}),
    Stack("layers.{}.", "tok_embeddings", "norm"),
    Stack("layers.{}.", "embed_in", "final_layer_norm"),
    Stack("h.{}.", "wte", "ln_f", {"positions": "wpe"}),
    Stack("h.{}.", "word_embeddings", "ln_f"),
    Stack("blocks.{}.", "wte", "norm_f"),
    Stack("encoder.layers.{}.", "embedding.word_embeddings", "encoder.final_layernorm"),
    Stack("blk.{}.", "token_embd", "output_norm"),
)

BARE = Stack("layers.{}.", "embed_tokens", "")
"""The stack of families without a single gain."""

HEADS = ("lm_head", "embed_out", "output", "output_layer", "transformer.output_layer")

_QK_NORM = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_QK_LAYERNORM = {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"}


def _separate(base: str, q: str, k: str, v: str, o: str, optional: Mapping[str, str] | None = None) -> Scheme:
    return Scheme({"q": base + q, "k": base + k, "v": base + v, "o": base + o}, optional or {})


# Fused projections are cut by `packing`: concat [q; k; v], head (q, k, v per head), group (q…, k, v per KV head), or
# "ask": the name alone does not say, config.json's model_type must (PACKING below).
ATTENTION = (
    _separate("self_attn.", "q_proj", "k_proj", "v_proj", "o_proj", _QK_NORM),
    _separate("self_attn.", "q_proj", "k_proj", "v_proj", "out_proj", _QK_LAYERNORM),
    _separate("self_attn.", "q_proj", "k_proj", "v_proj", "dense", _QK_NORM),
    _separate("attn.", "q_proj", "k_proj", "v_proj", "out_proj"),
    _separate("", "attn_q", "attn_k", "attn_v", "attn_output", {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}),
    Scheme({"qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj"}, packing="concat"),
    Scheme({"qkv": "self_attn.W_pack", "o": "self_attn.o_proj"}, packing="concat"),
    Scheme({"qkv": "attn.c_attn", "o": "attn.c_proj"}, packing="concat"),
    Scheme({"qkv": "attn.Wqkv", "o": "attn.out_proj"}, packing="concat"),
    Scheme({"qkv": "attention.wqkv", "o": "attention.wo"}, packing="group"),
    Scheme({"qkv": "attention.query_key_value", "o": "attention.dense"}, packing="ask"),
    Scheme({"qkv": "self_attention.query_key_value", "o": "self_attention.dense"}, packing="ask"),
    Scheme(
        {
            "q": "self_attn.q_proj",
            "kv_a": "self_attn.kv_a_proj_with_mqa",
            "kv_a_norm": "self_attn.kv_a_layernorm",
            "kv_b": "self_attn.kv_b_proj",
            "o": "self_attn.o_proj",
        },
        packing="latent",
    ),
    Scheme(
        {
            "q_a": "self_attn.q_a_proj",
            "q_a_norm": "self_attn.q_a_layernorm",
            "q_b": "self_attn.q_b_proj",
            "kv_a": "self_attn.kv_a_proj_with_mqa",
            "kv_a_norm": "self_attn.kv_a_layernorm",
            "kv_b": "self_attn.kv_b_proj",
            "o": "self_attn.o_proj",
        },
        packing="latent",
    ),
)

PACKING = {
    "gpt_neox": "head",
    "gpt_neox_japanese": "head",
    "bloom": "head",
    "falcon": "falcon",
    "chatglm": "concat",
    "glm": "concat",
}


def _gated(base: str, gate: str, up: str, down: str) -> Scheme:
    return Scheme({"gate": base + gate, "up": base + up, "down": base + down})


FEED_FORWARD = (
    _gated("mlp.", "gate_proj", "up_proj", "down_proj"),
    _gated("", "ffn_gate", "ffn_up", "ffn_down"),
    _gated("feed_forward.", "w1", "w3", "w2"),
    _gated("feed_forward.", "gate_proj", "up_proj", "down_proj"),
    _gated("feed_forward.experts.0.", "w1", "w3", "w2"),
    _gated("feed_forward.experts.0.", "gate_proj", "up_proj", "down_proj"),
    _gated("mlp.", "w2", "w1", "c_proj"),
    # in a mixture of experts, the first expert represents the layer
    _gated("mlp.experts.0.", "gate_proj", "up_proj", "down_proj"),
    _gated("block_sparse_moe.experts.0.", "w1", "w3", "w2"),
    Scheme({"gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}, packing="concat"),
    Scheme({"gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}, packing="experts"),
    Scheme(
        {"gate_up": "feed_forward.experts.gate_up_proj", "down": "feed_forward.experts.down_proj"}, packing="experts"
    ),
    Scheme({"gate_up": "block_sparse_moe.input_linear", "down": "block_sparse_moe.output_linear"}, packing="experts"),
    Scheme({"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}, packing="concat"),
    Scheme(  # the experts represent the layer
        {"gate_up": "block_sparse_moe.input_linear", "down": "block_sparse_moe.output_linear"}
        | {"shared_gate_up": "shared_mlp.input_linear", "shared_down": "shared_mlp.output_linear"},
        packing="experts",
    ),
    Scheme({"up": "mlp.c_fc", "down": "mlp.c_proj"}),
    Scheme({"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}, packing="maybe_gated"),
    Scheme({"up": "mlp.fc1", "down": "mlp.fc2"}),
    Scheme({"up": "mlp.fc_in", "down": "mlp.fc_out"}),
    Scheme({"up": "fc1", "down": "fc2"}),
    Scheme({"up": "ffn.up_proj", "down": "ffn.down_proj"}),
    Scheme({"up": "mlp.up_proj", "down": "mlp.down_proj"}),
)

NORMS = (
    Scheme({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}),
    Scheme(
        {
            "attn_norm": "input_layernorm",
            "post_attn_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffn_norm": "post_feedforward_layernorm",
        }
    ),
    Scheme({"post_attn_norm": "post_attention_layernorm", "post_ffn_norm": "post_feedforward_layernorm"}),
    Scheme({"attn_norm": "input_layernorm"}, packing="parallel"),
    Scheme(
        {
            "attn_norm": "input_layernorm",
            "post_attn_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffn_norm": "post_mlp_layernorm",
        }
    ),
    Scheme({"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}),
    Scheme({"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}),
    Scheme({"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}),
    Scheme({"attn_norm": "attention_layer_norm", "ffn_norm": "feedforward_layer_norm"}),
    Scheme({"post_attn_norm": "feedforward_layer_norm", "post_ffn_norm": "post_feedforward_layernorm"}),
    Scheme({"attn_norm": "ln_attn", "ffn_norm": "ln_mlp"}),
    Scheme({"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}),
    Scheme({"attn_norm": "ln_1", "ffn_norm": "ln_2"}),
    Scheme({"attn_norm": "ln_1"}, packing="parallel"),
    Scheme({"attn_norm": "norm_1", "ffn_norm": "norm_2"}),
    Scheme({"attn_norm": "attention_norm", "ffn_norm": "ffn_norm"}),
    Scheme({"attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}),
    Scheme({"attn_norm": "self_attn_layer_norm", "ffn_norm": "final_layer_norm"}),
)

# families that store gains as γ and use 1 + γ
UNIT_OFFSET_GAINS = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "nemotron"})
UNIT_OFFSET_GAINS |= {"vaultgemma"}
UNIT_OFFSET_GAINS |= {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
CONV1D = frozenset({"gpt2"})
INTERLEAVED_ROTARY = frozenset({"gptj", "chatglm", "glm", "glm4", "cohere", "cohere2", "cohere2_moe", "helium"})
INTERLEAVED_ROTARY |= {"ernie4_5", "ernie4_5_moe", "llama4", "llama4_text"}
# with latent attention; of some, `rope_interleave: false` says otherwise
INTERLEAVED_ROTARY |= {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "mistral4"}
INTERLEAVED_ROTARY |= {"longcat_flash", "bailing_hybrid", "youtu", "axk1"}
UNROTATED = frozenset({"gpt2", "opt", "bloom", "mpt", "jamba"})
ALIBI = frozenset({"bloom", "mpt", "falcon"})  # without rotary heads, each head has a slope of its own
GATED_OUTPUT = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
"""Families that store a gate of attention's output with the queries."""
LAYER_NORM = frozenset(
    {"gpt2", "opt", "bloom", "mpt", "gpt_neox", "gpt_neox_japanese", "falcon", "gptj", "phi", "stablelm"}
)
LAYER_NORM |= {"starcoder2", "cohere", "cohere2", "nemotron", "olmo"}
UNSCALED = frozenset({"olmo"})  # norms without gains
# queries and keys are brought to one length after they are rotated: the scale of a head is free, the gains are no rows'
HEADS_NORMED_LATE = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "llama4", "llama4_text"})
EXPERTS_IN_OUT = frozenset({"llama4", "llama4_text", "gpt_oss"})  # stacked experts are stored (in, out)
EXPERTS_WOVEN = frozenset({"gpt_oss"})  # gate and up rows alternate

MIXERS = {
    "linear_attn": "linear attention",
    "mamba": "a state-space mixer",
    "mixer": "a state-space mixer",
    "ssm": "a state-space mixer",
    "conv": "a short convolution",
    "temporal_block": "a recurrent block",
}
"""Modules that hybrid models have in place of attention, in some layers."""
_BUFFER = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|\.inv_freq$|^rope_freqs\.weight$")
_NOT_MIXING = re.compile(r"mlp|moe|experts|feed_forward|ffn|(^|_)(layer)?norm\.")
_LAYER = re.compile(r"^(?:.+\.)?(?:layers|h|blocks|blk)\.(\d+)\.(.+)$")


def is_buffer(name: str) -> bool:
    """Whether a tensor is a buffer that old checkpoints hold and the configuration gives: a causal mask, or frequencies
    of RoPE."""
    return bool(_BUFFER.search(name))


def parameter(names: Collection[str], module: str, kind: str = "weight") -> str | None:
    """The name of a module's tensor: `module.weight`, or `module` itself if a checkpoint stores bare parameters; None
    without one."""
    if f"{module}.{kind}" in names:
        return f"{module}.{kind}"
    return module if kind == "weight" and module in names else None


def matching(table: tuple[Scheme, ...], names: Collection[str], layer: str, what: str) -> Scheme | None:
    """The naming scheme of a table that fits the tensors of a layer; None if none fits."""
    fitting = [s for s in table if all(parameter(names, layer + module) for module in s.required.values())]
    for scheme in fitting:
        if all(set(other.required.values()) <= set(scheme.required.values()) for other in fitting):
            return scheme
    if not fitting:
        return None
    listed = " or ".join(layer + next(iter(scheme.required.values())) for scheme in fitting)
    raise ModelError(f"{what} of {layer.rstrip('.')} is ambiguous: {listed}")


def locate(names: Collection[str], model_type: str) -> tuple[str, Stack]:
    """The prefix of a checkpoint's tensor names, and the naming scheme of its stack."""
    found = [
        (prefix, stack)
        for prefix in PREFIXES
        for stack in ((BARE,) if model_type in UNSCALED else STACKS)
        if parameter(names, prefix + stack.embed)
        and any(matching(ATTENTION, names, layer, "the attention") for layer in stacked(names, prefix, stack))
        and (not stack.final_norm or parameter(names, prefix + stack.final_norm))
    ]
    if not found:
        raise ModelError(f"no decoder found: {why_not(names)}")
    if len(found) > 1:
        raise ModelError("several decoders found: " + " and ".join(prefix + stack.embed for prefix, stack in found))
    return found[0]


def stacked(names: Collection[str], prefix: str, stack: Stack) -> list[str]:
    """The names of a stack's layers, in order: those with attention, and those with another known token mixer
    instead."""
    depth = (prefix + stack.layer).count(".")
    held: dict[str, set[str]] = {}
    for name in (name for name in names if name.startswith(prefix)):
        parts = name.split(".", depth + 1)
        held.setdefault(".".join(parts[:depth]) + ".", set()).update(parts[depth : depth + 1])
    out: list[str] = []
    while True:
        layer = prefix + stack.layer.format(len(out))
        if not matching(ATTENTION, names, layer, "the attention") and not _has_state(held.get(layer, set())):
            return out
        out.append(layer)


def _has_state(modules: Collection[str]) -> bool:
    """Whether a layer has another token mixer instead of attention: one of a known name, and no module called
    attention."""
    known = {*MIXERS} & {*modules}
    return bool(known) and not any("attn" in name or "attention" in name for name in {*modules} - known - NORM_MODULES)


NORM_MODULES = frozenset({"post_attention_layernorm", "attention_layernorm", "attention_norm", "attention_layer_norm"})
"""Modules of a layer that are named after attention and are norms."""


def why_not(names: Collection[str], index: int = 0) -> str:
    """Why no known attention layout fits a layer, in words."""
    parts: dict[int, set[str]] = {}
    layers: dict[int, set[str]] = {}  # what is before the parts
    for name in names:
        if found := _LAYER.match(name):
            parts.setdefault(int(found[1]), set()).add(found[2])
            layers.setdefault(int(found[1]), set()).add(name[: found.start(2)])
    if index not in parts:
        return "no tensor is named as one of a layer" if not parts else f"layer {index} has no tensors"
    attentive = any(matching(ATTENTION, names, layer, "the attention") for some in layers.values() for layer in some)
    if not attentive and (mixers := {place: words for place in parts if (words := _mixer(parts[place]))}):
        listed = ", ".join(map(str, sorted(mixers)[:4])) + (", …" if len(mixers) > 4 else "")
        what = " and ".join(sorted(set(mixers.values())))
        return f"layers {listed} of {len(parts)} hold {what} in place of attention, and no test reads that"
    if any(matching(ATTENTION, names, layer, "the attention") for layer in layers[index]) or (
        attentive and _has_state({part.split(".")[0] for part in parts[index]})
    ):
        return "its layers are known, but not the names of its embedding and final norm"
    others = {
        part.removesuffix(".weight").removesuffix(".bias") for part in parts[index] if not _NOT_MIXING.search(part)
    }
    listed = ", ".join(sorted(others)[:8]) or "feed-forward weights and norms only"
    return f"layer {index} has no attention of known names; it holds {listed}"


def _mixer(parts: Collection[str]) -> str | None:
    return next((words for module, words in MIXERS.items() if any(p.startswith(f"{module}.") for p in parts)), None)
