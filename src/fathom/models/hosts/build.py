"""Build a family's decoder from its own configuration, and adapt its layers to Fathom's residuals and mixers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..axes.fields import DecoderConfig
from ..axes.roles import View
from ..decoder.rotary import RotaryEmbedding
from ..registry import DEFAULTS, add_residuals, mechanism, recurrence_class
from ..sublayers import order_of
from .handover import HANDOVER, Handover
from .hosted_layer import Hosted, takes, whole
from .latent import LatentHandover, one_head
from .layout import Layout
from .mixed import Made, mixed
from .turning import let_turn


def native_config(config: DecoderConfig) -> PreTrainedConfig:
    """The family's own configuration, with Fathom's attention backend, vocabulary size and tying of the head."""
    theirs = CONFIG_MAPPING[config.host].from_dict(dict(config.native))
    theirs._attn_implementation = config._attn_implementation
    theirs.vocab_size = config.vocab_size  # embeddings may have been resized
    theirs.tie_word_embeddings = config.tie_word_embeddings  # or untied
    return theirs


COPIED = ("hidden_size", "num_hidden_layers", "sliding_window")
"""Keys of Fathom's configuration that repeat the family's."""
UNSET: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "rms_norm_eps": (1e-6,),
    "attention_dropout": (0.0,),
    "rope_parameters": (None, {"rope_type": "default", "rope_theta": 10000.0}),
}
"""Keys that a family's layers read from the family's configuration alone, and the values that say nothing in Fathom's:
its defaults."""


def require_own(config: DecoderConfig, theirs: PreTrainedConfig) -> None:
    """Refuse a value that the family's layers would not follow, given by a caller or edited into an export."""
    for key in (*COPIED, *UNSET):
        said, own = getattr(config, key), getattr(theirs, key, None)
        if said != own and said not in UNSET.get(key, ()):
            raise ValueError(
                f"{key}={said}: the layers of a {config.host} model follow the family's own config.json, which has "
                f"{own}; change the key there (in an export, under `native`)"
            )


def choose_backend(config: DecoderConfig) -> None:
    """Choose the attention backend that transformers would choose for the family, if the user has set none."""
    if config._attn_implementation is None and not MODEL_MAPPING[CONFIG_MAPPING[config.host]]._supports_sdpa:
        config._attn_implementation = "eager"


def causal_class(config: DecoderConfig) -> type[PreTrainedModel]:
    """transformers' class of the family's causal language model."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[config.host]]


FLAGS = (
    *("_is_stateful", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_tied_weights_keys"),
    *("_keys_to_ignore_on_load_unexpected", "_can_compile_fullgraph", "_supports_sdpa", "_supports_flash_attn"),
    *("_supports_flex_attn", "_skip_keys_device_placement"),
)
"""The properties of a model's class in transformers: whether its states can be cropped, which tensors are tied, …"""


def copy_flags(model: PreTrainedModel, theirs: type[PreTrainedModel]) -> None:
    """Copy the class attributes by which transformers queries a model's abilities from the family's own class."""
    for name in FLAGS:
        if hasattr(theirs, name):
            setattr(model, name, copy.copy(getattr(theirs, name)))


class HostRotary(nn.Module):
    """Computes rotary angles in the form that the family's layers take, by layer type if they differ; None without
    RoPE."""

    signs = False
    """Fathom's own layers take signed sines, a family's do not."""

    def __init__(self, rotary: nn.Module | None, config: DecoderConfig) -> None:
        super().__init__()
        self.rotary, kinds = rotary, dict.fromkeys(config.layer_types)
        self.kinds = tuple(kind for kind in kinds if kind in getattr(rotary, "layer_types", kinds))
        self.forgets = getattr(rotary, "rope_type", "") == "dynamic" and config.rereads
        self.by_kind = rotary is not None and "layer_type" in inspect.signature(type(rotary).forward).parameters

    def changes(self, before: int, now: int) -> bool:
        """Whether the rotary angles of a text change when it grows from `before` to `now` tokens."""
        return self.rotary is not None and RotaryEmbedding.changes(cast(Any, self.rotary), before, now)

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        """Angles of positions `[B, T]`."""
        if self.rotary is None:
            return None
        if self.forgets:  # longer texts that were read before
            own: Any = self.rotary
            own.inv_freq, own.max_seq_len_cached = own.original_inv_freq.to(x.device), own.original_max_seq_len
        return self._made(self.rotary, x, position_ids)

    def first(self, x: Tensor) -> Any:
        """The rotary angles of position 0, computed without length-dependent scaling so that it also works on the meta
        device."""
        if self.rotary is None:
            return None
        plain = partial(inspect.unwrap(type(self.rotary).forward), self.rotary)
        return self._made(plain, x, x.new_zeros(1, 1, dtype=torch.long))

    def _made(self, rotary: Callable[..., Any], x: Tensor, position_ids: Tensor) -> Any:
        if self.by_kind:
            return {kind: rotary(x, position_ids, kind) for kind in self.kinds}
        return rotary(x, position_ids)


def become_host(decoder: PreTrainedModel, config: DecoderConfig) -> None:
    """Let a decoder, before it is built, convert tensors and choose an attention backend as the family's class does."""
    choose_backend(config)
    decoder.__class__ = converting(cast(Hashable, type(decoder)), config.host)


@cache
def converting(kind: Hashable, host: str) -> type[PreTrainedModel]:
    """A subclass registered with transformers, so that it converts the family's tensors (such as experts stored one by
    one) and records the family's attention weights."""
    made = cast(type[PreTrainedModel], mixed(Made, kind, f"{cast(type, kind).__name__}_{host}"))
    recorded = MODEL_MAPPING[CONFIG_MAPPING[host]]._can_record_outputs or {}
    made._can_record_outputs = {key: kind for key, kind in recorded.items() if key == "attentions"}
    conversions = get_checkpoint_conversion_mapping(host)
    if conversions is not None:
        conversions = [each for one in conversions for each in _within(one)]
        register_checkpoint_conversion_mapping(made.__name__, conversions, overwrite=True)
    return made


def _within(conversion: Any) -> list[Any]:
    """A conversion as the decoder's. A multimodal file's prefix is taken off, and not put back on saving."""
    kind, outer = type(conversion), r"^model\."
    if kind is WeightRenaming and conversion.source_patterns[0].startswith(outer):
        # Under a head names here have no prefix; a decoder alone reads a file that may have it.
        names = [conversion.source_patterns[0].replace(outer, "^", 1), conversion.target_patterns[0]]
        return [conversion, WeightRenaming(names[0], names[1].removeprefix("model."))]
    if not (getattr(conversion, "model_prefix", None) and conversion.prefix_to_remove):
        return [conversion]
    once = type(kind.__name__, (kind,), {"__slots__": (), "reverse_transform": lambda self: self})
    return [cast(Any, once)(None, conversion.prefix_to_remove)]


def build(config: DecoderConfig) -> PreTrainedModel:
    """Build the family's decoder without its head, with its layers adapted to Fathom's residuals and mixers."""
    theirs = native_config(config)
    require_own(config, theirs)
    decoder: PreTrainedModel = MODEL_MAPPING[type(theirs)](theirs)
    layouts = Layout.all_of(config)
    for name in (layouts[0].embedding, layouts[0].norm):
        if not hasattr(decoder, name):
            raise ValueError(f"{config.host}: its decoder has no {name}: give its name for this part in the layout")
    embedding: Any = getattr(decoder, layouts[0].embedding)
    if type(embedding) is not nn.Embedding:  # one that scales: the walk does, by `embedding_scale`
        if config.embedding_scale == 1.0:
            raise ValueError(
                f"{config.host}: its {layouts[0].embedding} scales embeddings: give embedding_scale in the switches"
            )
        embedding.__class__ = nn.Embedding
        del embedding.embed_scale
    inner = type(theirs).from_dict(theirs.to_dict())
    inner._attn_implementation = HANDOVER
    keyed, recurrence = config.keyed_layers, recurrence_class(config)
    asked = config.mixer != DEFAULTS["mixer"] or recurrence.stops(config) or recurrence.shares(config)
    asked = asked or recurrence.sees(config) is not View.SAME
    for i, layer in enumerate(decoder.layers):
        layout = adopt(layer, layouts)
        add_residuals(layer, config, i)
        layer.whole = bool(layout.sealed)
        layer.order = whole if layer.whole else order_of(layer, layout.parallel)
        spare(layer)
        layer.kind, layer.depth_mixer, layer.stateful = config.layer_types[i], None, i not in keyed
        layer.forgets = layer.stateful and layout.forgets
        layer.handover = LatentHandover if layout.latent else Handover
        if i in keyed and (asked or not layout.latent):
            seen = one_head(config, theirs) if layout.latent else config
            layer.depth_mixer = mechanism("mixer", config.mixer).build(seen, keyed.index(i))
            getattr(layer, layer.parts[0]).config = inner
    if config.mixer != DEFAULTS["mixer"] and keyed and not layouts[0].latent:
        one = torch.zeros_like(embedding.weight[:1]).unsqueeze(0)
        angles, rope = host_rotary(decoder, config).first(one), getattr(theirs, "rope_parameters", None) or {}
        let_turn([decoder.layers[i] for i in keyed], angles, rope, one, config.host)
    return decoder


def undropped(decoder: PreTrainedModel) -> str | None:
    """Dropout that the family's decoder applies in training outside attention and feed-forward modules, and Fathom does
    not."""
    rate = getattr(decoder, "embedding_dropout", 0.0)
    if isinstance(rate, float) and rate > 0:
        return f"embedding_dropout={rate}"
    owners = [decoder, *(layer for layer in decoder.layers if not layer.whole)]
    parts = (item for owner in owners for item in owner.named_children() if isinstance(item[1], nn.Dropout))
    return next((f"{name} of {part.p}" for name, part in parts if part.p > 0), None)


def host_rotary(decoder: PreTrainedModel, config: DecoderConfig) -> HostRotary:
    """The module that computes the rotary angles for a family's layers."""
    return HostRotary(getattr(decoder, Layout.all_of(config)[0].rotary, None), config)


def spare(layer: nn.Module) -> None:
    """Exempt two-dimensional parameters that are not matrices from weight decay: stacked experts' biases, state decay
    rates."""
    for part in layer.modules():
        names = [name for name, _ in part.named_parameters(recurse=False)]
        if spared := tuple(name for name in names if name == "A_log" or name.endswith("bias")):
            cast(Any, part).no_weight_decay = spared


def adopt(layer: nn.Module, layouts: tuple[Layout, ...]) -> Layout:
    """Turn a family's layer into a hosted layer by changing its class to a subclass; returns the layout that fits the
    layer."""
    held = {name for name, part in layer.named_children() if part is not None}
    layout = next((one for one in layouts if one.fits(held)), None)
    kind: Any = type(layer)
    if layout is None:
        raise ValueError(f"no layout matches the parts of {kind.__name__}: {', '.join(sorted(held))}")
    named = {*layout.before, *layout.after, *layout.token, *layout.channel}
    trained = {name for name, part in layer.named_children() if any(True for _ in part.parameters())}
    if trained - named and not layout.sealed:
        raise ValueError(f"{kind.__name__}: its layout does not name the parts {', '.join(sorted(trained - named))}")
    layer.__class__ = mixed(Hosted, kind, "DecoderLayer")
    ours: Any = layer
    ours.parts = next(name for name in layout.token if name in held), tuple(x for x in layout.channel if x in held)
    part = ours._modules[ours.parts[0]]
    ours.taken = takes(kind if layout.sealed else type(part))
    ours.own_attention = getattr(inspect.getmodule(type(part)), "eager_attention_forward", None)
    ours.before, ours.after = ((None, None),) * 2 if layout.sealed else (layout.before, layout.after)
    ours.multiplier = getattr(layer, layout.multiplier) if layout.multiplier else 1.0
    return layout
