"""The logit lens at one token position: what the model would have predicted there after every layer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fathom.errors import SettingsError
from fathom.lens.look import evaluating, hooks, spell
from fathom.models.numerics import widen

if TYPE_CHECKING:
    from fathom.models import FathomForCausalLM
    from fathom.models.roles import ResidualState

TOP = 5
"""Predictions that are kept for each visit."""


@torch.no_grad()
def look_at(
    model: FathomForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    said: int,
    max_trips: int | None = None,
) -> dict[str, object]:
    """What the model would have predicted after these tokens at every visit (one layer in one trip), as plain numbers.

    It makes one forward pass and applies the head to the last token alone, which costs much less than `look`.

    Args:
        model: Any `FathomForCausalLM`.
        tokenizer: Its tokenizer.
        tokens: The tokens before the position.
        said: The token that was generated there.
        max_trips: Loop iterations per token at most; None for the model's own number.
    """
    size = model.config.vocab_size
    if not tokens or not all(0 <= token < size for token in (*tokens, said)):
        raise SettingsError(f"tokens: token ids of 0 to {size - 1}, at least one before the place")
    if len(tokens) > model.config.max_position_embeddings:
        raise SettingsError(f"tokens: this model's context is {model.config.max_position_embeddings} tokens")
    plan = model.model.plan_of(max_trips or model.model.served_trips)
    stages = 1 if model.model.recurrence.view.depth_parallel else len(plan)
    last: deque[ResidualState] = deque(maxlen=sum(map(len, plan)) // stages)

    def left(state: ResidualState) -> None:
        last.append(tuple(part[:, -stages:] for part in state))

    ids = torch.tensor([list(tokens)], device=model.device)
    with evaluating(model), hooks(model, lambda *_: None, left):
        out = model.model(ids, use_cache=False, head=model.lm_head, max_trips=max_trips)
    made = out.recurrence_state.get("trips", torch.tensor([[len(plan)]]))
    # Under the view ALL the slots of a token stand side by side, and each round has them all.
    states = [tuple(part[:, stage : stage + 1] for part in state) for stage in range(stages) for state in last]
    visits = [
        {"layer": visit.layer, "trip": visit.trip, **_says(model, tokenizer, _hidden(model, state), said)}
        for visit, state in zip((visit for trip in plan for visit in trip), states, strict=True)
    ]
    final = _says(model, tokenizer, out.last_hidden_state[0, -1], said)
    return {"trips": int(made[0, -1]), "visits": visits, "final": final}


def _hidden(model: FathomForCausalLM, state: ResidualState) -> Tensor:
    """The head's input if this were the last layer."""
    return model.model.norm(model.model.final_residual.read(state)[0])[0, -1]


def _says(model: FathomForCausalLM, tokenizer: PreTrainedTokenizerBase, hidden: Tensor, said: int) -> dict[str, object]:
    logprobs = widen(model.lm_head(hidden[None]))[0].log_softmax(-1)
    values, indices = logprobs.topk(min(TOP, len(logprobs)))
    pairs = zip(indices.tolist(), values.exp().tolist(), strict=True)
    top = [[spell(tokenizer, index), round(share, 5)] for index, share in pairs]
    return {"top": top, "bits": round(-float(logprobs[said]) / math.log(2), 3)}
