"""`depth_attention`: a layer's query attends over earlier layers' keys of the same token and mixes their values.

For one token and one key-value head, with q̄ the mean of the head's group of queries, k̂ the keys that sequence
attention uses and D_ℓ = {i < ℓ : i mod stride = 0} ∪ {the `recent_layers` layers just below ℓ}:

    α   = softmax over j ∈ D_ℓ ∪ {ℓ} of  q̄_ℓ · k̂_j / √D   (+ self_bias where j = ℓ)
    ṽ_ℓ = α_ℓ v_ℓ + Σ_{j ∈ D_ℓ} α_j ṽ_j

With `norm_scores`, q̄ and every k̂ are first divided by their root mean square, for backbones that do not norm queries
and keys: keys of different layers then score on one scale.

With `mixes: key` or `both`, the same α mix keys: k̃_ℓ = α_ℓ k̂_ℓ + Σ_{j ∈ D_ℓ} α_j k̃_j. Attention and the cache
then hold k̃, and k̃_j is the key that later layers score. All keys of a token are rotated by one angle, so mixing
rotated keys equals rotating mixed ones.

With `blend` λ the result is ṽ_ℓ = v_ℓ + λ (mix - v_ℓ) instead, mix being the sum above; keys likewise. With
`blend: learned` it is ṽ_ℓ = (1 + g) v_ℓ + λ m, where m attends over D_ℓ alone. `blend.py` raises λ
over `blend_steps` in training.

Sources contribute their *mixed* value. ṽ is what the cache stores, so decoding needs nothing of the past but the
ordinary cache. No parameters.

The form below is chosen for memory traffic, which is all that the mix costs: a list of sources, no stack, no cat, no
einsum, arithmetic in float32, one rounding at the end. A compiler fuses it into one kernel. Eager training has a
hand-written backward, which keeps no float32 copies; a few decoded tokens on a CPU take fewer calls (`mix_few`).

`source_layers.py` decides which layers are sources, and `trips/slots.py` which of their earlier iterations.
`modeling.py` (`Attention._mixed`) norms and rotates keys before the mixer scores them. If layers rotate differently
(`mixes_unrotated` in `configuration.py`), it hands over un-rotated keys and rotates those that come back;
`hosts/turning.py` decides and does this for a family's own layers. `families/lumia.py` opens the released weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init

from ..axes.blend import mixing_cost
from ..axes.numerics import few, head_pool, head_sum, softmax_list, weighted_sum, widen
from ..axes.replaceable import faster
from ..axes.roles import Cost, Mechanism, Stored
from ..decoder.norms import unit
from .source_layers import GridMixer, ScheduleOptions

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit


@dataclass(frozen=True)
class DepthAttentionOptions(ScheduleOptions):
    """Options of `depth_attention`."""

    self_bias: float = 0.0
    """Bias on the logit of the layer's own value; no finite bias makes a model start exactly, as `blend: 0` does."""
    norm_scores: bool = False
    """Whether the mean query and the keys are RMS-normed (without a weight) for the scores over depth."""
    mixes: str = "value"
    """What is mixed over depth: `value`, `key`, or `both`; the paper's ablation finds that keys should not be mixed."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse unknown values of `mixes`, and `self_bias` or mixed keys together with learned gates."""
        super().check(config)
        self.require_one_of("mixes", MIXED)
        self.require(
            "self_bias", not (self.learned and self.self_bias), "be 0, because blend=learned scores no own value"
        )
        self.require("mixes", not self.learned or self.mixes == "value", "be value, because blend=learned gates values")


MIXED = ("value", "key", "both")


class DepthAttention(GridMixer):
    """Attention over depth."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        options = DepthAttentionOptions.of(config)
        self.bias = float(options.self_bias)
        self.norm_scores, self.parts = options.norm_scores, options.mixes
        self.eps = config.rms_norm_eps
        self.self_bias = nn.Buffer(torch.tensor(self.bias), persistent=False) if self.bias else None

    def init_weights(self, std: float) -> None:
        """Initialise the self-bias and λ, since checkpoints do not contain them."""
        super().init_weights(std)
        if self.self_bias is not None:
            init.constant_(self.self_bias, self.bias)

    def fused(
        self, projected: Tensor, sources: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
        """The kernel `norm_rotate_mix` if it is in use; None with `norm_scores`, mixed keys or learned gates, which it
        lacks."""
        supported = sources and not self.norm_scores and self.parts == "value"
        kernel = faster("norm_rotate_mix", projected) if supported else None
        if kernel is None or self.blend_gates is not None:
            return None  # a kernel's mix has the layer's own value in it
        if self.blend is None:
            return partial(kernel, self_bias=self.self_bias)

        def blend(projections: tuple[Tensor, ...], *further: Any) -> tuple[Tensor, Tensor, Tensor]:
            query, key, mixed = kernel(projections, *further, self_bias=self.self_bias)
            return query, key, self.blended(projections[2].transpose(1, 2), mixed)

        return blend

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Stored:
        """The mixed value ṽ, or with `mixes` other than `value` the mixed key k̃ and the value; the layer's own value if
        there is no source."""
        if self.blend_gates is not None:
            return self.with_gates(query, value, sources)
        if not sources:
            return value
        if self.parts != "value":
            return self.with_keys(query, key, value, sources)
        mixed = self.mixed(query, key, value, sources)
        return mixed if self.blend is None else self.blended(value, mixed)

    def of_sources(self, query: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """Attend over the sources alone, by passing the last source in place of the layer's own key and value."""
        *others, key, value = sources
        return self.mixed(query, key, value, tuple(others)) if others else value

    def with_keys(
        self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Mix keys, and values too with `mixes: both`; returns the mixed key, and the mixed or own value. What is mixed
        stands in the place of values: keys, and beside each key its value if both are."""
        keys, values, both = sources[::2], sources[1::2], self.parts == "both"
        own = torch.cat([key, value], -1) if both else key  # [B, H_kv, T, D or 2 D]
        rest = [torch.cat(pair, -1) for pair in zip(keys, values, strict=True)] if both else keys
        pairs = tuple(x for pair in zip(keys, rest, strict=True) for x in pair)
        mixed = self.blended(own, self.mixed(query, key, own, pairs))
        width = key.shape[-1]
        return mixed[..., :width], mixed[..., width:] if both else value

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """Mix the values, without blending, by the fastest implementation for these tensors."""
        if self.norm_scores:
            query, key, sources = self.normed(query, key, sources)
        as_wide = key.shape[-1] == value.shape[-1]
        if as_wide and (kernel := faster("depth_mix", value)) is not None:
            return kernel(query, key, value, sources, self.self_bias)
        if self.self_bias is None and few(query):
            return mix_few(query, key, value, sources)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return mix(query, key, value, sources, self.self_bias)[0]
        return _Mix.apply(query, self.self_bias, key, value, *sources)

    def normed(
        self, query: Tensor, key: Tensor, sources: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The mean query, the key and the sources; queries and keys are RMS-normed if `norm_scores` is set."""
        if not self.norm_scores:
            return query, key, sources
        pooled = head_pool(query, key.shape[1])
        query, key, *keys = (unit(x, self.eps).to(key.dtype) for x in (pooled, key, *sources[::2]))
        return query, key, tuple(x for pair in zip(keys, sources[1::2], strict=True) for x in pair)


def depth_weights(
    query: Tensor, key: Tensor, sources: tuple[Tensor, ...], self_bias: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """The weights α of every source and, last, of the layer itself (`[B, H_kv, T, 1]` each, float32), and the mean
    query."""
    q = head_pool(query, key.shape[1])  # [B, H_kv, T, D]
    scale = query.shape[-1] ** -0.5
    scores = [(q * k).sum(-1, keepdim=True) * scale for k in (*sources[::2], key)]
    if self_bias is not None:
        scores[-1] = scores[-1] + self_bias
    return softmax_list(scores), q


def mix(
    query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...], self_bias: Tensor | None = None
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The mixed value ṽ, and the weights and the mean query for its backward pass."""
    weights, q = depth_weights(query, key, sources, self_bias)
    mixed = weighted_sum(weights, (*sources[1::2], value))
    return mixed.to(value.dtype), weights, q


def mix_few(query: Tensor, key: Tensor, value: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    """The mixed value by few operations, for few tokens: PyTorch's attention with the depth as sequence axis."""
    batch, kv_heads, length, width = key.shape
    q = query.reshape(batch, kv_heads, -1, length, width).mean(2)  # [B, H_kv, T, D]
    keys, values = (*sources[::2], key), (*sources[1::2], value)
    if length == 1:  # the token axis is free to hold the depth
        return F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2))
    q, k, v = (x.flatten(0, 1) for x in (q.unsqueeze(-2), torch.stack(keys, -2), torch.stack(values, -2)))
    return F.scaled_dot_product_attention(q, k, v).view(value.shape)  # of [B H_kv, T, 1, D] and [B H_kv, T, S, D] twice


class _Mix(torch.autograd.Function):
    """`mix` with a hand-written backward pass, which saves only the inputs and the weights.

    With d = ∂loss/∂ṽ, q the sum of a group's G queries and ds_j = α_j (d · v_j - Σ_i α_i d · v_i) / (G √D):

        dv_j = α_j d        dk_j = ds_j q        dq_g = Σ_j ds_j k_j for every query of the group
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, self_bias: Tensor | None, key: Tensor, value: Tensor, *sources: Tensor
    ) -> Tensor:
        group, kv_heads = query.shape[1] // key.shape[1], key.shape[1]
        scores = _dots(head_sum(query, kv_heads), (*sources[::2], key)).mul_(query.shape[-1] ** -0.5 / group)
        if self_bias is not None:
            scores[-1] += self_bias
        weights = scores.softmax(0)  # [S, B, T, H_kv, 1], as keys and values lie in memory
        ctx.save_for_backward(query, key, value, weights, *sources)
        return weighted_sum(weights.transpose(2, 3), (*sources[1::2], value)).to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights, *sources = ctx.saved_tensors
        keys, values = (*sources[::2], key), (*sources[1::2], value)
        group = query.shape[1] // key.shape[1]
        q, grad = head_sum(query, key.shape[1]), widen(grad)

        gains = _dots(grad, values)
        slopes = gains.sub_((weights * gains).sum(0)).mul_(weights).mul_(query.shape[-1] ** -0.5 / group)
        weights, slopes = weights.transpose(2, 3), slopes.transpose(2, 3)
        grads = [
            g
            for w, ds, k, v in zip(weights, slopes, keys, values, strict=True)
            for g in ((ds * q).to(k.dtype), (w * grad).to(v.dtype))
        ]
        grad_query = weighted_sum(slopes, keys).to(query.dtype)
        if group > 1:
            grad_query = grad_query.transpose(1, 2).repeat_interleave(group, 2).transpose(1, 2)
        return grad_query, None, grads[-2], grads[-1], *grads[:-2]


def _dots(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Dot products of `x` with each of S other tensors, all `[B, H_kv, T, D]`; returns `[S, B, T, H_kv, 1]`."""
    batch, heads, length, _ = x.shape
    dots, products = x.new_empty(len(others), batch, length, heads, 1), torch.empty_like(x)
    for y, dot in zip(others, dots, strict=True):
        torch.sum(torch.mul(x, y, out=products).transpose(1, 2), -1, keepdim=True, out=dot)
    return dots


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: a score and a weighted sum over all candidates, and the mean of each group of queries."""
    width = config.num_key_value_heads * config.head_dim
    options = DepthAttentionOptions.of(config)
    counts = [len(v.sources) + (not options.learned) for v in visits if v.sources]
    candidates, mixing = sum(n for n in counts if n > 1), sum(n > 1 for n in counts)  # one alone is taken as it is
    pooled = config.num_attention_heads > config.num_key_value_heads
    pooling = mixing * config.num_attention_heads * config.head_dim * pooled
    softmax = 7 * config.num_key_value_heads * candidates  # including scaling
    mixed = 2 if options.mixes == "both" else 1  # tensors that are mixed
    norms = 3 * width * (candidates + mixing) * options.norm_scores
    blends = 3 * width * mixing * options.blends * (mixed - 1)  # of the second tensor
    return mixing_cost(config, visits, options, DepthAttention) + Cost(
        flops=2 * width * candidates * (1 + mixed),
        elementwise_flops=pooling + softmax + norms + blends,
        transient_bytes=2 * width * scalar * sum(v.kept for v in visits),
        io_bytes=scalar * width * ((1 + (options.mixes != "key")) * candidates + mixed * len(visits)),
    )


DEPTH_ATTENTION = Mechanism(
    name="depth_attention",
    axis="mixer",
    summary="attend over earlier layers' values of the same token",
    paper="arXiv 2606.05014",
    build=DepthAttention,
    cost=cost,
    options=DepthAttentionOptions,
    closed={"blend": 0.0},
)
