"""The recursion from its definition alone, in numpy: entry-index positions, no cache, no code under test.

Keys and values of a layer are compressed before RoPE; then keys get positions 0, 1, … and the group's queries those of
their own entries.
"""

from importlib import import_module
from importlib.util import find_spec

import numpy as np
from scipy.fft import dct, idct


def freqkv(x, kept):
    """SciPy's DCT-II, cut, and its inverse of the shorter length; `x` is `[H, M, D]`."""
    return idct(dct(x, norm="ortho", axis=1)[:, :kept], norm="ortho", axis=1) * np.sqrt(kept / x.shape[1])


def freqkv_high(x, kept):
    """The other end of the spectrum."""
    return idct(dct(x, norm="ortho", axis=1)[:, -kept:], norm="ortho", axis=1) * np.sqrt(kept / x.shape[1])


def freqkv_unscaled(x, kept):
    """Cut, and inverted, and that is all."""
    return idct(dct(x, norm="ortho", axis=1)[:, :kept], norm="ortho", axis=1)


def average(x, kept):
    """Every old entry spread over the interval that it covers."""
    m = x.shape[1]
    out = np.zeros((x.shape[0], kept, x.shape[2]))
    for i in range(kept):
        low, high = i * m / kept, (i + 1) * m / kept
        for j in range(m):
            out[:, i] += x[:, j] * max(0.0, min(high, j + 1) - max(low, j)) * kept / m
    return out


def learned(x, kept):
    """As it starts: averages, in the float32 of a parameter."""
    c = average(np.eye(x.shape[1])[None], kept)[0].astype(np.float32).astype(np.float64)
    return c @ x


def last(x, kept):
    """The last entries."""
    return x[:, x.shape[1] - kept :]


LINEAR = {
    **{"freqkv": freqkv, "freqkv_high": freqkv_high, "freqkv_unscaled": freqkv_unscaled, "freqkv_after_rope": freqkv},
    **{"average": average, "learned": learned, "drop": last, "sinks": last},
}


def rule_of(method):
    """What a method does to all heads alike, `[H, M, D]` to `[H, kept, D]`: from here, or as `rule` in its own test."""
    if method in LINEAR or find_spec(f"{__package__}.test_{method}") is None:
        return LINEAR.get(method)
    return getattr(import_module(f"{__package__}.test_{method}"), "rule", None)


class Oracle:
    """Qwen3 or Llama in float64 numpy, under a compression method."""

    def __init__(self, model, method, window=64, sinks=4, kept=28):
        self.c, self.method = model.config, method
        self.n, self.s, self.l = window, sinks, window - sinks - 1 if method == "sinks" else kept
        self.w = {name: t.detach().double().numpy() for name, t in model.state_dict().items()}
        self.head = self.w["lm_head.weight"]

    def __call__(self, ids):
        """Logits `[T, V]` of one row of ids."""
        x = self.w["model.embed_tokens.weight"][np.asarray(ids)]
        for layer in range(self.c.num_hidden_layers):
            p = f"model.layers.{layer}."
            h = self.norm(x, self.w[p + "input_layernorm.weight"])
            x = x + self.attention(h, p + "self_attn.")
            h = self.norm(x, self.w[p + "post_attention_layernorm.weight"])
            gate = h @ self.w[p + "mlp.gate_proj.weight"].T
            up = h @ self.w[p + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w[p + "mlp.down_proj.weight"].T
        return self.norm(x, self.w["model.norm.weight"]) @ self.head.T

    def norm(self, x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.c.rms_norm_eps) * weight

    def project(self, h, p, name):
        heads = (h @ self.w[f"{p}{name}_proj.weight"].T).reshape(len(h), -1, self.c.head_dim).transpose(1, 0, 2)
        norm = self.w.get(f"{p}{name}_norm.weight")
        return heads if norm is None else self.norm(heads, norm)

    def rotate(self, x, start=0):
        half = x.shape[-1] // 2
        theta = self.c.rope_parameters["rope_theta"]
        angles = np.outer(np.arange(start, start + x.shape[1]), theta ** (-np.arange(half) / half))
        cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, h, p):
        q, k, v = (self.project(h, p, name) for name in "qkv")  # [H, T, D], unrotated
        return self.recursion(q, k, v).transpose(1, 0, 2).reshape(len(h), -1) @ self.w[p + "o_proj.weight"].T

    def recursion(self, q, k, v):
        """Attention of all groups, `[H, T, D]`."""
        n, s, kept = self.n, self.s, self.l
        turned = self.method == "freqkv_after_rope"  # a key is rotated once, at its entry when it comes
        keys, values = self.rotate(k[:, :n]) if turned else k[:, :n], v[:, :n]
        out = [self.attend(q[:, :n], keys, values)]
        seen, freed = n, n - s - kept
        while seen < q.shape[1]:
            keys, values = self.compress(keys, values, q[:, seen - freed if seen > n else 0 : seen])
            stop = min(seen + freed, q.shape[1])
            new = self.rotate(k[:, seen:stop], keys.shape[1]) if turned else k[:, seen:stop]
            keys = np.concatenate([keys, new], 1)
            values = np.concatenate([values, v[:, seen:stop]], 1)
            out.append(self.attend(q[:, seen:stop], keys, values))
            seen = stop
        return np.concatenate(out, 1)

    def attend(self, q, keys, values):
        weights = self.weights(q, keys)
        return weights @ np.repeat(values, len(q) // len(values), 0)

    def weights(self, q, keys):
        """Softmax of a group's queries, the last entries of the memory, over all of it."""
        past = keys.shape[1] - q.shape[1]
        turned = keys if self.method == "freqkv_after_rope" else self.rotate(keys)
        scores = self.rotate(q, past) @ np.repeat(turned, len(q) // len(keys), 0).transpose(0, 2, 1)
        scores = scores / np.sqrt(self.c.head_dim)
        scores[:, ~np.tri(q.shape[1], keys.shape[1], past, dtype=bool)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return scores / scores.sum(-1, keepdims=True)

    def compress(self, keys, values, queries):
        s, kept = self.s, self.l
        rule = rule_of(self.method)
        if rule is not None:
            rest = [rule(x[:, s:], kept) for x in (keys, values)]
        else:
            chosen = getattr(self, self.method)(keys, queries, values)
            rest = [np.stack([x[h, chosen[h]] for h in range(len(x))]) for x in (keys, values)]
        return tuple(np.concatenate([x[:, :s], y], 1) for x, y in zip((keys, values), rest, strict=True))

    def key_norm(self, keys, queries, values):
        return [self.best(-row) for row in np.linalg.norm(keys, axis=-1)]

    def keydiff(self, keys, queries, values):
        turned = self.rotate(keys)
        unit = turned / np.linalg.norm(turned, axis=-1, keepdims=True)
        anchor = unit.mean(1, keepdims=True)
        return [self.best(-row) for row in (unit * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)]

    def tova(self, keys, queries, values):
        looks = self.weights(queries[:, -1:], keys).mean((0, 1))  # [N]
        looks[-1] = np.inf
        return [self.best(looks)] * len(keys)

    def snapkv(self, keys, queries, values, kernel=5):
        w = min(64, min(self.n - self.s - self.l, self.l) // 2)
        looks = self.weights(queries[:, -w:], keys).mean(1)[:, : self.n - w]  # [H, N − w]
        votes = looks.reshape(len(keys), -1, self.n - w).mean(1)
        around = np.ones(kernel) / kernel
        return [self.best(np.append(np.convolve(row, around, "same"), np.full(w, np.inf))) for row in votes]

    def expected_attention(self, keys, queries, values, future=512):
        """By the mean rotation as a matrix; `queries` are those since the last compression."""
        sinks = self.s if queries.shape[1] == self.n else 0
        queries, groups = queries[:, sinks:], len(queries) // len(keys)
        d = keys.shape[-1]
        mean = queries.mean(1)
        spread = np.stack([np.cov(q.T, bias=True) for q in queries])
        eye = np.repeat(np.eye(d)[:, None], future, 1)  # [D, future, D]
        ahead = self.rotate(eye, self.n).mean(1).T  # R̄, whose columns are the rotated unit vectors
        mean, spread = mean @ ahead.T, ahead @ spread @ ahead.T
        k = np.repeat(self.rotate(keys)[:, self.s :], groups, 0)  # [H, M, D]
        looks = (k @ mean[..., None])[..., 0] / np.sqrt(d) + (k @ spread * k).sum(-1) / (2 * d)
        looks = np.exp(looks - looks.max(-1, keepdims=True))
        looks = (looks / looks.sum(-1, keepdims=True)).reshape(len(keys), groups, -1).mean(1)
        scores = looks * np.linalg.norm(values[:, self.s :], axis=-1)
        return [self.best(np.append(np.full(self.s, np.inf), row)) for row in scores]

    def best(self, scores):
        """The entries of the highest of N scores beside the sinks; of those that differ by rounding, the earliest."""
        scores = scores[self.s :]
        least = np.sort(scores)[-self.l]
        with np.errstate(invalid="ignore"):
            equal = (scores == least) | (np.abs(scores - least) <= 2e-6 * np.abs(least))
        sure = np.flatnonzero((scores > least) & ~equal)
        return sorted(self.s + np.append(sure, np.flatnonzero(equal)[: self.l - len(sure)]))
