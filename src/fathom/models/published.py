"""The released Depth-Attention, DenseFormer, AttnRes and mHC checkpoints, opened as they are.

Their configurations say `llama` and carry keys of their own (two generations of them); Depth-Attention's tensors
have Qwen3's names, the three rivals' need renaming, and every one holds a norm that nothing reads.
"""

from __future__ import annotations

import json
import re
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

DEPTH_FLAGS = ("use_depth_attention", "recurrent_model", "cross_layer_pattern", "cross_layer_mode")
BASELINE_KEYS = ("baseline_mode", "residual_baseline")
HUB_KEYS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
DEAD = re.compile(r"^lm_head_layernorm\.")

RENAMES = (
    (r"^model\.densetransformer_dwa\.alphas\.(\d+)$", r"model.layers.\1.mlp_residual.alpha"),
    (r"^(model\.layers\.\d+)\.attnres_(attn|mlp)_aggregator\.", r"\1.\2_residual."),
    (r"^model\.attnres_final_aggregator\.", "model.final_residual."),
    (r"^(model\.layers\.\d+)\.(attn|mlp)_residual_connector\.mhc_input_norm\.", r"\1.\2_residual.norm."),
    (r"^(model\.layers\.\d+)\.(attn|mlp)_residual_connector\.mhc_dynamic_projection\.", r"\1.\2_residual.projection."),
    (r"^(model\.layers\.\d+)\.(attn|mlp)_residual_connector\.", r"\1.\2_residual."),
    (r"^model\.residual_stream_projector\.", "model.final_residual."),
)


ConfigValues: TypeAlias = dict[str, Any]
"""`config.json` as it was parsed: other projects' keys, or ours."""


def is_published(config: ConfigValues) -> bool:
    """Whether `config.json` belongs to one of the released models."""
    return config.get("model_type") == "llama" and any(config.get(key) for key in (*DEPTH_FLAGS, *BASELINE_KEYS))


def published_config(config: ConfigValues) -> ConfigValues:
    """The configuration with our keys."""
    if not config.get("use_qk_norm", True):
        raise ValueError("this checkpoint has use_qk_norm=false; Fathom's decoder always norms queries and keys")
    theirs = (*DEPTH_FLAGS, *BASELINE_KEYS, "use_qk_norm", "scale_embeds", "architectures", "auto_map")
    prefixes = ("depth_", "densetransformer_", "denseformer_", "attnres_", "residual_baseline_", "mhc_", "cross_layer_")
    ours = {k: v for k, v in config.items() if k not in theirs and not k.startswith(prefixes)}
    heads = config["num_attention_heads"]  # what Llama's configuration leaves out, it derives from this
    ours |= {
        "model_type": "fathom",
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
    }
    if config.get("scale_embeds"):
        ours["embedding_scale"] = config["hidden_size"] ** 0.5
    baseline = next((config[key] for key in BASELINE_KEYS if config.get(key)), None)
    if baseline is not None and config.get("use_depth_attention"):
        raise ValueError(f"this checkpoint says both use_depth_attention and baseline_mode {baseline!r}")
    return ours | (_depth_attention(config) if baseline is None else _baseline(config, baseline))


def _first(config: ConfigValues, *keys: str, default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _depth_attention(config: ConfigValues) -> ConfigValues:
    pattern = _first(config, "cross_layer_pattern", "cross_layer_mode")
    if not config.get("use_depth_attention") and pattern != "depth_softmax":  # `recurrent_model` alone mixes nothing
        raise ValueError(
            f"this checkpoint has neither use_depth_attention nor cross_layer_pattern 'depth_softmax', but {pattern!r}"
        )
    stride = _first(config, "depth_attention_stride", "depth_softmax_stride")
    if stride is None:
        raise ValueError("this Depth-Attention checkpoint does not say its stride (depth_attention_stride)")
    recent = _first(config, "depth_attention_recent_window", "depth_recent_window", default=0)
    # Depth-Attention could be trained with its SDPA class only, which norms keys after rotating them.
    options = {"stride": stride, "recent_layers": recent}
    return {"mixer": "depth_attention", "mixer_options": options, "k_norm_position": "after_rope"}


def _baseline(config: ConfigValues, name: str) -> ConfigValues:
    options: ConfigValues
    if name == "denseformer":
        residual = "denseformer"
        options = {
            "dilation": _first(config, "denseformer_dwa_dilation", "densetransformer_dwa_dilation", default=1),
            "period": _first(config, "denseformer_dwa_period", "densetransformer_dwa_period", default=1),
        }
    elif name == "attnres":
        residual = "attention_residuals"
        # Which variant it is shows in the tensors only; `released` corrects this.
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


def variant_of(names: list[str]) -> str:
    """Which attention-residuals variant a checkpoint's tensors belong to."""
    return "snapshot" if any(name.endswith(".recency_bias") for name in names) else "block_sum"


def rename(name: str) -> str | None:
    """Our name for a released tensor; None for one that the model does not use."""
    if DEAD.match(name):
        return None
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def published_state_dict(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Released tensors under our names; scalars become one-element vectors."""
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    return {name: t.reshape(1) if t.dim() == 0 else t for name, t in renamed.items() if name is not None}


def released(
    path: str | PathLike[str] | None, config_class: type[PretrainedConfig], kwargs: dict[str, Any]
) -> tuple[str | PathLike[str] | None, dict[str, Any]]:
    """Path and arguments for `from_pretrained`: unchanged, or with a released model's tensors and config translated."""
    hub = {key: kwargs[key] for key in HUB_KEYS if key in kwargs}
    if path is None or kwargs.get("state_dict") is not None:
        return path, kwargs
    if not is_published(PretrainedConfig.get_config_dict(path, **hub)[0]):
        return path, kwargs
    config = kwargs.pop("config", None)
    if config is None:
        config, kwargs = config_class.from_pretrained(path, return_unused_kwargs=True, **kwargs)
    kwargs.pop("use_safetensors", None)
    local = Path(path)
    if not local.is_dir():
        local = Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.safetensors.index.json"], **hub))
    tensors = {name: tensor for file in _weight_files(local) for name, tensor in load_file(file).items()}
    if config.residual == "attention_residuals":
        config.residual_options["variant"] = variant_of(list(tensors))
    return None, {**kwargs, "config": config, "state_dict": published_state_dict(tensors)}


def _weight_files(directory: Path) -> list[Path]:
    if (index := directory / "model.safetensors.index.json").exists():
        return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (whole := directory / "model.safetensors").exists():
        return [whole]
    raise FileNotFoundError(f"{directory} has neither model.safetensors nor an index of its parts")
