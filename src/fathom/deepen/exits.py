"""`--exit`: choose how confident a prediction in a loop must be to skip further iterations, so that the loss rises by
at most ε.

A document's difference d_i(τ) is its mean loss, in nats per token, with `exit_confidence` τ, minus that with every
trip. The claim is about its mean over documents:

    P( E d(τ̂) ≤ ε ) ≥ 1 - δ        over the documents that chose τ̂; δ = 0.05 by default

Learn then Test (arXiv 2110.01052): a fixed list of τ, from surest to least sure, is tested in this order, each on the
same documents at level δ: H_τ: E d(τ) > ε. The first that is not rejected ends the search, and τ̂ is the last that was.
No correction is needed, since a false rejection anywhere needs one at the first true hypothesis.

`betting` (arXiv 2010.09686) rejects where a gambler who bets against H_τ, document after document, ever has 1/δ times
his stake. It holds for every number of documents, for d clipped to ±`clip`. `t` is Student's test: it clips nothing,
but its level is asymptotic.

The rule is measured as it is deployed: a model with τ reads the documents, so that later tokens read the keys and
values of halted tokens as in decoding.

If not even the first τ passes, none is set, and every token makes every iteration. On other text (`--shifted`) the rise
of the loss is only measured. `set_exit` writes the model and `exits.json`. `models/recurrences/confidence.py` makes
tokens halt by τ; a trained gate is in `models/recurrences/exit_gate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from fathom.checkpoints.export import export, require_replaceable
from fathom.checkpoints.file_names import EXITS, MODEL
from fathom.checkpoints.runs import open_source
from fathom.deepen.spans import Document, read_documents
from fathom.deepen.write import deeper_model
from fathom.errors import SettingsError
from fathom.models.configuration import FathomConfig
from fathom.models.modeling import FathomForCausalLM
from fathom.models.recurrences.confidence import ConfidenceExit
from fathom.report.files import write_atomically
from fathom.report.progress import ProgressBar
from fathom.report.results import to_json
from fathom.report.statistics import student_below

GRID = (0.99, 0.98, 0.96, 0.94, 0.92, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
"""The τ that are tested, in this order."""
ROWS = 16
"""Documents that are read at once."""
TESTS = ("betting", "t")
Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The bound on the loss that is to be guaranteed, and the amount of text on which it is tested."""

    loss: float = 0.01
    """ε, nats per token."""
    level: float = 0.05
    """δ, the risk that the bound does not hold."""
    documents: int = 1000
    """Documents that choose τ."""
    tokens: int = 512
    """Tokens of each, from its beginning."""
    test: str = "betting"
    """`betting`, or the asymptotic `t`."""
    clip: float = 0.5
    """Nats per token to which a document's difference is clipped, by `betting` alone."""

    def __post_init__(self) -> None:
        allowed = {
            "loss": (0 < self.loss < self.clip, f"above 0, below clip={self.clip:g}"),
            "level": (0 < self.level < 0.5, "above 0, below 0.5"),
            "documents": (self.documents >= 2, "2 or more"),
            "tokens": (self.tokens >= 1, "1 or more"),
            "test": (self.test in TESTS, ", ".join(TESTS)),
        }
        for name, (holds, words) in allowed.items():
            if not holds:
                raise SettingsError(f"{name}={getattr(self, name)}: allowed: {words}")

    def rejects(self, differences: Array) -> Array:
        """Whether each row of loss increases `[..., documents]` rejects the hypothesis that their expectation exceeds
        ε."""
        if self.test == "t":
            return student(differences, self.loss) <= self.level
        return betting(differences.clip(-self.clip, self.clip), self.loss, self.clip, self.level)


def betting(differences: Array, loss: float, clip: float, level: float) -> Array:
    """Whether a bet against a mean increase of the loss above `loss` ever multiplies its stake by 1 / `level`, for each
    row of `[..., documents]`.

    With x = (d + clip) / (2 clip) in [0, 1] and m that of `loss`, the wealth Π (1 + λ_i (m - x_i)) is a supermartingale
    if E x ≥ m, for every λ_i ≥ 0 that depends on earlier documents alone and keeps it positive. λ_i is the bet that is
    best for the mean and the variance of the documents before, at most ¾ of what could be lost.
    """
    x, m = (differences + clip) / (2 * clip), (loss + clip) / (2 * clip)
    count = np.arange(1, x.shape[-1] + 1)
    mean = (0.5 * m + x.cumsum(-1)) / (0.5 + count)  # one half of a document at the edge
    spread = (1e-4 + ((x - mean) ** 2).cumsum(-1)) / (1 + count)
    gap = np.maximum(m - mean, 0)
    bets = np.minimum(gap / (spread + gap**2), 0.75 / (1 - m))
    bets = np.concatenate((np.zeros_like(bets[..., :1]), bets[..., :-1]), -1)  # known before the document
    return np.log1p(bets * (m - x)).cumsum(-1).max(-1) >= -math.log(level)


def student(differences: Array, loss: float) -> Array:
    """The p-value of a one-sided t-test of the hypothesis that the mean increase of the loss exceeds `loss`, for each
    row of `[..., documents]`."""
    count = differences.shape[-1]
    spread = differences.std(-1, ddof=1) / math.sqrt(count)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.nan_to_num((differences.mean(-1) - loss) / spread, nan=0.0)
    return student_below(statistic, count - 1)


def chosen(differences: Callable[[int], Array], bound: Bound, count: int = len(GRID)) -> int | None:
    """The index of the last exit threshold τ that passes its test when the list is tested in order up to the first
    failure; None if the first one fails.

    Args:
        differences: d for the τ of a place in the list, `[documents]`; asked for in order.
        bound: What is to be guaranteed.
        count: Length of the list.
    """
    found = None
    for place in range(count):
        if not bound.rejects(differences(place)):
            break
        found = place
    return found


@dataclass(frozen=True)
class Measured:
    """A rule on some documents."""

    exit_confidence: float
    loss: float
    """Mean over documents of the difference to all trips, nats per token."""
    trips: float
    """Mean trips of a token."""


@dataclass(frozen=True)
class Chosen:
    """The exit threshold that was chosen and written, and the measurements of all thresholds tested."""

    directory: Path
    bound: Bound
    exit_confidence: float | None
    """τ̂; None if no τ keeps the bound, and every token makes every trip."""
    trips: int
    """The most trips of a token."""
    tested: list[Measured]
    """In order; all but perhaps the last keep the bound."""
    shifted: list[Measured]
    """The chosen rule on other text, for which nothing is guaranteed."""

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self) | {"directory": str(self.directory)}


class ThresholdReader:
    """Measures a model's loss on documents under one exit threshold τ after another."""

    def __init__(self, model: FathomForCausalLM, documents: Sequence[Document]) -> None:
        self.model, self.documents = model, list(documents)
        lengths = [len(document.ids) for document in documents]
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # alike ones together
        self.full, self.most = self.read(math.inf)

    @torch.no_grad()
    def read(self, confidence: float) -> tuple[Array, float]:
        """Each document's mean loss `[documents]`, and the mean number of loop iterations per token over all
        documents."""
        cast(ConfidenceExit, self.model.model.recurrence).confidence = confidence
        losses, trips, tokens = np.empty(len(self.documents)), 0.0, 0
        with ProgressBar(f"documents at {confidence:g}", len(self.documents)) as bar:
            for start in range(0, len(self.documents), ROWS):
                places = self.order[start : start + ROWS]
                rows = [self.documents[place] for place in places]
                ids = torch.zeros(len(rows), len(rows[0].ids), dtype=torch.long)
                real = torch.zeros_like(ids)
                for i, row in enumerate(rows):
                    ids[i, : len(row.ids)], real[i, : len(row.ids)] = torch.from_numpy(row.ids), 1
                ids, real = ids.to(self.model.device), real.to(self.model.device)
                out = self.model(
                    ids[:, :-1],
                    attention_mask=real[:, :-1],
                    shift_labels=ids[:, 1:].masked_fill(real[:, 1:] == 0, -100),
                    return_token_losses=True,
                    use_cache=False,
                )
                scored = real[:, 1:].sum(1)
                losses[places] = (out.token_losses.double().sum(1) / scored).cpu().numpy()
                trips += float((out.trips * real[:, 1:]).sum())
                tokens += int(scored.sum())
                bar.update(start + len(rows))
        return losses, trips / tokens

    def measured(self, confidence: float) -> tuple[Array, Measured]:
        """Every document's increase of the loss at one exit threshold, and a summary of these increases."""
        losses, trips = self.read(confidence)
        return losses - self.full, Measured(confidence, float((losses - self.full).mean()), trips)


def set_exit(
    source: str | Path, out: str | Path, text: Sequence[str], bound: Bound, shifted: Sequence[str] = ()
) -> Chosen:
    """Choose a loop's `exit_confidence` on text, and write the model with this value.

    Args:
        source: A loop: a model directory, or a run.
        out: The directory to write.
        text: What `fathom evaluate --perplexity` takes; text that the model was not trained on.
        bound: What is to be guaranteed.
        shifted: Other text on which the rule is measured.
    """
    require_replaceable(Path(out), Path(source), Path(source) / MODEL)
    opened = open_source(Path(source))
    model, tokenizer = exiting(opened.model), opened.tokenizer
    if tokenizer is None:
        raise SettingsError(f"{source}: has no tokenizer to read the text with")
    reader, tested = ThresholdReader(model, _documents(tokenizer, text, bound, model)), list[Measured]()

    def differences(place: int) -> Array:
        found, summary = reader.measured(GRID[place])
        tested.append(summary)
        return found

    place = chosen(differences, bound)
    confidence, elsewhere = None if place is None else GRID[place], list[Measured]()
    if confidence is not None and shifted:
        elsewhere = [ThresholdReader(model, _documents(tokenizer, shifted, bound, model)).measured(confidence)[1]]
    model.config.recurrence_options["exit_confidence"] = confidence
    made = Chosen(Path(out), bound, confidence, model.model.served_trips, tested, elsewhere)
    export(model, made.directory, tokenizer)
    write_atomically(made.directory / EXITS, to_json(made.to_dict()) + "\n")
    return made


def exiting(model: FathomForCausalLM) -> FathomForCausalLM:
    """Put a looped model's weights into a model whose tokens may halt early; with its initial exit confidence of 1,
    none does."""
    if model.config.recurrence != "loop":
        raise SettingsError(f"--exit needs recurrence=loop, this model has {model.config.recurrence}")
    values = model.config.to_dict()
    values["recurrence_options"] = values["recurrence_options"] | {"exit_confidence": 1.0}
    try:
        config = FathomConfig.from_dict(values)
    except ValueError as error:
        raise SettingsError(" ".join(str(error).split())) from error
    return deeper_model(model, config)


def _documents(
    tokenizer: PreTrainedTokenizerBase, text: Sequence[str], bound: Bound, model: FathomForCausalLM
) -> list[Document]:
    length = min(bound.tokens, model.config.max_position_embeddings)
    return read_documents(tokenizer, text, bound.documents, length)
