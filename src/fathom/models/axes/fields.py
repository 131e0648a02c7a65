"""The fields of a configuration: what the parts of a decoder and its mechanisms read.

`FathomConfig` (`configuration.py`) has these fields and checks them, which needs the list of all mechanisms; so
mechanisms and parts name this class in their hints, and nothing that they import imports them.
"""

from __future__ import annotations

from dataclasses import field

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

KEYED = ("full_attention", "sliding_attention", "chunked_attention")
"""Types of layers that keep a key and a value of every token."""


@strict
class DecoderConfig(Qwen3Config):
    """A backbone's switches, and the mechanism on each axis (mixer, residual, recurrence); other keys are
    `Qwen3Config`'s."""

    mixer: str = "none"
    """Which value attention stores and reads: `none` (the layer's own), or a mechanism."""
    residual: str = "plain"
    """How a layer's output reaches later layers: `plain`, or a mechanism."""
    recurrence: str = "once"
    """How many trips a token makes through the stack: `once`, or a mechanism."""
    mixer_options: dict = field(default_factory=dict)
    """Options of the mixer, documented in its file; missing ones get defaults."""
    residual_options: dict = field(default_factory=dict)
    """Options of the residual."""
    recurrence_options: dict = field(default_factory=dict)
    """Options of the recurrence."""
    max_trips: int | None = None
    """Maximum trips per token, up to the number that the model was trained for, unless a forward pass sets it; None for
    no limit. Engines can set it too (vLLM's `hf_overrides`)."""
    norm: str = "rms"
    """The norm of sub-layers and before the head: `rms`, `rms_wide`, `rms_offset`, `layer` or `layer_plain` (see
    `norms.py`). `rms_norm_eps` is the ε of all norms."""
    norm_placement: str = "before"
    """Where norms stand: `before` each sub-layer, `after` it, or `both`."""
    qk_norm: str = "head"
    """The part of queries and keys that is normed together: each `head`, the `full` projection, or nothing (`none`)."""
    k_norm_position: str = "before_rope"
    """Keys are normed `before_rope`, or `after_rope` as the released Depth-Attention weights need."""
    parallel_residual: bool = False
    """Whether attention and MLP of a layer read the same state, and both are added to it."""
    gated_mlp: bool = True
    """Whether the MLP has a gate."""
    output_bias: bool | None = None
    """Whether o_proj has a bias; None follows `attention_bias`."""
    mlp_bias: bool = False
    """Whether the MLP's projections have biases."""
    experts: int = 0
    """Experts of each layer's MLP, of `intermediate_size / experts_per_token` channels each; 0 for a dense MLP."""
    experts_per_token: int = 2
    """How many of them a token visits."""
    router_aux_loss_coef: float = 0.01
    """Factor on the loss that balances experts in training; 0 for none."""
    positions: str = "rotary"
    """How positions enter: `rotary`, or `learned`, a table of `max_position_embeddings` rows that is added to the
    embeddings."""
    position_offset: int = 0
    """Rows of a learned table of positions before position 0."""
    no_rope_layers: list[int] | None = None
    """For each layer 1 if queries and keys are rotated, else 0; None rotates in all layers."""
    rope_float32: bool = False
    """Whether queries and keys are rotated in at least float32."""
    attention_scale: float | None = None
    """Factor on attention's logits; None: 1 / sqrt(head_dim)."""
    scale_queries: bool = False
    """Whether `attention_scale` multiplies the queries instead of the logits."""
    attn_logit_softcapping: float | None = None
    """c of c · tanh(logit / c) in attention; None for no cap."""
    final_logit_softcapping: float | None = None
    """c of the same formula for the head's logits; None for no cap."""
    embedding_scale: float = 1.0
    """Factor on the input embeddings, with any mechanism."""
    round_embedding_scale: bool = False
    """Whether `embedding_scale` is rounded to the model's dtype first."""
    residual_multiplier: float = 1.0
    """Factor on every sub-layer's output."""
    logits_scaling: float = 1.0
    """Divisor of the head's logits."""
    output_init: str = "plain"
    """`depth` divides the initial o_proj and down_proj by sqrt(2 · layers · trips that add to one stream)."""
    host: str = ""
    """The family whose own layers the decoder has, by its `model_type`; `native` describes them. Empty for Fathom's."""
    host_layouts: list = field(default_factory=list)
    """The parts of the host's layers by the names of their modules (`hosts/layout.py`), one for each kind of layer."""
    logits_multiplier: float = 1.0
    """Factor on the head's logits."""
    hidden_scaling: float = 1.0
    """Divisor of the head's input."""
    head_bias: bool = False
    """Whether the head has a bias."""
    native: dict = field(default_factory=dict)
    """The original `config.json` of a model of another family."""
    ignore_keys: list[str] | None = None
    """Keys of that `config.json` to read the model without; of a key within another, as in `rope_scaling.factor`."""

    @property
    def keyed_layers(self) -> tuple[int, ...]:
        """The indices of layers that cache a key and a value for each token, unlike layers with a recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind in KEYED)

    @property
    def read_across_trips(self) -> str:
        """How the mixer reads sources from earlier iterations: `none`, `same_layer`, `grid` or `first`."""
        return "none"

    @property
    def parallel(self) -> str:
        """How attention and MLP of a layer are added if both read the same state: `sum` if their sum is added, `steps`
        if one is added after the other; empty if the MLP reads what attention wrote."""
        if not self.host:
            return "sum" if self.parallel_residual else ""
        kinds = {layout.get("parallel", "") for layout in self.host_layouts}
        if len(kinds) > 1 and not self.native.get("use_parallel_residual"):  # StableLM has both
            return ""
        return max(kinds, default="")

    @property
    def attention_chunk_size(self) -> int | None:
        """The chunk size of a host's chunked attention, under the name that caches ask for; None without chunked
        attention."""
        return self.native.get("attention_chunk_size") if "chunked_attention" in self.layer_types else None

    @property
    def rope_by_layer_type(self) -> bool:
        """Whether `rope_parameters` holds separate parameters for each layer type."""
        rope = self.rope_parameters or {}
        return bool(rope and self.layer_types) and all(isinstance(rope.get(kind), dict) for kind in self.layer_types)

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys."""
        return self.positions == "rotary" and (self.no_rope_layers is None or bool(self.no_rope_layers[layer]))
