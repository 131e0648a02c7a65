"""Find the layers that cost least to repeat: every range of consecutive layers is scored as a loop on text, without
training.

A loop over the layers a … b of K iterations with damping δ needs the residual stream before layer a and after layer b.
One pass of the base model gives both for all spans, so a span computes only its own layers K - 1 times and those above
it once.

All spans are scored on a first set of documents. The best are scored again on other documents, because the best of many
is biased on the documents that chose it.

`search_page.py` writes `spans.html` and `spans.json`. `evaluation/perplexity.py` reads the text.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fathom.errors import SettingsError
from fathom.evaluation.perplexity import WHOLE, beginning, encoder, read_domains
from fathom.models.decoder.loss import token_losses
from fathom.models.decoder.rotary import signed
from fathom.models.modeling import FathomForCausalLM
from fathom.models.registry import AXES, DEFAULTS
from fathom.report.progress import ProgressBar
from fathom.report.statistics import Difference, weighted_difference
from fathom.settings import show
from fathom.values import plain

LOG = "spans.jsonl"
GROUP = 16
"""Loops whose scores are written together."""


class Candidate(NamedTuple):
    """A loop over some layers."""

    first: int
    last: int
    """The last layer, included."""
    trips: int
    damping: float

    @property
    def layers(self) -> str:
        """The loop's first and last layer, written as a value of `--layers`."""
        return f"{self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True)
class Search:
    """The ranges of layers to try as loops, and the amount of text that scores them."""

    sizes: tuple[int, int] = (2, 6)
    """Fewest and most layers of a span."""
    trips: int = 2
    """Loop iterations, the first included."""
    dampings: tuple[float, ...] = (0.5, 1.0)
    """Values of the damping δ; every span is scored with each."""
    documents: tuple[int, int] = (12, 40)
    """Documents for all spans, and other documents for the best spans."""
    keep: int = 20
    """How many spans are scored on the second set."""
    tokens: int = 512
    """Tokens of each document, from its beginning."""

    def __post_init__(self) -> None:
        first, others = self.documents
        allowed = {
            "trips": (self.trips >= 2, self.trips, "2 or more"),
            "damping": (all(0 < one <= 1 for one in self.dampings), self.dampings, "above 0, up to 1"),
            "documents": (first >= 1 and others >= 0, f"{first},{others}", "1 or more, and 0 or more others"),
            "tokens": (self.tokens >= 1, self.tokens, "1 or more"),
        }
        for name, (holds, value, words) in allowed.items():
            if not holds:
                raise SettingsError(f"{name}={show(plain(value))}: allowed: {words}")

    def candidates(self, layers: int) -> list[Candidate]:
        """Every candidate loop of a model with `layers` layers: each range of consecutive layers with each damping."""
        least, most = self.sizes
        if not 1 <= least <= most <= layers:
            raise SettingsError(f"sizes={least}-{most}: allowed: from 1 to {layers}, the number of layers")
        spans = [(a, a + n - 1) for n in range(least, most + 1) for a in range(layers - n + 1)]
        return [Candidate(a, b, self.trips, damping) for damping in self.dampings for a, b in spans]


class Document(NamedTuple):
    """Tokens to score."""

    name: str
    ids: np.ndarray
    """`[T + 1]`, a start token first."""

    @property
    def key(self) -> str:
        """The document's name with a checksum of its tokens, since documents of another text may have the same
        names."""
        return f"{self.name} {zlib.crc32(self.ids.tobytes()):08x}"


@dataclass(frozen=True)
class Ranked:
    """A loop over some layers, and the increase of the loss that it causes."""

    candidate: Candidate
    gap: Difference
    """Nats per token: the loop's loss minus the base model's, paired by document."""
    again: Difference | None = None
    """The same difference on the other documents, if it was among the best."""

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {"layers": self.candidate.layers, **self.candidate._asdict()} | {
            name: None if found is None else asdict(found) | {"low": found.low, "high": found.high}
            for name, found in (("gap", self.gap), ("again", self.again))
        }


def read_documents(
    tokenizer: PreTrainedTokenizerBase, inputs: Sequence[str], count: int, tokens: int
) -> list[Document]:
    """`count` documents chosen at random, but the same in every call, each cut after `tokens` tokens."""
    found = []
    for domain in read_domains(inputs):
        encode = encoder(tokenizer, domain)
        found += [(f"{domain.name}/{i}", encode, document) for i, document in enumerate(domain.documents)]
    drawn = []
    for place in np.random.default_rng(0).permutation(len(found)).tolist():
        name, encode, document = found[place]
        ids = np.asarray([beginning(tokenizer), *encode(document)[:tokens]], dtype=np.int64)
        if len(ids) > 1:
            drawn.append(Document(name, ids))
        if len(drawn) == count:
            return drawn
    raise SettingsError(
        f"{', '.join(inputs)}: only {len(drawn)} documents, but {count} are needed; give more text, or lower "
        f"`documents`. {WHOLE}"
    )


class Reading:
    """One forward pass of the base model over a document, whose hidden states all candidate loops reuse."""

    def __init__(self, model: FathomForCausalLM, document: Document) -> None:
        self.model = model
        self.ids = torch.from_numpy(document.ids).to(model.device).unsqueeze(0)
        decoder = model.model
        out = decoder(input_ids=self.ids[:, :-1], use_cache=False, output_hidden_states=True)
        self.before: list[Tensor] = list(out.hidden_states[:-1])
        """The residual stream before every layer and, last, after all of them."""
        positions = torch.arange(self.ids.shape[1] - 1, device=self.ids.device).unsqueeze(0)
        self.given = {
            "rotation": signed(decoder.rotary_emb(self.before[0], positions)),
            "position_ids": positions,
        }
        self.masks = decoder.causal_masks(self.before[0], None, None, None)
        self.before.append(self.through(self.before[-1], len(decoder.layers) - 1, len(decoder.layers)))
        self.nats = self.score(self.before[-1])

    def through(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The residual stream after the layers `[start, stop)`."""
        for i in range(start, stop):
            mask = self.masks[self.model.config.layer_types[i]]
            x = self.model.model.layers[i](x, attention_mask=mask, **self.given)[0]
        return x

    def score(self, stream: Tensor) -> float:
        """The document's total loss in nats, computed from the residual stream after the last layer."""
        hidden = self.model.model.norm(stream)
        return float(token_losses(hidden, self.model.lm_head, self.ids[:, 1:]).double().sum())

    def looped(self, one: Candidate) -> float:
        """The document's total loss in nats when some of the model's layers run as a loop."""
        x, made = self.before[one.first], self.before[one.last + 1]
        for trip in range(one.trips):
            made = made if trip == 0 else self.through(x, one.first, one.last + 1)
            x = made if one.damping == 1 else torch.lerp(x, made, one.damping)
        return self.score(self.through(x, one.last + 1, len(self.before) - 1))


class Log:
    """Scores by document and loop. They are stored in a file, if one is given, so that a search can resume."""

    def __init__(self, path: Path | None, about: dict[str, object]) -> None:
        self.path, self.found = path, dict[tuple[str, Candidate | None], tuple[float, int]]()
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
            except ValueError:
                continue  # an incomplete last line
            if number == 0:
                if row != about:
                    raise SettingsError(f"{path}: contains scores of another model or length; choose another `out`")
                continue
            one = None if row["first"] is None else Candidate(*(row[key] for key in Candidate._fields))
            self.found[row["document"], one] = row["nats"], row["tokens"]
        if path is not None and not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(about) + "\n", encoding="utf-8")

    def add(self, document: Document, scores: Sequence[tuple[Candidate | None, float]]) -> None:
        """Store the scores of a document in the log; None in place of a loop stands for the base model."""
        lines = []
        for one, nats in scores:
            self.found[document.key, one] = nats, len(document.ids) - 1
            fields = one._asdict() if one is not None else dict.fromkeys(Candidate._fields)
            row = {"document": document.key, **fields, "nats": nats, "tokens": len(document.ids) - 1}
            lines.append(json.dumps(row) + "\n")
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))

    def gap(self, one: Candidate, documents: Sequence[Document]) -> Difference:
        """The loop's loss minus the base model's, per token, paired by document."""
        pairs = [(self.found[document.key, one], self.found[document.key, None]) for document in documents]
        return weighted_difference([ours[0] - own[0] for ours, own in pairs], [own[1] for _, own in pairs])


def search(
    model: FathomForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    text: Sequence[str],
    asked: Search,
    out: Path | None = None,
) -> list[Ranked]:
    """Score every loop that `asked` describes and return all, lowest loss first: the best ones ordered by the second
    set of documents, then the others.

    Args:
        model: A model without mechanisms.
        tokenizer: Its tokenizer.
        text: What `fathom evaluate --perplexity` takes.
        asked: The loops, and the amount of text.
        out: A directory for the scores; a later call resumes the search.
    """
    for axis in AXES:
        if (name := getattr(model.config, axis)) != DEFAULTS[axis]:
            raise SettingsError(f"a search needs a model without mechanisms, this one has {axis}={name}")
    every = asked.candidates(model.config.num_hidden_layers)
    length = min(asked.tokens, model.config.max_position_embeddings)
    documents = read_documents(tokenizer, text, sum(asked.documents), length)
    about: dict[str, object] = {"tokens": length, "layers": model.config.num_hidden_layers, "weights": checksum(model)}
    log = Log(None if out is None else out / LOG, about)
    first, others = documents[: asked.documents[0]], documents[asked.documents[0] :]
    _score(model, first, every, log)
    ranked = sorted((Ranked(one, log.gap(one, first)) for one in every), key=lambda row: row.gap.mean)
    best = ranked[: asked.keep] if others else []
    _score(model, others, [row.candidate for row in best], log)
    again = [Ranked(row.candidate, row.gap, log.gap(row.candidate, others)) for row in best]
    again.sort(key=lambda row: row.again.mean if row.again is not None else 0.0)
    return [*again, *ranked[len(best) :]]


def checksum(model: torch.nn.Module) -> str:
    """A checksum of the first numbers of every parameter; further training changes it."""
    found = 0
    for parameter in model.parameters():
        found = zlib.crc32(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes(), found)
    return f"{found:08x}"


@torch.no_grad()
def _score(model: FathomForCausalLM, documents: Sequence[Document], loops: Sequence[Candidate], log: Log) -> None:
    """Score the pairs of document and loop that are not in the log yet, some loops at a time."""
    training = model.training
    model.eval()
    with ProgressBar("spans", len(documents) * len(loops)) as bar:
        for number, document in enumerate(documents):
            left = [one for one in loops if (document.key, one) not in log.found]
            if not left:
                continue
            reading = Reading(model, document)
            log.add(document, [(None, reading.nats)])
            for done in range(0, len(left), GROUP):
                log.add(document, [(one, reading.looped(one)) for one in left[done : done + GROUP]])
                bar.update(number * len(loops) + done)
    model.train(training)
