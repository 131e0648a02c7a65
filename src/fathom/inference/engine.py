"""The engine's thread, which generates text: requests join and leave running batches between tokens.

It alternates between reading a chunk of waiting prompts (`reading_order.py`), short ones several at once where the
batch can, and making one token for every row. A prompt is admitted when the cache of its batch, with all rows as long
as the longest may become, fits into the budget, so no text that runs is stopped for another. A request that can never
fit is refused. Nothing here knows text or HTTP.

An idle engine holds no cache but the prefix cache. If one batch fails, only its requests end (`_guarded`). If the
thread itself fails, all requests end, `server.py` answers 503, and `launch.py` ends the process. `reading_order.py`
decides which prompt is read next and how much of it, `drafting.py` whether to draft, `sampling.py` which token follows,
`prefixes.py` what later prompts reuse, and `batches.py` which models read a whole prompt at once.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers.utils import logging

from fathom.errors import RequestError, SettingsError
from fathom.inference.batches import (
    DRAFTS,
    GRAIN,
    DraftBatch,
    LiveBatch,
    LoneBatch,
    SlabBatch,
    batch_for,
    may_chunk,
    refuse_forgetful,
    shares,
    token_bytes,
    trips_of,
)
from fathom.inference.by_rows import attend_by_rows, needs_rows
from fathom.inference.drafting import LOOKUP, PLAIN, TRIPS, Drafting, NextStep, TextDrafts
from fathom.inference.histogram import Histogram
from fathom.inference.positions import depends_on_company
from fathom.inference.prefixes import LEAST as SHORTEST
from fathom.inference.prefixes import NOTHING, Found, Kept, Prefixes
from fathom.inference.reading_order import (
    FIRST_PART,
    LEAST,
    chunk,
    in_order,
    interrupts,
    learned,
    most_rows,
    piece,
    rank,
    rest,
    taken,
)
from fathom.inference.sampling import NO_NUMBERS, Choice, finite, likeliest
from fathom.iterations import most_trips
from fathom.kvcache.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)

SCORED = 64
"""Most tokens of a chunk of a prompt whose own tokens are scored, since each of them needs logits over the
vocabulary."""
BY_ROWS = 64
"""Tokens of a chunk where products must not depend on company: neither may the places where a prompt is cut."""
FULL = 1 - 1e-6
"""The share of a turn after which no prompt is read: 1, but for rounding."""
ROWS = 64
"""Most rows that generate at a time."""
OTHERS = 8
"""The rows of `ROWS` that the second and later texts of a request leave to others; of memory, they leave a row."""
WAITING = 256
"""Most jobs that wait, so the most that a request may be. One of a single text only counts the first of each request:
the further texts of others do not keep it out."""
FILLED = 2 / 3
"""Least share of tokens, not padding, in prompts that are read at once."""
COUNTED = (
    *("prompt_tokens", "tokens", "steps", "finished", "cancelled", "failed", "drafted", "accepted", "refused"),
    *("cached", "hits"),
)
"""The counters."""
TIMED = "queue", "first", "between"
"""Times in seconds: from submission until the prompt is read, and to the first token, and between two tokens."""

T = TypeVar("T")


@dataclass(frozen=True)
class Scored:
    """A token, and on request its log-probability and the most likely tokens at its position."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    trips: int | None = None
    """Loop iterations of the forward pass that chose it; None for a model without iterations."""


Event = Scored | list[Scored] | str | Exception
"""A new token; the scored tokens of a prompt; why the text ended (`stop` or `length`); or an error."""


@dataclass(eq=False)
class Job:
    """One text to generate."""

    prompt: Sequence[int]
    new_tokens: int
    """Maximum number of new tokens."""
    choice: Choice
    deliver: Callable[[Event], None]
    stops: frozenset[int] = frozenset()
    """Tokens that end it; the ending token is delivered too."""
    logprobs: int | None = None
    """Number of likeliest tokens to deliver with log-probabilities; None for no log-probabilities."""
    score_prompt: bool = False
    tell_trips: bool = False
    """Whether to deliver the loop iterations of each token."""
    trips: int | None = None
    cancelled: str = ""
    """How a cancelled job is counted: `cancelled`, or `finished` if everything that is needed was generated."""
    made: list[int] = field(default_factory=list)
    read: int = 0
    cached: int = 0
    """Tokens of its prompt that were found in the prefix cache."""
    resumed: int = 0
    """Tokens of its prompt that had been read when its reading began, or was resumed."""
    cut: int = 0
    """Where its prompt is split, for later prompts with the same beginning."""
    cuts: list[int] = field(default_factory=list)
    """How many of its tokens had been read at the end of each chunk."""
    behind: Tensor | None = None
    """The logits `[1, V]` after its prompt, if they were in the prefix cache."""
    kept: Kept | None = None
    """Its entry in the prefix cache."""
    prompt_scores: list[Scored] = field(default_factory=list)
    sound: bool = True
    """Whether the logits of its prompt's tokens are finite."""
    began: float = 0.0
    """Submission time, by `time.perf_counter`."""
    latest: float = 0.0
    """When its last token was made."""
    before: int = 0
    """Prompt tokens that the engine had read when it was submitted."""
    passed: int = 0
    """Prompt tokens of others that were read since."""
    paused: tuple[object, int] | None = None
    """If another's prompt interrupted its own: the state of its batch, and the bytes of its copy."""
    drafts: TextDrafts = field(default_factory=TextDrafts)
    request: object = None
    """The object that it shares with the other texts of its request."""
    further: bool = False
    """Whether it is not the first text of its request."""

    salt: str | None = None
    """Prefixes are shared with texts of the same one alone."""

    @property
    def kind(self) -> tuple[int | None, str | None]:
        """A key: only jobs with equal keys may share prefixes in the prefix cache."""
        return self.trips, self.salt

    @property
    def left(self) -> int:
        """The number of the job's prompt tokens that are not read yet."""
        return len(self.prompt) - self.read

    @property
    def in_a_row(self) -> int:
        """The number of prompt tokens that were read since reading began or was last resumed."""
        return self.read - self.resumed

    @property
    def longest(self) -> int:
        """The maximum length of a job's sequence in tokens: its prompt and its new tokens."""
        return len(self.prompt) + self.new_tokens


@dataclass
class Lane:
    """A batch and the jobs of its sequences; the engine has one lane for each number of loop iterations."""

    batch: LiveBatch
    token_bytes: int
    jobs: list[Job] = field(default_factory=list)
    rectangle: tuple[int, int] = (0, 0)
    """Sequences and tokens for which memory is reserved."""

    def bytes(self, rectangle: tuple[int, int]) -> int:
        """Bytes of keys and values in a buffer for (sequences, tokens)."""
        return rectangle[0] * rectangle[1] * self.token_bytes


class Engine:
    """Generates texts with one model, on one thread.

    Args:
        model: An open causal language model.
        budget: Bytes that keys and values may take.
        policy: A constant-size cache for every text.
        hand_out: Receives the new events after each turn; by default they are delivered at once.
        draft_trips: Draft with this many first trips where that is faster, for jobs with more.
        lookup: Draft what followed the same tokens before, where that is faster.
        prefix_budget: Bytes of the prefix cache, in addition to `budget`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        budget: int,
        policy: Policy | None = None,
        hand_out: Callable[[list[tuple[Job, Event]]], None] | None = None,
        draft_trips: int | None = None,
        prefix_budget: int = 0,
        lookup: bool = False,
    ) -> None:
        if depends_on_company(model):  # texts would depend on other requests
            raise SettingsError(
                "rope_type longrope: its angles depend on the longest sequence of a batch, so an answer would depend "
                "on other requests: use `fathom generate` or `fathom chat`"
            )
        self.by_rows = policy is None and needs_rows(model) and shares(model)
        """Whether each sequence is attended to, and each prompt read, by itself."""
        if self.by_rows:
            attend_by_rows(model)
        batch = batch_for(model, None, policy, draft_trips)  # refuses models that cannot draft here
        if policy is None and isinstance(batch, LoneBatch):
            refuse_forgetful(model)
        if lookup and not isinstance(batch, SlabBatch):
            raise SettingsError("lookup: the cache of this model, or `kvcache`, cannot remove tokens: leave lookup out")
        self.lookup = lookup
        self.model, self.budget, self.policy = model, budget, policy
        self.hand_out, self.draft_trips = hand_out or deliver, draft_trips
        self.prefixes = Prefixes(prefix_budget)
        self.lanes: dict[int | None, Lane] = {}
        self.waiting: deque[Job] = deque()
        self.calls: deque[tuple[Callable[[], object], Future]] = deque()
        self.joining: tuple[Lane, list[Job]] | None = None
        """Jobs whose prompts are being read: one, or several whose whole prompts are read at once."""
        self.paused: list[tuple[Lane, Job]] = []
        """Jobs whose prompts were interrupted by shorter ones."""
        self.blocked: Job | None = None
        """The job that last waited for room after others had overtaken it enough."""
        self.fitting: dict[int | None, float] = {}
        """How many tokens of a prompt can be read between two steps, by number of trips."""
        self.steps: dict[int | None, tuple[int, float]] = {}
        """Rows and seconds of the latest step, by number of trips."""
        self.drafting: dict[int | None, Drafting] = {}
        self.counts: dict[str, float] = dict.fromkeys(COUNTED, 0)
        """Since the start, for /metrics."""
        self.times = {name: Histogram() for name in TIMED}
        self._out: list[tuple[Job, Event]] = []
        self._wake, self._closing, self._reason = threading.Condition(), False, "the server is shutting down"
        self.fault: str | None = None
        """Why the thread ended, if a bug ended it."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # Called from other threads.

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue either all of these jobs or none."""
        try:
            self._queue(jobs)
        except RequestError:
            self.counts["refused"] += 1
            raise

    def _queue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.began = time.perf_counter()
            if not job.prompt:  # it would fail in a batch, and take the others along
                raise RequestError("the prompt has no tokens", "empty_prompt")
            needed = self.token_bytes(job.trips) * self._tokens(job)
            if needed > self.budget:
                raise RequestError(
                    f"this request may need {_mebibytes(needed)} of cache for its {job.longest} tokens; the server has "
                    f"{_mebibytes(self.budget)} (`cache_memory`)",
                    "cache_memory_exceeded",
                )
        with self._wake:
            if self._closing:
                raise RequestError(self._reason, "shutting_down")
            waiting = self._waiting(len(jobs) == 1)
            if waiting + len(jobs) > WAITING:
                raise RequestError(f"{waiting} sequences are already waiting; try again later", "rate_limit_exceeded")
            for i, job in enumerate(jobs):
                job.before = int(self.counts["prompt_tokens"])
                job.further = i > 0 and job.request is not None
            self.waiting.extend(jobs)
            self._wake.notify()

    def _waiting(self, single: bool) -> int:
        """The number of waiting jobs; with `single`, a request of several texts counts as one job."""
        return sum(not (single and job.further) for job in list(self.waiting))

    def cancel(self, jobs: Sequence[Job], counted: str = "cancelled") -> None:
        """Cancel jobs at their next token or prompt chunk; the first call for a job decides under which name it is
        counted."""
        for job in jobs:
            job.cancelled = job.cancelled or counted
        with self._wake:
            self._wake.notify()

    def call(self, function: Callable[[], object]) -> Future:
        """Run a function on the engine's thread; returns a future."""
        future: Future = Future()
        with self._wake:
            if self._closing:
                raise RequestError(self._reason, "shutting_down")
            self.calls.append((function, future))
            self._wake.notify()
        return future

    def close(self) -> None:
        """Refuse new jobs, and end the running ones with an error that gives the reason."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def join(self, seconds: float) -> None:
        """Close the engine, and wait for its thread to end."""
        self.close()
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and self.fault is None

    @property
    def ready(self) -> bool:
        """Whether the engine would accept a new job."""
        return self.alive and not self._closing and self._waiting(single=True) < WAITING

    @property
    def running(self) -> int:
        """Number of sequences that generate."""
        return sum(len(lane.jobs) for lane in list(self.lanes.values()))

    @property
    def cache_bytes(self) -> int:
        """Bytes that are now allocated for keys and values."""
        return sum(lane.bytes(lane.rectangle) for lane in list(self.lanes.values()))

    def token_bytes(self, trips: int | None) -> int:
        """Bytes that one token's keys and values take."""
        return token_bytes(self.model, trips)

    def most_tokens(self, trips: int | None) -> int:
        """The most tokens of one sequence, prompt included, whose buffer, a multiple of GRAIN, fits the budget."""
        if self.policy is not None:
            return sys.maxsize
        return self.budget // (self.token_bytes(trips) * GRAIN) * GRAIN - self._spare

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a bug of the engine, not of a request; no request may be left waiting
            logger.exception("the engine failed")
            self._reason = self.fault = f"the engine failed: {type(error).__name__}"
        with self._wake:
            self._closing = True
        for _, future in self.calls:
            future.set_exception(RequestError(self._reason, "shutting_down"))
        left = [*self.waiting, *(job for lane in self.lanes.values() for job in lane.jobs)]
        left += [*(self.joining[1] if self.joining else []), *(job for _, job in self.paused)]
        self._out += [(job, RequestError(self._reason, "shutting_down")) for job in left]
        self.waiting.clear()
        self.lanes.clear()
        self._flush()

    @torch.inference_mode()
    def _serve(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self.calls or self.waiting or self.lanes)
                if self._closing:
                    return
                calls, self.calls = self.calls, deque()
            for function, future in calls:
                _fulfil(function, future)
            self._drop_cancelled()
            self._read_prompts()
            for trips, lane in list(self.lanes.items()):
                self._guarded(lane, self._step, lane)
                if not self._held(lane):
                    self.lanes.pop(trips, None)  # frees its memory
            self._flush()

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            try:
                self.hand_out(out)
            except Exception:  # a fault of those who listen is no reason to end the others' texts
                logger.exception("events were not delivered")

    def _drop_cancelled(self) -> None:
        with self._wake:
            gone = [job for job in self.waiting if job.cancelled]
            self.waiting = deque(job for job in self.waiting if not job.cancelled)
        for lane in list(self.lanes.values()):
            left = [job for job in lane.jobs if job.cancelled]
            gone += left
            self._guarded(lane, self._leave, lane, *left)
        if self.joining is not None and self.joining[1][0].cancelled:  # one entry: several are read in one turn
            lane, jobs = self.joining
            gone += jobs
            self.joining = None
            self._guarded(lane, lane.batch.forget)
        gone += [job for _, job in self.paused if job.cancelled]
        self.paused = [(lane, job) for lane, job in self.paused if not job.cancelled]
        for job in gone:
            self.counts[job.cancelled] += 1

    def _read_prompts(self) -> None:
        """Read prompts for a limited share of the time, or until there is no room for the next prompt."""
        spent = 0.0
        while spent < FULL and self._choose(spent):
            assert self.joining is not None
            lane, jobs = self.joining
            share = self._share(jobs[0])
            # Memory that the others release is free before memory is requested.
            for other in [one for one in self.lanes.values() if one is not lane]:
                self._guarded(other, other.batch.reserve, *other.rectangle)
            part, most = FIRST_PART if not spent and jobs[0].left <= LEAST else 1.0, rest(spent, share)
            count = self._guarded(lane, self._read, lane, jobs, most)
            spent += min(part, taken(count, share)) if count else 1 / share  # without a pass: it was known, or failed
            self._flush()  # so that a first token does not wait for the next prompt

    def _share(self, job: Job) -> int:
        """The number of prompt tokens to read between two decoding steps of the running sequences."""
        return BY_ROWS if self.by_rows else chunk(self.fitting.get(job.trips))

    def _choose(self, spent: float) -> bool:
        """Choose the next prompt to read: the current one, a paused one, or a waiting one."""
        read = int(self.counts["prompt_tokens"])
        reading = self.joining[1][0] if self.joining is not None else None
        with self._wake:
            waiting = list(self.waiting)
        for job in [*waiting, *(job for _, job in self.paused), *([] if reading is None else [reading])]:
            job.passed = read - job.before - (job.read - job.cached)
        paused = [job for _, job in self.paused]
        first = not spent and self.blocked not in waiting
        able = [*paused, *waiting] if reading is None else [job for job in waiting if interrupts(job, reading, first)]
        for job in in_order(able, first):
            if job.paused is not None:
                self._resume(job)
                return True
            if self._admit(job, waiting, spent):
                return True
            if rank(job) <= 0 and not self._has_fellows(job):  # overtaken enough: nobody takes the room it waits for
                self.blocked = job
                if self.joining is None and paused:  # these have room, which it waits for too
                    self._resume(paused[0])
                break
        return self.joining is not None

    def _admit(self, job: Job, waiting: Sequence[Job], spent: float) -> bool:
        """Admit a waiting job if there is room, together with other jobs whose prompts can be read in the same forward
        pass."""
        left = rest(spent or (FIRST_PART if job.left <= LEAST else 0.0), self._share(job))
        jobs: list[Job] = []
        more = (other for others in [waiting] for other in in_order(others) if other is not job)  # sorted if need be
        for one in chain([job], more):
            try:
                held = sum(len(self._held(lane)) for lane in self.lanes.values()) + len(jobs)
                for_one = min(ROWS - OTHERS, most_rows(self.steps.get(one.trips)))
                most = for_one if self._has_fellows(one, jobs) else ROWS
                if held >= most or not (self._beside(jobs, one, left) and self._make_room(one, jobs)):
                    break
            except Exception as error:  # whatever it is, it concerns this job alone: nothing was changed for it yet
                logger.exception("a request was not admitted")
                self._remove([one])
                self._fail([one], error)
                break
            jobs.append(one)
            self.times["queue"].observe(time.perf_counter() - one.began)
        if jobs:
            self._remove(jobs)
            lane = self.lanes[jobs[0].trips]
            if self.joining is not None:
                self._interrupt(*self.joining)
            if lane in self.lanes.values():
                self.joining = lane, jobs
            else:
                self._fail(jobs, MemoryError())
        return self.joining is not None

    def _remove(self, jobs: Sequence[Job]) -> None:
        with self._wake:
            self.waiting = deque(job for job in self.waiting if job not in jobs)

    def _interrupt(self, lane: Lane, jobs: Sequence[Job]) -> None:
        """Pause the prompt that is being read; if pausing fails, all requests of its lane fail."""
        paused = self._guarded(lane, lane.batch.pause)
        if paused is not None:
            jobs[0].paused = paused
            self.paused.append((lane, jobs[0]))
            self.joining = None

    def _resume(self, job: Job) -> None:
        """Resume reading a prompt that was paused."""
        self.joining = next((lane, [one]) for lane, one in self.paused if one is job)
        self.paused.remove((self.joining[0], job))

    def _has_fellows(self, job: Job, beside: Sequence[Job] = ()) -> bool:
        """Whether another text of the same request is being generated, or its prompt is being read."""
        held = (one for lane in list(self.lanes.values()) for one in self._held(lane))
        return job.request is not None and any(one.request is job.request for one in chain(held, beside))

    def _held(self, lane: Lane) -> list[Job]:
        """The jobs for which a lane reserves memory: jobs that generate, and jobs whose prompts are read or paused."""
        joining = self.joining[1] if self.joining is not None and self.joining[0] is lane else []
        return [*lane.jobs, *joining, *(job for one, job in self.paused if one is lane)]

    def _beside(self, jobs: Sequence[Job], job: Job, left: int) -> bool:
        """Whether a job's prompt can be read in one forward pass with the prompts of other jobs, without much
        padding."""
        if not jobs:
            return True
        all_jobs = [*jobs, job]
        lengths = [len(one.prompt) for one in all_jobs]
        padded = max(lengths) * len(lengths)
        alike = job.trips == jobs[0].trips and self.lanes[job.trips].batch.reads_several
        alike = alike and not (self.by_rows or any(one.score_prompt for one in all_jobs))
        alike = alike and padded <= left and sum(lengths) >= FILLED * padded
        unsure = all_jobs if len(jobs) == 1 else [job]  # the others were looked up in the prefix cache on arrival
        return alike and all(self._found(one) is NOTHING for one in unsure)

    def _make_room(self, job: Job, beside: Sequence[Job]) -> bool:
        """Make room in the cache for a job and the jobs `beside` it that are admitted together; False if the budget is
        too small."""
        lane = self.lanes.get(job.trips)
        if lane is None or not (self._held(lane) or beside):
            batch = batch_for(self.model, job.trips, self.policy, self.draft_trips)
            lane = Lane(batch, self.token_bytes(job.trips))
        others = [one for trips, one in self.lanes.items() if trips != job.trips]
        copied = sum(one.paused[1] for _, one in self.paused if one.paused is not None)
        if self.joining is not None:  # it would be paused
            copied += self.joining[1][0].read * self.joining[0].token_bytes
        left = self.budget - copied - sum(one.bytes(one.rectangle) for one in others)
        jobs = [*self._held(lane), *beside, job]
        (rows, tokens), tight = lane.rectangle, self._tight(jobs)
        tight = tight[0] + self._has_fellows(job, beside), tight[1]  # a row for others
        wanted = max(rows, tight[0]), max(tokens, tight[1])
        if lane.bytes(wanted) > left:
            wanted = tight  # without the room that longer texts, or more of them, have left
            least = self.budget - copied - sum(one.bytes(self._tight(self._held(one))) for one in others)
            if left < lane.bytes(wanted) <= least:
                left = least
                for one in others:
                    one.rectangle = self._tight(self._held(one))
        fits = len(jobs) <= wanted[0] and lane.bytes(wanted) <= left
        if not fits and (len(jobs) > 1 or others):
            return False
        generous = 1 << (wanted[0] - 1).bit_length(), wanted[1]  # so that a slab is not copied for every row
        if lane.bytes(generous) <= left:
            wanted = generous
        self.lanes[job.trips] = lane
        lane.rectangle = wanted
        return True

    def _tight(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """The number of sequences and of tokens to reserve for jobs if every sequence becomes as long as the longest
        may."""
        return len(jobs), max(map(self._tokens, jobs), default=0)

    def _read(self, lane: Lane, jobs: Sequence[Job], left: int) -> int:
        """Read at most `left` tokens of the joining prompts; if this ends them, choose their first new tokens."""
        lane.batch.reserve(*lane.rectangle)
        before, began = self.counts["prompt_tokens"], time.perf_counter()
        logits = self._read_several(lane, jobs) if len(jobs) > 1 else self._read_chunk(lane, jobs[0], left)
        if logits is not None:
            self.joining = None
            lane.jobs += jobs
            self._out += [(job, job.prompt_scores) for job in jobs if job.score_prompt and job.sound]
            self._take(lane, jobs, logits)
        count = int(self.counts["prompt_tokens"] - before)
        seconds, trips = time.perf_counter() - began, jobs[0].trips
        if count >= LEAST or trips in self.fitting:  # fewer say little at first
            self.fitting[trips] = learned(self.fitting.get(trips), count, seconds)
        return count

    def _read_chunk(self, lane: Lane, job: Job, left: int) -> Tensor | None:
        """Read a chunk of a prompt; after its last chunk the sequence joins the batch, and the last token's logits `[1,
        V]` are returned."""
        if job.paused is not None:
            state, job.paused, job.resumed = job.paused[0], None, job.read
            lane.batch.resume(state)
        elif not job.read:
            self._take_over(lane, job)
        end = job.cut if job.read < job.cut else len(job.prompt)
        share = min(SCORED, left) if job.score_prompt else left
        whole = BY_ROWS if self.by_rows else piece(end - job.read, share)
        whole = whole if may_chunk(self.model) else len(job.prompt)
        chunk = job.prompt[job.read : min(end, job.read + whole)]
        logits = lane.batch.read(chunk, every=job.score_prompt) if job.behind is None else job.behind
        if job.score_prompt:
            job.prompt_scores += self._scored(job, logits)
        job.read += len(chunk)
        self.counts["prompt_tokens"] += len(chunk)
        job.cuts += [job.read] if chunk else []
        if job.read < len(job.prompt):
            return None
        if job.behind is None:
            self._keep(lane, job, logits[-1:])
        lane.batch.join()
        return logits[-1:]

    def _read_several(self, lane: Lane, jobs: Sequence[Job]) -> Tensor:
        """Read whole prompts, whose sequences join the batch; returns the logits `[n, V]` of their last tokens."""
        logits = lane.batch.read_several([job.prompt for job in jobs])
        for i, job in enumerate(jobs):
            job.read = len(job.prompt)
            self.counts["prompt_tokens"] += job.read
            job.cuts = [job.read]
            self._keep(lane, job, logits[i : i + 1], len(lane.jobs) + i)
        return logits

    def _found(self, job: Job) -> Found:
        """The part of a job's prompt that can be reused from the prefix cache."""
        lane = self.lanes.get(job.trips)
        if not self.prefixes.budget or job.score_prompt or job.tell_trips or (lane and not lane.batch.keeps_prefixes):
            return NOTHING
        return self.prefixes.find(job.prompt, job.kind, may_chunk(self.model))

    def _take_over(self, lane: Lane, job: Job) -> None:
        """Start a prompt from the part that can be reused from the prefix cache."""
        found = self._found(job)
        job.cut = found.cut
        if found.kept is None:
            return
        lane.batch.take_over(found.kept.state, found.count)
        job.read = job.cached = job.resumed = found.count
        job.cuts = [cut for cut in found.kept.cuts if cut <= found.count]
        job.behind = found.kept.scores.get(found.count) if found.count == len(job.prompt) else None
        job.kept = found.kept if job.behind is not None or found.count == len(found.kept) else None
        self.counts["cached"] += found.count
        self.counts["hits"] += 1

    def _keep(self, lane: Lane, job: Job, logits: Tensor | None = None, row: int | None = None) -> None:
        """Store a sequence's cache in the prefix cache (by default that of the prompt being read), with the last logits
        `[1, V]`."""
        batch = lane.batch
        if not (self.prefixes.budget and batch.keeps_prefixes and (batch.keeps_steps or row is None)):
            return
        before, same = job.kept, len(job.prompt)  # an entry that was found may go on with another text
        scores = {} if before is None else {count: one for count, one in before.scores.items() if count <= same}
        size = batch.read_already if row is None else batch.lengths[row]
        if size < SHORTEST or (before is not None and len(before) >= size):
            return
        if isinstance(batch, SlabBatch) and size * lane.token_bytes > self.prefixes.budget:
            return  # the copy would not be used
        if logits is not None:
            scores[size] = logits.clone()
        cuts = [*job.cuts, *range(len(job.prompt) + 1, size + 1)]
        tokens = [*job.prompt, *job.made][:size]
        job.kept = self.prefixes.keep(tokens, job.kind, cuts, scores, batch.kept(row), before)

    def _scored(self, job: Job, logits: Tensor) -> list[Scored]:
        """The log-probabilities of the prompt tokens that a chunk's logits `[T, V]` predict. The first token is not
        predicted. The logits are those of prefill: with `ponder2` and `ponder3`, by default, of Jacobi rounds."""
        first = [Scored(job.prompt[0])] if job.read == 0 else []
        after = job.prompt[job.read + 1 : job.read + 1 + len(logits)]
        found = likeliest(logits[: len(after)], after, job.logprobs or 0)
        job.sound = job.sound and not any(math.isnan(logprob) for logprob, _ in found)
        return first + [Scored(token, *one) for token, one in zip(after, found, strict=True)]

    def _step(self, lane: Lane) -> None:
        if not lane.jobs:
            return
        self.counts["steps"] += 1
        jobs, batch, began = list(lane.jobs), lane.batch, time.perf_counter()
        drafting, kept = self._drafting(jobs[0].trips, batch), [(0, 0)] * len(jobs)
        plan = drafting.plan(jobs, batch.count if isinstance(batch, DraftBatch) else 0)
        if plan.kind == PLAIN:
            self._take(lane, jobs, batch.step([job.made[-1] for job in jobs]))
        else:
            assert isinstance(batch, SlabBatch)
            kept = self._step_drafted(lane, batch, plan)
        taken = time.perf_counter() - began
        self.steps[jobs[0].trips] = len(jobs), taken
        drafting.learn(plan, jobs, kept, taken)

    def _drafting(self, trips: int | None, batch: LiveBatch) -> Drafting:
        """The draft planner, with its statistics, for a number of loop iterations."""
        if trips not in self.drafting:
            self.drafting[trips] = Drafting(*[LOOKUP] * self.lookup, *[TRIPS] * isinstance(batch, DraftBatch))
        return self.drafting[trips]

    def _step_drafted(self, lane: Lane, batch: SlabBatch, plan: NextStep) -> list[tuple[int, int]]:
        """One step that checks drafted tokens: every sequence gets its accepted drafts and the token after them.
        Returns how many tokens each drafted, and how many of them were right."""
        jobs = list(lane.jobs)
        if plan.kind == LOOKUP:
            drafts = plan.drafts
            logits = batch.check([[job.made[-1], *mine] for job, mine in zip(jobs, drafts, strict=True)])
        else:
            assert isinstance(batch, DraftBatch)
            drafts, logits = self._drafted(jobs, batch)
        settled = [
            job.choice.settled(mine, rows, job.prompt, job.made)
            for job, mine, rows in zip(jobs, drafts, logits, strict=True)
        ]
        sizes = [len(tokens) for tokens in settled]
        batch.keep(sizes)
        if isinstance(batch, DraftBatch) and plan.kind == TRIPS:
            batch.adapt(sizes, logits.shape[1])
        kept = [(len(mine), sum(map(int.__eq__, mine, tokens))) for mine, tokens in zip(drafts, settled, strict=True)]
        self.counts["drafted"] += sum(drafted for drafted, _ in kept)
        self.counts["accepted"] += sum(accepted for _, accepted in kept)
        sound = finite(logits).all(1).tolist()
        for job, tokens, rows, fine in zip(jobs, settled, logits, sound, strict=True):
            if not fine:
                self._refuse(lane, job)
                continue
            for scored in self._scores(lane, [job] * len(tokens), tokens, rows[: len(tokens)]):
                if not self._give(lane, job, scored):
                    break
        return kept

    def _drafted(self, jobs: Sequence[Job], batch: DraftBatch) -> tuple[list[list[int]], Tensor]:
        """The tokens drafted by the first loop iterations, and the whole model's logits at the drafted positions, `[n,
        T, V]`."""
        drafts: list[list[int]] = [[] for _ in jobs]

        def choose(logits: Tensor) -> list[int]:
            for job, mine, row, best in zip(jobs, drafts, logits, logits.argmax(-1).tolist(), strict=True):
                mine.append(best if job.choice.plain else job.choice.token(row, job.prompt, [*job.made, *mine]))
            return [mine[-1] for mine in drafts]

        count = min(batch.count, max(job.new_tokens - len(job.made) for job in jobs))
        return drafts, batch.draft([job.made[-1] for job in jobs], count, choose)

    def _take(self, lane: Lane, jobs: Sequence[Job], logits: Tensor) -> None:
        """From logits `[n, V]`, choose and deliver the next token of each job that generates tokens."""
        tokens, sound = torch.stack((logits.argmax(-1), finite(logits))).tolist()
        for i, job in enumerate(jobs):
            if job.new_tokens and sound[i] and not job.choice.plain:
                tokens[i] = job.choice.token(logits[i], job.prompt, job.made)
        for job, scored, fine in zip(jobs, self._scores(lane, jobs, tokens, logits), sound, strict=True):
            if not job.sound or (job.new_tokens and not fine):
                self._refuse(lane, job)
            elif not job.new_tokens:
                self._end(lane, job, "length")
            else:
                self._give(lane, job, scored)

    def _scores(self, lane: Lane, jobs: Sequence[Job], tokens: Sequence[int], logits: Tensor) -> list[Scored]:
        """The chosen token of each job with the scores that the job requested, from logits `[n, V]`."""
        made = self._trips_made(lane, jobs)
        scored = [Scored(token, trips=trips) for token, trips in zip(tokens, made, strict=True)]
        # One topk per requested count, because ties are broken differently for another count.
        for count in {job.logprobs for job in jobs if job.logprobs is not None}:
            rows = [i for i, job in enumerate(jobs) if job.logprobs == count]
            given = logits if len(rows) == len(jobs) else logits[rows]  # avoid a copy of all logits
            found = likeliest(given, [tokens[i] for i in rows], count)
            for i, one in zip(rows, found, strict=True):
                scored[i] = Scored(tokens[i], *one, trips=made[i])
        return scored

    def _trips_made(self, lane: Lane, jobs: Sequence[Job]) -> list[int | None]:
        """The number of loop iterations that produced each job's next token; None for a model without iterations."""
        if most_trips(self.model) == 1:
            return [None] * len(jobs)
        counted = lane.batch.trips_made
        if counted is None:
            return [trips_of(self.model, job.trips) for job in jobs]
        if jobs[0].behind is not None and not jobs[0].made:
            return [None] * len(jobs)  # its logits come from the prefix cache
        return list(counted)

    def _give(self, lane: Lane, job: Job, scored: Scored) -> bool:
        """Deliver a job's next token; returns whether the text continues."""
        token = scored.token
        job.made.append(token)
        self.counts["tokens"] += 1
        now = time.perf_counter()
        if len(job.made) == 1:
            self.times["first"].observe(now - job.began)
        else:
            self.times["between"].observe(now - job.latest)
        job.latest = now
        self._out.append((job, scored))
        constraint = job.choice.constraint
        complete = constraint is not None and constraint.complete(job.made)
        ended = "stop" if complete or token in job.stops else "length" if len(job.made) == job.new_tokens else None
        if constraint is not None and constraint.fault is not None:
            self._refuse(lane, job, RequestError(constraint.fault, "grammar_too_complex"))
        elif ended is not None:
            self._end(lane, job, ended)
        else:
            return True
        return False

    def _end(self, lane: Lane, job: Job, why: str) -> None:
        self._keep(lane, job, row=lane.jobs.index(job))
        self._out.append((job, why))
        self.counts["finished"] += 1
        self._leave(lane, job)

    def _refuse(self, lane: Lane, job: Job, why: RequestError | None = None) -> None:
        """End a job with an error because its next token cannot be chosen, by default because the logits are not
        finite."""
        self._out.append((job, why or RequestError(NO_NUMBERS, "failed")))
        self.counts["failed"] += 1
        self._leave(lane, job)

    def _leave(self, lane: Lane, *jobs: Job) -> None:
        for job in jobs:
            row = lane.jobs.index(job)
            moved = lane.batch.leave(row)
            lane.jobs[row] = lane.jobs[moved]
            lane.jobs.pop(moved)

    def _guarded(self, lane: Lane, work: Callable[..., T], *arguments: object) -> T | None:
        """Run one step of a lane's batch. If it raises an exception, only the requests of this lane fail."""
        try:
            return work(*arguments)
        except Exception as error:
            logger.exception("generation failed")
            failed = list(lane.jobs)
            if self.joining is not None and self.joining[0] is lane:
                failed += self.joining[1]
                self.joining = None
            failed += [job for one, job in self.paused if one is lane]
            self.paused = [(one, job) for one, job in self.paused if one is not lane]
            self._fail(failed, error)
            self.lanes = {trips: other for trips, other in self.lanes.items() if other is not lane}
            return None

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        self.counts["failed"] += len(jobs)
        self._out += [(job, RequestError(f"generation failed: {type(error).__name__}", "failed")) for job in jobs]

    def _tokens(self, job: Job) -> int:
        """The maximum length of a job's sequence, rounded up to the granularity of the cache buffers."""
        longest = job.longest if self.policy is None else min(job.longest, self.policy.window or job.longest)
        return -(-(longest + self._spare) // GRAIN) * GRAIN

    @property
    def _spare(self) -> int:
        """Positions reserved after a sequence's last token, for drafts that are rejected."""
        return 0 if self.draft_trips is None else DRAFTS


def deliver(out: list[tuple[Job, Event]]) -> None:
    """Deliver each event to the job that it belongs to."""
    for job, event in out:
        job.deliver(event)


def _fulfil(function: Callable[[], object], future: Future) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # raised where the result is read
        future.set_exception(error)


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
