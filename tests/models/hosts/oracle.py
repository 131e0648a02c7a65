"""One hosted family of each kind in NumPy and float64, a text at a time, written from what the layers mean.

attention       softmax(q kᵀ s + mask, with a sink that takes weight and gives nothing) v
latent          k = [W^K c; r], v = W^V c of a normed latent c and one rotated key r for all heads
convolution     C ⊙ conv(B ⊙ x)
delta net       S ← γ S + k β (v - γ Sᵀ k)ᵀ,  y = Sᵀ q
state space     S ← e^{Δ A} S + Δ x bᵀ,  y = S c + D x
experts         Σ over the chosen of w_e E_e(x), and what every token visits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Tensors = Mapping[str, Array]


def silu(x: Array) -> Array:
    """x σ(x)."""
    return x * sigmoid(x)


def sigmoid(x: Array) -> Array:
    """σ(x)."""
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    """log(1 + eˣ)."""
    return np.logaddexp(0, x)


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x: Array, gain: Array, eps: float) -> Array:
    """Divided by the root mean square."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


class Model:
    """A decoder: `layer_<type>` mixes tokens, `channels` mixes channels."""

    def __init__(self, config: Any, tensors: Tensors) -> None:
        self.config, self.all, self.kind = config, tensors, config.model_type
        self.offset = 1.0 if self.kind == "qwen3_5_text" else 0.0
        self.eps = getattr(config, "norm_eps", None) or config.rms_norm_eps
        self.routed: list[list[Array]] = []
        """By trip and layer: the logits of routers `[T, experts]`."""
        self.interleaved = self.kind == "deepseek_v3"

    def __call__(self, ids: Array, trips: int = 1, alphas: list[Array] | None = None, grid: Any = None) -> Array:
        """Logits `[T, V]`; `alphas` are DenseFormer's, by layer; `grid` the layers that those above mix with."""
        c = self.config
        x = self.all["model.embed_tokens.weight"][ids] * getattr(c, "embedding_multiplier", 1.0)
        self.routed = []
        for _ in range(trips):
            self.routed.append([])
            history, pairs = [x], {}
            kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
            for i, kind in enumerate(kinds):
                at = Layer(self, i, kind, {j: pairs[j] for j in grid if j in pairs} if grid is not None else {})
                x = at(x)
                if at.pair is not None:
                    pairs[i] = at.pair
                if alphas is not None:
                    history.append(x)
                    x = sum(a * h for a, h in zip(alphas[i], history, strict=True))
        final = "embedding_norm" if self.kind == "lfm2" else "norm"
        head = self.all.get("lm_head.weight", self.all["model.embed_tokens.weight"])
        x = rms(x, self.all[f"model.{final}.weight"] + self.offset, self.eps)
        return x @ head.T / getattr(c, "logits_scaling", 1.0)


class Layer:
    """One layer."""

    def __init__(self, model: Model, i: int, kind: str, sources: dict[int, tuple[Array, Array]]) -> None:
        self.model, self.c, self.kind, self.sources = model, model.config, kind, sources
        self.w = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in model.all.items()
            if name.startswith(f"model.layers.{i}.")
        }
        self.pair: tuple[Array, Array] | None = None
        """Keys and mixed values `[H, T, D]`."""

    def __call__(self, x: Array) -> Array:
        before = ("operator_norm", "ffn_norm") if self.model.kind == "lfm2" else None
        first, second = before or ("input_layernorm", "post_attention_layernorm")
        factor = getattr(self.c, "residual_multiplier", 1.0)
        x = x + factor * self.tokens()(self.normed(x, first))
        return x + factor * self.channels(self.normed(x, second))

    def normed(self, x: Array, name: str) -> Array:
        """The layer's norm of this name."""
        return rms(x, self.w[f"{name}.weight"] + self.model.offset, self.model.eps)

    def linear(self, x: Array, name: str) -> Array:
        """x Wᵀ + b."""
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def tokens(self) -> Callable[[Array], Array]:
        """What mixes tokens here."""
        if self.model.kind == "deepseek_v3":
            return self.latent
        kinds = {"conv": self.convolution, "linear_attn": self.delta, "mamba": self.space}
        held = {name.partition(".")[0] for name in self.w}
        return next((mix for name, mix in kinds.items() if name in held), self.attention)

    def attention(self, x: Array) -> Array:
        """Grouped queries, with what the family adds."""
        c, t, w = self.c, len(x), self.w
        heads, kv = c.num_attention_heads, c.num_key_value_heads
        width = getattr(c, "head_dim", None) or c.hidden_size // heads
        q, k, v = (self.linear(x, f"self_attn.{name}_proj") for name in "qkv")
        gate = 1.0
        if self.model.kind == "qwen3_5_text":
            q, gate = np.split(q.reshape(t, heads, 2 * width), 2, -1)
            gate = sigmoid(gate.reshape(t, -1))
        q, k, v = (a.reshape(t, -1, width).swapaxes(0, 1) for a in (q, k, v))  # [H, T, D]
        norms = ("q_layernorm", "k_layernorm") if self.model.kind == "lfm2" else ("q_norm", "k_norm")
        if f"self_attn.{norms[0]}.weight" in w:
            q, k = (self.normed(a, f"self_attn.{name}") for a, name in zip((q, k), norms, strict=True))
        if self.model.kind != "granitemoehybrid":
            q, k = self.rotated(q), self.rotated(k)
        scale = getattr(c, "attention_multiplier", width**-0.5)
        v = self.mixed(q, k, v, width**-0.5)
        self.pair = k, v
        reach = c.sliding_window if self.kind == "sliding_attention" else t
        out = self.attend(q, *(np.repeat(a, heads // kv, 0) for a in (k, v)), scale, reach)
        name = "out_proj" if self.model.kind == "lfm2" else "o_proj"
        return self.linear(out * gate, f"self_attn.{name}")

    def attend(self, q: Array, k: Array, v: Array, scale: float, reach: int) -> Array:
        """Causal, over the last `reach` tokens; a sink's logit has a weight and no value. `[T, H·D]`."""
        t = q.shape[1]
        back = np.arange(t)[:, None] - np.arange(t)
        scores = np.where((back >= 0) & (back < reach), q @ k.swapaxes(1, 2) * scale, -np.inf)
        if (sinks := self.w.get("self_attn.sinks")) is not None:
            scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], -1)
        return (softmax(scores)[..., :t] @ v).swapaxes(0, 1).reshape(t, -1)

    def mixed(self, q: Array, k: Array, v: Array, scale: float) -> Array:
        """Depth-Attention: a token's query weighs its keys in the layers below and here, and their values are mixed."""
        if not self.sources:
            return v
        q = q.reshape(len(k), -1, *q.shape[1:]).mean(1)
        keys, values = zip(*self.sources.values(), (k, v), strict=True)
        weights = softmax(np.stack([(q * key).sum(-1) * scale for key in keys], -1))  # [H, T, S]
        return (weights[..., None] * np.stack(values, 2)).sum(2)

    def rotated(self, x: Array) -> Array:
        """Pairs of a head's first channels, turned by an angle that grows with the position."""
        rope, (t, width) = self.c.rope_parameters, x.shape[1:]
        size = int(width * (1.0 if self.model.interleaved else rope.get("partial_rotary_factor", 1.0)))
        angle = np.outer(np.arange(t), rope["rope_theta"] ** (-np.arange(0, size, 2) / size))
        turn = np.exp(1j * angle)
        part = x[..., :size]
        a, b = (part[..., ::2], part[..., 1::2]) if self.model.interleaved else np.split(part, 2, -1)
        z = (a + 1j * b) * turn
        return np.concatenate([z.real, z.imag, x[..., size:]], -1)

    def latent(self, x: Array) -> Array:
        """Keys and values of all heads from one latent."""
        c, t, heads = self.c, len(x), self.c.num_attention_heads
        eps, rope, plain = 1e-6, c.qk_rope_head_dim, c.qk_nope_head_dim
        q = rms(self.linear(x, "self_attn.q_a_proj"), self.w["self_attn.q_a_layernorm.weight"], eps)
        q = self.linear(q, "self_attn.q_b_proj").reshape(t, heads, -1).swapaxes(0, 1)
        down = self.linear(x, "self_attn.kv_a_proj_with_mqa")
        content = rms(down[:, :-rope], self.w["self_attn.kv_a_layernorm.weight"], eps)
        turned = self.rotated(down[None, :, -rope:])
        q = np.concatenate([q[..., :plain], self.rotated(q[..., plain:])], -1)
        keys = self.w["self_attn.kv_b_proj.weight"].reshape(heads, -1, c.kv_lora_rank)[:, :plain]
        asked = [np.concatenate([a[:, :plain] @ w, a[:, plain:]], -1) for a, w in zip(q, keys, strict=True)]
        seen = np.concatenate([content, turned[0]], -1)[None]
        content = self.mixed(np.mean(asked, 0)[None], seen, content[None], (plain + rope) ** -0.5)
        self.pair = seen, content
        both = self.linear(content[0], "self_attn.kv_b_proj").reshape(t, heads, -1).swapaxes(0, 1)
        k = np.concatenate([both[..., :plain], np.broadcast_to(turned, (heads, t, rope))], -1)
        return self.linear(self.attend(q, k, both[..., plain:], (plain + rope) ** -0.5, t), "self_attn.o_proj")

    def causal(self, x: Array, name: str) -> Array:
        """Each channel with its own kernel over the tokens before."""
        kernel = self.w[f"{name}.weight"][:, 0]  # [C, K]
        size = kernel.shape[1]
        padded = np.concatenate([np.zeros((size - 1, x.shape[1])), x])
        return sum(padded[j : j + len(x)] * kernel[:, j] for j in range(size)) + self.w.get(f"{name}.bias", 0.0)

    def convolution(self, x: Array) -> Array:
        """Gated before and after."""
        b, c, y = np.split(self.linear(x, "conv.in_proj"), 3, -1)
        return self.linear(c * self.causal(b * y, "conv.conv"), "conv.out_proj")

    def delta(self, x: Array) -> Array:
        """A state of keys by values, corrected towards each token's value."""
        c, t, keys, heads = self.c, len(x), self.c.linear_num_key_heads, self.c.linear_num_value_heads
        dk, dv = c.linear_key_head_dim, c.linear_value_head_dim
        qkv = silu(self.causal(self.linear(x, "linear_attn.in_proj_qkv"), "linear_attn.conv1d"))
        q, k, v = np.split(qkv, [keys * dk, 2 * keys * dk], -1)
        q, k = (np.repeat(a.reshape(t, keys, dk), heads // keys, 1) for a in (q, k))
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        q, v, beta = q * dk**-0.5, v.reshape(t, heads, dv), sigmoid(self.linear(x, "linear_attn.in_proj_b"))
        rate = np.exp(self.w["linear_attn.A_log"])
        decay = np.exp(-rate * softplus(self.linear(x, "linear_attn.in_proj_a") + self.w["linear_attn.dt_bias"]))
        state, out = np.zeros((heads, dk, dv)), np.empty((t, heads, dv))
        for i in range(t):
            state = state * decay[i, :, None, None]
            wrong = v[i] - np.einsum("hkv,hk->hv", state, k[i])
            state = state + np.einsum("hk,hv->hkv", k[i], beta[i, :, None] * wrong)
            out[i] = np.einsum("hkv,hk->hv", state, q[i])
        z = self.linear(x, "linear_attn.in_proj_z").reshape(t, heads, dv)
        y = rms(out, self.w["linear_attn.norm.weight"], self.model.eps) * silu(z)
        return self.linear(y.reshape(t, -1), "linear_attn.out_proj")

    def space(self, x: Array) -> Array:
        """Mamba-2: one rate of decay for each head."""
        t, heads, width, n = len(x), self.c.mamba_n_heads, self.c.mamba_d_head, self.c.mamba_d_state
        z, xbc, dt = np.split(self.linear(x, "mamba.in_proj"), [heads * width, 2 * heads * width + 2 * n], -1)
        y, b, read = np.split(silu(self.causal(xbc, "mamba.conv1d")), [heads * width, heads * width + n], -1)
        y, dt = y.reshape(t, heads, width), softplus(dt + self.w["mamba.dt_bias"])
        decay, state, out = np.exp(-dt * np.exp(self.w["mamba.A_log"])), np.zeros((heads, width, n)), np.empty_like(y)
        for i in range(t):
            state = state * decay[i, :, None, None] + np.einsum("hd,n->hdn", dt[i, :, None] * y[i], b[i])
            out[i] = state @ read[i] + self.w["mamba.D"][:, None] * y[i]
        gated = out.reshape(t, -1) * silu(z)
        return self.linear(rms(gated, self.w["mamba.norm.weight"], self.model.eps), "mamba.out_proj")

    def channels(self, x: Array) -> Array:
        """A gated product of matrices, or experts."""
        kind = self.model.kind
        if kind == "lfm2":
            gated = silu(self.linear(x, "feed_forward.w1")) * self.linear(x, "feed_forward.w3")
            return self.linear(gated, "feed_forward.w2")
        if kind == "granitemoehybrid":
            gate, up = np.split(self.linear(x, "shared_mlp.input_linear"), 2, -1)
            chosen = self.chosen(self.linear(x, "block_sparse_moe.router"), softmax)
            first, last = (self.w[f"block_sparse_moe.experts.{name}_proj"] for name in ("gate_up", "down"))
            routed = self.experts(x, chosen, lambda e, row: halves(first[e] @ row) @ last[e].T)
            return routed + self.linear(silu(gate) * up, "shared_mlp.output_linear")
        if "mlp.experts.gate_up_proj" not in self.w:
            return self.gated(x, "mlp")
        first, last = self.w["mlp.experts.gate_up_proj"], self.w["mlp.experts.down_proj"]
        if kind == "gpt_oss":
            bias, after = (self.w[f"mlp.experts.{name}_proj_bias"] for name in ("gate_up", "down"))
            chosen = self.chosen(self.linear(x, "mlp.router"), softmax)
            return self.experts(x, chosen, lambda e, row: clamped(row @ first[e] + bias[e]) @ last[e] + after[e])
        routes, c = self.linear(x, "mlp.gate"), self.c
        if kind == "deepseek_v3":
            share = sigmoid(routes)
            order = share + self.w["mlp.gate.e_score_correction_bias"]
            chosen = self.chosen(order, None, share, c.routed_scaling_factor if c.norm_topk_prob else 1.0)
        else:
            self.model.routed[-1].append(routes)
            share = softmax(routes)
            chosen = self.chosen(share, None, share, 1.0 if c.norm_topk_prob else None)
        routed = self.experts(x, chosen, lambda e, row: halves(first[e] @ row) @ last[e].T)
        return routed + (self.gated(x, "mlp.shared_experts") if kind == "deepseek_v3" else 0.0)

    def gated(self, x: Array, name: str) -> Array:
        """W₃ (silu(W₁ x) ⊙ W₂ x)."""
        up = silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(up, f"{name}.down_proj")

    def chosen(self, order: Array, norm: Any, share: Array | None = None, total: float | None = 1.0) -> list[Any]:
        """For each token its experts, the highest by `order`, and their weights."""
        best = np.argsort(-order, -1)[:, : self.c.num_experts_per_tok]
        picked = np.take_along_axis(order if share is None else share, best, -1)
        if norm is not None:
            picked = norm(picked)
        elif total is not None:
            picked = picked / picked.sum(-1, keepdims=True) * total
        return list(zip(best, picked, strict=True))

    def experts(self, x: Array, chosen: list[Any], expert: Callable[[int, Array], Array]) -> Array:
        """The weighted sum."""
        rows = [sum(w * expert(e, row) for e, w in zip(*one, strict=True)) for row, one in zip(x, chosen, strict=True)]
        return np.stack(rows)


def balance(logits: list[Array], top_k: int) -> float:
    """E Σ_e f_e P_e over the tokens of all layers: f is the share of choices, P the mean probability, times top_k."""
    share = softmax(np.concatenate(logits))
    chosen = np.zeros_like(share)
    np.put_along_axis(chosen, np.argsort(-share, -1)[:, :top_k], 1.0, -1)
    return float(share.shape[-1] * (chosen.mean(0) * share.mean(0)).sum())


def halves(x: Array) -> Array:
    """silu of one half, times the other."""
    gate, up = np.split(x, 2, -1)
    return silu(gate) * up


def clamped(x: Array) -> Array:
    """gpt-oss: clamped at 7, in pairs, and a sharper sigmoid."""
    gate, up = np.minimum(x[..., ::2], 7.0), np.clip(x[..., 1::2], -7.0, 7.0)
    return (up + 1) * gate * sigmoid(1.702 * gate)
