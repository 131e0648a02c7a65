"""Held-out loss: per domain, in bits per byte, and by position in the context.

In a mixture every collection is scored as a domain. Iterations per token are counted here too, with their rank
correlation with the loss. With `kvcache.method` the model attends under compression here as in training.

`data/shards.py` decides which documents are held out (`choose_split`) and how many bytes tokens stand for
(`bytes_before`). `data/rows.py` chooses the windows (`windows_of`), the same for every model. `data/targets.py` decides
which tokens of a conversation count. `results.py` (`Evaluation.flat`) names the entries of the log.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fathom.data.batches import Batch, evaluation_batches
from fathom.data.puzzles import PuzzleDataset
from fathom.data.rows import IGNORED, windows_of
from fathom.data.shards import TokenDataset
from fathom.data.targets import TargetDataset
from fathom.recipe import Recipe
from fathom.report.statistics import rank_correlation
from fathom.training.hooks import Hook, ObservedRun
from fathom.training.jacobi_gap import SAMPLE, WINDOWS, Row, gap_of, read_both_ways, token_losses_and_trips, watching
from fathom.training.parallel import Ranks
from fathom.training.results import DecodingGap, Evaluation, Score, StepMetrics, Trips


class HeldOut(Hook):
    """Scores the held-out split every `evaluate.every` steps, and whenever it is asked to."""

    every_rank = True

    def __init__(self, data: TokenDataset | None) -> None:
        self.data = data
        """The split; None in a corpus without one."""
        self.last: Evaluation | None = None
        """The last evaluation of this process."""
        self.last_step = -1
        """After which step that was."""

    def after_step(self, run: ObservedRun, metrics: StepMetrics) -> None:
        """Evaluate if due."""
        if run.due(run.recipe.evaluate.every):
            self.score(run)

    def score(self, run: ObservedRun) -> Evaluation | None:
        """Score the held-out split now, and pass the result to the other hooks; None if the corpus has no held-out
        split."""
        if self.data is None:
            return None
        run.read()
        with run.meter.paused():
            last, self.last_step = run.step == run.recipe.train.steps, run.step
            self.last = evaluation = evaluate(run.training.model, self.data, run.recipe, run.ranks, decode=last)
            values = {"tokens": run.tokens, "seconds": run.meter.seconds}
            run.log({**values, **evaluation.flat()})
            run.say(
                f"step {run.step}: held-out loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f}, "
                f"{evaluation.bits_per_byte:.4f} bits per byte{evaluation.how}"
            )
            for hook in run.hooks:
                hook.after_evaluation(run, evaluation)
        return evaluation


def evaluate(model: nn.Module, data: TokenDataset, recipe: Recipe, ranks: Ranks, decode: bool = False) -> Evaluation:
    """Score a model on a held-out split; the ranks share the work and all get the result.

    Args:
        model: In any state; it is left in training mode if it was.
        data: The held-out split.
        recipe: `evaluate`, and the context and packing that `data` names.
        ranks: The processes.
        decode: Whether to decode a sample token by token if the model reads text by Jacobi rounds.
    """
    was_training = model.training
    model.eval()
    length, buckets = recipe.data.sequence_length, recipe.evaluate.position_buckets
    rows = recipe.evaluate.micro_batch or recipe.train.micro_batch
    share = math.ceil(recipe.evaluate.tokens / len(data.domains))
    # Where target t (0 … length-2) of a row belongs.
    places = torch.arange(length - 1, device=ranks.device) * buckets // (length - 1)
    sums, counts, num_bytes, right = [], [], [], []
    read = available = 0
    tally, rounds = Tally(), list[float]()
    for domain in data.domains:
        total = torch.zeros(2, buckets, dtype=torch.float64, device=ranks.device)
        solved = torch.zeros((), dtype=torch.float64, device=ranks.device)
        seen_bytes = 0
        part = data.select(domain)
        read += len(windows_of(part, length, share))
        available += part.num_documents if isinstance(part, PuzzleDataset) else len(windows_of(part, length))
        for batch in evaluation_batches(part, length, rows, share, ranks.rank, ranks.world_size, recipe.data.packing):
            batch = batch.to(ranks.device)
            with watching(model) as made:
                losses, trips = token_losses_and_trips(model, batch.input_ids, batch.labels, batch.position_ids)
            rounds += made
            if trips is not None:
                tally.add(losses, trips[:, :-1], batch.labels[:, 1:] >= 0)
            total[0].index_add_(0, places, losses.double().sum(0))
            total[1].index_add_(0, places, (batch.labels[:, 1:] >= 0).double().sum(0))
            seen_bytes += batch.num_bytes or 0
            if isinstance(part, PuzzleDataset):
                solved += right_answers(model, batch)
        total = ranks.sum(total)
        right.append(float(ranks.sum(solved)) if isinstance(part, PuzzleDataset) else None)
        sums.append(total[0].tolist())
        counts.append(total[1].tolist())
        num_bytes.append(seen_bytes)
    # In conversations only trained tokens have labels, and an ignored label would end the text before it.
    whole_text = not any(isinstance(data.select(domain), TargetDataset) for domain in data.domains)
    recurrence = getattr(getattr(model, "model", None), "recurrence", None)
    gap = decoding_gap(model, data, recipe, ranks.device) if decode and rounds and whole_text else None
    model.train(was_training)
    scores = [_score(sum(s), sum(n), b, r) for s, n, b, r in zip(sums, counts, num_bytes, right, strict=True)]
    known = [count for count in right if count is not None]
    whole = _score(sum(map(sum, sums)), sum(map(sum, counts)), sum(num_bytes), sum(known) if known else None)
    by_position = [sum(column) for column in zip(*sums, strict=True)]
    targets = [sum(column) for column in zip(*counts, strict=True)]
    return Evaluation(
        **asdict(whole),
        domains=dict(zip(data.domains, scores, strict=True)),
        position_loss=[s / n if n else None for s, n in zip(by_position, targets, strict=True)],
        trips=tally.trips(ranks, 1 if recurrence is None else int(recurrence.trips)),
        coverage=read / available,
        jacobi_rounds=math.fsum(rounds) / len(rounds) if rounds else None,
        gap=gap,
    )


def decoding_gap(model: nn.Module, data: TokenDataset, recipe: Recipe, device: torch.device) -> DecodingGap | None:
    """Read a sample of a held-out split in parallel and by decoding; every rank reads the whole sample, because sharded
    weights need all ranks.

    Args:
        model: In evaluation mode.
        data: The held-out split.
        recipe: The context and packing.
        device: Where the model is.
    """
    length = recipe.data.sequence_length
    windows = max(WINDOWS, math.ceil(SAMPLE / (length - 1)))
    share = math.ceil(windows / len(data.domains)) * (length - 1)
    rows: list[Row] = []
    for domain in data.domains:
        for batch in evaluation_batches(data.select(domain), length, 1, share, packing=recipe.data.packing):
            rows += _stretches(batch.input_ids[0], batch.labels[0], device)
    found = read_both_ways(model, rows)
    return None if found is None else gap_of([found])


def _stretches(ids: Tensor, labels: Tensor, device: torch.device) -> Iterator[Row]:
    """The documents of a sequence, which ignored labels divide, or the whole sequence if no label is ignored; padding
    is left out."""
    ends = [*(labels < 0).nonzero().flatten().tolist(), len(ids)]
    for start, stop in pairwise([0, *ends]):
        if stop - start > 1:
            yield Row(ids[start:stop].to(device), stop - start - 1)


@dataclass
class Tally:
    """Losses and iterations of every token that has a target, sequence by sequence."""

    losses: list[np.ndarray] = field(default_factory=list)
    made: list[np.ndarray] = field(default_factory=list)

    def add(self, losses: Tensor, trips: Tensor, counts: Tensor) -> None:
        """Add the losses and iterations of some sequences, `[rows, T - 1]`; `counts` is False where a token has no
        target. Sequences without a target only fill a batch, and are left out."""
        some = counts.any(1)
        for loss, made, valid in zip(losses[some], trips[some], counts[some], strict=True):
            self.losses.append(loss[valid].cpu().numpy())
            self.made.append(made[valid].cpu().numpy())

    def trips(self, ranks: Ranks, most: int) -> Trips | None:
        """The statistics of iterations over all ranks, up to `most` iterations; None if the model reports no
        iterations."""
        rows = list(zip(self.losses, self.made, strict=True))
        if ranks.control is not None:
            found: list[list[tuple[np.ndarray, np.ndarray]]] = [[]] * ranks.world_size
            dist.all_gather_object(found, rows, group=ranks.control)
            rows = [row for part in found for row in part]
        if not sum(len(made) for _, made in rows):
            return None
        losses, made = zip(*rows, strict=True)
        every = np.concatenate(made)
        return Trips(
            mean=float(every.mean()),
            shares=(np.bincount(every, minlength=most + 1)[1:] / len(every)).tolist(),
            correlation=rank_correlation(losses, made),
        )


@torch.no_grad()
def right_answers(model: nn.Module, batch: Batch) -> Tensor:
    """The number of labels that equal the model's likeliest token."""
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    labels = batch.labels[:, 1:]
    return ((logits[:, :-1].argmax(-1) == labels) & (labels != IGNORED)).sum().double()


def _score(loss: float, tokens: float, num_bytes: int, right: float | None) -> Score:
    bits = loss / math.log(2) / num_bytes if num_bytes else math.nan
    accuracy = None if right is None or not tokens else right / tokens
    return Score(loss / tokens if tokens else math.nan, bits, int(tokens), accuracy=accuracy)
