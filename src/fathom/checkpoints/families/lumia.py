"""The released Depth-Attention, DenseFormer, AttnRes and mHC checkpoints, opened unchanged.

Their configurations say `llama` and carry keys of their own (two generations of them); Depth-Attention's tensors
have Qwen3's names, the three rivals' need renaming, and each contains an unused norm.

A Depth-Attention checkpoint without a stride is refused here, and so is one with two mechanisms or with another
`baseline_mode`. With `use_qk_norm: false` a checkpoint opens without QK norm; otherwise Depth-Attention opens with
`k_norm_position: after_rope`. A model's tensors show which variant of attention residuals it has (`Lumia.tensors`).
`models/loading.py` refuses unknown tensors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fathom.checkpoints.families.family import Values, known_as
from fathom.checkpoints.families.llama import LLAMA
from fathom.checkpoints.families.published import Published
from fathom.checkpoints.families.tensor_names import Piece, Rule, read_tensors
from fathom.models import FathomConfig

DEPTH_FLAGS = ("use_depth_attention", "cross_layer_pattern", "cross_layer_mode")
BASELINE_KEYS = ("baseline_mode", "residual_baseline")
READ = (
    *(*DEPTH_FLAGS, *BASELINE_KEYS, "recurrent_model", "use_qk_norm", "scale_embeds"),
    *("depth_attention_stride", "depth_softmax_stride", "depth_attention_recent_window", "depth_recent_window"),
    *("denseformer_dwa_dilation", "densetransformer_dwa_dilation"),
    *("denseformer_dwa_period", "densetransformer_dwa_period"),
    *("attnres_block_size", "attnres_recency_bias_init", "residual_baseline_num_streams"),
    *("mhc_num_streams", "mhc_sinkhorn_iters", "mhc_alpha_init"),
)
"""Keys that Llama does not have."""
SWITCHES = ("depth_", "densetransformer_", "denseformer_", "attnres_", "residual_baseline_", "mhc_", "cross_layer_")
"""How the names of further switches begin; those that are off are ignored, and so are PonderLM's."""
DEAD = r"^lm_head_layernorm\."
VECTOR = Rule("", ("",), lambda x, _: (x.reshape(1) if x.ndim == 0 else x,), lambda parts, _: parts[0])
"""Scalars become vectors of one element."""

RENAMES = (
    (r"^model\.densetransformer_dwa\.alphas\.(\d+)$", r"model.layers.\1.mlp_residual.alpha"),
    (r"^(model\.layers\.\d+)\.attnres_(attn|mlp)_aggregator\.", r"\1.\2_residual."),
    (r"^model\.attnres_final_aggregator\.", "model.final_residual."),
    (r"^(model\.layers\.\d+)\.(attn|mlp)_residual_connector\.mhc_input_norm\.", r"\1.\2_residual.norm."),
    (r"^(model\.layers\.\d+)\.(attn|mlp)_residual_connector\.mhc_dynamic_projection\.", r"\1.\2_residual.projection."),
    (r"^(model\.layers\.\d+)\.(attn|mlp)_residual_connector\.", r"\1.\2_residual."),
    (r"^model\.residual_stream_projector\.", "model.final_residual."),
)


def published_config(config: Values) -> Values:
    """The configuration in Fathom's keys."""
    for key in ("num_latent_thoughts", "ponderinglm"):
        if config.get(key):
            raise ValueError(f"{key}={config[key]}: a checkpoint that mixes over depth cannot also be a PonderLM model")
    off = [key for key, value in config.items() if key.startswith(SWITCHES) and not value]
    _, ours = known_as(LLAMA, config, (*READ, *off, "num_latent_thoughts", "ponderinglm"))
    if config.get("scale_embeds"):
        ours["embedding_scale"] = ours["hidden_size"] ** 0.5
    baseline = next((config[key] for key in BASELINE_KEYS if config.get(key)), None)
    if baseline is not None and config.get("use_depth_attention"):
        raise ValueError(f"config.json sets both use_depth_attention and baseline_mode {baseline!r}; keep one of them")
    if not config.get("use_qk_norm", True):
        ours["qk_norm"] = "none"
    return ours | (_depth_attention(config) if baseline is None else _baseline(config, baseline))


def _first(config: Values, *keys: str, default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _depth_attention(config: Values) -> Values:
    pattern = _first(config, "cross_layer_pattern", "cross_layer_mode")
    if not config.get("use_depth_attention") and pattern != "depth_softmax":
        raise ValueError(
            "config.json must set use_depth_attention, or cross_layer_pattern to 'depth_softmax'; it has the pattern "
            f"{pattern!r}"
        )
    stride = _first(config, "depth_attention_stride", "depth_softmax_stride")
    if stride is None:
        raise ValueError("this Depth-Attention checkpoint does not say its stride (depth_attention_stride)")
    recent = _first(config, "depth_attention_recent_window", "depth_recent_window", default=0)
    # Depth-Attention could be trained with its SDPA class only, which norms keys after rotating them.
    options = {"stride": stride, "recent_layers": recent}
    normed = config.get("use_qk_norm", True)
    position = "after_rope" if normed else "before_rope"
    return {"mixer": "depth_attention", "mixer_options": options, "k_norm_position": position}


def _baseline(config: Values, name: str) -> Values:
    options: Values
    if name == "denseformer":
        residual = "denseformer"
        options = {
            "dilation": _first(config, "denseformer_dwa_dilation", "densetransformer_dwa_dilation", default=1),
            "period": _first(config, "denseformer_dwa_period", "densetransformer_dwa_period", default=1),
        }
    elif name == "attnres":
        residual = "attention_residuals"
        # only the tensors show the variant; `Lumia.tensors` corrects this
        options = {
            "block_size": _first(config, "attnres_block_size", default=12),
            "recency_bias": _first(config, "attnres_recency_bias_init", default=3.0),
            "variant": "snapshot",
        }
    elif name == "mhc":
        residual = "hyper_connections"
        options = {
            "streams": _first(config, "residual_baseline_num_streams", "mhc_num_streams", default=4),
            "sinkhorn_iterations": _first(config, "mhc_sinkhorn_iters", default=20),
            "alpha": _first(config, "mhc_alpha_init", default=0.01),
        }
    else:
        raise ValueError(f"baseline_mode must be one of denseformer, attnres, mhc, got {name!r}")
    return {"residual": residual, "residual_options": options}


def rename(name: str) -> str:
    """Fathom's name for a tensor of a released checkpoint."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


class Lumia(Published):
    """Llama checkpoints whose configuration has a flag that switches on one of the mechanisms."""

    def owns(self, config: Values) -> bool:
        """Whether `config.json` belongs to one of the released models."""
        return super().owns(config) and any(config.get(key) for key in (*DEPTH_FLAGS, *BASELINE_KEYS))

    def tensors(self, directory: Path, config: FathomConfig) -> dict[str, Piece]:
        """The tensors under Fathom's names. They show the variant of attention residuals, which is then set in
        `config`."""
        found = read_tensors(directory, (), (DEAD,), config)
        if config.residual == "attention_residuals":  # only the snapshot has a bias
            biased = any(name.endswith(".recency_bias") for name in found)
            config.residual_options["variant"] = "snapshot" if biased else "block_sum"
        for piece in found.values():
            piece.rule = VECTOR
        return {rename(name): piece for name, piece in found.items()}


LUMIA = Lumia("llama", published_config)
