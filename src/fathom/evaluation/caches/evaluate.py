"""Evaluate every checkpoint with every cache, store the results, and write a report.

`measure.py` reads texts through a cache, `needles.py` asks for token needles, `asking.py` puts the other questions and
scores their answers, `prompts.py` places them before or after the last compression, `questions.py` leaves out tasks
that the full cache does not solve, and `page.py` makes the verdict. LongBench's and other tasks of lm-eval are scored
with caches by `../scoring.py` (`fathom evaluate --kvcache`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fathom.checkpoints.file_names import CONFIG
from fathom.errors import SettingsError
from fathom.evaluation.caches import natural, ruler
from fathom.evaluation.caches.asking import answer, batches, make_prompts
from fathom.evaluation.caches.measure import CHUNK, consume, loads, losses, scorer, stretches
from fathom.evaluation.caches.needles import Needles, Recall, Rows, enough, plant, recall
from fathom.evaluation.caches.page import page, summarize
from fathom.evaluation.caches.prompts import Frame, Prompt
from fathom.evaluation.caches.results import (
    Answer,
    CacheReport,
    CacheRow,
    CheckpointCaches,
    Load,
    Questions,
)
from fathom.evaluation.caches.spectrum import Spectrum, spectrum
from fathom.evaluation.clock import Clock
from fathom.evaluation.perplexity import Domain, encoder
from fathom.evaluation.scoring import Checkpoint, EvaluationSettings, kept, name_checkpoints
from fathom.kvcache import METHODS, NAMES, Schedule, build_cache
from fathom.kvcache.build import base
from fathom.kvcache.policy import CacheOptions, Policy, cache_policy, without_ratio
from fathom.kvcache.whole import WHOLE
from fathom.report import html
from fathom.report.files import read_json
from fathom.report.numbers import duration
from fathom.report.progress import ProgressBar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TASKS = {"1 needle": (1, True), "4 needles": (4, True), "4 needles, anywhere": (4, False)}
"""Tasks with token needles: the number in a text, and whether all are planted in its first window."""
NEEDLES = ("tokens", "natural")
"""Kinds of needles: random tokens with multiple-choice answers, or sentences in real text."""
COMPRESSIONS = (1, 2, 4)
QUESTIONS = 300
"""Questions for each cache, over all tasks, places and numbers of compressions."""
DECODED = 64
"""Tokens decoded at every length; more if no compression would happen among them."""
READ_AT_ONCE = 4096
WITHOUT_CACHES = (
    "max_trips",
    "context",
    "stride",
    "num_fewshot",
    "apply_chat_template",
    "include",
    "task_data",
    "batch_size",
)
"""Settings of other evaluations, which mean nothing here."""

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """The settings of a cache evaluation."""

    methods: tuple[str, ...]
    at: tuple[int, ...]
    """Text lengths, in windows."""
    options: CacheOptions
    """The requested schedule."""
    questions: int = QUESTIONS
    compressions: tuple[int, ...] = COMPRESSIONS
    """How often the cache is compressed before a question is answered."""
    needles: str | None = "tokens"
    tasks: tuple[str, ...] = ()
    """Tasks of RULER."""

    @property
    def prompted(self) -> tuple[str, ...]:
        """The tasks whose questions are text."""
        return (*(natural.TASKS if self.needles == "natural" else ()), *self.tasks)

    def policy(self, checkpoint: Checkpoint, method: str) -> Policy:
        """The cache policy: method and schedule."""
        config = read_json(checkpoint.directory / CONFIG)
        # A ratio applies only to methods that have one.
        meant = base(method) not in METHODS or METHODS[base(method)].has_ratio
        return cache_policy(method, config.get("kvcache"), self.options if meant else replace(self.options, ratio=None))

    def schedule(self, checkpoint: Checkpoint) -> Schedule:
        """The schedule by which the compressions and windows of all caches are counted."""
        compressed = [method for method in self.methods if base(method) in METHODS] or ["freqkv"]
        with_ratio = (method for method in compressed if METHODS[base(method)].has_ratio)
        policy = self.policy(checkpoint, next(with_ratio, compressed[0]))
        try:
            return Schedule.at(policy.window or 0, policy.sinks, policy.ratio, policy.kept)
        except ValueError as error:
            raise SettingsError(f"`kvcache`: {error}") from error


def evaluate_caches(checkpoints: Sequence[str | Path], settings: EvaluationSettings, asked: Asked) -> CacheReport:
    """Evaluate every checkpoint with every cache; returns what `report.json` holds."""
    for name in WITHOUT_CACHES:
        if (value := getattr(settings, name)) is not None and value is not False:
            raise SettingsError(f"`{name}` and `kvcache` exclude each other")
    named = name_checkpoints(checkpoints, settings)
    domains = settings.texts()
    if asked.needles == "natural" and not domains:
        raise SettingsError("needles=natural: needs `perplexity`, the text in which the needles are planted")
    schedules = [asked.schedule(checkpoint) for checkpoint in named]
    found = {}
    for checkpoint, schedule in zip(named, schedules, strict=True):
        found[checkpoint.name] = Evaluation(checkpoint, schedule, asked, domains, settings).run()
        checkpoint.close()
    report = summarize(found, asked.methods, asked.at)
    if settings.out is not None:
        html.write(settings.out, report, page(report))
    return report


def ask(
    kvcache: str,
    options: CacheOptions,
    at: str = "1x,2x,4x,8x",
    *,
    questions: int | None = None,
    compressions: str | None = None,
    needles: str | None = "tokens",
    tasks: str | None = None,
) -> Asked:
    """The settings of a cache evaluation, checked before anything is opened.

    Args:
        kvcache: Methods, comma between.
        options: The schedule; other settings are those with which the checkpoint was trained.
        at: Numbers of windows, comma between.
        questions: Questions for each cache, over all tasks.
        compressions: Numbers of compressions before an answer, comma between.
        needles: A kind of `NEEDLES`, or None.
        tasks: Tasks of RULER, comma between, or `ruler` for all.
    """
    methods = tuple(dict.fromkeys(word.strip() for word in kvcache.split(",") if word.strip()))
    for method in methods or (kvcache,):
        if base(method) not in NAMES and base(method) not in WHOLE:
            raise SettingsError(f"kvcache={method}: allowed: {', '.join(dict.fromkeys([*WHOLE, *NAMES]))}")
    lengths = _counts(at, "x", f"at={at}: expected numbers of windows, as in 1x,2x,4x")
    refusal = f"compressions={compressions}: expected numbers of compressions, as in 1,2,4"
    counts = COMPRESSIONS if compressions is None else _counts(compressions, "", refusal)
    words = [word.strip() for word in (tasks or "").split(",") if word.strip()]
    chosen = dict.fromkeys(task for word in words for task in (ruler.TASKS if word == "ruler" else (word,)))
    for task in chosen:
        if task not in ruler.TASKS:
            raise SettingsError(f"tasks={task}: with `kvcache`, allowed: ruler, {', '.join(ruler.TASKS)}")
    if needles is None and not chosen:
        for name, value in (("questions", questions), ("compressions", compressions)):
            if value is not None:
                raise SettingsError(f"{name}={value}: has no effect without `needles` or `tasks`")
    questions = QUESTIONS if questions is None else questions
    if questions < 1:
        raise SettingsError(f"questions={questions}: allowed: 1 or more")
    compressed = [base(method) for method in methods if base(method) in METHODS]
    if options.ratio is not None and compressed and not any(METHODS[method].has_ratio for method in compressed):
        raise SettingsError(without_ratio(compressed[0], options.ratio))
    return Asked(methods, lengths, options, questions, counts, needles, tuple(chosen))


def _counts(words: str, suffix: str, refusal: str) -> tuple[int, ...]:
    """Parse comma-separated positive integers, each with or without a suffix; returns them in order and without
    duplicates."""
    found = [word.strip().removesuffix(suffix) for word in words.split(",")]
    if not all(word.isdigit() and int(word) for word in found):
        raise SettingsError(refusal)
    return tuple(sorted({int(word) for word in found}))


class Evaluation:
    """The evaluation of one checkpoint with every cache; finished parts are stored."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        schedule: Schedule,
        asked: Asked,
        domains: Sequence[Domain],
        settings: EvaluationSettings,
    ) -> None:
        self.checkpoint, self.schedule, self.asked, self.settings = checkpoint, schedule, asked, settings
        self.lengths = [n * schedule.window for n in asked.at]
        length = self.lengths[-1]
        # Texts with needles have room for a window and all compressions, whatever lengths were requested.
        self.size = schedule.window + max(asked.compressions) * schedule.freed
        found = _texts(checkpoint, domains, length + 1, max(length + 1, self.size)) if domains else []
        self.texts, clusters = [text for text, _ in found], [cluster for _, cluster in found]
        self.clusters = clusters if any(clusters) else None
        self.key = {
            **checkpoint.key(settings),
            "schedule": asdict(schedule),
            "texts": [hashlib.sha256(text.numpy().tobytes()).hexdigest() for text in self.texts],
        }
        self.questions = {**self.key, "questions": asked.questions, "compressions": list(asked.compressions)}
        _, tokenizer = checkpoint.open()
        special = set(tokenizer.all_special_ids)
        self.usable = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
        self.generator = torch.Generator().manual_seed(0)
        self.needles = Needles.drawn(self.usable, self.generator) if asked.needles == "tokens" else None
        self.width = min(CHUNK, schedule.freed)  # the same for full caches, so that pieces have one size for all
        self.planted: dict[str, list[Rows]] = {}
        if self.needles is not None:
            self.planted = {name: self._planted(self.needles, task) for name, task in TASKS.items()}
        self.prompts: list[Prompt] = []
        self.left_out: dict[str, str] = {}
        if asked.prompted:
            strings = [str(tokenizer.decode(text[0].tolist(), skip_special_tokens=True)) for text in self.texts]
            self.prompts, self.left_out = make_prompts(
                Frame(tokenizer), schedule, asked.prompted, asked.compressions, strings, asked.questions
            )

    def run(self) -> CheckpointCaches:
        """All results."""
        policies = {method: self.asked.policy(self.checkpoint, method) for method in self.asked.methods}
        for policy in policies.values():
            try:
                self._new(policy, room=1)
            except SettingsError as error:
                raise SettingsError(f"{self.checkpoint.name}: {error}") from error
        self._say_what_it_takes(policies)
        caches = {method: self._cache(method, policy) for method, policy in policies.items()}
        reference = self._answers("full", replace(next(iter(policies.values())), method="full", window=None))
        return CheckpointCaches(
            directory=str(self.checkpoint.directory),
            tuned=read_json(self.checkpoint.directory / CONFIG).get("kvcache"),
            schedule=self.schedule,
            documents=len(self.texts),
            haystack="documents" if any(text.shape[1] >= self.size for text in self.texts) else "random tokens",
            questions=Questions(len(self.prompts), self.left_out, reference),
            caches=caches,
            spectrum=self._part(Spectrum, "spectrum", self.key, self._spectrum),
            clusters=self.clusters,
        )

    def _part(self, kind: object, name: str, key: Mapping[str, object], work: Callable[[], T]) -> T:
        return kept(kind, self.checkpoint, self.settings.out, "kvcache", name, key, work)

    def _new(self, policy: Policy, room: int) -> Cache:
        model, _ = self.checkpoint.open()
        return (replace(policy, window=room) if base(policy.method) in WHOLE else policy).empty(model)

    def _cache(self, method: str, policy: Policy) -> CacheRow:
        key = {**self.key, "policy": asdict(policy), "at": list(self.asked.at)}
        asked = {**self.questions, "policy": asdict(policy)}
        look = partial(self._losses, method, policy)
        nats = self._part(list[list[float]], f"{method}, loss", key, look) if self.texts else []
        recall = {
            task: self._part(Recall, f"{method}, {task}", asked, partial(self._recall, method, policy, task))
            for task in self.planted
        }
        answers = self._answers(method, policy)
        loads = self._part(list[Load], f"{method}, costs", key, partial(self._loads, policy))
        chance = self.needles.chance if self.needles is not None else 0.0
        return CacheRow(nats, recall, chance, answers, loads)

    def _losses(self, method: str, policy: Policy) -> list[list[float]]:
        """The loss of each document, summed over segments of consecutive positions."""
        model, _ = self.checkpoint.open()
        by_document: list[list[float]] = []
        with ProgressBar(f"{self.checkpoint.name}: {method}, loss", len(self.texts)) as bar:
            size = max(1, READ_AT_ONCE // self.schedule.window)
            for start in range(0, len(self.texts), size):
                rows = torch.cat([text[:, : self.lengths[-1] + 1] for text in self.texts[start : start + size]])
                nats = losses(model, rows, self._new(policy, rows.shape[1]), self.width)
                by_document += stretches(nats, self.schedule.chunk)
                bar.update(len(by_document))
        return by_document

    def _recall(self, method: str, policy: Policy, task: str) -> Recall:
        """The number of correct answers about token needles."""
        assert self.needles is not None
        model, _ = self.checkpoint.open()
        batches = self.planted[task]
        with ProgressBar(f"{self.checkpoint.name}: {method}, {task}", len(batches)) as bar:
            score = scorer(model, partial(self._new, policy, self.size), self.width)
            return recall(score, _counted(batches, bar), self.needles, self.schedule, max(self.asked.compressions))

    def _answers(self, method: str, policy: Policy) -> list[Answer]:
        """The answers of one cache to all questions that are text, in order."""
        # A full cache gives the same answers under every schedule. It also is the reference, so it always answers.
        key = {**self.questions, "policy": {"method": method} if base(method) in WHOLE else asdict(policy)}
        found: list[Answer] = []
        for task, prompts in groupby(self.prompts, key=lambda prompt: prompt.cell.task):
            name = f"{method}, {task}"
            found += self._part(list[Answer], name, key, partial(self._answered, name, policy, list(prompts)))
        return found

    def _answered(self, name: str, policy: Policy, prompts: Sequence[Prompt]) -> list[Answer]:
        """The answers of one cache to the questions of one task."""
        model, tokenizer = self.checkpoint.open()
        new, parts = partial(self._new, policy), list(batches(prompts))
        with ProgressBar(f"{self.checkpoint.name}: {name}", len(parts)) as bar:
            found = (answer(model, tokenizer, new, part, self.schedule, self.width) for part in _counted(parts, bar))
            return list(chain.from_iterable(found))

    def _loads(self, policy: Policy) -> list[Load]:
        """The bytes and the speed of one cache at every text length."""
        model, _ = self.checkpoint.open()
        decode = _decoded(self.schedule, self.lengths)
        generator = torch.Generator().manual_seed(0)
        draw = torch.randint(0, len(self.usable), (1, self.lengths[-1] + decode), generator=generator)
        with ProgressBar(f"{self.checkpoint.name}: {policy.method}, costs", len(self.lengths)) as bar:
            new = partial(self._new, policy)
            return list(_counted(loads(model, self.usable[draw], new, self.lengths, decode, self.width), bar))

    def _spectrum(self) -> Spectrum:
        """The spectrum of the keys and values (shares of energy), or the reason why there is none."""
        model, _ = self.checkpoint.open()
        rows = max(1, READ_AT_ONCE // self.schedule.window)
        generator = torch.Generator().manual_seed(0)
        ids = _haystack(self.texts, self.usable, rows, self.schedule.window, generator)
        try:
            return spectrum(model, ids, self.schedule)
        except ValueError as error:
            return Spectrum(left_out=str(error))

    def _planted(self, needles: Needles, task: tuple[int, bool]) -> list[Rows]:
        """Batches of texts with planted token needles and the questions of one needle task; a batch is cut after its
        last question."""
        count, early = task
        batch = max(1, READ_AT_ONCE // self.size)

        def draw() -> Rows:
            text = _haystack(self.texts, self.usable, batch, self.size, self.generator)
            within = self.schedule.window if early else None
            return plant(text, needles, count, self.generator, within, after=self.schedule.sinks)

        wanted = [0, *self.asked.compressions]
        each = -(-self.asked.questions // (len(TASKS) * len(wanted)))
        rows = enough(draw, self.schedule, wanted, each)
        return [rows.pick(slice(start, start + batch)).cut() for start in range(0, len(rows.ids), batch)]

    def _say_what_it_takes(self, policies: Mapping[str, Policy]) -> None:
        """Print the number of tokens and an estimate of the time, before anything is measured."""
        lengths, decode = self.lengths, _decoded(self.schedule, self.lengths)
        tokens = {
            "loss": sum(min(text.shape[1], lengths[-1] + 1) for text in self.texts),
            "needles": sum(rows.ids.numel() for batches in self.planted.values() for rows in batches),
            "questions": sum(len(prompt.ids) for prompt in self.prompts),
            "costs": sum(lengths),
        }
        steps = len(lengths) * decode + sum(max(prompt.most for prompt in part) for part in batches(self.prompts))
        model, _ = self.checkpoint.open()
        read_one, decode_one = _speed(model, self.usable, self.width)
        caches = len(policies) + bool(self.prompts and "full" not in policies)
        seconds = caches * (sum(tokens.values()) * read_one + steps * decode_one)
        parts = ", ".join(f"{name} {count:,}" for name, count in tokens.items() if count)
        print(
            f"{self.checkpoint.name}: each of {caches} caches reads {sum(tokens.values()):,} tokens ({parts}) and "
            f"decodes up to {steps:,} steps; at {1 / read_one:,.0f} tokens and {1 / decode_one:,.1f} steps a second, "
            f"about {duration(max(1, seconds))} in all",
            file=sys.stderr,
        )


def _counted(parts: Iterable[T], bar: ProgressBar) -> Iterator[T]:
    for done, part in enumerate(parts, 1):
        yield part
        bar.update(done)


@torch.no_grad()
def _speed(model: PreTrainedModel, usable: Tensor, width: int) -> tuple[float, float]:
    """Seconds per token of the prompt (prefill) and per step of decoding, measured in a short trial."""
    ids = usable[torch.arange(2 * width + 3) % len(usable)].unsqueeze(0)
    cache, clock = build_cache(model, "full"), Clock(model.device)
    pieces = ids.split([width, width, 1, 1, 1], dim=1)
    _, together, *alone = (clock.seconds(partial(consume, model, piece, cache, width)) for piece in pieces)
    return max(together, 1e-9) / width, max(sum(alone), 1e-9) / 3


def _decoded(schedule: Schedule, lengths: Sequence[int]) -> int:
    """The number of tokens to decode, large enough that a compression happens among them at every text length."""
    waits = [schedule.window - schedule.entries(length) + 1 for length in lengths]
    return max(min(DECODED, schedule.freed), *waits)


def _texts(
    checkpoint: Checkpoint, domains: Sequence[Domain], length: int, most: int
) -> list[tuple[Tensor, str | None]]:
    """The first tokens `[1, T]`, at most `most`, of each document that has at least `length` tokens, and its
    cluster."""
    _, tokenizer = checkpoint.open()
    found, longest = [], 0
    for domain in domains:
        encode = encoder(tokenizer, domain)
        for document in domain.documents:
            ids = np.asarray(encode(document)[:most], np.int64)
            longest = max(longest, len(ids))
            if len(ids) >= length:
                found.append((torch.from_numpy(ids).unsqueeze(0), document.cluster))
    if not found:
        raise SettingsError(
            f"`at`: no document has {length:,} tokens; the longest has {longest:,}: give shorter lengths"
        )
    return found


def _haystack(texts: Sequence[Tensor], usable: Tensor, batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Token ids `[batch, size]`: random passages of the texts, or random tokens of the vocabulary if no text is long
    enough."""
    long = [text[0] for text in texts if text.shape[1] >= size]
    if not long:
        return usable[torch.randint(0, len(usable), (batch, size), generator=generator)]
    rows = []
    for number in torch.randint(0, len(long), (batch,), generator=generator).tolist():
        start = int(torch.randint(0, len(long[number]) - size + 1, (), generator=generator))
        rows.append(long[number][start : start + size])
    return torch.stack(rows)
