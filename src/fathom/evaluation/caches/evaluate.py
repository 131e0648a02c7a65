"""Evaluate every checkpoint with every cache; results are stored as they come, and make a report."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fathom.checkpoints.layout import CONFIG
from fathom.errors import SettingsError
from fathom.evaluation.caches.measure import CHUNK, each_length, losses, scorer, stretches
from fathom.evaluation.caches.needles import Needles, Rows, enough, plant, recall
from fathom.evaluation.caches.page import summarize, write_report
from fathom.evaluation.caches.spectrum import spectrum
from fathom.evaluation.perplexity import Domain, encoder
from fathom.evaluation.results import (
    CacheReport,
    CacheValues,
    CheckpointCaches,
    RecallValues,
    SpectrumValues,
)
from fathom.evaluation.scoring import Checkpoint, Settings, kept, name_checkpoints
from fathom.kvcache import METHODS, NAMES, Schedule, build_cache
from fathom.kvcache.whole import WHOLE
from fathom.recipe import CacheSettings, CacheWishes, cache_policy
from fathom.report.files import read_json
from fathom.report.progress import ProgressBar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = {"1 needle": (1, True), "4 needles": (4, True), "4 needles, anywhere": (4, False)}
"""Tasks: number of needles in a text, and whether all are planted in its first window."""
COMPRESSIONS = 8
"""Needles are asked for after up to this many compressions."""
QUESTIONS = 200
"""Fewest questions for each task and number of compressions."""
DECODED = 64
"""Tokens decoded at every length; more if no compression would happen among them."""
READ_AT_ONCE = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """The settings of a cache evaluation."""

    methods: tuple[str, ...]
    at: tuple[int, ...]
    """Text lengths, in windows."""
    wishes: CacheWishes
    """The schedule, as far as the command line says it."""

    def policy(self, checkpoint: Checkpoint, method: str) -> CacheSettings:
        """Method and schedule."""
        config = read_json(checkpoint.directory / CONFIG)
        # A ratio is meant for the methods that have one.
        meant = method not in METHODS or METHODS[method].has_ratio
        return cache_policy(method, config.get("kvcache"), self.wishes if meant else replace(self.wishes, ratio=None))

    def schedule(self, checkpoint: Checkpoint) -> Schedule:
        """The schedule by which compressions and windows are counted, for every cache alike."""
        compressed = [method for method in self.methods if method in METHODS] or ["freqkv"]
        with_ratio = (method for method in compressed if METHODS[method].has_ratio)
        policy = self.policy(checkpoint, next(with_ratio, compressed[0]))
        try:
            return Schedule.at(policy["window"] or 0, policy["sinks"], policy["ratio"], policy["kept"])
        except ValueError as error:
            raise SettingsError(f"--kvcache: {error}") from error


def evaluate_caches(checkpoints: Sequence[str | Path], settings: Settings, asked: Asked) -> CacheReport:
    """Evaluate every checkpoint with every cache; returns what `report.json` holds."""
    if settings.tasks:
        raise SettingsError("--tasks reads short prompts, in which no cache is ever full: leave out --kvcache")
    if settings.max_trips is not None:
        raise SettingsError("--max-trips and --kvcache: ask one question at a time")
    named = name_checkpoints(checkpoints, settings)
    domains = settings.texts()
    schedules = [asked.schedule(checkpoint) for checkpoint in named]
    found = {}
    for checkpoint, schedule in zip(named, schedules, strict=True):
        found[checkpoint.name] = _checkpoint(checkpoint, schedule, asked, domains, settings)
        checkpoint.close()
    report = summarize(found, asked.methods, asked.at)
    if settings.out is not None:
        write_report(report, settings.out)
    return report


def ask(kvcache: str, wishes: CacheWishes, at: str = "1x,2x,4x,8x") -> Asked:
    """The settings of a cache evaluation, checked before anything is opened.

    Args:
        kvcache: Methods, comma between.
        wishes: The schedule; what it does not say is as the checkpoint was tuned.
        at: Numbers of windows, comma between.
    """
    methods = tuple(dict.fromkeys(word.strip() for word in kvcache.split(",") if word.strip()))
    for method in methods:
        if method not in NAMES and method not in WHOLE:
            raise SettingsError(f"--kvcache {method}: allowed: {', '.join(dict.fromkeys([*WHOLE, *NAMES]))}")
    numbers = [word.strip().removesuffix("x") for word in at.split(",")]
    if not methods or not all(number.isdigit() and int(number) for number in numbers):
        raise SettingsError(f"--at {at}: expected numbers of windows, as in 1x,2x,4x")
    return Asked(methods, tuple(sorted({int(number) for number in numbers})), wishes)


def _checkpoint(
    checkpoint: Checkpoint, schedule: Schedule, asked: Asked, domains: Sequence[Domain], settings: Settings
) -> CheckpointCaches:
    """All results of one checkpoint."""
    length = max(asked.at) * schedule.window
    # Texts of needles hold a window and COMPRESSIONS compressions, whatever the lengths asked for.
    size = schedule.window + COMPRESSIONS * schedule.freed
    texts = _texts(checkpoint, domains, length + 1, max(length + 1, size)) if domains else []
    key = {
        "checkpoint": checkpoint.fingerprint(),
        "dtype": settings.dtype,
        "schedule": asdict(schedule),
        "at": list(asked.at),
        "questions": QUESTIONS,
        "compressions": COMPRESSIONS,
        "texts": [hash_of(text) for text in texts],
    }
    caches = {}
    for method in asked.methods:
        policy = asked.policy(checkpoint, method)
        work = partial(_cache, checkpoint, policy, schedule, asked.at, texts)
        caches[method] = kept(checkpoint, settings.out, "kvcache", method, {**key, "policy": policy}, work)
    look = partial(_spectrum, checkpoint, schedule, texts)
    return {
        "directory": str(checkpoint.directory),
        "tuned": read_json(checkpoint.directory / CONFIG).get("kvcache"),
        "schedule": {
            "window": schedule.window,
            "sinks": schedule.sinks,
            "kept": schedule.kept,
            "freed": schedule.freed,
            "chunk": schedule.chunk,
        },
        "documents": len(texts),
        "haystack": "documents" if any(text.shape[1] >= size for text in texts) else "random tokens",
        "caches": caches,
        "spectrum": kept(checkpoint, settings.out, "kvcache", "spectrum", key, look),
    }


def _cache(
    checkpoint: Checkpoint, policy: CacheSettings, schedule: Schedule, at: Sequence[int], texts: Sequence[Tensor]
) -> CacheValues:
    """The results of one checkpoint with one cache: loss, needles, costs."""
    model, tokenizer = checkpoint.open()
    try:
        build_cache(model, **{"window": 1, **policy} if policy["window"] is None else policy)
    except ValueError as error:
        raise SettingsError(f"{checkpoint.name}: --kvcache {policy['method']}: {error}") from error

    def made_for(room: int) -> Cache:
        return build_cache(model, **{**policy, "window": room} if policy["method"] in WHOLE else policy)

    generator = torch.Generator().manual_seed(0)
    usable = _usable(tokenizer)
    needles = Needles.drawn(usable, generator)
    tasks = {name: _planted(texts, usable, needles, task, schedule, generator) for name, task in TASKS.items()}
    lengths = [n * schedule.window for n in at]
    width = min(CHUNK, schedule.freed)  # the same for full caches, so that pieces and logits have one size for all
    work = len(texts) + sum(map(len, tasks.values())) + len(at)
    with ProgressBar(f"{checkpoint.name}: {policy['method']}", work) as bar:
        by_document: list[list[float]] = []
        for rows in _side_by_side([text[:, : lengths[-1] + 1] for text in texts], schedule.window):
            by_document += stretches(losses(model, rows, made_for(rows.shape[1]), width), schedule.chunk)
            bar.update(len(by_document))
        done = len(texts)

        def counted(parts: Iterable[T]) -> Iterator[T]:
            nonlocal done
            for part in parts:
                yield part
                done += 1
                bar.update(done)

        found = {}
        for name, batches in tasks.items():
            new = partial(made_for, schedule.window + COMPRESSIONS * schedule.freed)
            answers = recall(scorer(model, new, width), counted(batches), needles, schedule, COMPRESSIONS)
            found[name] = cast(RecallValues, asdict(answers))
        decode = _decoded(schedule, lengths)
        ids = usable[torch.randint(0, len(usable), (1, lengths[-1] + decode), generator=generator)]
        costs = list(counted(each_length(model, ids, made_for, lengths, decode, width)))
    return {"nats": by_document, "recall": found, "chance": needles.chance, "loads": costs}


def _planted(
    texts: Sequence[Tensor],
    usable: Tensor,
    needles: Needles,
    task: tuple[int, bool],
    schedule: Schedule,
    generator: torch.Generator,
) -> list[Rows]:
    """Batches of texts with at least QUESTIONS questions after each number of compressions, cut after the last one."""
    count, early = task
    size = schedule.window + COMPRESSIONS * schedule.freed
    batch = max(1, READ_AT_ONCE // size)

    def draw() -> Rows:
        text = _haystack(texts, usable, batch, size, generator)
        return plant(text, needles, count, generator, schedule.window if early else None, after=schedule.sinks)

    rows = enough(draw, schedule, COMPRESSIONS, QUESTIONS)
    return [rows.pick(slice(start, start + batch)).cut() for start in range(0, len(rows.ids), batch)]


def _decoded(schedule: Schedule, lengths: Sequence[int]) -> int:
    """Number of tokens to decode, so that a compression is among them at every length."""
    waits = [schedule.window - schedule.entries(length) + 1 for length in lengths]
    return max(min(DECODED, schedule.freed), *waits)


def _spectrum(checkpoint: Checkpoint, schedule: Schedule, texts: Sequence[Tensor]) -> SpectrumValues:
    """Shares of energy, or the reason why there are none."""
    model, tokenizer = checkpoint.open()
    generator = torch.Generator().manual_seed(0)
    rows = max(1, READ_AT_ONCE // schedule.window)
    ids = _haystack(texts, _usable(tokenizer), rows, schedule.window, generator)
    try:
        return cast(SpectrumValues, asdict(spectrum(model, ids, schedule)))
    except ValueError as error:
        return {"left_out": str(error)}


def _texts(checkpoint: Checkpoint, domains: Sequence[Domain], length: int, most: int) -> list[Tensor]:
    """The first tokens, at least `length` and at most `most`, of each document that is long enough, `[1, T]`."""
    _, tokenizer = checkpoint.open()
    found, longest = [], 0
    for domain in domains:
        encode = encoder(tokenizer, domain)
        for document in domain.documents:
            ids = np.asarray(encode(document)[:most], np.int64)
            longest = max(longest, len(ids))
            if len(ids) >= length:
                found.append(torch.from_numpy(ids).unsqueeze(0))
    if not found:
        raise SettingsError(
            f"--at: no document has {length:,} tokens; the longest has {longest:,}: give shorter lengths"
        )
    return found


def _side_by_side(texts: Sequence[Tensor], window: int) -> Iterator[Tensor]:
    """Texts in batches `[B, T]`, as many as a window of each leaves room for."""
    size = max(1, READ_AT_ONCE // window)
    for start in range(0, len(texts), size):
        yield torch.cat(list(texts[start : start + size]))


def _haystack(texts: Sequence[Tensor], usable: Tensor, batch: int, size: int, generator: torch.Generator) -> Tensor:
    """`[batch, size]`: stretches of the texts, or single tokens of the vocabulary where no text is long enough."""
    long = [text[0] for text in texts if text.shape[1] >= size]
    if not long:
        return usable[torch.randint(0, len(usable), (batch, size), generator=generator)]
    rows = []
    for number in torch.randint(0, len(long), (batch,), generator=generator).tolist():
        start = int(torch.randint(0, len(long[number]) - size + 1, (), generator=generator))
        rows.append(long[number][start : start + size])
    return torch.stack(rows)


def _usable(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Every token that is not special."""
    special = set(tokenizer.all_special_ids)
    return torch.tensor([i for i in range(len(tokenizer)) if i not in special])


def hash_of(text: Tensor) -> str:
    """A hash of the text."""
    return hashlib.sha256(text.numpy().tobytes()).hexdigest()
