"""Mixers for multi-head latent attention (MLA), which stores one normed latent c and one rotated key r for all heads.

Keys and values of every head h are made of them, k_h = [W^K_h c; r] and v_h = W^V_h c, so the latent is what is mixed.
With s the family's scale and H heads, a mixer sees one head, whose key is [c; r] and whose value is c:

    q̄ = mean_h (W^K_h)ᵀ q_h^nope        ρ̄ = mean_h q_h^rope        score of layer j: s (q̄ · c_j + ρ̄ · r_j)

The cache holds the mixed latent and r, and is as large as before. A mixed latent makes keys too.

`layer_cost.py` counts the FLOPs of the mean query (`mixer_cost`). `refusals.py` refuses `mixes: key` and `both`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..axes.fields import DecoderConfig
from ..decoder.loss import is_bare
from .handover import Handover, KeyValue


@dataclass
class LatentHandover(Handover):
    """What the attention of one layer with latents (MLA) needs in one iteration."""

    waits = True

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> KeyValue:
        """Keep the new latents and rotated keys until the query is known, which mixing needs. The family expands what
        this returns, for nothing; so it is one token's."""
        self.made = key, value
        return key[:, :, :1], value[:, :, :1]

    def store(self, module: Any, query: Tensor, key: Tensor, value: Tensor) -> KeyValue:
        """Mix and store the latent; returns the keys and values of all heads, expanded from the latents that are
        read."""
        read = super().store(module, query, key, value)
        pairs = zip(self.earlier[::2], self.earlier[1::2], strict=True)
        self.earlier = tuple(one for pair in pairs for one in expanded(module, *pair))
        return expanded(module, *read)

    def mixed(self, module: Any, query: Tensor, key: Tensor, value: Tensor) -> KeyValue:
        """The key that mixers score, [c; r] `[B, 1, T, r + d]`, and the mixed latent."""
        latent, rotated = self.made
        seen = torch.cat([latent, rotated], -1)
        query = absorbed(module, query) * (module.scaling * seen.shape[-1] ** 0.5) if self.sources else query
        return self.mixer.stored(query, seen, latent, self.sources)

    def kept(self, module: Any, key: Tensor, value: Tensor) -> KeyValue:
        """The tensors to store in the cache: the rotated key r and the latent."""
        return key[..., -module.qk_rope_head_dim :], value


def expanded(module: Any, key: Tensor, latent: Tensor) -> KeyValue:
    """Expand latents to the keys and values of all heads; the last channels of `key` are the rotated key r."""
    return module.expand_kv(latent, key[..., -module.qk_rope_head_dim :])


def absorbed(module: Any, query: Tensor) -> Tensor:
    """The mean query in latent space, [q̄; ρ̄] `[B, 1, T, r + d]`, from all heads' queries `[B, H, T, D]`."""
    plain, rank = module.qk_nope_head_dim, module.kv_lora_rank
    project, heads = module.kv_b_proj, query.shape[1]
    # an adapter's, a quantised or an offloaded matrix shows itself in what it makes of unit vectors only
    exact = is_bare(project)
    weight = project.weight if exact else project(torch.eye(rank, dtype=query.dtype, device=query.device)).T
    matrices = weight.view(heads, -1, rank)[:, :plain]  # [H, D_nope, r]
    content = torch.einsum("bhtd,hdr->btr", query[..., :plain], matrices) / heads
    return torch.cat([content, query[..., plain:].mean(1)], -1).unsqueeze(1)


def one_head(config: DecoderConfig, theirs: Any) -> DecoderConfig:
    """A configuration for mixing latents: one attention head whose width is that of the latent."""
    seen = copy.copy(config)
    seen.num_attention_heads = seen.num_key_value_heads = 1
    seen.head_dim = theirs.kv_lora_rank
    return seen
