"""`FathomConfig`: Qwen3's configuration and one value for each axis of depth."""

from __future__ import annotations

from dataclasses import field
from difflib import get_close_matches
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .published import is_published, published_config
from .registry import AXES, DEFAULTS, check_trips, present_options, recurrence_class, resolve_options

K_NORM_POSITIONS = ("before_rope", "after_rope")
OUTPUT_INITS = ("plain", "depth")
OURS = (*AXES, *(f"{axis}_options" for axis in AXES), "k_norm_position", "embedding_scale", "output_init", "max_trips")
POSITIVE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")


@strict
class FathomConfig(Qwen3Config):
    """The configuration of a Fathom decoder: Qwen3's, and one value for each axis of depth.

    With every axis at its first value the model is Qwen3, bit for bit. Values and their options are listed by
    `fathom mechanisms` and checked here; what is wrong is a `ValueError` that names the key.

    Args:
        mixer: What value attention reads: `none`, or a mechanism.
        residual: How a layer's output reaches later layers: `plain`, or a mechanism.
        recurrence: How many trips a token makes through the stack: `once`, or a mechanism.
        mixer_options: Options of the mixer; those left out get its defaults.
        residual_options: Options of the residual.
        recurrence_options: Options of the recurrence.
        k_norm_position: Keys are normed `before_rope`, or `after_rope` as the released Depth-Attention weights need.
        embedding_scale: Factor on the input embeddings.
        output_init: `plain`, or `depth`: smaller initial output projections, the deeper the model.
        max_trips: Most trips per token, up to the number that the model was trained for; None for no limit.

    Every other key is `Qwen3Config`'s.
    """

    model_type = "fathom"
    base_model_pp_plan = None  # sources would have to travel from stage to stage
    keys_to_ignore_at_inference = ["past_key_values", "aux_losses", "metrics", "trips"]

    mixer: str = "none"
    """What value attention reads."""
    residual: str = "plain"
    """How a layer's output reaches later layers."""
    recurrence: str = "once"
    """How many trips a token makes through the stack."""
    mixer_options: dict = field(default_factory=dict)
    """Options of the mixer, as its file documents them."""
    residual_options: dict = field(default_factory=dict)
    """Options of the residual."""
    recurrence_options: dict = field(default_factory=dict)
    """Options of the recurrence."""
    max_trips: int | None = None
    """Most trips per token, unless a call says otherwise; engines can set it too (vLLM's `hf_overrides`)."""
    k_norm_position: str = "before_rope"
    """`after_rope` norms keys after rotating them, as the released Depth-Attention weights need."""
    embedding_scale: float = 1.0
    """Factor on the input embeddings, for every mechanism alike."""
    output_init: str = "plain"
    """`depth` divides the initial o_proj and down_proj by sqrt(2 · layers · trips that add to one stream)."""

    def __post_init__(self, **kwargs: object) -> None:
        for key in kwargs:
            if near := get_close_matches(key, OURS, cutoff=0.8):
                raise ValueError(f"{key} is not a key of the configuration; did you mean {near[0]}?")
        if isinstance(self.dtype, str) and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype must be a type of torch, such as float32 or bfloat16, got {self.dtype!r}")
        super().__post_init__(**kwargs)
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even, since rotary embedding turns pairs")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be one of {', '.join(ACT2FN)}, got {self.hidden_act!r}")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout must be at least 0 and below 1, got {self.attention_dropout}")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id must be below vocab_size ({self.vocab_size}), got {self.pad_token_id}")
        if self.k_norm_position not in K_NORM_POSITIONS:
            raise ValueError(
                f"k_norm_position must be one of {', '.join(K_NORM_POSITIONS)}, got {self.k_norm_position!r}"
            )
        if self.output_init not in OUTPUT_INITS:
            raise ValueError(f"output_init must be one of {', '.join(OUTPUT_INITS)}, got {self.output_init!r}")
        for axis in AXES:
            setattr(self, f"{axis}_options", resolve_options(self, axis))
        check_trips(self)
        most = recurrence_class(self).most_trips(self)
        if self.max_trips is not None and not 1 <= self.max_trips <= most:
            raise ValueError(
                f"max_trips must be between 1 and {most}, the trips of this {self.recurrence}, got {self.max_trips}"
            )

    def validate_rope(self) -> None:
        """As in transformers, with messages that name an unknown `rope_type` and the key that lacks a parameter."""
        given = self.rope_parameters or {}
        for part in given.values() if given and all(isinstance(part, dict) for part in given.values()) else [given]:
            kind, theta = part.get("rope_type", part.get("type", "default")), part.get("rope_theta", 1.0)
            if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
                allowed = ", ".join(dict.fromkeys(["default", *ROPE_INIT_FUNCTIONS]))
                raise ValueError(f"rope_parameters.rope_type must be one of {allowed}, got {kind!r}")
            if isinstance(theta, int | float) and not theta > 0:
                raise ValueError(f"rope_parameters.rope_theta must be positive, got {theta}")
        try:
            super().validate_rope()
        except KeyError as error:
            raise ValueError(f"rope_parameters: {error.args[0]}") from None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, but overrides of an axis are applied before validation, not after."""
        config_dict = dict(config_dict)
        for axis in AXES:
            options = f"{axis}_options"
            if axis in kwargs and kwargs[axis] != config_dict.get(axis):
                config_dict.pop(options, None)  # they belonged to another mechanism
            elif isinstance(kwargs.get(options), dict):
                name = kwargs.get(axis) or config_dict.get(axis) or DEFAULTS[axis]
                both = (present_options(axis, name, part or {}) for part in (config_dict.get(options), kwargs[options]))
                kwargs[options] = {key: value for part in both for key, value in part.items()}
        if "num_hidden_layers" in kwargs:
            config_dict.pop("layer_types", None)
        for key in [k for k in kwargs if k in cls.__dataclass_fields__ and k not in ("dtype", "torch_dtype")]:
            config_dict[key] = kwargs.pop(key)
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def get_config_dict(cls, *args: object, **kwargs: object) -> tuple[dict[str, object], dict[str, object]]:
        """Read `config.json`: ours, any Qwen3's, or one of the released depth models."""
        config_dict, kwargs = super().get_config_dict(*args, **kwargs)
        if not isinstance(config_dict, dict):
            raise ValueError(f"{args[0] if args else 'config.json'}: config.json is not a JSON object")
        kind = config_dict.get("model_type")
        if is_published(config_dict):
            config_dict = published_config(config_dict)
        elif kind == "qwen3":
            config_dict = {**config_dict, "model_type": cls.model_type}
        elif kind not in (cls.model_type, None):
            raise ValueError(
                f"{args[0] if args else 'this checkpoint'} is a {kind} model; Fathom opens qwen3 and fathom"
            )
        return config_dict, kwargs
