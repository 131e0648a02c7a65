"""Perplexity and bits per byte of text, document by document and domain by domain.

The tokens x_1 … x_n of a document follow a start token: BOS, or EOS if there is no BOS, as between documents in
training. Windows of at most C tokens begin at 0, S, 2S, … of that sequence (context C, stride S ≤ C), and
every token is predicted once, in the first window that reaches it. After the first window a token is therefore
predicted from more than C - S tokens and at most C. With S = C windows do not overlap. No prediction crosses documents,
and the end of a document is not predicted, because it has no bytes.

`data/sources.py` reads files of text, and `data/shards.py` prepared corpora. `scoring.py` chooses the default context,
and `paired.py` computes differences. Here a sample of windows is drawn for a model that reads text in Jacobi rounds;
`training/jacobi_gap.py` decodes it too.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from fathom.checkpoints.file_names import TOKENIZER_JSON
from fathom.checkpoints.special_tokens import unknown_token
from fathom.data.shards import INDEX, TokenDataset
from fathom.data.sources import HUB, Reading, find_sources, split_name
from fathom.data.tokenizer import plain
from fathom.errors import SettingsError
from fathom.evaluation.paired import Items
from fathom.evaluation.results import PlaceLoss, TextScore
from fathom.iterations import counting
from fathom.report.progress import ProgressBar
from fathom.training.jacobi_gap import SAMPLE, WINDOWS, Row, Sample, read_both_ways

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST_DEFAULT_CONTEXT = 2048
"""The default context, unless the model's own is shorter."""
TOKENS_AT_ONCE = {"cpu": 1 << 12, "other": 1 << 15}
"""Tokens of a batch, by device."""
SORTED_AT_ONCE = 512
"""Windows that are sorted by length before they are put into batches."""
SPLIT = "val"
"""The split of a corpus that is scored by default."""
WHOLE = "A text file is one document; `fathom prepare` divides one, and its directory is an input"
"""Advice for too few documents."""


class Passage(NamedTuple):
    """A document: its text, or its token ids if it comes from prepared shards."""

    text: str | None
    ids: np.ndarray | None
    bytes: int
    cluster: str | None = None
    """Passages of one cluster are pieces of a document, or otherwise belong together."""


@dataclass(frozen=True)
class Domain:
    """Documents that are scored together."""

    name: str
    documents: list[Passage]
    tokenizer_file: Path | None = None
    """The file of the tokenizer that made the tokens in `documents`."""


class Window(NamedTuple):
    """A window of a sequence: the inputs from `start` to `stop`, which predict the tokens after `scored` up to and
    including `stop`."""

    start: int
    scored: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """How a document is cut into windows."""

    context: int
    """Maximum context of a prediction, start token included."""
    stride: int | None = None
    """Tokens from the start of a window to that of the next; by default the context."""

    def windows(self, length: int) -> Iterator[Window]:
        """The windows of a sequence of a start token and `length` tokens."""
        scored = start = 0
        while scored < length:
            stop = min(start + self.context, length)
            yield Window(start, scored, stop)
            scored, start = stop, start + (self.stride or self.context)


@dataclass
class DomainScore:
    """The loss on a domain, kept by document so that checkpoints can be paired."""

    nats: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    position_nats: list[float] = field(default_factory=list)
    """Summed over tokens predicted from [1, 2), [2, 4), [4, 8), … tokens."""
    position_tokens: list[int] = field(default_factory=list)
    trips: float = 0.0
    """Sum of the iterations of all predicting tokens; 0 for a model that is not Fathom's."""
    clusters: list[str | None] | None = None
    """The cluster of each document; None if no document names anything."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return sum(self.nats) / sum(self.tokens)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700))

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the text: comparable across tokenizers."""
        return sum(self.nats) / math.log(2) / sum(self.bytes)

    def items(self) -> dict[str, Items]:
        """The contribution of each document to the bits per byte and to the perplexity."""
        bits = [nats / math.log(2) for nats in self.nats]
        return {
            "bits_per_byte": Items(bits, self.bytes, self.clusters),
            "perplexity": Items(self.nats, self.tokens, self.clusters, log=True),
        }

    def summary(self) -> TextScore:
        """The scores for a report."""
        places = [
            PlaceLoss(1 << i, (2 << i) - 1, nats / count, count)
            for i, (nats, count) in enumerate(zip(self.position_nats, self.position_tokens, strict=True))
            if count
        ]
        return TextScore(
            documents=len(self.nats),
            tokens=sum(self.tokens),
            bytes=sum(self.bytes),
            loss=self.loss,
            perplexity=self.perplexity,
            bits_per_byte=self.bits_per_byte,
            by_context=places,
            trips_per_token=self.trips / sum(self.tokens) if self.trips else None,
        )

    @classmethod
    def joined(cls, parts: Sequence[DomainScore]) -> DomainScore:
        """Several domains as one."""
        whole = cls()
        if any(part.clusters for part in parts):
            named = ((part, part.clusters or [None] * len(part.nats)) for part in parts)
            whole.clusters = [one for _, clusters in named for one in clusters]
        for part in parts:
            whole.nats += part.nats
            whole.tokens += part.tokens
            whole.bytes += part.bytes
            whole.trips += part.trips
            whole._add_places(part.position_nats, part.position_tokens)
        return whole

    def _add_places(self, nats: Sequence[float], tokens: Sequence[int]) -> None:
        self.position_nats = [a + b for a, b in zip_longest(self.position_nats, nats, fillvalue=0.0)]
        self.position_tokens = [a + b for a, b in zip_longest(self.position_tokens, tokens, fillvalue=0)]

    def _add(self, document: int, losses: np.ndarray, seen: np.ndarray) -> None:
        self.nats[document] += float(losses.sum())
        places = np.log2(seen).astype(int)
        self._add_places(np.bincount(places, losses).tolist(), np.bincount(places).tolist())


def read_domains(
    inputs: Sequence[str], reading: Reading | None = None, split: str = SPLIT, limit: int | None = None
) -> list[Domain]:
    """Everything to score, by domain. Inputs with the same name form one domain, and `reading.domain_field` divides an
    input.

    Args:
        inputs: `[NAME=]INPUT`: text, JSONL or Parquet files, directories or globs of them, `hf:` data sets, or corpora
            that `fathom prepare` made. Without a name a domain is named after its file; a corpus has its own domains.
        reading: How records become documents.
        split: Of corpora.
        limit: Documents at most per domain, the first ones.
    """
    reading = reading or Reading()
    domains: list[Domain] = []
    texts: list[str] = []
    given: set[str] = set()
    stems: list[str] = []
    for entry in inputs:
        name, path = split_name(entry)
        if not (Path(path) / INDEX).is_file():
            texts.append(f"{name or _stem(path)}={path}")
            given |= {name} if name else set()
            stems += [] if name or reading.domain_field else [_stem(path)]
            continue
        corpus = TokenDataset.open(path, split, verify="cached")
        file = corpus.tokenizer_directory / TOKENIZER_JSON
        for label in corpus.domains:
            documents = _shard_documents(corpus.select(label), limit)
            domains.append(Domain(f"{name}/{label}" if name else label, documents, file))
    _require_one_each([*given, *stems])  # inputs with the same name form one domain
    _require_used(reading, split, len(texts), len(inputs))
    found: dict[str, list[Passage]] = defaultdict(list)
    for source in find_sources(texts, reading) if texts else ():
        for document in source.documents(reading):
            if document is not None and (limit is None or len(found[document.domain]) < limit):
                found[document.domain].append(Passage(document.text, None, document.size, document.cluster))
            if limit and reading.domain_field is None and len(found[source.domain]) >= limit:
                break
    domains += [Domain(label, documents) for label, documents in found.items() if documents]
    if not domains:
        raise SettingsError(f"{', '.join(inputs)}: no documents to score")
    _require_one_each([domain.name for domain in domains])
    return domains


def _require_used(reading: Reading, split: str, texts: int, inputs: int) -> None:
    """Refuse names of fields if all inputs are corpora, and a split if none is."""
    plain = Reading()
    for key in ("text_field", "domain_field") if not texts else ():
        if (given := getattr(reading, key)) != getattr(plain, key):
            raise SettingsError(f"{key}={given}: all inputs are prepared corpora, which have no fields")
    if texts == inputs and split != SPLIT:
        raise SettingsError(f"split={split}: no input is a prepared corpus, and others have no splits")


def _require_one_each(names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"two inputs have a domain {twice[0]!r}; name one of them: NAME=INPUT")


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    domain: Domain,
    cut: Cut,
    batch_size: int | None = None,
) -> DomainScore:
    """Score a domain.

    Args:
        model: Any Hugging Face causal language model.
        tokenizer: Its tokenizer.
        domain: What to score.
        cut: Into which windows.
        batch_size: Windows of full length at once. By default as many as fit: halved whenever memory runs out.
    """
    if cut.stride is not None and not 1 <= cut.stride <= cut.context:
        raise SettingsError(f"stride={cut.stride}: allowed: 1 to {cut.context}, the context")
    limit = getattr(model.config, "max_position_embeddings", None) or cut.context
    if cut.context > limit:
        raise SettingsError(f"context={cut.context}: allowed: at most {limit}, this model's context")
    forward = _Forward(model, batch_size and batch_size * cut.context)
    begin, encode = beginning(tokenizer), encoder(tokenizer, domain)
    clusters = [document.cluster for document in domain.documents]
    result = DomainScore(clusters=clusters if any(clusters) else None)
    pending: list[tuple[int, Window, np.ndarray]] = []
    with ProgressBar(domain.name, sum(document.bytes for document in domain.documents)) as bar:
        done = 0
        for number, document in enumerate(domain.documents):
            ids = _ids(model, begin, encode(document))
            result.nats.append(0.0)
            result.tokens.append(len(ids) - 1)
            result.bytes.append(document.bytes)
            for window in cut.windows(len(ids) - 1):
                pending.append((number, window, ids[window.start : window.stop + 1]))
            done += document.bytes
            if len(pending) >= SORTED_AT_ONCE:
                _flush(forward, pending, result)
                bar.update(done)
        _flush(forward, pending, result)
    if not any(result.tokens):
        raise SettingsError(f"{domain.name}: the tokenizer returns no tokens for these documents")
    return result


def sampled(tokens: Sequence[int], cut: Cut) -> list[tuple[int, Window]]:
    """Pairs (document, window) drawn at random, but the same in every call, until there are `SAMPLE` tokens and
    `WINDOWS` windows.

    Args:
        tokens: How many each document has.
        cut: As `score` takes it.
    """
    every = [(i, window) for i, count in enumerate(tokens) for window in cut.windows(count)]
    chosen: list[tuple[int, Window]] = []
    seen = 0
    for place in np.random.default_rng(0).permutation(len(every)).tolist():
        if seen >= SAMPLE and len(chosen) >= WINDOWS:
            break
        chosen.append(every[place])
        seen += every[place][1].stop - every[place][1].scored
    return chosen


def read_sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    domain: Domain,
    tokens: Sequence[int],
    cut: Cut,
) -> Sample | None:
    """The losses on a sample of the text, read in parallel and by token-by-token decoding; None for a model without
    Jacobi rounds."""
    encode, begin, rows = encoder(tokenizer, domain), beginning(tokenizer), []
    for number, window in sampled(tokens, cut):
        ids = _ids(model, begin, encode(domain.documents[number]))
        rows.append(Row(torch.from_numpy(ids[window.start : window.stop + 1]), window.stop - window.scored))
    return read_both_ways(model, rows) if rows else None


def _ids(model: PreTrainedModel, begin: int, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The start token and a document's tokens, `[n + 1]`; tokens outside the model's vocabulary are rejected."""
    whole = np.concatenate([[begin], ids]).astype(np.int64)
    if (fault := unknown_token([int(whole.max())], model)) is not None:
        raise SettingsError(fault)
    return whole


def beginning(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that is put before a document."""
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        raise SettingsError("the tokenizer has neither BOS nor EOS to start a document")
    return begin


def _flush(forward: _Forward, pending: list[tuple[int, Window, np.ndarray]], result: DomainScore) -> None:
    """Score pending windows, sorted by length so that there is little padding."""
    pending.sort(key=lambda entry: len(entry[2]), reverse=True)
    jobs = [(ids, window.stop - window.scored) for _, window, ids in pending]
    with counting(forward.model) as made:
        for (number, window, _), (losses, trips) in zip(pending, forward(jobs, made), strict=True):
            result._add(number, losses, np.arange(window.scored, window.stop) + 1 - window.start)
            result.trips += trips
    pending.clear()


class _Forward:
    """Losses of windows, in batches as large as memory allows."""

    def __init__(self, model: PreTrainedModel, tokens: int | None) -> None:
        self.model = model
        self.tokens = tokens or TOKENS_AT_ONCE["cpu" if model.device.type == "cpu" else "other"]

    def __call__(
        self, jobs: Sequence[tuple[np.ndarray, int]], made: list[torch.Tensor]
    ) -> Iterator[tuple[np.ndarray, float]]:
        """For every (ids, n): the losses of the last n ids, and the summed loop iterations that predicted them, taken
        from `made`."""
        done = 0
        while done < len(jobs):
            count = max(1, self.tokens // (len(jobs[done][0]) - 1))
            batch = jobs[done : done + count]
            made.clear()
            losses = None
            try:
                losses = self._losses(batch)
            except RuntimeError as error:
                out_of_memory = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
                if not out_of_memory or len(batch) == 1:
                    raise
            if losses is None:  # outside `except`, because the exception keeps every tensor of the failed pass alive
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                self.tokens = len(batch) // 2 * (len(batch[0][0]) - 1)
                print(f"out of memory: continuing with {self.tokens} tokens at once", file=sys.stderr)
                continue
            yield from zip(losses, _trips(batch, made), strict=True)
            done += len(batch)

    @torch.no_grad()
    def _losses(self, batch: Sequence[tuple[np.ndarray, int]]) -> list[np.ndarray]:
        width = len(batch[0][0]) - 1  # the longest is first
        inputs = torch.zeros(len(batch), width, dtype=torch.long)
        for row, (ids, _) in zip(inputs, batch, strict=True):
            row[: len(ids) - 1] = torch.from_numpy(ids[:-1])  # the padding on the right is masked
        first = min(len(ids) - 1 - count for ids, count in batch)
        logits = self.model(
            input_ids=inputs.to(self.model.device), use_cache=False, logits_to_keep=width - first
        ).logits
        losses = []
        # Row by row: the fp32 copy of all logits would be the largest tensor here.
        for row, (ids, count) in zip(logits, batch, strict=True):
            stop = len(ids) - 1 - first
            targets = torch.from_numpy(ids[-count:]).to(row.device)
            losses.append(F.cross_entropy(row[stop - count : stop].float(), targets, reduction="none"))
        flat = torch.cat(losses).double().cpu().numpy()
        return np.split(flat, np.cumsum([count for _, count in batch])[:-1])


def _trips(batch: Sequence[tuple[np.ndarray, int]], made: Sequence[torch.Tensor]) -> Iterator[float]:
    """For every (ids, n): the summed loop iterations of the n tokens that make the predictions."""
    for row, (ids, count) in enumerate(batch):
        found = made[-1] if made else torch.zeros(())
        stop = len(ids) - 1
        yield float(found[row, stop - count : stop].sum()) if found.ndim else float(found) * count


def encoder(tokenizer: PreTrainedTokenizerBase, domain: Domain) -> Callable[[Passage], np.ndarray | Sequence[int]]:
    """A function that encodes a document as `fathom prepare` does: it adds no token, and reads no special token from
    the text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        encode = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # noqa: E731
    else:
        from tokenizers import Tokenizer

        copy = plain(Tokenizer.from_str(backend.to_str()))
        encode = lambda text: copy.encode(text, add_special_tokens=False).ids  # noqa: E731
    if domain.tokenizer_file is None:
        return lambda document: encode(document.text)
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(domain.tokenizer_file))
    if theirs.get_vocab() == tokenizer.get_vocab():
        return lambda document: document.ids  # type: ignore[return-value]
    normalizer = json.loads(theirs.to_str())["normalizer"]
    if not _keeps_text(normalizer):
        raise SettingsError(
            f"{domain.name}: the shards do not decode to their original text, because their tokenizer changes it "
            f"({normalizer['type']}); evaluate on the original text instead"
        )

    def translate(document: Passage) -> list[int]:
        text = theirs.decode(document.ids.tolist(), skip_special_tokens=False)  # type: ignore[union-attr]
        if len(text.encode()) != document.bytes:
            raise SettingsError(
                f"{domain.name}: the shards do not decode to their original text; evaluate on the original text instead"
            )
        return encode(text)

    return translate


KEPT = (
    {"type": "NFC"},  # another spelling of the same characters
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
)
"""Normalizers, as `tokenizer.json` has them, after which decoding gives the text again; Llama's are the last two."""


def _keeps_text(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether decoding restores the text. Byte lengths are not enough: lower case is as long as upper case."""
    if normalizer is None or normalizer in KEPT:
        return True
    return normalizer["type"] == "Sequence" and all(map(_keeps_text, normalizer["normalizers"]))


def _shard_documents(corpus: TokenDataset, limit: int | None) -> list[Passage]:
    ends = [0, *corpus.document_ends(0, corpus.num_tokens).tolist(), corpus.num_tokens]
    documents = []
    for start, end in list(pairwise(ends))[:limit]:
        ids = np.empty(end - start, np.int64)
        corpus.read(start, ids)
        size = corpus.bytes_before(end) - corpus.bytes_before(start)
        # The last token is EOS. There is no cluster: shards do not record which pieces `fathom corpus` cut from one
        # document.
        documents.append(Passage(None, ids[:-1], size))
    return documents


def _stem(path: str) -> str:
    name = Path(path.removeprefix(HUB)).name.split(".")[0].split("?")[0]
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in name) or "text"
