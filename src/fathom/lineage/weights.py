"""Access to a model's weights by role and layer, read from disk or over the network one tensor at a time.

For example:

    weights = open_weights("org/name@revision")
    weights.tensor("q", layer=3, rows=slice(0, 128))    # float32 [128, width]

Nothing is cached: only tensors that the caller holds are in memory.

`layouts.py` has the names of tensors, and refuses models without attention. `checkpoints/origin.py` reads the bytes of
files and repositories, `checkpoints/gguf.py` GGUF files. `checkpoints/tensors.py` reads safetensors and adapters, and
refuses packed low-bit weights. `checkpoints/find.py` chooses the model of a run or a comparison. `neurons.py` chooses
the experts that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fathom.checkpoints.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from fathom.checkpoints.find import find_model, holds_model
from fathom.checkpoints.gguf import GgufStore
from fathom.checkpoints.origin import LocalOrigin, Origin, Shelf, open_origin, read_json
from fathom.checkpoints.tensors import (
    AdapterStore,
    Array,
    Ranges,
    SafetensorsStore,
    TensorInfo,
    TensorStore,
    is_scale,
    open_safetensors,
)
from fathom.errors import ModelError
from fathom.lineage import layouts, vocabulary
from fathom.lineage.layouts import Scheme, matching, parameter

Layer = dict[str, Array]
"""The tensors of one layer by role; matrices are (out, in)."""

SMALL_BYTES = 2 << 30  # of both models: for smaller ones fast mode skips nothing
LARGEST = 1e15  # products of larger weights overflow, here and in the model
WIDE_GAINS = frozenset({"attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm", "final_norm"})
"""Gains with an entry for each channel of the stream."""


@dataclass(frozen=True)
class TensorView:
    """Where a role's values are stored: the tensor, the rows in it, and whether it is stored transposed as (in,
    out)."""

    tensor: str
    rows: tuple[tuple[int, int], ...] | None = None
    transposed: bool = False
    item: int | None = None  # index in a stack of experts


Told = Callable[[str], None]
"""Called with what is done next."""
Views = dict[tuple[str, int | None], TensorView]
Pieces = Mapping[str, tuple[tuple[int, int], ...] | None]
"""The rows of each role in a fused tensor; None for all."""


@dataclass(frozen=True)
class Geometry:
    """The sizes and architecture options of a model, that is, everything about it except the tensors."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int
    norm: str  # rms | layer
    rotary: str  # half | interleaved | none
    rotary_dim: int
    qk_norm: bool
    late_norm: bool  # queries and keys are normed after rotation
    post_norm: bool  # a norm follows the sub-layers
    gated: bool
    tied: bool
    unit_offset: bool  # gains are stored as γ and used as 1 + γ
    model_type: str
    latent: tuple[int, int, int, int] | None = None  # MLA: no-RoPE, RoPE and value sizes, KV rank

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass
class Weights:
    """Role-addressed access to a checkpoint."""

    name: str
    store: TensorStore
    geometry: Geometry
    views: Mapping[tuple[str, int | None], TensorView]
    config: Mapping[str, object]
    extra_tensors: tuple[str, ...]
    vocabulary: Callable[[], dict[bytes, int] | None]
    """String of bytes -> embedding row, or None without a tokenizer; read when first called."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Tensors with unusable values (not finite, or beyond 1e15), and the number of such values in one read."""
    memo: dict[str, Any] = field(default_factory=dict)
    """Measurements on these weights alone."""
    ranked: bool = False
    """Whether the experts that are read are chosen by their router rows, not by number."""

    @property
    def origin(self) -> Origin:
        """The object that reads the model's files, and counts the bytes read."""
        return self.store.origin

    @property
    def origins(self) -> list[Origin]:
        """The origins of the model's files, and of the adapter's files if there is one."""
        return [self.origin, *([self.store.adapter.origin] if isinstance(self.store, AdapterStore) else [])]

    @property
    def keyed(self) -> list[int]:
        """The indices of the layers with attention: all layers, except in a hybrid model."""
        return [i for i in range(self.geometry.layers) if self.has("q", i)]

    @property
    def file_bytes(self) -> int:
        """Bytes of all tensors in the checkpoint."""
        return sum(info.stop - info.start for info in self.store.tensors.values())

    def has(self, role: str, layer: int | None = None) -> bool:
        """Whether the model has this role."""
        if self.geometry.latent and role in {"k", "v"}:
            return ("kv_b", layer) in self.views
        return (role, layer) in self.views or (role == "q" and ("q_b", layer) in self.views)

    def tensor(self, role: str, layer: int | None = None, rows: slice | Array | None = None, expert: int = 0) -> Array:
        """The tensor of a role, (out, in), as float32 (float64 if stored so); norm gains include the offset of 1 that
        some models add.

        Args:
            role: See `layouts`.
            layer: Layer index; None for the ends of the stack.
            rows: A slice or sorted row numbers; all rows by default.
            expert: Index of the expert in a mixture.
        """
        if self.geometry.latent and role in {"q", "k", "v"}:
            return self._usable(f"{role} of layer {layer}", self._latent(role, layer))
        view = self.views[role, layer]
        if expert:
            view = _of_expert(view, expert)
        values = self._read(view, rows)
        return values + 1 if role.endswith("norm") and self.geometry.unit_offset else values

    def stored(self, role: str, layer: int | None, rows: slice, expert: int = 0) -> Array:
        """Rows of a role's tensor exactly as they are stored: no offset is added, and unusable values are not
        replaced."""
        view = self.views[role, layer]
        return self._stored(_of_expert(view, expert) if expert else view, rows)

    def _usable(self, name: str, values: Array) -> Array:
        """The values, with those that are not finite or too large replaced by 0 and counted in `unusable`."""
        if not values.size or max(float(values.max()), -float(values.min())) <= LARGEST:  # false for NaN
            return values
        good = np.abs(values) <= LARGEST
        self.unusable[name] = max(self.unusable.get(name, 0), int(values.size - good.sum()))
        return np.where(good, values, values.dtype.type(0))

    def _read(self, view: TensorView, rows: slice | Array | None) -> Array:
        return self._usable(view.tensor, self._stored(view, rows))

    def _stored(self, view: TensorView, rows: slice | Array | None) -> Array:
        if view.item is None and not view.transposed:  # only the rows are read
            total = self.store.tensors[view.tensor].shape[0]
            return self.store.read(view.tensor, view.rows if rows is None else _select(view.rows, rows, total))
        item = view.item
        values = self.store.read(view.tensor) if item is None else self.store.read(view.tensor, [(item, item + 1)])[0]
        values = values.T if view.transposed else values
        values = values if view.rows is None else np.concatenate([values[a:b] for a, b in view.rows])
        return values if rows is None else values[rows]

    def _latent(self, role: str, layer: int | None) -> Array:
        """Multi-head latent attention's low-rank factors multiplied out: q rows are heads × (no-RoPE, RoPE); k rows are
        heads × no-RoPE, then the shared RoPE rows."""
        assert self.geometry.latent is not None
        plain, rotary, value, rank = self.geometry.latent
        if role == "q":
            if ("q", layer) in self.views:
                return self._read(self.views["q", layer], None)
            q_a, norm, q_b = (self._read(self.views[part, layer], None) for part in ("q_a", "q_a_norm", "q_b"))
            return (q_b * norm) @ q_a
        kv_a, norm, kv_b = (self._read(self.views[part, layer], None) for part in ("kv_a", "kv_a_norm", "kv_b"))
        heads = (kv_b * norm).reshape(self.geometry.heads, plain + value, rank)
        part = heads[:, :plain] if role == "k" else heads[:, plain:]
        composed = part.reshape(-1, rank) @ kv_a[:rank]
        return np.concatenate([composed, kv_a[rank : rank + rotary]]) if role == "k" else composed

    def experts(self, index: int) -> int:
        """Number of experts of one layer; 1 if the layer is no mixture."""
        view = self.views["down", index]
        if view.item is not None:
            return self.store.tensors[view.tensor].shape[0]
        count = 1
        while EXPERT in view.tensor and _of_expert(view, count).tensor in self.store.tensors:
            count += 1
        return count

    def router(self, index: int) -> Array | None:
        """The router of a layer, [E, d], found by its shape; None unless exactly one tensor next to the experts has
        this shape."""
        down = self.views["down", index].tensor
        beside = down.partition(".experts.")[0] if ".experts." in down else down.rsplit(".", 2)[0]
        shape = (self.experts(index), self.geometry.width)
        near = (name for name in self.store.tensors if name.startswith(beside + ".") and ".experts." not in name)
        found = [name for name in near if tuple(self.store.tensors[name].shape) == shape]
        return self._usable(found[0], self.store.read(found[0])) if len(found) == 1 else None

    def neurons(self, index: int) -> int:
        """Number of feed-forward neurons of one layer."""
        view = self.views["up", index]
        shape = self.store.tensors[view.tensor].shape[-2:]
        if view.rows is not None:
            return sum(stop - start for start, stop in view.rows)
        return shape[1] if view.transposed else shape[0]

    def layer(self, index: int, roles: tuple[str, ...]) -> Layer:
        """The tensors of those of the given roles that the layer has, with their biases."""
        wanted = [role + suffix for role in roles for suffix in ("", "_bias")]
        return {role: self.tensor(role, index) for role in wanted if self.has(role, index)}


@contextmanager
def holding(*models: Weights) -> Iterator[None]:
    """A context in which no byte of a small or remote model is read twice: memory caches files, and temporary files
    cache downloads."""
    local = sum(model.file_bytes for model in models) <= SMALL_BYTES
    origins = [origin for model in models for origin in model.origins]
    remote = {id(origin): not isinstance(origin, LocalOrigin) for origin in origins}
    fresh = [origin for origin in origins if origin.shelf is None and (local or remote[id(origin)])]
    for origin in fresh:
        origin.shelf = Shelf(spill=remote[id(origin)])
    try:
        yield
    finally:
        for origin in fresh:
            origin.shelf = None


EXPERT = ".experts.0."


def _of_expert(view: TensorView, expert: int) -> TensorView:
    """The view of the same role for another expert."""
    if view.item is not None:
        return replace(view, item=expert)
    return replace(view, tensor=view.tensor.replace(EXPERT, f".experts.{expert}."))


def _select(ranges: Ranges | None, rows: slice | Array, total: int) -> list[tuple[int, int]]:
    """The row ranges of a stored tensor that correspond to some rows of a view."""
    if isinstance(rows, slice) and ranges is None:
        start, stop, step = rows.indices(total)
        if step == 1:
            return [(start, max(start, stop))]
    index = np.arange(total) if ranges is None else np.concatenate([np.arange(a, b) for a, b in ranges])
    chosen = index[rows]
    if not len(chosen):
        return []
    # runs of consecutive rows become one range each
    breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(chosen, breaks)]


def open_weights(where: str | Path, base: str | Path | None = None) -> Weights:
    """Open a checkpoint. This reads only headers, the configuration and, on demand, the tokenizer.

    Args:
        where: A directory, `.safetensors`, `.gguf` or index file, `org/name@revision`, a run (its model) or a
            comparison (its best model).
        base: Base model of a PEFT adapter; by default the one in its adapter_config.json.
    """
    try:
        return _opened(where, base)
    except ModelError as error:
        if str(where) in str(error):
            raise
        raise type(error)(f"{error} (in {where})") from None  # of two checkpoints, which
    except OSError as error:  # a name too long for the system, a file that may not be read
        raise ModelError(f"{where!s:.200}: {error.strerror}") from None


def _opened(where: str | Path, base: str | Path | None) -> Weights:
    found = find_model(where) if holds_model(Path(where)) else where
    origin, file = open_origin(str(found))
    if file is not None and file.endswith(".gguf"):
        gguf = GgufStore(origin, file)
        names = vocabulary.from_pieces(gguf.tokens, gguf.byte_level) if gguf.tokens else None
        return resolve(str(where), gguf, gguf.config, lambda: names)
    if file is None and origin.exists(ADAPTER_CONFIG):
        return _open_adapter(str(where), origin, base)
    store = open_safetensors(origin, file)
    if not origin.exists(CONFIG):
        raise ModelError(f"{where}: no {CONFIG} next to the weights; it gives the number of heads")
    config = read_json(origin, CONFIG)
    return resolve(str(where), store, config, lambda: vocabulary.read_vocabulary(origin))


def _open_adapter(where: str, origin: Origin, base: str | Path | None) -> Weights:
    config = read_json(origin, ADAPTER_CONFIG)
    named = base or config.get("base_model_name_or_path")
    if not isinstance(named, str | Path):
        raise ModelError(f"{where}: this adapter names no base model; give the base model with `adapter_base`")
    below = open_weights(named)
    if not origin.exists(ADAPTER_WEIGHTS):
        raise ModelError(f"{where}: no {ADAPTER_WEIGHTS} (pickled adapters are never opened)")
    adapter = SafetensorsStore(origin, [ADAPTER_WEIGHTS])
    return replace(below, name=where, store=AdapterStore(below.store, adapter, config), unusable={}, memo={})


def resolve(
    name: str, store: TensorStore, config: Mapping[str, object], words: Callable[[], dict[bytes, int] | None]
) -> Weights:
    """Assign a role to every tensor; what the tensor names leave open is read from the config and checked against
    shapes."""
    config = _decoder_config(config)
    names = store.tensors
    prefix, stack = layouts.locate(names, str(config.get("model_type", "")))
    layers = layouts.stacked(names, prefix, stack)
    count = len(layers)
    said = _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if said is not None and said != count:
        why = layouts.why_not(names, count)
        raise ModelError(f"config.json says {said} layers, but the layout of only {count} is known: {why}")
    roles = _Roles(names, config, prefix, stack)
    for index, layer in enumerate(layers):
        roles.add_layer(layer, index)
    used = {view.tensor for view in roles.views.values()}
    inside = (n for n in names if n.startswith(prefix) or n.removesuffix(".bias") in layouts.HEADS)
    extra = tuple(sorted(n for n in inside if n not in used and not is_scale(n) and not layouts.is_buffer(n)))
    weights = Weights(name, store, roles.geometry(count), roles.views, config, extra, cache(words))
    _check_shapes(weights)
    return weights


def _decoder_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The decoder's section of a multimodal config (or the whole config of any other model), checked."""
    if not isinstance(config.get("model_type", ""), str):
        raise ModelError(f"config.json: model_type {config['model_type']!r:.40} must be a string")
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(inner := config.get(key), Mapping):
            above = {name: config[name] for name in ("model_type", "tie_word_embeddings") if name in config}
            return _decoder_config({**above, **inner})
    return config


def _number(config: Mapping[str, object], *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if value is None or value == 0 or isinstance(value, list):  # a list has a number for each layer
            continue
        if type(value) is not int or not 0 < value < 1 << 24:  # bool is an int
            raise ModelError(f"config.json: {key} {value!r:.40}: wanted a whole number from 1 to 16,777,215")
        return value
    return None


def _ends(names: Mapping[str, TensorInfo], prefix: str, stack: layouts.Stack) -> Views:
    views: Views = {}
    ends = {"embed": stack.embed, "final_norm": stack.final_norm, **stack.optional}
    for role, module in ((role, module) for role, module in ends.items() if module):
        for suffix, kind in (("", "weight"), ("_bias", "bias")):
            if tensor := parameter(names, prefix + module, kind):
                views[role + suffix, None] = TensorView(tensor)
    parents = {"", prefix, prefix.removesuffix("model.")}
    heads = {tensor for parent in parents for head in layouts.HEADS if (tensor := parameter(names, parent + head))}
    if len(heads) > 1:
        raise ModelError(f"the output head is ambiguous: {' or '.join(sorted(heads))}")
    for tensor in heads:
        views["head", None] = TensorView(tensor)
    return views


class _Roles:
    """Collects the views of a checkpoint's tensors by role, and the sizes that the checkpoint's config states."""

    def __init__(
        self, names: Mapping[str, TensorInfo], config: Mapping[str, object], prefix: str, stack: layouts.Stack
    ):
        self.names, self.config = names, config
        self.model_type = str(config.get("model_type", ""))
        self.packing: str | None = None  # of the attention
        self.views = _ends(names, prefix, stack)
        embed = self.views["embed", None].tensor
        if len(names[embed].shape) != 2:
            raise ModelError(f"{embed}: shape {names[embed].shape} is not a matrix")
        self.vocab, self.width = names[embed].shape
        for key in ("vocab_size", "intermediate_size"):
            _number(config, key)  # the tensors give the number, but it must be one
        width = _number(config, "hidden_size", "n_embd", "d_model")
        if width not in (None, self.width):
            raise ModelError(f"config.json: hidden size {width}, but {embed} has {self.width} columns")
        heads = _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
        if heads is None:
            raise ModelError("config.json does not say how many attention heads there are")
        self.heads, self.kv_heads = heads, self._kv_heads() or heads
        if heads % self.kv_heads:
            raise ModelError(
                f"config.json: {heads} attention heads are not a multiple of {self.kv_heads} key-value heads"
            )
        self.head_dim = _number(config, "head_dim", "kv_channels") or self.width // heads
        self.latent = self._latent()
        if self.latent is not None:
            self.head_dim, self.kv_heads = self.latent[0] + self.latent[1], heads

    def _kv_heads(self) -> int | None:
        if self.model_type == "falcon" and not self.config.get("new_decoder_architecture"):
            return 1 if self.config.get("multi_query", True) else None
        nested = self.config.get("attn_config")
        names = ("num_key_value_heads", "multi_query_group_num", "num_kv_heads", "n_head_kv")
        return _number(self.config, *names) or (_number(nested, "kv_n_heads") if isinstance(nested, Mapping) else None)

    def _latent(self) -> tuple[int, int, int, int] | None:
        """The head sizes and rank of multi-head latent attention, as in `Geometry`; None without it."""
        rank = _number(self.config, "kv_lora_rank")
        if rank is None:
            return None
        parts = (self.config.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        sizes = [part for part in parts if isinstance(part, int) and part is not True and part > 0]
        if len(sizes) < 3:
            raise ModelError("config.json: latent attention needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim")
        return sizes[0], sizes[1], sizes[2], rank

    def add_layer(self, layer: str, index: int) -> None:
        """Add the views of a layer's modules. A model whose layers pack attention in different ways is refused."""
        attention = matching(layouts.ATTENTION, self.names, layer, "the attention")
        feed_forward = matching(layouts.FEED_FORWARD, self.names, layer, "the feed-forward")
        norms = matching(layouts.NORMS, self.names, layer, "the norms")
        if norms is None and self.model_type not in layouts.UNSCALED:
            raise ModelError(f"{layer.rstrip('.')}: its norms have no known names")
        if attention is not None:
            packing = _packing(attention, self.config)
            if self.packing is not None and packing != self.packing:
                raise ModelError(f"{layer.rstrip('.')}: its attention weights are packed unlike earlier layers'")
            self.packing = packing
        for scheme in (attention, feed_forward, norms):
            if scheme is not None:
                for role, module in {**scheme.required, **scheme.optional}.items():
                    self._add(layer + module, role, scheme.packing, index)
        if norms is not None and norms.packing == "parallel":  # one norm feeds attention and feed-forward
            for suffix in ("", "_bias"):
                if ("attn_norm" + suffix, index) in self.views:
                    self.views["ffn_norm" + suffix, index] = self.views["attn_norm" + suffix, index]

    def _add(self, module: str, role: str, kind: str, index: int) -> None:
        """Add the views of one module: one view for a plain role, two or three for a fused role; likewise for its
        biases."""
        for suffix, part in (("", "weight"), ("_bias", "bias")):
            tensor = parameter(self.names, module, part)
            if tensor is None:
                continue
            shape = self.names[tensor].shape
            if len(shape) < (2 if part == "weight" and not role.endswith("norm") else 1):
                raise ModelError(f"{tensor}: shape {shape} is not a {'matrix' if part == 'weight' else 'vector'}")
            conv1d = self.model_type in layouts.CONV1D and len(shape) == 2
            out = shape[1] if conv1d else shape[0]
            item = None
            pieces: Pieces = {role: None}
            if role == "qkv":
                pieces = self._cut_qkv(out, module)
            elif role == "q" and self.model_type in layouts.GATED_OUTPUT and out == 2 * self.heads * self.head_dim:
                pieces = self._cut_gate()
            elif kind == "experts" and len(shape) == 3:
                item, conv1d = 0, self.model_type in layouts.EXPERTS_IN_OUT
                pieces = self._cut_experts(role, tensor, shape[::-1][:2] if conv1d else shape[1:])
            elif role == "gate_up" or (kind == "maybe_gated" and role == "up" and _is_gated(self.names, module, out)):
                pieces = _halves(out)
            for name, rows in pieces.items():
                self.views[name + suffix, index] = TensorView(tensor, rows, conv1d, item)

    def _cut_experts(self, role: str, tensor: str, shape: tuple[int, ...]) -> Pieces:
        """The row ranges of gate and up in a stack of experts, each of shape (out, in)."""
        if role != "gate_up":
            return {role: None}
        out, inner = shape
        if out % 2 or inner != self.width:
            raise ModelError(f"{tensor}: shape {self.names[tensor].shape} cannot be split into gate and up projection")
        if self.model_type in layouts.EXPERTS_WOVEN:
            return {name: tuple((row, row + 1) for row in range(at, out, 2)) for at, name in enumerate(("gate", "up"))}
        return _halves(out)

    def _cut_gate(self) -> Pieces:
        """The row ranges of q and of the attention's output gate, which alternate head by head in one projection."""
        dim = self.head_dim
        starts = {"q": 0, "q_gate": dim}
        return {
            role: tuple((2 * h * dim + a, 2 * h * dim + a + dim) for h in range(self.heads))
            for role, a in starts.items()
        }

    def _cut_qkv(self, out: int, module: str) -> Pieces:
        """The row ranges of q, k and v inside a fused projection."""
        heads, dim = self.heads, self.head_dim
        kv_heads = heads if self.packing == "head" else self.kv_heads
        if out != (heads + 2 * kv_heads) * dim:
            raise ModelError(
                f"{module}: {out} rows do not equal {heads} query, {kv_heads} key and {kv_heads} value heads of {dim}"
            )
        if self.packing == "concat":
            cuts = [0, heads * dim, (heads + kv_heads) * dim, out]
            return {role: ((cuts[i], cuts[i + 1]),) for i, role in enumerate("qkv")}
        group = heads // kv_heads
        block = (group + 2) * dim
        starts = {"q": (0, group * dim), "k": (group * dim, (group + 1) * dim), "v": ((group + 1) * dim, block)}
        return {role: tuple((h * block + a, h * block + b) for h in range(kv_heads)) for role, (a, b) in starts.items()}

    def geometry(self, layers: int) -> Geometry:
        """The shape of the model, once all layers are added."""
        unrotated = self.model_type in layouts.UNROTATED or self.config.get("alibi") is True
        if self.model_type == "granitemoehybrid":
            unrotated = self.config.get("position_embedding_type") != "rope"
        rotary = "none" if unrotated else "half"
        if self.model_type in layouts.INTERLEAVED_ROTARY and self.config.get("rope_interleave") is not False:
            rotary = "interleaved"
        layer_norm = self.model_type in layouts.LAYER_NORM or ("final_norm_bias", None) in self.views
        down = self.views.get(("down", layers - 1))
        turned = int(self.head_dim * _rotary_share(self.config, self.head_dim)) // 2 * 2
        late_norm = self.model_type in layouts.HEADS_NORMED_LATE and self.config.get("use_qk_norm") is not False
        return Geometry(
            layers=layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
            ffn=self.names[down.tensor].shape[-2 if down.transposed else -1] if down is not None else 0,
            norm="layer" if layer_norm else "rms",
            rotary=rotary,
            rotary_dim=0 if rotary == "none" else self.latent[1] if self.latent else turned,
            qk_norm=any(role == "q_norm" for role, _ in self.views) or late_norm,
            late_norm=late_norm,
            post_norm=any(role == "post_attn_norm" for role, _ in self.views),
            gated=("gate", layers - 1) in self.views,
            tied=("head", None) not in self.views or self.config.get("tie_word_embeddings") is True,
            unit_offset=self.model_type in layouts.UNIT_OFFSET_GAINS,
            model_type=self.model_type,
            latent=self.latent if self.packing == "latent" else None,
        )


def _halves(out: int) -> Pieces:
    return {"gate": ((0, out // 2),), "up": ((out // 2, out),)}


def _packing(attention: Scheme, config: Mapping[str, object]) -> str:
    if attention.packing != "ask":
        return attention.packing
    packing = layouts.PACKING.get(str(config.get("model_type")))
    if packing is None:
        module = attention.required["qkv"]
        raise ModelError(
            f"{module}: fused query, key and value rows may be interleaved in three ways, and model_type does not say "
            "which"
        )
    if packing == "falcon":
        if config.get("new_decoder_architecture"):
            return "group"
        return "concat" if config.get("multi_query", True) else "head"
    return packing


def _is_gated(names: Mapping[str, TensorInfo], module: str, out: int) -> bool:
    down = parameter(names, module.replace("dense_h_to_4h", "dense_4h_to_h"))
    return down is not None and names[down].shape[1] * 2 == out


def _rotary_share(config: Mapping[str, object], head_dim: int) -> float:
    """The share of a head's coordinates that rotate; 1 if the config does not specify it."""
    if (turned := _number(config, "rotary_dim")) is not None and turned <= head_dim:
        return turned / head_dim
    rope = config.get("rope_parameters")
    places = [(rope, "partial_rotary_factor")] if isinstance(rope, Mapping) else []
    for place, key in [*places, (config, "rotary_pct"), (config, "partial_rotary_factor")]:
        value = place.get(key)
        if value is None or value == 0:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ModelError(f"config.json: {key} {value!r:.40}: wanted a share between 0 and 1")
        return float(value)
    return 1.0


def _check_shapes(weights: Weights) -> None:
    """Check the shapes that scores depend on against the config."""
    g = weights.geometry
    want: dict[str, tuple[int | None, int | None]] = {}
    if g.latent is None:
        want = {
            "q": (g.heads * g.head_dim, g.width),
            "k": (g.kv_heads * g.head_dim, g.width),
            "v": (None, g.width),
            "o": (g.width, None),
        }
    want |= {"up": (None, g.width), "gate": (None, g.width), "down": (g.width, None), "head": (None, g.width)}
    for (role, layer), view in weights.views.items():
        if role == "up" and (("gate", layer) in weights.views) != g.gated:
            raise ModelError(f"layer {layer} has {'no' if g.gated else 'a'} gate, unlike the last layer")
        shape = weights.store.tensors[view.tensor].shape
        if role.removesuffix("_bias") in WIDE_GAINS and shape != (g.width,):
            raise ModelError(f"{view.tensor}: shape {shape}, wanted {(g.width,)}")
        if role not in want:
            continue
        if len(shape) != (2 if view.item is None else 3):
            raise ModelError(f"{view.tensor}: shape {shape} is not a matrix")
        out, inner = shape[-2:][::-1] if view.transposed else shape[-2:]
        if view.rows is not None:
            out = sum(stop - start for start, stop in view.rows)
        if any(w is not None and w != s for w, s in zip(want[role], (out, inner), strict=True)):
            raise ModelError(f"{view.tensor}: {role} of layer {layer} is {out}×{inner}, wanted {want[role]}")
        bias = weights.views.get((f"{role}_bias", layer))
        if bias is not None and bias.rows is None and weights.store.tensors[bias.tensor].shape[-1] != out:
            raise ModelError(f"{bias.tensor}: shape {weights.store.tensors[bias.tensor].shape}, wanted {(out,)}")
