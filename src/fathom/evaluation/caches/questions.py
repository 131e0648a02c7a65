"""Summaries of the answers: scores by task and place of the question, the tasks that the full cache solves, and
differences from the full cache.

`prompts.py` places a question before or after the last compression (`inside`, `outside`), and `asking.py` spreads
questions evenly over both places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from fathom.evaluation.caches.results import Answer, CheckpointCaches
from fathom.report.numbers import DASH
from fathom.report.statistics import paired_difference, wilson
from fathom.report.tables import PlainTable

SOLVED = 0.5
"""Tasks on which the full cache scores lower are not used in the verdict."""
Filter = Callable[[Answer], bool]


@dataclass(frozen=True)
class Scores:
    """The answers of one cache and of the full cache to the same questions."""

    mine: Sequence[Answer]
    full: Sequence[Answer]

    def where(self, wanted: Filter) -> Scores:
        """Some of the questions."""
        kept = [i for i, one in enumerate(self.full) if wanted(one)]
        return Scores([self.mine[i] for i in kept], [self.full[i] for i in kept])

    @property
    def score(self) -> str:
        """The mean score with a 95 % interval: Wilson's for answers that are right or wrong, else Student's, which a
        single answer and equal ones do not have."""
        scores = [one.score for one in self.mine]
        if not scores:
            return DASH
        if set(scores) <= {0.0, 1.0}:
            low, high = wilson(int(sum(scores)), len(scores))
        else:
            gap = paired_difference(scores, [0.0] * len(scores))
            if gap.low is None or gap.high is None:
                return f"{gap.mean:.2f} ({DASH})"
            low, high = max(0.0, gap.low), min(1.0, gap.high)
        return f"{np.mean(scores):.2f} ({low:.2f}–{high:.2f})"

    @property
    def nats(self) -> str:
        """The mean loss of the answers, in nats per token, as text."""
        found = [one.nats for one in self.mine if one.nats is not None]
        return f"{np.mean(found):.2f}" if found else DASH

    def gap(self, of: Callable[[Answer], float | None]) -> str:
        """The mean difference from the full cache, paired over questions, with its interval."""
        pairs = [(of(a), of(b)) for a, b in zip(self.mine, self.full, strict=True)]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        return str(paired_difference(*zip(*both, strict=True))) if both else DASH


def solved(values: CheckpointCaches) -> tuple[list[str], list[str]]:
    """The tasks that the full cache solves, and those that it does not."""
    by_task: dict[str, list[float]] = {}
    for one in values.questions.reference:
        by_task.setdefault(one.task, []).append(one.score)
    good = [task for task, scores in by_task.items() if np.mean(scores) >= SOLVED]
    return good, [task for task in by_task if task not in good]


def scores_of(values: CheckpointCaches, method: str) -> Scores:
    """Pair one cache's answers with the full cache's answers."""
    return Scores(values.caches[method].answers, values.questions.reference)


def sentence(values: CheckpointCaches, method: str) -> str:
    """The verdict on a cache from its answers to the questions; empty if no questions were asked."""
    if not values.questions.reference:
        return ""
    good, bad = solved(values)
    words = f" The full cache solves {', '.join(good) or 'no task'}"
    if bad:
        words += f"; tasks that it solves below 50 % are not used: {', '.join(bad)}"
    if not good:
        return words + "."
    mine = scores_of(values, method).where(lambda one: one.task in good)
    parts = [
        f"{mine.where(lambda one, place=place: one.place == place).score} with the question {place}"  # type: ignore[misc]
        for place in ("outside", "inside")
    ]
    full = Scores(mine.full, mine.full).score
    return f"{words}. There {method} scores {', '.join(parts)} the last compression, and full {full}."


def question_tables(values: CheckpointCaches, methods: Sequence[str]) -> Iterator[PlainTable]:
    """The tables of scores and losses by task and place of the question and by compressions, and of differences from
    the full cache."""
    reference = values.questions.reference
    if not reference:
        return
    good, bad = solved(values)
    shown = [*methods, *(["full"] if "full" not in methods else [])]

    def of(method: str) -> Scores:
        return Scores(reference, reference) if method == "full" else scores_of(values, method)

    places = list(dict.fromkeys(one.place for one in reference))
    cells = [(task, place) for task in (*good, *bad) for place in places]

    def in_cell(task: str, place: str) -> Filter:
        return lambda one: one.task == task and one.place == place

    rows = [[method, *(of(method).where(in_cell(*cell)).score for cell in cells)] for method in shown]
    note = f"; not used, below 50 % with the full cache: {', '.join(bad)}" if bad else ""
    columns = ["cache", *(f"{task}, {place}" for task, place in cells)]
    yield f"answers, 95 % intervals: score by task and by place of the question{note}", columns, rows
    rows, counts = [], sorted({one.compressions for one in reference})
    for method in shown:
        mine = of(method).where(lambda one: one.task in good)
        row = [method]
        for count in counts:
            here = mine.where(lambda one, count=count: one.compressions == count)  # type: ignore[misc]
            row += [f"{here.score}, {here.nats}"]
        older = mine.where(lambda one: one.beyond)
        rows.append([*row, f"{older.score}, {older.nats}", mine.gap(attrgetter("score")), mine.gap(attrgetter("nats"))])
    caption = "answers to the tasks that the full cache solves: score, nats per answer token, by compressions"
    columns = ["cache", *(f"after {n}" for n in counts), "beyond what drop holds", "score − full's", "nats − full's"]
    yield caption, columns, rows
