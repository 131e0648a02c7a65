"""The decoder and its forward pass: Qwen3's, with a mixer, a residual and a recurrence that mechanisms can replace.

`Attention` asks the mixer which value to store; `DecoderLayer` reads from and writes to the residual; `FathomModel`
embeds, and hands over to `walk.py`, which walks the plan of `slots.py` and gives every layer the sources that
its mixer reads. Parameter names are Qwen3's, so no checkpoint is ever converted.

Dropout of hidden states is not applied. `pretrained.py` initialises weights, and decides where reentrant activation
checkpointing is refused. `hosts/arrangement.py` refuses padding between tokens that would use up a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import (
    LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
    create_causal_mask,
    create_masks_for_generate,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .axes.cache_name import CACHE, by_any_name, returned
from .axes.numerics import IGNORE
from .axes.roles import Recurrence, Residual, ResidualState, TripState, ValueMixer, View, Ways, watched
from .axes.visit import Plan
from .configuration import FathomConfig
from .decoder.capped_attention import attend_capped
from .decoder.experts import feed_forward
from .decoder.head import ScaledHead, build_head, check_adapter
from .decoder.loss import causal_lm_loss, per_item, shifted, token_losses, weighted_lm_loss
from .decoder.norms import NORMS
from .decoder.rotary import Angles, Rotation, build_rotary, rotate
from .generation import FathomGenerationMixin
from .hosts.arrangement import Arrangement, check_windows, of_documents, of_padding
from .hosts.build import become_host, build, causal_class, choose_backend, copy_flags, host_rotary, undropped
from .hosts.layout import Layout
from .hosts.refusals import check_host
from .hosts.router import Balance, Routing, adopt_routers, balance_of, mean_of_trips
from .hosts.selecting import let_select
from .hosts.turning import turning
from .pretrained import FathomPreTrainedModel
from .registry import add_residuals, mechanism
from .sublayers import Sublayers, in_turn, order_of
from .trips.engines import COMPANY, ENGINES, CachedAttention, check_engine, handed, seat, take_banks
from .trips.flex_reading import ReadingRule, attend_by_rule
from .trips.reading import attend_beside, with_key_bias
from .trips.slot_cache import with_slots
from .trips.slots import plan, with_banks
from .trips.walk import Inputs, Store
from .trips.walk import run as run_trips

NORM_NAMES: Mapping[str, tuple[tuple[str | None, str | None], tuple[str | None, str | None]]] = {
    "before": (("input_layernorm", "post_attention_layernorm"), (None, None)),
    "after": ((None, None), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "both": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
"""The norms before and after a layer's two sub-layers by placement, under the names that transformers gives them."""
Places = bool | int | Sequence[int]
"""The values of `output_hidden_states`: all or none, one, or some of them."""


class Attention(CachedAttention):
    """Grouped-query attention. The mixer acts between the projections and the cache."""

    def __init__(self, config: FathomConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.query_scale: float | None = scale if config.scale_queries else None
        self.scaling: float = 1.0 if config.scale_queries else scale
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.layer_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None
        self.cap = {} if config.attn_logit_softcapping is None else {"softcap": config.attn_logit_softcapping}
        self.banks: dict[int, nn.Module] = {}  # by index, for engines that attach their cache to modules
        self.qk_norm, self.rotates = config.qk_norm, config.rotates(layer_idx)
        self.norm_rotated_keys = config.k_norm_position == "after_rope"

        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bool(config.output_bias))
        norm, by_head = NORMS[config.norm], self.qk_norm == "head"
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if self.qk_norm != "none":
            self.q_norm = norm(self.head_dim if by_head else width, config.rms_norm_eps)
            self.k_norm = norm(self.head_dim if by_head else kv_width, config.rms_norm_eps)
        self.mixer: ValueMixer = mechanism("mixer", config.mixer).build(config, layer_idx)
        self.asks = self.mixer.asks
        whole = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) == 1.0 and not config.rope_float32
        self.mixes_unrotated = config.mixes_unrotated
        usual = self.qk_norm == "head" and config.norm == "rms"
        self.fusible = whole and self.rotates and usual and not self.mixes_unrotated

    def forward(
        self,
        hidden_states: Tensor,
        rotation: Rotation,
        attention_mask: Tensor | ReadingRule | None,
        past_key_values: Cache | None = None,
        bank: int | None = None,
        sources: tuple[Tensor, ...] = (),
        earlier: tuple[Tensor, ...] = (),
        alive: Tensor | None = None,
        key_bias: Tensor | None = None,
        others: tuple[Tensor, Tensor] | None = None,
        lent: tuple[Tensor, Tensor] | None = None,
        backend: str | None = None,
        **kwargs: object,
    ) -> tuple[Any, ...]:
        """Returns attention's output, its weights (or None, depending on the backend), and the new tokens' key and
        mixed value. Where mixers score un-rotated keys, the un-rotated key comes before these two.

        Queries, keys and values are projections of `hidden_states`. With `others`, keys are projections of its first
        tensor and values of its second. With `lent`, its two tensors are all keys and values, and none are projected.
        `earlier` holds keys and values of the same tokens' earlier iterations through this layer. They are read in
        addition to the new ones, or instead of them where `alive` (`[B, 1, T, 1]`) is False. `key_bias` (`[B, T]`) is
        added to the logit of every query that reads the slot. `backend` is the attention backend. The walk reads it
        from the configuration once for all layers, because reading a field of a configuration takes as long as a small
        matrix product.
        """
        shape = hidden_states.shape[:-1]
        if isinstance(lent, tuple):
            query, key, value, scored = self._asked(hidden_states, rotation), *lent, lent[0]
            past_key_values = None
        elif isinstance(others, tuple):
            query, key, value, scored = self._mixed(*self._projected(hidden_states, *others), rotation, sources)
        else:  # also where vLLM traces with a stand-in for every argument, to fuse these three
            query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
            query, key, value, scored = self._mixed(query, key, value, rotation, sources)
        if alive is not None:
            key, value = (torch.where(alive, new, old) for new, old in zip((key, value), earlier, strict=True))
            earlier = ()
        own = self.layer_idx if bank is None else bank
        if past_key_values is None:
            keys, values = handed(key, value, own, kwargs)
        else:
            keys, values = past_key_values.update(key, value, own)
        if self.asks:
            query = self.mixer.asked(query)
        if self.query_scale is not None:
            query = query * self.query_scale
        if key_bias is not None:
            query, keys, values = with_key_bias(query, keys, values, key_bias, self.scaling)

        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            backend if isinstance(backend, str) else self.config._attn_implementation,
            attend_capped if self.cap else eager_attention_forward,
        )
        if isinstance(attention_mask, ReadingRule):
            attend = attend_by_rule
        if earlier:
            attend = partial(attend_beside, attend, earlier)
        output, weights = attend(
            self if bank is None else seat(self, bank, kwargs),
            query,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **self.cap,
            **kwargs,
        )
        if key_bias is not None:
            output = output[..., : self.head_dim]
        output = self.o_proj(output.reshape(*shape, -1).contiguous())
        return (output, weights, scored, key, value) if self.mixes_unrotated else (output, weights, key, value)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Ways:
        """Project the inputs of queries, keys and values to `[B, T, H D]` each."""
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)

    def _asked(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        """Compute only the queries `[B, H, T, D]`, if keys and values are reused from an earlier iteration."""
        query = self.q_proj(hidden_states)
        query = self.q_norm(query) if self.qk_norm == "full" else query
        query = query.view(*query.shape[:-1], -1, self.head_dim)
        query = (self.q_norm(query) if self.qk_norm == "head" else query).transpose(1, 2)
        angles = self._angles(rotation)
        return query if angles is None else rotate(query, query[:, :0], *angles)[0]  # without a key

    def _angles(self, rotation: Rotation) -> Angles | None:
        """The rotary angles for this layer's queries and keys; None if it does not rotate them."""
        if not self.rotates:
            return None
        return rotation[self.layer_type] if isinstance(rotation, dict) else rotation

    def _mixed(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, sources: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values `[B, H, T, D]` for attention, and the keys that mixers score, from projections `[B,
        T, H D]`."""
        if self.qk_norm == "full":
            query, key = self.q_norm(query), self.k_norm(key)
        heads = (*query.shape[:-1], -1, self.head_dim)
        query, key, value = query.view(heads), key.view(heads), value.view(heads)
        angles = rotation if self.rotates and not isinstance(rotation, dict) else self._angles(rotation)
        parts: Any = self._modules
        mixer, q_norm, k_norm = parts["mixer"], parts["q_norm"], parts["k_norm"]
        fused = mixer.fused(value, sources) if sources and self.fusible else None
        if fused is not None and not any(watched(part) for part in (q_norm, k_norm, mixer)):
            query, key, value = fused((query, key, value), sources, (q_norm, k_norm), angles, self.norm_rotated_keys)
            return query, key, value, key
        if self.qk_norm == "head":
            query = q_norm(query)
            key = key if self.norm_rotated_keys else k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.mixes_unrotated:
            scored, value = mixer.stored(query, key, value, sources)
            query, key = (query, scored) if angles is None else rotate(query, scored, *angles)
            return query, key, value, scored
        if angles is not None:
            query, key = rotate(query, key, *angles)
        if self.norm_rotated_keys:
            key = k_norm(key)
        if type(mixer) is not ValueMixer or watched(mixer):  # the plain one changes nothing
            key, value = mixer.stored(query, key, value, sources)
        return query, key, value, key


class DecoderLayer(Routing, Sublayers, GradientCheckpointingLayer):
    """A decoder layer: attention and MLP, each with a residual that reads before it and writes after it."""

    def __init__(self, config: FathomConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = feed_forward(config)
        for name, part in self.named_modules():
            if name == "self_attn.o_proj" or (name.startswith("mlp.") and name.endswith("down_proj")):
                part.writes_residual = True  # `_init_weights` sees one Linear at a time
        self.before, self.after = NORM_NAMES[config.norm_placement]
        for name in filter(None, (*self.before, *self.after)):
            setattr(self, name, NORMS[config.norm](config.hidden_size, config.rms_norm_eps))
        self.multiplier = config.residual_multiplier
        add_residuals(self, config, layer_idx)
        usual = config.norm_placement == "before" and self.multiplier == 1.0 and not config.parallel_residual
        added = usual and type(self.attn_residual) is Residual
        self.order = add if added else order_of(self, "sum" if config.parallel_residual else "")

    @property
    def depth_mixer(self) -> ValueMixer:  # type: ignore[override]
        """Its attention's mixer."""
        return self.self_attn.mixer

    def forward(self, *state: Tensor, trip: int = 0, **kwargs: object) -> ResidualState:
        """Run the layer: returns the new residual state, the router's logits if `routes` is set, and attention's key
        and mixed value.

        Inputs and outputs are tensors, not tuples of tensors: reentrant checkpointing tracks gradients of tensors only.
        """
        made = self.order(self, state, trip, kwargs)
        return self.with_logits(made, state[0].shape[:2]) if self.routes else made

    def mix_tokens(self, x: Tensor | Ways, gained: Callable[[Ways], Ways], **kwargs: object) -> tuple[Tensor, ...]:
        """The update from attention, and the key and mixed value that other layers read."""
        if isinstance(x, tuple):
            x, *others = gained(self.normed_ways(*x))
            kwargs["others"] = tuple(others)
        else:
            x = self.normed(self.before[0], x)
        update, _, *kept = self._modules["self_attn"](x, **kwargs)
        return self.scaled(self.normed(self.after[0], update)), *kept

    def normed_ways(self, query: Tensor, key: Tensor, value: Tensor) -> Ways:
        """Norm the inputs of the query, key and value projections; each distinct tensor is normed once."""
        name = self.before[0]
        q = self.normed(name, query)
        k = q if key is query else self.normed(name, key)
        v = q if value is query else k if value is key else self.normed(name, value)
        return q, k, v

    def mix_channels(self, x: Tensor) -> Tensor:
        """The MLP's update of the residual."""
        update = self._modules["mlp"](self.normed(self.before[1], x))
        return self.scaled(self.normed(self.after[1], update))


def add(layer: DecoderLayer, state: ResidualState, trip: int, given: Mapping[str, Any]) -> ResidualState:
    """A fast form of `in_turn` for layers with a plain residual, with fewer Python calls per decoded token. Hooks on
    residuals see theirs."""
    parts: Any = layer._modules
    attn, mlp = parts["attn_residual"], parts["mlp_residual"]
    if type(attn) is not Residual or type(mlp) is not Residual or watched(attn) or watched(mlp):  # or were replaced
        return in_turn(layer, state, trip, given)
    update, _, *kept = parts["self_attn"](parts["input_layernorm"](state[0]), **given)
    x = state[0] + update
    return x + parts["mlp"](parts["post_attention_layernorm"](x)), *kept


def _at_places(hidden: tuple[Tensor, ...], places: Places) -> tuple[Tensor | None, ...]:
    """Keep all hidden states, or those with the given indices (negative ones count from the end); the others become
    None."""
    if isinstance(places, bool):
        return hidden
    count, asked = len(hidden), [places] if isinstance(places, int) else places
    found = {i % count for i in asked if -count <= i < count}
    return tuple(x if i in found else None for i, x in enumerate(hidden))


def _called(name: str) -> Any:
    """A property that returns the current module for Fathom's name of it, whatever the family names it."""

    def part(decoder: Any) -> nn.Module:
        found = decoder._modules.get(decoder.names.get(name, name))
        if found is None:
            raise AttributeError(name)
        return found

    return property(part)


class FathomModel(FathomPreTrainedModel):
    """The decoder without the language-modelling head, or with it if the recurrence feeds back logits.

    Args:
        config: The model's configuration.
        own_head: Whether to own the head of such a recurrence; `FathomForCausalLM` passes its own head.
    """

    _can_record_outputs = {"attentions": Attention}
    drops = False
    """Whether a family's decoder has dropout that training would leave out."""
    names: dict[str, str] = {}
    """The family's names of the embedding and the final norm, by ours."""
    embed_tokens = _called("embed_tokens")
    norm = _called("norm")

    def __init__(self, config: FathomConfig, own_head: bool = True) -> None:
        if config.host:
            become_host(self, config)
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.plan = plan(config)
        self.plans: dict[int, Plan] = {len(self.plan): self.plan}
        """By number of trips: a run may make fewer than it could."""
        self.host: PreTrainedModel | None = None
        if config.host:
            self._adopt(build(config))
        else:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
            self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
            self.balance: Balance | None = balance_of(config, self.layers)
        self.final_residual: Residual = mechanism("residual", config.residual).build(
            config, 2 * config.num_hidden_layers
        )
        if not config.host:
            self.norm = NORMS[config.norm](config.hidden_size, config.rms_norm_eps)
        self.recurrence: Recurrence = mechanism("recurrence", config.recurrence).build(config)
        self.coda = self.recurrence.span(config)[1]
        """The first layer that is visited once, after all trips. Asked here, since a compiled graph cannot ask."""
        self.slotted = self.recurrence.slotted
        window = {"sliding_attention": config.sliding_window}
        self.reach: dict[str, int | None] = {kind: window.get(kind) for kind in config.layer_types}
        """By layer type: how many tokens back it reads; None for all."""
        self.layer_types, self.chunk_size = tuple(config.layer_types), config.attention_chunk_size
        self.stateful = len(config.keyed_layers) < config.num_hidden_layers
        self.norms_embedding = any(layout.norms_embedding for layout in Layout.all_of(config))
        self.embedding_scale, self.rounds_scale = config.embedding_scale, config.round_embedding_scale
        if not config.host:
            self.rotary_emb = build_rotary(config)
        self.mixes_unrotated = config.mixes_unrotated or turning(self.layers)
        self.stretches, self.rereads = config.rope_stretches, config.rereads
        self.embed_positions = None
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(
                config.max_position_embeddings + config.position_offset, config.hidden_size
            )
        self.gradient_checkpointing = False
        if own_head and self.recurrence.needs_head(config):
            self.lm_head = build_head(config)
            self._tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}
        self.per_visit = any(layer.again for layer in self.layers)
        self.multiway = any(layer.attn_residual.multiway for layer in self.layers)  # type: ignore[union-attr]
        if config.host:
            check_host(config, self.recurrence, self.multiway)
        check_engine(self.config, self.recurrence, self.plan, multiway=self.multiway)
        if self.rereads and str(config._attn_implementation).startswith(ENGINES):
            raise ValueError(COMPANY)
        if config._attn_implementation == "vllm" and len(self.plan) > 1:
            self.banks = take_banks(self._attentions(), plan(config, self.served_trips))
        self.post_init()

    @by_any_name
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,  # [B, T]
        attention_mask: Tensor | None = None,  # [B, past + T]
        position_ids: Tensor | None = None,  # [B, T]
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,  # [B, T, hidden_size]
        use_cache: bool | None = None,
        output_hidden_states: Places | None = None,
        head: nn.Module | None = None,
        max_trips: int | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Like `Qwen3Model.forward`, with `head`, which computes logits for recurrences that feed them back, and
        `max_trips`, which limits iterations at run time."""
        if self.training and torch.is_grad_enabled() and not (self._step_known or torch.compiler.is_compiling()):
            self.expect_steps()
        x = self._embed(input_ids, inputs_embeds)  # [B, T, hidden_size]
        trips = self.trips_asked(max_trips)
        check_engine(self.config, self.recurrence, self.plan_of(trips), kwargs, self._attentions(), self.multiway)
        places = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        places = None if places is False else places  # 0 is one

        # Masks look at the caller's arguments: without a cache or a mask, positions that restart mark packed documents.
        # Positions that are generated here never do.
        given = past_key_values
        packed = position_ids if given is None and attention_mask is None else None
        if (
            self.stateful
            and (arrangement := self._arranged(packed, attention_mask, x, given is not None or bool(use_cache)))
            is not None
        ):
            kwargs["arrangement"] = arrangement
            use_cache = use_cache and packed is None  # a row of documents has no state to go on from
        if not self.slotted and (window := self.window) is not None:
            check_windows(attention_mask, window)
        if use_cache and given is None and not (self.slotted and torch.is_grad_enabled()) and not self.recomputing:
            past_key_values = DynamicCache(config=self.config if self.host is None else self.host.config)
        if position_ids is None:
            seen = 0 if given is None else given.get_seq_length()
            position_ids = self._positions(seen, x, attention_mask)
        x = self._with_learned_positions(x, position_ids)

        if self.training and self.drops and self.host is not None and (left_out := undropped(self.host)):
            raise ValueError(
                f"{self.config.host}: Fathom does not apply this family's dropout, {left_out}, in training: set its "
                "rate to 0 in config.json, or in the open model"
            )
        head = self._modules.get("lm_head") if head is None else head  # by its name it costs an exception
        if head is not None:
            check_adapter(head)
        inputs = Inputs(trips, position_ids, packed, attention_mask, given, x.dtype, head, kwargs)
        inputs.hidden = None if places is None else []
        inputs.balances = [] if self.balance is not None and self.training else None
        inputs.furthest = position_ids.max() if self.stretches else None
        state = run_trips(self, x, inputs, self._store(past_key_values, inputs, x))
        hidden = self.recurrence.readout(state)
        return FathomModelOutput(
            last_hidden_state=hidden,
            **{CACHE: past_key_values if use_cache else None},
            hidden_states=None if places is None else _at_places((*(inputs.hidden or ()), hidden), places),
            recurrence_state=state,
            balance=mean_of_trips(inputs.balances) if inputs.balances else None,
        )

    def _adopt(self, host: PreTrainedModel) -> None:
        """Move the modules of a family's decoder into this model, under the names that they have there."""
        layout = Layout.all_of(self.config)[0]
        for name, module in host.named_children():
            self.add_module(name, module)
        self.rotary_emb = host_rotary(host, self.config)
        self.names = {"embed_tokens": layout.embedding, "norm": layout.norm}
        self.__dict__["host"], self.drops = host, undropped(host) is not None
        self.balance = adopt_routers(host)
        copy_flags(self, type(host))

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a module, by Fathom's name for it or the family's, under the name that the family has for it."""
        super().__setattr__(self.names.get(name, name) if isinstance(value, nn.Module) else name, value)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the embedding, under the name that the family's decoder has for it."""
        self.embed_tokens = value

    def _arranged(self, packed: Tensor | None, mask: Any, x: Tensor, stores: bool) -> Arrangement | None:
        """The order in which layers with a recurrent state read padded or packed tokens; None for the given order."""
        if packed is not None:
            return of_documents(packed, len(x))
        return of_padding(mask, x.shape[1], stores) if getattr(mask, "ndim", 0) == 2 else None

    def native_config(self) -> PreTrainedConfig:
        """The family's own configuration, updated with the current attention backend."""
        assert self.host is not None
        self.host.config._attn_implementation = self.config._attn_implementation
        return self.host.config

    def embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The input of the first layer for tokens `[B, T]`."""
        return self._with_learned_positions(self._embed(input_ids, None), position_ids)

    def _with_learned_positions(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Add position embeddings to token embeddings, if positions are learned."""
        return (
            x if self.embed_positions is None else x + self.embed_positions(position_ids + self.config.position_offset)
        )

    def _store(self, cache: Cache | None, inputs: Inputs, x: Tensor) -> Cache | Store | None:
        """Extend `cache` so that it has room for every iteration."""
        if self.slotted and not (inputs.padding is None or getattr(inputs.padding, "ndim", 0) == 2):
            raise ValueError(f"recurrence={self.config.recurrence} makes its own masks: pass a padding mask [B, T]")
        if cache is None:
            return None
        if self.stateful:
            let_select(cache)
        if self.slotted:
            layers, view = self.config.num_hidden_layers, self.recurrence.view
            return Store(cache, with_slots(cache, layers, inputs.trips, view, len(x), x.device))
        return with_banks(cache, self.plan_of(inputs.trips))

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        shape = (input_ids if input_ids is not None else inputs_embeds).shape[:2]  # type: ignore[union-attr]
        if 0 in shape:
            raise ValueError(f"the input is empty: {shape[0]} sequences of {shape[-1]} tokens")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.norms_embedding:
            return self.norm(x)
        if self.rounds_scale:
            return x * torch.tensor(self.embedding_scale, dtype=x.dtype, device=x.device)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def _positions(self, seen: int, x: Tensor, attention_mask: object) -> Tensor:
        """The positions of new tokens that follow `seen` cached ones, `[1 or B, T]`; padding is not counted if a mask
        is given.

        Called if no `position_ids` are given. Learned positions end at `max_position_embeddings`.
        """
        length = x.shape[1]
        if self.embed_positions is not None and seen + length > self.config.max_position_embeddings:
            raise ValueError(
                f"{seen + length} tokens: this model has {self.config.max_position_embeddings} positions, and learned "
                "positions do not extend"
            )
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
        return (torch.arange(length, device=x.device) + seen).unsqueeze(0)

    def plan_of(self, trips: int) -> Plan:
        """The visits of `trips` iterations."""
        if trips not in self.plans:
            self.plans[trips] = plan(self.config, trips)
        return self.plans[trips]

    def _attentions(self) -> Iterator[Attention]:
        return (module for module in self.layers.modules() if isinstance(module, Attention))

    @property
    def beside(self) -> int:
        """The number of tensors that a layer returns besides the residual state, for later layers and for losses."""
        return 2 + self.mixes_unrotated + (self.balance is not None)

    @property
    def window(self) -> int | None:
        """The smallest attention window or chunk among the layers, in tokens; None if all layers attend to everything
        before."""
        spans = [span for span in (*self.reach.values(), self.chunk_size) if span]
        return min(spans) if spans else None  # a default of `min` would break a compiled graph

    @property
    def recomputing(self) -> bool:
        """Whether the backward pass recomputes each pass through the layers (the recurrence's option `recompute`)."""
        return self.recurrence.recompute and self.training and torch.is_grad_enabled()

    @property
    def served_trips(self) -> int:
        """The number of iterations per token in inference, unless `max_trips` is passed; inference engines read it."""
        return self.config.max_trips or self.recurrence.grown

    def trips_asked(self, max_trips: int | None) -> int:
        """The number of iterations that a forward pass makes, given its `max_trips`."""
        if max_trips is None:
            return self.recurrence.drawn_trips if self.training else self.served_trips
        most = self.recurrence.most_trips(self.config)
        if type(max_trips) is not int or not 1 <= max_trips <= most:
            raise ValueError(
                f"max_trips must be between 1 and {most}, the iterations that this model was trained for: {max_trips}"
            )
        return max_trips

    def causal_masks(
        self,
        x: Tensor,
        attention_mask: Tensor | Mapping[str, object] | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None,
    ) -> Mapping[str, object]:
        """transformers' causal masks by layer type, made from the caller's `attention_mask`, or from positions of
        packed documents."""
        if isinstance(attention_mask, dict):  # `generate` may have prepared it
            return attention_mask
        arguments = {
            "config": self.config if self.host is None else self.native_config(),
            "inputs_embeds": x,
            "attention_mask": attention_mask,
            CACHE: past_key_values,
            "position_ids": position_ids,
        }
        if self.host is not None:
            if any(kind not in LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING for kind in self.reach):
                # layers of Nemotron-H that are experts alone mix no tokens
                return {
                    kind: make(**arguments) if (make := LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(kind)) else None
                    for kind in self.reach
                }
            made = create_masks_for_generate(**arguments)
            return made if isinstance(made, dict) else dict.fromkeys(self.reach, made)
        masks = {"full_attention": create_causal_mask(**arguments)}
        if "sliding_attention" in self.reach:
            masks["sliding_attention"] = create_sliding_window_causal_mask(**arguments)
        return masks


@dataclass
class FathomModelOutput(BaseModelOutputWithPast):
    """`BaseModelOutputWithPast` with the recurrence's state, from which losses and metrics are computed."""

    recurrence_state: dict[str, Tensor] | None = None
    balance: Tensor | None = None
    """In training, `[2]`: the family's loss that balances its experts, and their load, the means over trips."""


@dataclass
class FathomCausalLMOutput(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` with the auxiliary losses that `loss` already includes, by name, and metrics to log.

    In training with labels, `logits` is None unless `return_logits=True`.
    """

    aux_losses: dict[str, Tensor] | None = None
    metrics: dict[str, Tensor] | None = None
    token_losses: Tensor | None = None
    """The loss of every position, `[B, T]`, if requested."""
    trips: Tensor | None = None
    """The trips that every token made, `[B, T]`, if tokens may halt."""


class FathomForCausalLM(FathomPreTrainedModel, FathomGenerationMixin):
    """The decoder with a language-modelling head: a `PreTrainedModel` that generates like any other of transformers.

    The constructor initialises the weights at random; `from_pretrained` opens a checkpoint of Fathom or of any known
    family.

    Args:
        config: A `FathomConfig` with sizes and mechanisms.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: FathomConfig) -> None:
        if config.host:
            choose_backend(config)
        super().__init__(config)
        self.model = FathomModel(config, own_head=False)
        self.vocab_size = config.vocab_size
        self.lm_head = build_head(config)
        if config.host:
            copy_flags(self, causal_class(config))
        self.post_init()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """See transformers."""
        self.model.set_input_embeddings(value)

    def _get_resized_lm_head(self, old_lm_head: nn.Linear, *args: Any, **kwargs: Any) -> nn.Linear:
        """See transformers, which makes a plain linear layer; a head that scales or caps its logits keeps doing so."""
        made: nn.Linear = super()._get_resized_lm_head(old_lm_head, *args, **kwargs)
        if not isinstance(old_lm_head, ScaledHead):
            return made
        made.requires_grad_(old_lm_head.weight.requires_grad)  # transformers asks the old head afterwards
        old_lm_head.weight, old_lm_head.bias, old_lm_head.out_features = made.weight, made.bias, made.out_features
        return old_lm_head

    @by_any_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        max_trips: int | None = None,
        return_token_losses: bool = False,
        **kwargs: Any,
    ) -> FathomCausalLMOutput:
        """Like `Qwen3ForCausalLM.forward`. In training, labels give a loss without logits; `return_logits=True` gives
        both.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, past + T]`; zeros are padding.
            position_ids: `[B, T]`; positions that restart within a row mark packed documents, unless there is a mask.
            past_key_values: A cache from an earlier forward pass, or an empty one.
            inputs_embeds: `[B, T, hidden_size]`, instead of `input_ids`.
            labels: `[B, T]`, shifted internally; -100 is ignored. With labels the loss is computed.
            use_cache: Whether to return a cache; by default the configuration's value, and False in training.
            logits_to_keep: Compute logits only for this many last positions; 0 for all.
            return_logits: Whether to compute logits in addition to a loss; by default only outside training.
            num_items_in_batch: Targets of the whole batch, if this forward pass is a part of it.
            max_trips: Maximum iterations per token, up to the number that the model was trained for.
            return_token_losses: Return the loss of every position, without a gradient, instead of the mean.
            kwargs: `shift_labels` (labels that are already shifted), and arguments of the attention backend.
        """
        routed = kwargs.pop("output_router_logits", None)
        if routed is not None and bool(routed) != (self.model.balance is not None):
            raise ValueError("output_router_logits is read when a model opens, not in a call: set it in config.json")
        # Not an explicit parameter, since transformers' Trainer requires every argument with "label" in its name.
        targets = kwargs.pop("shift_labels", None)
        if targets is None and labels is not None:
            targets = shifted(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=self._use_cache(use_cache, past_key_values, targets is not None),
            head=self.lm_head,
            max_trips=max_trips,
            **kwargs,
        )
        hidden, state = outputs.last_hidden_state, outputs.recurrence_state
        loss = logits = every = aux = metrics = None
        if return_token_losses:
            if targets is None:
                raise ValueError("return_token_losses needs labels")
            every = token_losses(hidden, self.lm_head, targets)
        elif targets is not None:
            loss, aux, metrics = self._loss(hidden, state, targets, num_items_in_batch, outputs.balance)
        if return_logits is None:
            return_logits = targets is None or not (self.training or return_token_losses)
        if return_logits or targets is None:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, keep])
        # Built in one call, since an output lists its fields in the order in which they were set.
        return FathomCausalLMOutput(
            loss=loss,
            logits=logits,
            **{CACHE: returned(outputs)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            aux_losses=aux or None,
            metrics=metrics or None,
            token_losses=every,
            trips=None if state is None else state.get("trips"),
        )

    def _use_cache(self, use_cache: bool | None, cache: Cache | None, with_loss: bool) -> bool | None:
        """The `use_cache` to pass to the decoder: off by default where a loss, gradients or the view ALL rule out a
        cache."""
        if use_cache is None and with_loss and (self.training or self.model.slotted):
            use_cache = False
        if self.model.slotted and cache is None and torch.is_grad_enabled():
            if use_cache:
                raise ValueError(
                    "this model's cache is written in place, which autograd cannot follow: call under torch.no_grad()"
                )
            use_cache = False
        if use_cache is None and cache is None and self.model.recurrence.view is View.ALL:
            use_cache = False  # prefill and evaluation make different numbers of rounds
        return use_cache

    def _loss(
        self,
        hidden: Tensor,
        state: TripState,
        targets: Tensor,
        num_items_in_batch: Tensor | int | None,
        balance: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Returns the loss, the named terms that recurrence and routers add to it in training, and the metrics to
        log."""
        recurrence = self.model.recurrence
        aux: dict[str, Tensor] = {}
        weighted = recurrence.weighted_readouts(state) if self.training else None
        if weighted is None:
            loss = causal_lm_loss(hidden, self.lm_head, targets, num_items_in_batch)
        else:
            loss = weighted_lm_loss(weighted, self.lm_head, targets, num_items_in_batch)
        metrics = recurrence.metrics(state, targets)
        if self.training:
            aux = recurrence.aux_losses(state, targets, num_items_in_batch, self.lm_head)
            if balance is not None:  # the passes of a batch are weighed by their targets
                aux["router"] = balance[0] * per_item((targets != IGNORE).sum(), targets, num_items_in_batch)
                metrics["expert_load"] = balance[1]
            loss = loss + sum(aux.values()) if aux else loss
        return loss, aux, metrics


# transformers' Trainer shifts labels for the causal classes named here, and its pipelines know all of them. It is done
# in this file, which an export holds too.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FathomConfig.model_type] = FathomForCausalLM.__name__
