"""`FathomConfig`: a backbone's switches (Qwen3's by default), and a mechanism for each axis (mixer, residual,
recurrence).

The fields, the switches among them, are declared in `axes/fields.py`.

`checkpoints/families/keys.py` refuses unknown keys of other families; `ignore_keys` are left out before
(`get_config_dict`). `loading.py` refuses keys that contradict a checkpoint's shapes. `rereads` decides which models
read a text again (`generation.py`) when `longrope` or `dynamic` RoPE changes its angles.
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .axes.cache_name import CACHE
from .axes.fields import DecoderConfig
from .axes.roles import MixerOptions
from .decoder.norms import NORMS
from .foreign import reader, without
from .registry import (
    AXES,
    DEFAULTS,
    across_trips,
    check_trips,
    check_visits,
    mechanism,
    recurrence_class,
    resolve_options,
)

LOCAL = "local_params"
"""transformers' name for a module that computes with its own parts of parameters, in releases that have it."""
CHOICES = {
    "norm": tuple(NORMS),
    "norm_placement": ("before", "after", "both"),
    "qk_norm": ("head", "full", "none"),
    "k_norm_position": ("before_rope", "after_rope"),
    "positions": ("rotary", "learned"),
    "output_init": ("plain", "depth"),
}
"""The values of every key that is a choice, its default first."""
POSITIVE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
SCALES = ("embedding_scale", "residual_multiplier", "logits_scaling")
CAPS = ("attention_scale", "attn_logit_softcapping", "final_logit_softcapping")
STRETCHING = ("dynamic", "longrope")
"""Types of RoPE whose angles depend on the longest text of a batch."""
NOT_NEGATIVE = ("initializer_range", "rms_norm_eps")


def together(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Merge a file's options with a caller's, which take precedence; `blend_steps` alone opens a mechanism saved with
    `blend` 0."""
    opens = bool(given.get("blend_steps")) and "blend" not in given and saved.get("blend") == 0
    return {**saved, **({"blend": 1.0} if opens else {}), **given}


def _is_number(value: object, *kinds: type) -> bool:
    """Whether a value is a number, or of the given kinds; in Python, true is also the integer 1, here it is not."""
    return isinstance(value, kinds or (int, float)) and not isinstance(value, bool)


@strict
class FathomConfig(DecoderConfig):
    """The configuration of a Fathom decoder: a backbone's switches, and a mechanism for each axis (mixer, residual,
    recurrence).

    With every axis at its first value the model equals its family's own model, bit for bit. Every switch defaults to
    Qwen3's. `fathom mechanisms` lists the values and their options. Invalid values raise a `ValueError` that names the
    key.

    Every other key is `Qwen3Config`'s.
    """

    model_type = "fathom"
    base_model_pp_plan = None  # sources would have to be sent from stage to stage
    keys_to_ignore_at_inference = [CACHE, "aux_losses", "metrics", "trips"]

    def __post_init__(self, **kwargs: object) -> None:
        for key in kwargs:
            if near := get_close_matches(key, ours(), cutoff=0.8):
                raise ValueError(f"{key} is not a key of the configuration; did you mean {near[0]}?")
        if isinstance(self.dtype, str) and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype must be a type of torch, such as float32 or bfloat16, got {self.dtype!r}")
        super().__post_init__(**kwargs)
        self._check_switches()
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be one of {', '.join(ACT2FN)}, got {self.hidden_act!r}")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout must be at least 0 and below 1, got {self.attention_dropout}")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id must be below vocab_size ({self.vocab_size}), got {self.pad_token_id}")
        for axis in AXES:
            setattr(self, f"{axis}_options", resolve_options(self, axis))
        self.base_model_tp_plan = self._tensor_parallel_plan()
        check_trips(self)
        check_visits(self)
        most = recurrence_class(self).most_trips(self)
        if self.max_trips is not None and not (_is_number(self.max_trips, int) and 1 <= self.max_trips <= most):
            raise ValueError(
                f"max_trips must be between 1 and {most}, the iterations of recurrence={self.recurrence}, got "
                f"{self.max_trips}"
            )

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """How transformers splits projections for tensor parallelism: attention by heads, the MLP by channels.

        A norm over the full width of queries and keys needs all heads, so attention then runs unsplit on each process.
        """
        full = self.qk_norm == "full"
        attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise_gather_output" if full else "colwise")
        if self.qk_norm == "head":
            attention |= dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")
        attention["o_proj"] = "rowwise_split_input" if full else "rowwise"
        if not full and LOCAL in ALL_PARALLEL_STYLES:
            options = mechanism("mixer", self.mixer).options
            for gate in options.of(self).head_gates if issubclass(options, MixerOptions) else ():
                attention |= {f"mixer.{gate}": "colwise", f"mixer.{gate.rpartition('.')[0]}": LOCAL}
        mlp = dict.fromkeys(("gate_proj", "up_proj") if self.gated_mlp else ("up_proj",), "colwise")
        mlp["down_proj"] = "rowwise"
        parts = {"self_attn": attention, "mlp.experts.*" if self.experts else "mlp": mlp}
        return {f"layers.*.{part}.{name}": how for part, plan in parts.items() for name, how in plan.items()}

    def validate_layer_type(self) -> None:
        """See transformers. A family checks its own: 5.16 takes any class but its own for older code, and renames a
        family's `conv` in it."""
        if not self.host:
            super().validate_layer_type()

    def _check_switches(self) -> None:
        """Refuse combinations of switches that no backbone has."""
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        for name in (*SCALES, *CAPS):
            number = getattr(self, name)
            if not (number is None and name in CAPS) and not (_is_number(number) and 0 < number < math.inf):
                raise ValueError(f"{name} must be a positive number, got {number}")
        for name in NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        if self.output_bias is None:
            self.output_bias = self.attention_bias
        if self.k_norm_position == "after_rope" and self.qk_norm != "head":
            raise ValueError(f"k_norm_position=after_rope needs qk_norm=head, got {self.qk_norm}")
        if self.parallel_residual and self.norm_placement != "before":
            raise ValueError(f"parallel_residual needs norm_placement=before, got {self.norm_placement}")
        self._check_experts()
        if not _is_number(self.position_offset, int) or self.position_offset < 0:
            raise ValueError(f"position_offset must be an integer of at least 0, got {self.position_offset}")
        layers = self.num_hidden_layers
        if self.no_rope_layers is not None and not isinstance(self.no_rope_layers, (list, tuple)):
            raise ValueError(f"no_rope_layers must be a list or null, got {self.no_rope_layers}")
        if self.no_rope_layers is not None and len(self.no_rope_layers) != layers:
            raise ValueError(f"no_rope_layers needs {layers} entries, one per layer, got {len(self.no_rope_layers)}")
        if self.positions == "rotary":
            whole = self.rope_parameters or {}
            for rope in [whole[kind] for kind in self.layer_types] if self.rope_by_layer_type else [whole]:
                part = 1.0 if rope.get("rope_type") == "proportional" else rope.get("partial_rotary_factor", 1.0)
                if (turned := int(self.head_dim * part)) % 2 or turned < 2:
                    raise ValueError(
                        f"head_dim ({self.head_dim}): RoPE must rotate an even number of channels, 2 or more, "
                        f"got {turned}"
                    )

    def _check_experts(self) -> None:
        """Refuse numbers of experts that cannot be built, such as more experts per token than experts."""
        for name in ("experts", "experts_per_token"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name}={value}: allowed: a whole number")
        if not isinstance(self.router_aux_loss_coef, (int, float)) or not 0 <= self.router_aux_loss_coef < math.inf:
            raise ValueError(f"router_aux_loss_coef must be a number of at least 0, got {self.router_aux_loss_coef}")
        if self.experts == 0:
            return
        if self.host:
            raise ValueError(f"experts={self.experts}: the MLPs of a {self.host} model cannot be replaced")
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token must be between 1 and experts ({self.experts}), got {self.experts_per_token}"
            )
        if self.intermediate_size % self.experts_per_token:
            raise ValueError(
                f"intermediate_size ({self.intermediate_size}) must be a multiple of experts_per_token "
                f"({self.experts_per_token}), because an expert's width is their quotient"
            )

    @property
    def read_across_trips(self) -> str:
        """How the mixer reads sources from earlier iterations, as its options or the recurrence's rule say."""
        return across_trips(self)

    @property
    def mixes_unrotated(self) -> bool:
        """Whether mixers use queries and keys before rotation: if layers have different rotary angles, scores between
        rotated ones would depend on a token's position. Keys that are normed after rotation stay rotated."""
        if self.mixer == DEFAULTS["mixer"] or self.k_norm_position == "after_rope" or self.positions == "learned":
            return False
        rope = self.rope_parameters or {}
        kinds = self.layer_types if self.rope_by_layer_type else []
        turns = [self.rotates(i) and (rope[kinds[i]] if kinds else rope) for i in range(self.num_hidden_layers)]
        return any(turn != turns[0] for turn in turns)

    @property
    def rope_stretches(self) -> bool:
        """Whether rotary angles change with the length of a text."""
        named = (self.native.get(name) for name in ("rope_parameters", "rope_scaling"))  # a host's, as published
        rope = next((one for one in named if one), {}) if self.host else self.rope_parameters or {}
        parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
        return self.positions == "rotary" and any(
            part.get("rope_type", part.get("type")) in STRETCHING for part in parts
        )

    @property
    def rereads(self) -> bool:
        """Whether generation recomputes the cache when rotary angles change with length, since cached keys have the old
        angles. The classes of Phi-3 and PhiMoE do. Those of other families keep the cached keys, and so does a model
        without mechanisms, which equals them."""
        depth = any(getattr(self, axis) != DEFAULTS[axis] for axis in AXES)
        return self.rope_stretches and (depth or self.native.get("model_type") in ("phi3", "phimoe"))

    def validate_rope(self) -> None:
        """Like transformers' method, but its errors name an unknown `rope_type` or a missing parameter."""
        given = self.rope_parameters or {}
        for part in given.values() if given and all(isinstance(part, dict) for part in given.values()) else [given]:
            kind, theta = part.get("rope_type", part.get("type", "default")), part.get("rope_theta", 1.0)
            if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
                allowed = ", ".join(dict.fromkeys(["default", *ROPE_INIT_FUNCTIONS]))
                raise ValueError(f"rope_parameters.rope_type must be one of {allowed}, got {kind!r}")
            if isinstance(theta, int | float) and not 0 < theta < math.inf:
                raise ValueError(f"rope_parameters.rope_theta must be positive, got {theta}")
        try:
            super().validate_rope()
        except KeyError as error:
            raise ValueError(f"rope_parameters: {error.args[0]}") from None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Like transformers' method, but overridden keys are applied before validation, not after it."""
        config_dict = dict(config_dict)
        for axis in AXES:
            options = f"{axis}_options"
            if axis in kwargs and kwargs[axis] != config_dict.get(axis):
                config_dict.pop(options, None)  # they belong to another mechanism
            elif isinstance(kwargs.get(options), dict) and isinstance(config_dict.get(options), dict):
                kwargs[options] = together(config_dict[options], kwargs[options])
        if "num_hidden_layers" in kwargs:
            config_dict.pop("layer_types", None)
            config_dict.pop("no_rope_layers", None)
        for key in [k for k in kwargs if k in cls.__dataclass_fields__ and k not in ("dtype", "torch_dtype")]:
            config_dict[key] = kwargs.pop(key)
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def get_config_dict(cls, *args: object, **kwargs: object) -> tuple[dict[str, object], dict[str, object]]:
        """Read `config.json` of Fathom, or of any known family if Fathom is installed."""
        given: Any = kwargs.pop("ignore_keys", None) or ()
        ignored = [given] if isinstance(given, str) else list(given)
        config_dict, kwargs = super().get_config_dict(*args, **kwargs)
        where = args[0] if args else "config.json"
        if not isinstance(config_dict, dict):
            raise ValueError(f"{where}: config.json is not a JSON object")
        if config_dict.get("model_type") not in (cls.model_type, None):
            config_dict = reader().configuration(without(config_dict, ignored), str(where))
            config_dict |= {"ignore_keys": ignored} if ignored else {}
        return config_dict, kwargs


def ours() -> tuple[str, ...]:
    """The keys of `FathomConfig` that `Qwen3Config` lacks."""
    return tuple(key for key in FathomConfig.__dataclass_fields__ if key not in Qwen3Config.__dataclass_fields__)
