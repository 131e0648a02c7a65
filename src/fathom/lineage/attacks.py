"""Function-preserving edits of weights, which the canonical form undoes; the result is written as a new checkpoint.

For tests and demonstrations: each edit changes the weights and keeps the logits. A model is rewritten one layer at a
time.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fathom.checkpoints.file_names import CONFIG, INDEX
from fathom.checkpoints.origin import read_json
from fathom.checkpoints.tensors import Array
from fathom.errors import ModelError
from fathom.lineage import canonical, layouts
from fathom.lineage.weights import Geometry, Layer, TensorView, Weights
from fathom.report.files import as_usual, write_json

READERS = ("q", "k", "v", "gate", "up")
WRITERS = ("o", "down")
LAYER_ROLES = (*canonical.MATRICES, "attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm", "q_norm", "k_norm")
ENDS = ("embed", "positions", "final_norm", "head")


@dataclass
class Attack:
    """One edit of a model: returns new arrays for the embedding, final norm and head, and for each layer."""

    geometry: Geometry
    seed: int

    def draw(self, *place: int) -> np.random.Generator:
        """A random generator that depends only on the seed and on the numbers in `place`."""
        return np.random.default_rng([self.seed, *place])

    def ends(self, ends: Layer) -> Layer:
        """Edit embedding, final norm and head."""
        return ends

    def layer(self, layer: Layer, index: int) -> Layer:
        """Edit one layer."""
        return layer

    def check(self) -> None:
        """Refuse models whose function the edit would change."""


@dataclass
class Permute(Attack):
    """Permute the residual channels and flip signs (with LayerNorm only permute, since it is not sign-invariant)."""

    def __post_init__(self) -> None:
        draw = self.draw(0)
        self.order = draw.permutation(self.geometry.width)
        self.sign = draw.choice([-1.0, 1.0], self.geometry.width)
        if self.geometry.norm == "layer":
            self.sign = np.ones(self.geometry.width)

    def ends(self, ends: Layer) -> Layer:
        """Permute channels and flip signs: E ← E P D, likewise the output head; the final norm's gain is permuted."""
        return {
            role: value[self.order] if value.ndim == 1 else value[:, self.order] * self.sign
            for role, value in ends.items()
        }

    def layer(self, layer: Layer, index: int) -> Layer:
        """Matrices that read the residual stream become W P D, those that write to it (P D)ᵀ W."""
        out = dict(layer)
        for role in (r for r in READERS if r in out):
            out[role] = out[role][:, self.order] * self.sign
        for role in (r for r in WRITERS if r in out):
            out[role] = out[role][self.order] * self.sign[:, None]
            if f"{role}_bias" in out:
                out[f"{role}_bias"] = out[f"{role}_bias"][self.order] * self.sign
        for role in ("attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm"):
            for name in (n for n in (role, f"{role}_bias") if n in out):
                out[name] = out[name][self.order]
        return out


@dataclass
class Rotate(Attack):
    """Fold the gains, then rotate the residual stream by a random orthogonal matrix."""

    def __post_init__(self) -> None:
        noise = self.draw(1).normal(size=(self.geometry.width, self.geometry.width))
        self.rotation = np.linalg.qr(noise)[0]

    def check(self) -> None:
        """Refuse models without RMSNorm before the sub-layers: only RMSNorm commutes with rotations."""
        _require_rms(self.geometry, "rotate")

    def ends(self, ends: Layer) -> Layer:
        """Rotate the ends: embedding E ← E Q; output head ← head diag(γ) Q; final gain γ ← 1."""
        head = ends["head"] * ends["final_norm"]
        out = {**ends, "embed": ends["embed"] @ self.rotation, "head": head @ self.rotation}
        return {**out, "final_norm": np.ones_like(ends["final_norm"])}

    def layer(self, layer: Layer, index: int) -> Layer:
        """Rotate a layer: reading matrices become W diag(γ) Q, writing matrices Qᵀ W, and the norm gains γ ← 1."""
        out = {**layer, **canonical.fold(layer, self.geometry)}
        for role in (r for r in READERS if r in out):
            out[role] = out[role] @ self.rotation
        for role in (r for r in WRITERS if r in out):
            out[role] = self.rotation.T @ out[role]
            if f"{role}_bias" in out:
                out[f"{role}_bias"] = out[f"{role}_bias"] @ self.rotation
        for role in ("attn_norm", "ffn_norm"):
            out[role] = np.ones_like(layer[role])
        return out


@dataclass
class Gain(Attack):
    """Multiplies norm gains by random factors, and divides the matrices that read after each norm by the same ones."""

    def check(self) -> None:
        """Refuse models with LayerNorm, or with norms after the sub-layers, whose output no matrix reads directly."""
        _require_rms(self.geometry, "gain")

    def ends(self, ends: Layer) -> Layer:
        """Multiply the final gain γ by random factors s, and divide the output head by s."""
        scale = _lognormal(self.draw(2), len(ends["final_norm"]), 0.7)
        return {**ends, "final_norm": ends["final_norm"] * scale, "head": ends["head"] / scale}

    def layer(self, layer: Layer, index: int) -> Layer:
        """Multiply each norm's gain γ by random factors s, and divide the matrices that read after the norm by s."""
        out = dict(layer)
        for place, (norm, roles) in enumerate(canonical.READERS.items()):
            scale = _lognormal(self.draw(2, index, place), self.geometry.width, 0.7)
            out[norm] = out[norm] * scale
            for role in (r for r in roles if r in out):
                out[role] = out[role] / scale
        return out


@dataclass
class Plane(Attack):
    """Scale the keys in every rotary plane by a factor and the queries by its inverse.

    With q/k-norm the gains are scaled instead, those of coordinates that are not rotated one by one, and the signs of
    planes are flipped, unless q/k-norm takes a mean away.
    """

    spread: float = 2.0

    def check(self) -> None:
        """Refuse models without rotary planes."""
        if not self.geometry.rotary_dim:
            raise ModelError("attack plane: the model has no rotary heads")

    def layer(self, layer: Layer, index: int) -> Layer:
        """Scale q by 1/a and k by a in every rotary plane; with q/k-norm, scale the norms' weights instead, and
        flip the signs of planes."""
        g, out, draw = self.geometry, _copied(layer), self.draw(3, index)
        plane = canonical.planes(g.rotary_dim, g.rotary)
        if "q_norm" in out:
            scale = _per_plane(_lognormal(draw, len(plane), 1.5), plane, g.head_dim)
            scale[g.rotary_dim :] = _lognormal(draw, g.head_dim - g.rotary_dim, 1.5)
            out["q_norm"] = _tiled(out["q_norm"], scale, 1)
            out["k_norm"] = _tiled(out["k_norm"], scale, -1)
        signs = [-1.0, 1.0] if g.norm == "rms" else [1.0]  # a sign would change a head's mean
        for block in (b for b in canonical.blocks(g) if b.rotary):
            factor = draw.choice(signs, len(plane)) if g.qk_norm else _lognormal(draw, len(plane), self.spread)
            scale = _per_plane(factor, plane, len(block.key))
            _scale_rows(out, "q", block.query, 1 / scale)
            _scale_rows(out, "k", block.key, scale)
        return out


@dataclass
class Head(Attack):
    """For each KV head: queries are divided and keys multiplied by a factor (with q/k-norm each gets a scale of its
    own), values are mixed by a random matrix that W_o undoes, and heads are permuted."""

    def check(self) -> None:
        """Refuse models with ALiBi, in which a head's slope depends on its number."""
        if self.geometry.rotary == "none" and self.geometry.model_type in layouts.ALIBI:
            raise ModelError("attack head: with ALiBi, heads in another order would not keep their outputs")

    def layer(self, layer: Layer, index: int) -> Layer:
        """Apply the scales of queries and keys, then the change of basis between V and O, then the permutation of KV
        groups and of query heads within them."""
        g, out, draw = self.geometry, _copied(layer), self.draw(4, index)
        scale = _lognormal(draw, g.kv_heads, 1.0)
        of_queries, of_keys = np.ones(g.heads), np.ones(g.kv_heads)
        if not g.qk_norm:
            of_queries, of_keys = np.repeat(1 / scale, g.group), scale
        elif "q_norm" not in out or out["q_norm"].size == g.head_dim:
            of_queries, of_keys = _lognormal(draw, g.heads, 1.0), scale
        values = out["v"].shape[0] // g.kv_heads
        v = out["v"].reshape(g.kv_heads, values, -1)
        o = out["o"].reshape(-1, g.kv_heads, g.group, values)
        turn = np.linalg.qr(draw.normal(size=(g.kv_heads, values, values)))[0] * scale[:, None, None]
        v, o = turn @ v, np.einsum("dhgj,hji->dhgi", o, np.linalg.inv(turn))
        if "v_bias" in out:
            out["v_bias"] = np.einsum("hij,hj->hi", turn, out["v_bias"].reshape(g.kv_heads, values)).reshape(-1)
        for role, factor in (("q", of_queries), ("k", of_keys)):
            for name in (n for n in (role, f"{role}_bias") if n in out):
                out[name] = (out[name].reshape(len(factor), -1) * factor[:, None]).reshape(out[name].shape)
        out["v"], out["o"] = v.reshape(out["v"].shape), o.reshape(out["o"].shape)
        return self._permuted(out, draw, values)

    def _permuted(self, out: Layer, draw: np.random.Generator, values: int) -> Layer:
        g = self.geometry
        groups = draw.permutation(g.kv_heads)
        inside = np.stack([draw.permutation(g.group) for _ in range(g.kv_heads)])
        heads = (groups[:, None] * g.group + inside).reshape(-1)  # query heads in their new order
        if "q_norm" in out and out["q_norm"].size != g.head_dim:
            heads, groups = np.arange(g.heads), np.arange(g.kv_heads)
        for role, order, dim in (("q", heads, g.head_dim), ("k", groups, g.head_dim), ("v", groups, values)):
            for name in (n for n in (role, f"{role}_bias") if n in out):
                rows = out[name].reshape(len(order), dim, -1)
                out[name] = rows[order].reshape(out[name].shape)
        out["o"] = out["o"].reshape(-1, g.heads, values)[:, heads].reshape(out["o"].shape)
        return out


@dataclass
class Neuron(Attack):
    """Permutes feed-forward neurons; in gated layers also multiplies up rows by c and divides down columns by c, of
    either sign."""

    def layer(self, layer: Layer, index: int) -> Layer:
        """Permute and scale the neurons of one layer, with one permutation and one scale for each neuron."""
        out, draw = dict(layer), self.draw(5, index)
        count = out["up"].shape[0]
        order = draw.permutation(count)
        scale = _lognormal(draw, count, 1.0) * draw.choice([-1.0, 1.0], count)
        if not self.geometry.gated:
            scale = np.ones(count)
        for role in ("gate", "up"):
            for name in (n for n in (role, f"{role}_bias") if n in out):
                out[name] = out[name][order]
        out["up"] = out["up"] * scale[:, None]
        if "up_bias" in out:
            out["up_bias"] = out["up_bias"] * scale
        out["down"] = out["down"][:, order] / scale
        return out


@dataclass
class Scale(Attack):
    """Multiplies the whole residual stream by 7.3, which leaves the function unchanged up to the norms' epsilon."""

    factor: float = 7.3

    def check(self) -> None:
        """Refuse models with norms after the sub-layers, which would undo the scaling of the matrices that write to the
        residual stream."""
        if self.geometry.post_norm:
            raise ModelError("attack scale: the model must not have norms after its sub-layers")

    def ends(self, ends: Layer) -> Layer:
        """E × c."""
        return {r: v * self.factor if r in {"embed", "positions"} else v for r, v in ends.items()}

    def layer(self, layer: Layer, index: int) -> Layer:
        """Writers × c."""
        names = {name for role in WRITERS for name in (role, f"{role}_bias")}
        return {name: value * self.factor if name in names else value for name, value in layer.items()}


ATTACKS: Mapping[str, Callable[[Geometry, int], Attack]] = {
    "permute": Permute,
    "rotate": Rotate,
    "gain": Gain,
    "plane": Plane,
    "head": Head,
    "neuron": Neuron,
    "scale": Scale,
}
UNTYING = {"rotate", "gain", "scale"}
STREAM = {"permute", *UNTYING}
"""Edits of the residual stream."""
AXES = {"mixer": "none", "residual": "plain", "recurrence": "once"}
"""Keys of a Fathom configuration, and the value that is Qwen3; the registry has them too, but it needs torch."""
RELEASED = (
    *("use_depth_attention", "cross_layer_pattern", "cross_layer_mode", "baseline_mode", "residual_baseline"),
    *("recurrent_model", "ponderinglm", "pondering_steps", "num_latent_thoughts"),
)
"""Keys of the papers' own depth models. No depth model is edited, since few edits keep what its mechanism computes."""


def _require_rms(geometry: Geometry, kind: str) -> None:
    if geometry.norm != "rms" or geometry.post_norm:
        raise ModelError(f"attack {kind}: only models with RMSNorm before each sub-layer would keep their outputs")


def _lognormal(draw: np.random.Generator, count: int, spread: float) -> Array:
    return np.exp(draw.normal(0, spread, count))


def _copied(layer: Layer) -> Layer:
    return {role: value.copy() for role, value in layer.items()}


def _per_plane(factor: Array, plane: Array, size: int) -> Array:
    out = np.ones(size)
    out[plane] = factor[:, None]
    return out


def _tiled(gain: Array, scale: Array, power: int) -> Array:
    return (gain.reshape(-1, len(scale)) * scale**power).reshape(gain.shape)


def _scale_rows(out: Layer, role: str, rows: Array, scale: Array) -> None:
    out[role][rows] *= scale[:, None]
    if f"{role}_bias" in out:
        out[f"{role}_bias"][rows] *= scale


def attack(weights: Weights, kinds: Sequence[str], out: Path, seed: int = 0, dtype: str = "float32") -> None:
    """Write a copy of a model that computes the same function with other weights.

    Args:
        weights: The model; separate or fused projections, dense, in a local directory.
        kinds: Which edits, applied in this order; see ATTACKS.
        out: Directory to create.
        seed: Seed of every random choice.
        dtype: float32 or float64; lower precision would change the function.
    """
    from safetensors.numpy import save_file

    _check(weights, kinds, dtype)
    edits = [ATTACKS[kind](weights.geometry, seed + number) for number, kind in enumerate(kinds)]
    for edit in edits:
        edit.check()
    out.mkdir(parents=True)
    untied = weights.geometry.tied and bool(UNTYING & set(kinds))
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_edited(weights, edits, untied, np.dtype(dtype)), 1):
        name = f"model-{number:05d}.safetensors"
        save_file({key: np.ascontiguousarray(value).reshape(value.shape) for key, value in tensors.items()}, out / name)
        as_usual(out / name)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(value.nbytes for value in tensors.values())
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _copy_side_files(weights, out, dtype, untied)


def _edited(
    weights: Weights, edits: Sequence[Attack], untied: bool, number: np.dtype[np.floating]
) -> Iterator[dict[str, Array]]:
    """Yields the edited tensors: embedding, final norm and head, then each layer's, then tensors with no known role."""
    ends = {n: weights.tensor(n).astype(np.float64) for r in ENDS for n in (r, f"{r}_bias") if weights.has(n)}
    if untied:
        ends["head"] = ends["embed"].copy()
    for edit in edits:
        ends = edit.ends(ends)
    head = {"lm_head.weight": ends.pop("head").astype(number)} if untied else {}
    yield {**_stored(weights, ends, None, number), **head}
    for index in range(weights.geometry.layers):
        layer = {role: value.astype(np.float64) for role, value in weights.layer(index, LAYER_ROLES).items()}
        for edit in edits:
            layer = edit.layer(layer, index)
        yield _stored(weights, layer, index, number)
    if weights.extra_tensors:
        yield {name: weights.store.read(name).astype(number) for name in weights.extra_tensors}


def _check(weights: Weights, kinds: Sequence[str], dtype: str) -> None:
    if unknown := [kind for kind in kinds if kind not in ATTACKS]:
        raise ModelError(f"unknown attack {unknown[0]}; there are {', '.join(ATTACKS)}")
    if dtype not in {"float32", "float64"}:
        raise ModelError(f"dtype {dtype}: wanted float32 or float64")
    if weights.geometry.latent or any(view.item is not None for view in weights.views.values()):
        raise ModelError("attack: latent attention and mixtures of experts are not supported")
    if any(role == "q_gate" for role, _ in weights.views):
        raise ModelError("attack: attention with a gated output is not supported")
    if (name := _mechanism(weights.config)) is not None:
        raise ModelError(f"attack: the outputs of a model with {name} could change")
    if unknown := [name for name in weights.extra_tensors if not _is_safe(weights, name, kinds)]:
        raise ModelError(f"attack: tensor {unknown[0]} would have to be edited too, and its role is not known")


def _is_safe(weights: Weights, name: str, kinds: Sequence[str]) -> bool:
    """Whether no edit changes what a tensor of unknown role does: a single number, the head's bias, the gain of a
    head's queries and keys after their rotation, or a vector outside the layers if the stream stays as it is."""
    shape = weights.store.tensors[name].shape
    outside = len(shape) == 1 and re.search(r"\.\d+\.", name) is None and not STREAM & set(kinds)
    late = weights.geometry.late_norm and name.endswith(("query_layernorm.weight", "key_layernorm.weight"))
    bias = name.endswith(".bias") and name.removesuffix(".bias") in layouts.HEADS
    return math.prod(shape) == 1 or bias or late or outside


def _mechanism(config: Mapping[str, object]) -> str | None:
    """The first setting by which a depth model, of Fathom or of a paper, differs from a plain decoder; None if there is
    none."""
    if config.get("model_type") != "fathom":
        return next((key for key in RELEASED if config.get(key)), None)
    changed = ((axis, config.get(axis, plain), plain) for axis, plain in AXES.items())
    return next((f"{axis}={name}" for axis, name, plain in changed if name != plain), None)


def _stored(weights: Weights, arrays: Layer, index: int | None, dtype: np.dtype[np.floating]) -> dict[str, Array]:
    """The arrays of roles, written back into the stored tensors that they were read from."""
    out: dict[str, Array] = {}
    for role, value in arrays.items():
        view: TensorView = weights.views[role, index]
        if role.endswith("norm") and weights.geometry.unit_offset:
            value = value - 1
        if view.rows is None:
            out[view.tensor] = (value.T if view.transposed else value).astype(dtype)
            continue
        shape = weights.store.tensors[view.tensor].shape
        whole = out.setdefault(view.tensor, np.zeros(shape, dtype))
        target = whole.T if view.transposed else whole
        done = 0
        for start, stop in view.rows:
            target[start:stop] = value[done : done + stop - start]
            done += stop - start
    return out


def _copy_side_files(weights: Weights, out: Path, dtype: str, untied: bool) -> None:
    config = read_json(weights.origin, CONFIG)
    config["dtype"] = config["torch_dtype"] = dtype
    if untied:
        config["tie_word_embeddings"] = False
    write_json(out / CONFIG, config)
    for name in weights.origin.names():
        if re.match(r"(tokenizer|vocab|merges|special_tokens|generation_config|added_tokens)", name):
            shutil.copyfile(Path(weights.origin.name) / name, out / name)
