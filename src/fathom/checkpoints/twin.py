"""A small model with random weights, opened by its family's class in transformers and by Fathom, and run by both.

Each way of running a model (`VIEWS`) is written once and called with either model. It returns the logits of the tokens
that are not padding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessor, PreTrainedModel
from transformers.utils import logging

from fathom.checkpoints.families.family import Values
from fathom.checkpoints.file_names import CONFIG
from fathom.checkpoints.shrink import read_as_class
from fathom.models import FathomForCausalLM
from fathom.models.axes.cache_name import passed

PROMPT = 5
"""Tokens of the longest prompt; the other text's is padded."""


@dataclass(frozen=True)
class Batch:
    """Two texts of different lengths, the shorter one padded on the left."""

    ids: Tensor  # [2, T]
    mask: Tensor  # [2, T]; 0 is padding

    @property
    def positions(self) -> Tensor:
        """The position of each token in its text, `[2, T]`."""
        return (self.mask.cumsum(1) - 1).clamp(min=0)


def make_batch(tokens: int, vocabulary: int, seed: int = 1) -> Batch:
    """Two random texts, one of `tokens` tokens and one that is two tokens shorter."""
    ids = torch.randint(0, vocabulary, (2, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, : min(2, tokens - 1)] = 0
    return Batch(ids, mask)


@torch.no_grad()
def write_twin(config: Values, directory: Path, seed: int = 0) -> None:
    """Write a model directory with this `config.json` and random weights, norm gains and biases under the class's
    names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(read_as_class(config), dtype=torch.float32)
        for tensor in model.state_dict().values():
            if tensor.ndim > 1:
                tensor.copy_(torch.randn_like(tensor) * tensor.shape[-1] ** -0.5)
            elif tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(directory)
    (directory / CONFIG).write_text(json.dumps(config))  # save_pretrained writes the class's version of it


def runs_in_sdpa(theirs: type[PreTrainedModel], config: Values) -> bool:
    """Whether a transformers class gives the same results with SDPA as with eager attention. In some
    versions Gemma 2's class claims to support SDPA, and drops its softcap there."""
    return bool(theirs._supports_sdpa) and not getattr(read_as_class(config), "attn_logit_softcapping", None)


def open_both(
    directory: Path, dtype: torch.dtype, attention: str, ignore_keys: Collection[str] = ()
) -> tuple[PreTrainedModel, FathomForCausalLM]:
    """A directory's model, opened by its transformers class and by Fathom, which ignores `ignore_keys`."""
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "local_files_only": True}
    theirs = AutoModelForCausalLM.from_pretrained(directory, **settings).eval()
    return theirs, FathomForCausalLM.from_pretrained(directory, ignore_keys=ignore_keys, **settings).eval()


def whole(model: PreTrainedModel, batch: Batch) -> Tensor:
    """One forward pass without padding."""
    logits: Tensor = model(batch.ids, use_cache=False).logits
    return logits


def padded(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits of one forward pass over a padded batch, with positions that do not count padding."""
    placed = _positions(model, batch.positions)
    logits = model(batch.ids, attention_mask=batch.mask, use_cache=False, **placed).logits
    return logits[batch.mask.bool()]


def cached(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits of a padded batch with a KV cache: the prompt in one forward pass, then one token at a time."""
    cache, found, start = DynamicCache(config=model.config), [], 0
    for stop in range(PROMPT, batch.ids.shape[1] + 1):
        ids, placed = batch.ids[:, start:stop], _positions(model, batch.positions[:, start:stop])
        found.append(model(ids, attention_mask=batch.mask[:, :stop], **passed(model, cache), **placed).logits)
        start = stop
    return torch.cat(found, 1)[batch.mask.bool()]


def _positions(model: PreTrainedModel, positions: Tensor) -> dict[str, Tensor]:
    """The `position_ids` to pass to a transformers class; empty for Fathom, which derives positions from the mask.
    `generate` makes them for both."""
    return {} if isinstance(model, FathomForCausalLM) else {"position_ids": positions}


def generated(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits of `generate` after padded prompts, while it is forced to continue with the given texts."""
    model.generation_config.use_mtp = None  # some published files draft by layers that the class leaves out
    said = model.generate(
        batch.ids[:, :PROMPT],
        attention_mask=batch.mask[:, :PROMPT],
        logits_processor=[_Dictation(batch.ids)],
        max_new_tokens=batch.ids.shape[1] - PROMPT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(said.logits, 1)


View: TypeAlias = Callable[[PreTrainedModel, Batch], Tensor]
VIEWS: dict[str, View] = {
    "whole texts": whole,
    "left-padded texts": padded,
    "token by token with a cache": cached,
    "generate": generated,
}
"""The ways of running a model, by name."""


class _Dictation(LogitsProcessor):
    """A logits processor that forces `generate` to choose the given text's next token."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores of 0 for the next token, and of minus infinity for the others."""
        wanted = self.ids[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter(1, wanted, 0.0)


@torch.no_grad()
def difference(view: View, theirs: PreTrainedModel, ours: PreTrainedModel, batch: Batch) -> float:
    """The largest difference between the logits of two models, relative to the largest logit."""
    return off(view(theirs, batch), view(ours, batch))


def off(expected: Tensor, found: Tensor) -> float:
    """The largest difference of two logits, relative to the largest logit; 0.0 only if all bits are equal."""
    if torch.equal(expected, found):
        return 0.0
    if not (expected.isfinite().all() and found.isfinite().all()):
        return torch.inf
    return float((expected.double() - found.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))


@contextmanager
def quiet() -> Iterator[None]:
    """A context that hides transformers' progress bars and its warnings about the user's own `config.json`."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
