"""Every method on every family against an oracle in float64 numpy that shares no code with what it tests.

The family's own layers run around it; attention alone is the oracle's: it takes keys and queries back to position 0 by
rotations of its own, compresses as the definition says, and rotates entries and queries by their indices.
"""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from fathom.kvcache import METHODS, prefill

from .cases import N, cache_of, cached, model_of, tokens
from .oracle import Oracle
from .test_recursion import FEW, THEIRS

PAIRS = {"cohere", "cohere2", "glm", "glm4", "ernie4_5", "ernie4_5_moe", "helium"}
"""Families that rotate neighbouring channels; the others rotate the two halves of what they rotate."""
BACKWARDS = {"nanochat"}
LIMIT = 1e-5
LENGTH = 140


class Family(Oracle):
    """One layer of any family: rotation, scale and cap are its own."""

    def __init__(self, module, method, scale, cap, rotated, sink=None):
        self.method, self.scale, self.cap, self.rotated, self.sink = method, scale, cap, rotated, sink
        self.n, self.s, self.l = N, 4, N - 5 if method == "sinks" else 28
        self.module, self.config = module, module.config

    def inverse(self, d):
        rope = self.config.rope_parameters
        kinds = getattr(self.config, "layer_types", None)
        rope = rope[kinds[self.module.layer_idx]] if "rope_type" not in rope else rope
        if rope["rope_type"] != "default":
            pytest.skip("scaled angles are compared in test_recursion")
        size = int(d * rope.get("partial_rotary_factor", 1.0))
        return rope["rope_theta"] ** (-np.arange(0, size, 2) / size)

    def rotate(self, x, start=0, step=1):
        if not self.rotated:
            return x
        inverse = self.inverse(x.shape[-1])
        size = 2 * len(inverse)
        angles = np.outer(start + step * np.arange(x.shape[1]), inverse) * (-1 if self.kind in BACKWARDS else 1)
        cos, sin, part = np.cos(angles), np.sin(angles), x[..., :size]
        if self.kind in PAIRS:
            a, b = part[..., 0::2], part[..., 1::2]
            part = np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(part.shape)
        else:
            a, b = np.split(part, 2, -1)
            part = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        return np.concatenate([part, x[..., size:]], -1)

    @property
    def kind(self):
        return self.config.model_type

    def looks(self, q, keys):
        past = keys.shape[1] - q.shape[1]
        turned = keys if self.method == "freqkv_after_rope" else self.rotate(keys)
        scores = self.rotate(q, past) @ np.repeat(turned, len(q) // len(keys), 0).transpose(0, 2, 1)
        scores = scores * self.scale
        visible = np.tri(q.shape[1], keys.shape[1], past, dtype=bool)
        return scores, visible

    def weights(self, q, keys):
        scores, visible = self.looks(q, keys)
        return softmax(np.where(visible, scores, -np.inf))

    def attend(self, q, keys, values, sees=None):
        scores, visible = self.looks(q, keys)
        if self.cap:
            scores = np.tanh(scores / self.cap) * self.cap
        if sees is not None:
            visible &= ~np.tri(*visible.shape, visible.shape[1] - visible.shape[0] - sees, dtype=bool)
        scores = np.where(visible, scores, -np.inf)
        if self.sink is not None:  # one more score per head, of an entry without a value
            sinks = np.broadcast_to(self.sink[:, None, None], (*scores.shape[:2], 1))
            return softmax(np.concatenate([scores, sinks], -1))[..., :-1] @ np.repeat(values, len(q) // len(values), 0)
        return softmax(scores) @ np.repeat(values, len(q) // len(values), 0)

    def expected_attention(self, keys, queries, values, future=512):
        factor = self.scale * np.sqrt(keys.shape[-1])  # the base class divides by √d
        return super().expected_attention(keys, queries * factor, values, future)

    def stored(self, k, start=0):
        """Keys from a position on as the method keeps them: this one rotates a key once, where it comes."""
        return self.rotate(k, start) if self.method == "freqkv_after_rope" else k

    def __call__(self, q, k, v, sees):
        if sees is not None and sees < N:
            out = self.attend(q, self.stored(k), v, sees)
        else:
            out = self.recursion(q, k, v)
        return out


def softmax(scores):
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def attention(module, query, key, value, mask=None, scaling=None, softcap=None, sliding_window=None, **kwargs):
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sink = kwargs["s_aux"].detach().double().numpy() if "s_aux" in kwargs else None
    kinds = getattr(module.config, "layer_types", None)
    if kinds and kinds[module.layer_idx] == "full_attention":
        sliding_window = None
    out = []
    for row in zip(query, key, value, strict=True):
        oracle = Family(module, module.config.oracle_method, scale, softcap, still(module), sink)
        q, k, v = (x.detach().double().numpy() for x in row)
        q, k = oracle.rotate(q, 0, -1), oracle.rotate(k, 0, -1)
        out.append(torch.from_numpy(oracle(q, k, v, sliding_window)))
    return torch.stack(out).transpose(1, 2).contiguous().to(query.dtype), None


def still(module):
    """Whether this layer rotates at all, by each family's own rule."""
    config, layer = module.config, module.layer_idx
    if config.model_type == "smollm3":
        return bool(config.no_rope_layers[layer])
    if config.model_type in ("cohere2", "exaone4", "afmoe"):
        return config.layer_types[layer] == "sliding_attention"
    return True


AttentionInterface.register("kvcache_oracle", attention)
AttentionMaskInterface.register("kvcache_oracle", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@torch.no_grad()
def truth_of(case, method, ids):
    model = model_of(case, torch.float64)
    model.config.oracle_method = method
    model.get_decoder().config.oracle_method = method
    model.set_attn_implementation("kvcache_oracle")
    return model(ids, use_cache=False).logits


@pytest.mark.quick(
    "qwen3-freqkv",
    "llama-freqkv",
    "gpt_neox-freqkv",
    "mistral-sliding-freqkv",
    "qwen3-tova",
    "gemma2-tova",
    "gpt_oss-tova",
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", THEIRS)
def test_oracle_on_every_family(case, method):
    """In float64, in the longest pieces, in one call that cuts itself, and token by token."""
    ids = tokens(1, LENGTH)
    truth = truth_of(case, method, ids)
    model = model_of(case, torch.float64)
    assert (cached(model, ids, cache_of(model, method)) - truth).abs().max() < LIMIT
    cache = cache_of(model, method)
    with torch.no_grad():
        whole = model(ids, past_key_values=cache).logits
    assert whole.shape[1] == LENGTH and (whole - truth).abs().max() < LIMIT
    if method in ("snapkv", "expected_attention", "freqkv") and not (
        case in FEW and method == "freqkv"
    ):  # test_recursion does
        assert (cached(model, ids, cache_of(model, method), 1) - truth).abs().max() < LIMIT
    again = prefill(model, ids, cache_of(model, method))
    assert (again.logits[:, -1] - truth[:, -1]).abs().max() < LIMIT


def test_the_oracle_sees_a_wrong_rotation():
    """The negative control: keys of a layer without RoPE that are rotated anyway."""
    from fathom.kvcache.rope import Still

    ids, model = tokens(1, LENGTH), model_of("smollm3", torch.float64)
    cache = cache_of(model, "freqkv")
    plan = cache.method.rope.plan
    assert [isinstance(turn, Still) and type(turn) is Still for turn in plan] == [False, True, False]
    plan[1] = plan[0]
    assert (cached(model, ids, cache) - truth_of("smollm3", "freqkv", ids)).abs().max() > 0.05
