"""Qwen3's sub-layers in float64, from their equations: what the truth of each mechanism is built on."""

import math

import torch


class Oracle:
    """The weights of a model as leaves, and plain functions over them. Nothing of the code under test is called."""

    def __init__(self, model):
        self.c = model.config
        self.w = {name: t.detach().double().clone().requires_grad_() for name, t in model.state_dict().items()}
        self.embedding, self.head = self.w["model.embed_tokens.weight"], self.w["lm_head.weight"]

    def rms(self, x, name):
        return self.normed(x) * self.w[name]

    def normed(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps).sqrt()

    def rotate(self, x):
        """`[B, H, T, D]`; angles in float32, as every model of the family has them."""
        half = x.shape[-1] // 2
        frequencies = 1.0 / 10_000.0 ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
        angles = torch.arange(x.shape[2]).float()[:, None] * frequencies
        cos, sin = angles.cos().double(), angles.sin().double()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def project(self, layer, x):
        """Query, key and raw value of a normed input."""
        p = f"model.layers.{layer}.self_attn."

        def heads(name):
            return (x @ self.w[p + name].T).unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)

        query, key, value = (heads(f"{name}_proj.weight") for name in "qkv")
        query = self.rotate(self.rms(query, p + "q_norm.weight"))
        if self.c.k_norm_position == "after_rope":
            key = self.rms(self.rotate(key), p + "k_norm.weight")
        else:
            key = self.rotate(self.rms(key, p + "k_norm.weight"))
        return query, key, value

    def attend(self, layer, query, key, value):
        """Causal attention and the output projection."""
        group, length = query.shape[1] // key.shape[1], query.shape[2]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.c.head_dim)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.c.layer_types[layer] == "sliding_attention":
            seen &= torch.ones_like(seen).triu(1 - self.c.sliding_window)
        out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ value
        return out.transpose(1, 2).flatten(2) @ self.w[f"model.layers.{layer}.self_attn.o_proj.weight"].T

    def attention(self, layer, x, mixed=None):
        """What attention adds to the stream x. `mixed(layer, query, key, value)` may replace the value."""
        query, key, value = self.project(layer, self.rms(x, f"model.layers.{layer}.input_layernorm.weight"))
        if mixed is not None:
            value = mixed(layer, query, key, value)
        return self.attend(layer, query, key, value)

    def mlp(self, layer, x):
        """What the MLP adds to the stream x."""
        p = f"model.layers.{layer}."
        x = self.rms(x, p + "post_attention_layernorm.weight")
        gate, up = x @ self.w[p + "mlp.gate_proj.weight"].T, x @ self.w[p + "mlp.up_proj.weight"].T
        return gate * gate.sigmoid() * up @ self.w[p + "mlp.down_proj.weight"].T

    def block(self, layer, x, mixed=None):
        """A whole plain layer."""
        x = x + self.attention(layer, x, mixed)
        return x + self.mlp(layer, x)

    def logits(self, x):
        return self.rms(x, "model.norm.weight") @ self.head.T


def agree(model, ids, truth, oracle, exact=1e-9):
    """Logits and the gradients of every parameter against the oracle's; returns the logits' largest error."""
    ours = model(ids, use_cache=False).logits
    seed = torch.randn(truth.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model.zero_grad()
    (ours * seed).sum().backward()
    for t in oracle.w.values():
        t.grad = None
    (truth * seed).sum().backward()
    error = (ours - truth).abs().max().item()
    assert error <= exact * max(1.0, truth.abs().max().item())
    for name, parameter in model.named_parameters():
        wanted, found = oracle.w[name].grad, parameter.grad
        if wanted is None:
            assert found is None or not found.any(), name
            continue
        scale = max(1.0, wanted.abs().max().item())
        assert (found - wanted).abs().max() <= exact * scale, name
    return error


def unrolled(oracle, ids, order, sources_of, mix):
    """Logits of a plain decoder that visits the layers of `order`, with `mix` over the (key, mixed value) of sources.

    `sources_of(position)` are positions in `order`; `mix(query, key, value, sources)` gives the value to attend to.
    """
    x, history = oracle.embedding[ids], []

    def mixed(layer, query, key, value):
        sources = [history[p] for p in sorted(sources_of(len(history)))]
        value = mix(query, key, value, sources) if sources else value
        history.append((key, value))
        return value

    for layer in order:
        x = oracle.block(layer, x, mixed)
    return oracle.logits(x)
