"""The families whose layers Fathom runs as transformers' own modules: one layout for each kind of layer.

Gemma 4 models whose layers read more than the previous layer's output (inputs of their own, or the keys of another
layer) are refused here. `keys.py` refuses keys of `config.json` one by one, and `registry.py` the types in `CLOSED`,
with the reason. `hosted.py` reads a `config.json`. `models/hosts/refusals.py` refuses mechanisms that these layers
cannot have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING

from fathom.checkpoints.families.family import Values
from fathom.models.hosts.layout import Layout


@dataclass(frozen=True)
class Host:
    """A hosted family."""

    layouts: tuple[Layout, ...]
    switches: Callable[[Any], Values] = lambda config: {}
    """Keys of our configuration that say what the family's model does around its layers, such as `embedding_scale`."""


SANDWICH: dict[str, Any] = {
    "before": ("input_layernorm", "pre_feedforward_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
AFTER: dict[str, Any] = {"before": (None, None), "after": ("post_attention_layernorm", "post_feedforward_layernorm")}


def granite(theirs: Any) -> Values:
    """Scaled embeddings and logits."""
    return {"embedding_scale": float(theirs.embedding_multiplier), "logits_scaling": float(theirs.logits_scaling)}


def cohere(theirs: Any) -> Values:
    """Logits times a factor."""
    return {"logits_multiplier": float(theirs.logit_scale)}


def phi(theirs: Any) -> Values:
    """A head with a bias."""
    return {"head_bias": bool(getattr(theirs, "lm_head_bias", True))}


def afmoe(theirs: Any) -> Values:
    """Embeddings are multiplied by the square root of their width."""
    return {"embedding_scale": theirs.hidden_size**0.5 if theirs.mup_enabled else 1.0}


def ernie(theirs: Any) -> Values:
    """A head with a bias."""
    return {"head_bias": bool(theirs.use_bias)}


def minicpm(theirs: Any) -> Values:
    """Embeddings are multiplied by a factor, and the head's input is divided by another."""
    scale = {"embedding_scale": float(theirs.scale_emb), "round_embedding_scale": True}
    return {**scale, "hidden_scaling": float(theirs.logits_scaling)}


def hyperclova(theirs: Any) -> Values:
    """Embeddings and logits are each multiplied by a factor."""
    return {"embedding_scale": float(theirs.embedding_multiplier), "logits_multiplier": float(theirs.logits_scaling)}


def caps(theirs: Any) -> Values:
    """Capped logits."""
    return {key: getattr(theirs, key, None) for key in ("attn_logit_softcapping", "final_logit_softcapping")}


def gemma(theirs: Any) -> Values:
    """Scaled embeddings and capped logits."""
    return {"embedding_scale": theirs.hidden_size**0.5, "round_embedding_scale": True, **caps(theirs)}


def gemma4(theirs: Any) -> Values:
    """Gemma's switches; refuses Gemma 4 models whose layers read more than the previous layer's output."""
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if getattr(theirs, key):
            raise ValueError(
                f"{key}={getattr(theirs, key)}: layers would read more than the previous layer's output; Fathom opens "
                f"only models with {key}=0"
            )
    return gemma(theirs)


SHORT: dict[str, Any] = {
    "token": ("conv", "self_attn"),
    "channel": ("feed_forward",),
    "before": ("operator_norm", "ffn_norm"),
}
MAMBA: dict[str, Any] = {
    "token": ("mamba", "self_attn"),
    "channel": ("feed_forward",),
    "before": ("input_layernorm", "pre_ff_layernorm"),
}
SHARED: dict[str, Any] = {
    "channel": ("block_sparse_moe", "shared_mlp"),
    "multiplier": "residual_multiplier",
}
ONE_NORM = ("input_layernorm", "input_layernorm")


def _families() -> dict[str, Host]:
    found: dict[str, Host] = {}

    def add(names: str, *layouts: Layout, switches: Callable[[Any], Values] = lambda config: {}) -> None:
        found.update(dict.fromkeys(names.split(), Host(layouts, switches)))

    add("qwen3 llama ministral ministral3 cwm seed_oss arcee starcoder2 iquestcoder jais2 glm olmo ernie4_5", Layout())
    add("helium internlm3 hunyuan_v1_dense nemotron bitnet", Layout())
    add("stablelm", Layout(), Layout(before=ONE_NORM, parallel="steps"))
    add("persimmon", Layout(norm="final_layernorm"))
    add("minicpm3", Layout(latent=True, multiplier="residual_scale"), switches=minicpm)
    add(
        "hyperclovax", Layout(after=("post_norm1", "post_norm2"), multiplier="residual_multiplier"), switches=hyperclova
    )
    add("qwen3_moe qwen2_moe olmoe mixtral glm4_moe gpt_oss minimax_m2 hunyuan_v1_moe", Layout())
    add("aria_text dots1 hy_v3 solar_open flint exaone_moe mellum", Layout())
    add("ernie4_5_moe", Layout(), switches=ernie)
    add("llama4_text", Layout(channel=("feed_forward",)))
    add("phimoe", Layout(), switches=phi)
    add("deepseek_v2 deepseek_v3 glm4_moe_lite youtu axk1 kimi_linear bailing_hybrid", Layout(latent=True))
    add("qwen3_next qwen3_5_text qwen3_5_moe_text", Layout(token=("linear_attn", "self_attn")))
    add("lfm2", Layout(**SHORT, norm="embedding_norm"))
    add("lfm2_moe", Layout(**SHORT, norm="embedding_norm", rotary="pos_emb"))
    short_after = ("post_operator_norm", "post_ffn_norm")
    add("lfm3", Layout(**SHORT, after=short_after, norm="embedding_norm"))
    add("jamba", Layout(**MAMBA, norm="final_layernorm", forgets=True))
    add("bamba", Layout(**MAMBA, norm="final_layernorm"))
    add("granitemoe granitemoeshared", Layout(**SHARED), switches=granite)
    add("granitemoehybrid", Layout(token=("mamba", "self_attn"), **SHARED), switches=granite)
    add("olmo3 exaone4 flex_olmo", Layout(**AFTER))
    add("olmo_hybrid", Layout(**AFTER), Layout(token=("linear_attn",)))
    add("gemma2", Layout(**SANDWICH), switches=gemma)
    add("vaultgemma", Layout(before=("input_layernorm", "pre_feedforward_layernorm")), switches=gemma)
    add("nanochat", Layout(norms_embedding=True), switches=caps)
    scales = "the layer scales what it adds to, so no other residual can stand there"
    add("gemma4_text", Layout(sealed=scales), switches=gemma4)
    one = "a layer is one sub-layer, not two"
    add("nemotron_h", Layout(token=("mixer",), sealed=one, embedding="embeddings", norm="norm_f"))
    add("glm4 kolibri1", Layout(after=("post_self_attn_layernorm", "post_mlp_layernorm")))
    add(
        "afmoe",
        Layout(
            before=("input_layernorm", "pre_mlp_layernorm"),
            after=("post_attention_layernorm", "post_mlp_layernorm"),
        ),
        switches=afmoe,
    )
    add("apertus", Layout(before=("attention_layernorm", "feedforward_layernorm")))
    add("cohere", Layout(before=ONE_NORM, parallel="steps"), switches=cohere)
    add("cohere2 cohere2_moe", Layout(before=ONE_NORM, parallel="steps"), switches=cohere)
    add("phi", Layout(before=ONE_NORM, parallel="sum", norm="final_layernorm"), switches=phi)
    return found


HOSTS = _families()


def _closed() -> dict[str, str]:
    reasons = {
        "its layers have residual streams of their own": "deepseek_v4 hy_v4 qwen4_exp qwen4_exp_text inkling2_text",
        "its layers scale what they add to, so no other residual can stand there": (
            "beam doge minimax zaya inkling_text gemma4_unified_text gemma4_assistant "
            "gemma4_unified_assistant gemma3n_text"
        ),
        "an indexer chooses the keys of a layer, for several layers at once": (
            "deepseek_v32 glm_moe_dsa axk2 dots3_note dots3_note_text minimax_m3_vl_text"
        ),
        "a layer mixes tokens in two parts, attention and a state": "falcon_h1 zamba zamba2",
        "a layer is one sub-layer, not two": "mamba mamba2 falcon_mamba xlstm rwkv longcat_flash",
        "its layers differ in their heads or angles": "laguna mimo_v2_flash granite_swa granitemoe_swa",
        "its attention is made of experts": "jetmoe",
        "its embeddings are normed before the layers": "modernbert-decoder bloom",
        "its attention calls no attention function of transformers": (
            "diffllama recurrent_gemma ctrl reformer xlnet xlm cpmant moshi blt hrm_text gpt_neox_japanese"
        ),
        "its layers are not named as those of a hosted decoder are": (
            "codegen falcon gpt-sw3 gpt_bigcode gpt_neo gptj mpt openai-gpt biogpt xglm phi4_multimodal dbrx "
            "cohere_compass_text"
        ),
        "it has a vision, audio or codebook part; its text model may open alone": (
            "emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama moss_transcribe_diarize "
            "musicgen musicgen_melody trocr whisper qwen3_5 qwen3_5_moe"
        ),
        "it is an encoder, or has one": (
            "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text "
            "electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta "
            "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
        ),
    }
    return {kind: why for why, kinds in reasons.items() for kind in kinds.split()}


CLOSED = _closed()
"""Types of transformers with a causal language model that do not open, and why."""


SINCE = {"afmoe": (5, 17), "llama4_text": (5, 20)}
"""The first transformers whose own model of a type reads a text with a cache."""


def add_family(kind: str, *layouts: Layout, switches: Callable[[Any], Values] = lambda config: {}) -> None:
    """Let Fathom open models of another `model_type` of transformers, or of a package that registers a type with it.

    The models then open, train, decode and export as those of Fathom's own list. An export holds the layouts, so it
    opens without this call, where the type is registered with transformers.

    Args:
        kind: The `model_type`, for which transformers has a configuration and a decoder.
        layouts: Where a layer has its norms and parts, one for each kind of layer; the first one also names the
            embedding and the final norm.
        switches: Keys of Fathom's configuration for a configuration of the family: what its model does around its
            layers, such as `{"embedding_scale": 2.0}`.
    """
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"{kind}: register its configuration and models with transformers first (AutoConfig.register)")
    if not layouts:
        raise ValueError(f"{kind}: give at least one layout; `Layout()` fits layers whose parts are named as in Llama")
    HOSTS[kind] = Host(layouts, switches)
