"""Attention rules for FlexAttention: a function says whether one slot (token, iteration) reads another, so no full mask
is needed.

A pass has one `ReadingRule` for all layers of a kind. It holds the tags of the slots, `[B, N]`, and knows for each pair
of blocks whether none, some or all of its slots read one another. The kernel calls the function only for blocks with
some.

`walk.py` refuses FlexAttention for gradients on a CPU or MPS, which `training/build.py` refuses before a run, and for a
static cache of slots. `attend_by_rule` here refuses `attention_dropout`, and adds biases such as `ponder3`'s log w to
the scores, in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.flex_attention import repeat_kv

from ..axes.numerics import widen
from ..axes.roles import View
from .reading import reads
from .slot_table import Tags

Kernel: TypeAlias = Callable[..., Tensor]
FLEX = "flex_attention"
"""transformers' name of this backend."""
NO_BACKWARD = ("cpu", "mps")
"""Devices on which torch refuses its backward pass."""
VARIANTS = 64
"""Kernels that a process may compile: with and without padding, documents and biases, of fixed and free lengths."""
BLOCK = 128
FAR = 1 << 30
"""Beyond every token, trip and document; the difference of two such fits 32 bits."""


@dataclass
class ReadingRule:
    """The rule by which queries of one pass read keys: a block mask, and a bias on the logits."""

    blocks: BlockMask
    bias: Tensor | None
    """Bias on the logit of every query that reads a slot, `[1 or B, N]`."""


def read_rule(view: View, query: Tags, key: Tags, reach: int | None) -> ReadingRule:
    """Arguments are those of `reading.read_mask`. A row that may read nothing gets zeros."""
    given = (x for tags in (query, key) for x in (tags.token, tags.live, tags.document, tags.halt))
    rows = max(len(x) for x in given if x is not None)

    def whole(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.expand(rows, -1).to(torch.int32).contiguous()

    documents = query.document is not None and key.document is not None
    t, k, mine = whole(query.token), whole(query.trip), whole(query.document) if documents else None
    of, at, other = whole(key.token), whole(key.trip), whole(key.document) if documents else None
    live, halt = whole(key.live), whole(key.halt)
    assert t is not None and k is not None and of is not None and at is not None

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        b = b if rows > 1 else b - b
        found = reads(view, t[b, i], k[b, i], of[b, j], at[b, j], None if halt is None else halt[b, j])
        if reach is not None:
            found = found & (t[b, i] - of[b, j] < reach)
        if mine is not None and other is not None:
            found = found & (mine[b, i] == other[b, j])
        return found if live is None else found & (live[b, j] != 0)

    some, every = _blocks(view, (t, k, mine), (of, at, other), live, reach)
    blocks = BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(t.shape[1], of.shape[1]),
        compute_q_blocks=torch.is_grad_enabled(),
    )
    return ReadingRule(blocks, None if key.bias is None else widen(key.bias))


def _blocks(
    view: View,
    query: tuple[Tensor, Tensor, Tensor | None],
    key: tuple[Tensor, Tensor, Tensor | None],
    live: Tensor | None,
    reach: int | None,
) -> tuple[Tensor, Tensor]:
    """Which pairs of query and key blocks may contain a slot that reads another, and in which pairs every query slot
    reads every key slot: `[B, blocks of M, blocks of N]` each.

    Both follow from the smallest and largest token, iteration and document of a block, without looking at pairs. The
    first may include a block where none does, the second may miss a block where all do.
    """
    (t, last_t), (k, last_k), *mine = (_range(x, -FAR, 2) for x in query if x is not None)
    (of, last_of), (at, last_at), *other = (_range(x, FAR, 1) for x in key if x is not None)
    some, every = of <= last_t, last_of < t
    if view is not View.ALL:
        some = some & (at <= last_k)
        every = (last_of <= t) & (last_at <= k) & (view is View.DUO)
    if reach is not None:
        some, every = some & (t - last_of < reach), every & (last_t - of < reach)
    for (a, last_a), (b, last_b) in zip(mine, other, strict=True):
        some, every = some & (a <= last_b) & (b <= last_a), every & (a == last_a) & (b == last_b) & (a == b)
    if live is not None:
        least, most = _range(live, 0, 1)
        some, every = some & (most != 0), every & (least != 0)
    return some, every


def _range(x: Tensor, fill: int, along: int) -> tuple[Tensor, Tensor]:
    """The minimum and the maximum of `x` `[B, N]` in each block of the last axis, with a new axis of size one at
    `along`. A last block that is filled up never reads, or is read, as a whole."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK), value=fill).unflatten(1, (-1, BLOCK))
    return blocks.amin(2).unsqueeze(along), blocks.amax(2).unsqueeze(along)


def _listed(which: Tensor) -> tuple[Tensor, Tensor]:
    """For each query block, the number of key blocks to compute, and key block indices with those first: `[B, 1, M]`,
    `[B, 1, M, N]`."""
    order = (~which).to(torch.int8).argsort(dim=-1, stable=True)
    return which.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)


def attend_by_rule(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: ReadingRule,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """FlexAttention as a transformers attention function, with a `ReadingRule` instead of a mask. Biases are added to
    capped logits."""
    if dropout:
        raise ValueError(f"attention_dropout={dropout}: attn_implementation={FLEX} has no dropout: set it to 0")
    groups, bias = query.shape[1] // key.shape[1], rule.bias
    if query.shape[1] & (query.shape[1] - 1):  # its kernels share keys among powers of two of heads
        key, value, groups = repeat_kv(key, groups), repeat_kv(value, groups), 1
    if bias is not None:
        bias = bias.expand(len(query), -1).contiguous()

    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            logit = torch.tanh(logit / softcap) * softcap
        return logit if bias is None else logit + bias[b, j]

    plain = query.device.type == "cpu" or torch.compiler.is_compiling()
    output: Tensor = (cast(Kernel, flex_attention) if plain else compiled())(
        query,
        key,
        value,
        score_mod=None if bias is None and softcap is None else score,
        block_mask=rule.blocks,
        scale=scaling,
        enable_gqa=groups > 1,
        kernel_options=kwargs.get("kernel_options"),
    )
    return output.transpose(1, 2), None


@cache
def compiled() -> Kernel:
    """FlexAttention as a kernel. Beyond its recompilation limit torch would continue without the kernel and compute all
    scores; with a full graph it raises an error."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return cast(Kernel, torch.compile(flex_attention, fullgraph=True))
