"""Select questions, and score the answers of a model with a cache. A natural needle is found if every token of its
answer is the likeliest; the nats are recorded too. RULER's answers are generated greedily, and score the share of
expected strings that appear.

All caches get the prompts of `make_prompts`; `questions.py` pairs their answers with those of the full cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from fathom.errors import SettingsError
from fathom.evaluation.caches import natural, ruler
from fathom.evaluation.caches.measure import CHUNK, read
from fathom.evaluation.caches.prompts import PLACES, Cell, Frame, Prompt
from fathom.evaluation.caches.results import Answer
from fathom.kvcache.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_TOKENS = 8192
"""Maximum tokens of prompts that are read together; these have one length."""
LOOKED_AT = 8
"""Generated text is checked every so many tokens; generation ends when all answers appear."""


def make_prompts(
    frame: Frame,
    schedule: Schedule,
    tasks: Sequence[str],
    compressions: Sequence[int],
    texts: Sequence[str],
    count: int,
) -> tuple[list[Prompt], dict[str, str]]:
    """Up to `count` prompts, spread evenly over tasks, places of the question and numbers of compressions; and the
    tasks whose prompts do not fit in the length that a number of compressions fixes, with the reason.

    Args:
        frame: The tokenizer and its template.
        schedule: When caches are compressed.
        tasks: Names of `natural.TASKS` and `ruler.TASKS`.
        compressions: Numbers of compressions before the answer.
        texts: Real text, for the tasks that need it.
        count: Questions in all.
    """
    cells = [Cell(*cell) for cell in product(tasks, PLACES, compressions)]
    random.Random(0).shuffle(cells)
    found: list[Prompt] = []
    left_out: dict[str, str] = {}
    for number in range(count):
        cell = cells[number % len(cells)]
        draw = random.Random(f"{cell}{number}")
        try:
            found.append(_prompt(frame, schedule, cell, texts, draw))
        except SettingsError as error:
            left_out[cell.task] = str(error)
    return sorted(found, key=lambda prompt: (str(prompt.cell), len(prompt.ids), len(prompt.wanted))), left_out


def _prompt(frame: Frame, schedule: Schedule, cell: Cell, texts: Sequence[str], draw: random.Random) -> Prompt:
    if cell.task in natural.TASKS:
        parts = natural.make(cell.task, texts, draw)
    else:
        parts = ruler.make(
            cell.task, texts, draw, lambda parts: frame.room(cell, schedule, parts), lambda text: len(frame.ids(text))
        )
    return frame.build(cell, schedule, parts, draw)


def batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Batches of prompts that can be read together: they have the same length and the same task, question place and
    compressions."""
    for _, group in groupby(prompts, key=lambda prompt: (prompt.cell, len(prompt.ids), len(prompt.wanted))):
        rows = list(group)
        size = max(1, BATCH_TOKENS // len(rows[0].ids))
        yield from (rows[start : start + size] for start in range(0, len(rows), size))


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    new_cache: Callable[[int], Cache],
    prompts: Sequence[Prompt],
    schedule: Schedule,
    width: int = CHUNK,
) -> list[Answer]:
    """The model's answers to a batch of prompts.

    Args:
        model: Any causal language model.
        tokenizer: Its tokenizer.
        new_cache: Returns an empty cache with room for a number of tokens.
        prompts: As `batches` gives them.
        schedule: When caches are compressed, which says how many last tokens `drop` can still read.
        width: Tokens of a row to read at once.
    """
    ids = torch.stack([prompt.ids for prompt in prompts])
    first, last_tokens = prompts[0], schedule.entries(ids.shape[1]) - schedule.sinks
    cache = new_cache(ids.shape[1] + max(first.most, len(first.wanted)))
    for _, logits in read(model, ids, cache, keep=1, width=width):
        last = logits
    if first.most:
        scores = _generated(model, tokenizer, cache, last, prompts)
        nats: Sequence[float | None] = [None] * len(prompts)
    else:
        scores, nats = _forced(model, cache, last, torch.stack([prompt.wanted for prompt in prompts]).to(model.device))
    return [
        Answer(prompt.cell.task, prompt.cell.place, prompt.cell.compressions, prompt.age >= last_tokens, score, cost)
        for prompt, score, cost in zip(prompts, scores, nats, strict=True)
    ]


def _forced(
    model: PreTrainedModel, cache: Cache, last: Tensor, wanted: Tensor
) -> tuple[list[float], Sequence[float | None]]:
    """Whether every token of each expected answer `[B, n]` is the model's likeliest token, and the answer's loss in
    nats per token."""
    logits = [last[:, -1:]]
    if wanted.shape[1] > 1:
        logits += [out for _, out in read(model, wanted[:, :-1], cache)]
    found = torch.cat(logits, dim=1).float()  # [B, n, V]
    nats = F.cross_entropy(found.mT, wanted, reduction="none").mean(1)
    return (found.argmax(-1) == wanted).all(1).float().tolist(), nats.tolist()


def _generated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Cache,
    last: Tensor,
    prompts: Sequence[Prompt],
) -> list[float]:
    """The share of expected strings in each greedy continuation."""
    ends = torch.tensor(sorted({tokenizer.eos_token_id, *_ends(model)} - {None}), device=model.device)
    tokens: list[Tensor] = []
    for step in range(prompts[0].most):
        tokens.append(last[:, -1].argmax(-1, keepdim=True))
        if (step + 1) % LOOKED_AT == 0 or step + 1 == prompts[0].most:
            said = [_text(tokenizer, row, ends) for row in torch.cat(tokens, 1)]
            scores = [_share(text, prompt.answers) for (text, _), prompt in zip(said, prompts, strict=True)]
            if step + 1 == prompts[0].most or all(
                score == 1 or over for score, (_, over) in zip(scores, said, strict=True)
            ):
                break
        for _, logits in read(model, tokens[-1], cache, keep=1):
            last = logits
    return scores


def _ends(model: PreTrainedModel) -> list[int]:
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _text(tokenizer: PreTrainedTokenizerBase, row: Tensor, ends: Tensor) -> tuple[str, bool]:
    """The text of a continuation up to its end token, and whether the continuation has an end token."""
    over = torch.isin(row, ends).nonzero()
    stop = int(over[0]) if len(over) else len(row)
    return str(tokenizer.decode(row[:stop].tolist())), bool(len(over))


def _share(text: str, answers: Sequence[str]) -> float:
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)
