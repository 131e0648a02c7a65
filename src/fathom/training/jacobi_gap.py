"""The gap in loss between text read in parallel, by Jacobi rounds, and the same text decoded token by token. If an
iteration reads later iterations of earlier tokens (view ALL), no parallel pass is exact: a model without a cache makes
a few rounds that approximate decoding, and its perplexity is that of the rounds. Here a sample of the text is read both
ways. Other models have no gap.

`evaluation/perplexity.py` draws the sample of `fathom evaluate`, and `heldout.py` that of a run.
`models/trips/slots.py` (`jacobi`) makes the rounds. `models/trips/walk.py` decides how many: the option `jacobi_eval`,
or with `prefill=exact` as many as are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fathom.models.axes.cache_name import returned
from fathom.report.statistics import Difference, combined_difference, weighted_difference
from fathom.training.results import DecodingGap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fathom.models.modeling import FathomCausalLMOutput

SAMPLE = 4096
"""Minimum number of predicted tokens in a sample, if the text has as many."""
WINDOWS = 8
"""Minimum number of windows in a sample, if the text has as many; the interval is over windows."""
TOKENS_AT_ONCE = {"cpu": 1 << 12, "other": 1 << 13}
"""Maximum tokens of sequences that are decoded together, because their cache holds every slot."""


class Row(NamedTuple):
    """A passage of text; each of its last `scored` tokens is predicted from all tokens before it."""

    ids: Tensor
    """`[T]`"""
    scored: int


@dataclass
class Sample:
    """The losses of windows that were read in parallel and decoded token by token."""

    rounds: float
    tokens: list[int] = field(default_factory=list)
    parallel: list[float] = field(default_factory=list)
    """Nats, window by window."""
    sequential: list[float] = field(default_factory=list)

    def difference(self) -> Difference:
        """The loss of parallel reading minus that of sequential decoding, in nats per token."""
        gaps = [a - b for a, b in zip(self.parallel, self.sequential, strict=True)]
        return weighted_difference(gaps, self.tokens)


def gap_of(samples: Sequence[Sample], sizes: Sequence[float] = (1.0,)) -> DecodingGap:
    """The gap between parallel reading and decoding over several texts together, weighted by the texts' sizes."""
    shares = [size / sum(sizes) for size in sizes]
    found = combined_difference([sample.difference() for sample in samples], shares)
    rounds = sum(share * sample.rounds for share, sample in zip(shares, samples, strict=True))
    tokens = sum(sum(sample.tokens) for sample in samples)
    return DecodingGap(
        value=found.mean, low=found.low, high=found.high, rounds=rounds, tokens=tokens, windows=found.pairs
    )


def read_both_ways(model: PreTrainedModel, rows: Sequence[Row]) -> Sample | None:
    """The losses of some sequences, read in parallel and decoded token by token; None for a model without Jacobi
    rounds.

    Args:
        model: In evaluation mode.
        rows: Of at least two tokens each.
    """
    sample, made = Sample(0.0), 0.0
    rows = sorted(rows, key=lambda row: len(row.ids), reverse=True)
    done, most = 0, TOKENS_AT_ONCE["cpu" if model.device.type == "cpu" else "other"]
    while done < len(rows):
        batch = rows[done : done + max(1, most // len(rows[done].ids))]
        ids = torch.nn.utils.rnn.pad_sequence([row.ids for row in batch], batch_first=True).to(model.device)
        with watching(model) as rounds:
            parallel, _ = token_losses_and_trips(model, ids, ids)  # padding on the right is read by no other token
        if not rounds:
            return None
        made += rounds[-1] * len(batch)
        sequential = _decoded(model, ids)
        for row, one, other in zip(batch, parallel, sequential, strict=True):
            part = slice(len(row.ids) - 1 - row.scored, len(row.ids) - 1)
            sample.tokens.append(row.scored)
            sample.parallel.append(float(one[part].double().sum()))
            sample.sequential.append(float(other[part].double().sum()))
        done += len(batch)
    sample.rounds = made / len(rows)
    return sample


@contextmanager
def watching(model: PreTrainedModel) -> Iterator[list[float]]:
    """A list to which every forward pass appends its number of Jacobi rounds, if it makes any."""
    rounds: list[float] = []

    def note(_: object, __: object, out: FathomCausalLMOutput) -> None:
        if "jacobi_rounds" in (getattr(out, "recurrence_state", None) or {}):
            rounds.append(float(out.recurrence_state["jacobi_rounds"]))

    inner = getattr(model, "model", None)
    handle = inner.register_forward_hook(note) if inner is not None else None
    try:
        yield rounds
    finally:
        if handle is not None:
            handle.remove()


@torch.no_grad()
def token_losses_and_trips(
    model: nn.Module, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy of every predicted token in fp32, `[rows, T - 1]`, zero where the label is IGNORE; and the
    iterations of every token, `[rows, T]`, if tokens may halt. The full logits never exist: the model computes losses
    in chunks, as in training.
    """
    out = model(
        input_ids=input_ids, labels=labels, position_ids=position_ids, use_cache=False, return_token_losses=True
    )
    return out.token_losses[:, :-1], getattr(out, "trips", None)


@torch.no_grad()
def _decoded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The losses of token ids `[B, T]`, decoded one token after another with a KV cache."""
    cache, losses = None, []
    with torch.compiler.set_stance("force_eager"):  # a growing cache would recompile at every step
        for t, following in enumerate(ids[:, 1:].T):
            start = t
            if model.model.rereads and model.model.rotary_emb.changes(t, t + 1):  # as `generate` does
                start, cache = 0, None
            out = model(input_ids=ids[:, start : t + 1], past_key_values=cache, use_cache=True)
            cache = returned(out)
            losses.append(F.cross_entropy(out.logits[:, -1].float(), following, reduction="none"))
    return torch.stack(losses, 1)
