"""A base model and one made from it, compared on held-out text and on questions.

Questions are asked in two ways, as lm-eval scores them: by letter, with the choices listed in the prompt, and by the
text of the choice, with no choices listed. A third run asks by letter with the choices in another order.

This is `fathom evaluate tuned`. `tuned_page.py` makes the page, the table and `card.md`, `tuned_origin.py` finds the
runs between both models and the corpus, `tasks.py` checks the fields of a question, and `report/statistics.py` has the
tests and intervals. Outside the package, `benchmarks/expert.py` makes questions from held-out documents,
`recipes/expert/` has the recipes of `make expert`, and `benchmarks/recompute.py` recomputes a report.
"""

from __future__ import annotations

import json
import math
import random
import string
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from fathom.data.shards import INDEX, read_index
from fathom.errors import DataError, SettingsError, to_install
from fathom.evaluation.paired import terms
from fathom.evaluation.perplexity import DomainScore
from fathom.evaluation.results import Answered, Asking, ExampleRow, NamedModel, PairReport, RatioGap, TextPair
from fathom.evaluation.scoring import Checkpoint, EvaluationSettings, run
from fathom.evaluation.tasks import json_rows, problem_of
from fathom.evaluation.tuned_origin import corpus_beside, runs_between
from fathom.evaluation.tuned_page import WAYS, card, page
from fathom.report import html
from fathom.report.files import read_json, write_atomically
from fathom.report.provenance import provenance
from fathom.report.statistics import LEAST_DOCUMENTS, bootstrap_ratio, holm

LETTERS = string.ascii_uppercase
CARD = "card.md"
EXAMPLES = 8
"""Questions that a page shows."""


@dataclass(frozen=True)
class Quizzed:
    """A multiple-choice question of a benchmark."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    dirty: bool | None = None
    """Whether it is contaminated by training text; None if that was not checked."""


def read_benchmarks(directory: Path) -> dict[str, list[Quizzed | None]]:
    """The questions of every file `NAME.jsonl` of a directory, with the fields `question`, `choices`, `answer` and, if
    known, `dirty` (contaminated). A row that is not a question with a correct choice is None."""
    if not directory.is_dir():
        raise SettingsError(f"benchmark={directory}: {'a file' if directory.exists() else 'no such directory'}")
    found = {path.stem: list(_asked(path)) for path in sorted(directory.glob("*.jsonl"))}
    if not any(one is not None for rows in found.values() for one in rows):
        raise SettingsError(f"benchmark={directory}: no *.jsonl file with question, choices and answer")
    return found


def left_out(directory: Path, name: str) -> dict[str, int]:
    """The number of items missing from a benchmark's file, by reason, as `fathom corpus` recorded it."""
    path = directory / f"{name}.check.json"
    return read_json(path).get("left_out", {}) if path.is_file() else {}


def chosen(
    rows: Sequence[Quizzed | None], limit: int | None = None, absent: Mapping[str, int] | None = None
) -> tuple[list[Quizzed], Asking]:
    """The questions of a benchmark to ask: without duplicates, at most `limit` of them drawn at random, in the
    benchmark's order.

    Args:
        rows: The rows of its file.
        limit: How many to ask at most.
        absent: How many items are not in its file, by reason.
    """
    once: dict[tuple[str, tuple[str, ...]], Quizzed] = {}
    for one in rows:
        if one is not None:
            same = once.setdefault((one.question, tuple(sorted(one.choices))), one)
            if one.dirty and not same.dirty:  # a duplicate is contaminated if either copy is
                once[one.question, tuple(sorted(one.choices))] = replace(same, dirty=True)
    items = list(once.values())
    if limit is not None and limit < len(items):
        items = [items[number] for number in sorted(random.Random("fathom limit").sample(range(len(items)), limit))]
    skipped = {
        **(absent or {}),
        "no choices, or none that is right": sum(one is None for one in rows),
        "repeated": sum(one is not None for one in rows) - len(once),
        "not drawn": len(once) - len(items),
    }
    kept = {why: count for why, count in skipped.items() if count}
    checked = bool(items) and all(one.dirty is not None for one in items)
    return items, Asking(len(items), len(rows) + sum((absent or {}).values()), kept, checked)


def _asked(path: Path) -> Iterator[Quizzed | None]:
    for number, row in enumerate(json_rows(path)):
        if not row.get("choices") or row.get("answer") is None:
            yield None
            continue
        dirty = row.get("dirty")
        problem = problem_of("choice", row)
        if problem is None and len(row["choices"]) > len(LETTERS):
            problem = f"has more than {len(LETTERS)} `choices`"
        if problem is None and not isinstance(dirty, bool | None):  # 1 would be neither clean nor dirty
            problem = "`dirty` is neither true nor false"
        if problem is not None:
            raise DataError(f"{path}: document {number + 1}: {problem}")
        yield Quizzed(str(row.get("id", number)), row["question"], tuple(row["choices"]), row["answer"], dirty)


def task_rows(items: Sequence[Quizzed], way: str) -> list[dict[str, object]]:
    """The questions as documents for lm-eval, to be answered by `letter`, by `shuffled` letter or by option `text`."""
    rows = []
    for item in items:
        if way == "text":
            rows.append({"question": item.question, "choices": list(item.choices), "answer": item.answer})
            continue
        order = list(range(len(item.choices)))
        if way == "shuffled":
            random.Random(f"fathom {item.id} {item.question}").shuffle(order)
        listed = "\n".join(f"{letter}. {item.choices[one]}" for letter, one in zip(LETTERS, order, strict=False))
        question = f"{item.question}\n{listed}\nAnswer:"
        rows.append({"question": question, "choices": list(LETTERS[: len(order)]), "answer": order.index(item.answer)})
    return rows


def evaluate_pair(entries: Sequence[str | Path], directory: Path, settings: EvaluationSettings) -> PairReport:
    """Score a base and a model made from it on a benchmark and on texts; returns what `report.json` holds.

    Args:
        entries: Base and new, as `evaluate` takes them.
        directory: The benchmark. If it belongs to a corpus, the held-out text of that is scored too.
        settings: Texts to score instead, `out`, and how models are opened; no tasks.
    """
    if len(entries) != 2 or settings.tasks or settings.max_trips:
        raise SettingsError(
            "`benchmark` compares two checkpoints, BASE and NEW, and takes no `tasks` and no `max_trips`"
        )
    picked = {
        name: chosen(rows, settings.limit, left_out(directory, name))
        for name, rows in read_benchmarks(directory).items()
    }
    benchmarks = {name: items for name, (items, _) in picked.items() if items}
    if find_spec("lm_eval") is None:
        raise SettingsError(f"`benchmark` needs lm-eval: {to_install('evaluate')}")
    texts = settings.perplexity or _beside(directory)
    with _task_files(benchmarks, settings.out) as files:
        words = ",".join(f"choice:{path}" for path in files.values())
        found, _ = run(entries, replace(settings, tasks=words, perplexity=texts, limit=None))
        report = summarize(found, benchmarks, {key: f"choice:{path}" for key, path in files.items()})
    report.asked = {name: asking for name, (_, asking) in picked.items()}
    report.runs, report.corpus = runs_between(*(one.directory for one in found)), corpus_beside(directory)
    if settings.out is not None:
        html.write(settings.out, report, page(report))
        write_atomically(settings.out / CARD, card(report))
    return report


def _beside(directory: Path) -> tuple[str, ...]:
    """The held-out text of the corpus in the parent of the benchmark's directory; nothing if there is none."""
    shards = directory.resolve().parent / "shards"
    return (str(shards),) if (shards / INDEX).is_file() and "val" in read_index(shards).splits else ()


@contextmanager
def _task_files(benchmarks: Mapping[str, Sequence[Quizzed]], out: Path | None) -> Iterator[dict[tuple[str, str], Path]]:
    """Write a task file for each benchmark and each way of asking its questions. With `out` its path is the same in
    every call."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if out is None else out / "questions"
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for name, items in benchmarks.items():
            for way in ("text", "letter", "shuffled"):
                path = folder / f"{name}.{way}.jsonl"
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in task_rows(items, way))
                if not path.is_file() or path.read_text(encoding="utf-8") != text:
                    write_atomically(path, text)
                files[name, way] = path
        yield files


def summarize(
    pair: Sequence[Checkpoint], benchmarks: Mapping[str, Sequence[Quizzed]], tasks: Mapping[tuple[str, str], str]
) -> PairReport:
    """The report for programs.

    Args:
        pair: Base and new, scored.
        benchmarks: What was asked.
        tasks: The task of each benchmark and way, as the checkpoints know it.
    """
    base, new = pair
    for one in pair:
        for task, why in one.failed.items():
            raise SettingsError(f"{one.name}: {task}: {why}")
    answered: list[Answered] = []
    for name, items in benchmarks.items():
        for way in WAYS:
            task, metric = tasks[name, "text" if way == "length" else way], "acc_norm" if way == "length" else "acc"
            answered += count_answers(name, way, items, *(_right(one, task, metric) for one in pair))
    report = PairReport(
        **vars(provenance()),
        base=NamedModel(base.name, str(base.directory)),
        new=NamedModel(new.name, str(new.directory)),
        texts={name: compare_texts(score, new.domains[name]) for name, score in base.domains.items()},
        questions=answered,
        asked={name: chosen(items)[1] for name, items in benchmarks.items()},
        guessing={name: guessing(items) for name, items in benchmarks.items()},
        examples=[row for name, items in benchmarks.items() for row in _examples(items, pair, tasks[name, "text"])],
        runs=[],
        corpus=None,
    )
    report.verdict = verdict(report)
    return report


def _right(one: Checkpoint, task: str, metric: str = "acc") -> list[bool]:
    """For every question, whether a checkpoint answers it correctly."""
    return [value == 1 for value in one.tasks[task].items[f"{task}/{metric}"].values]


def _examples(items: Sequence[Quizzed], pair: Sequence[Checkpoint], task: str) -> list[ExampleRow]:
    """The first questions that are not known to be contaminated, with whether each model answers them correctly by
    option text."""
    base, new = (_right(one, task) for one in pair)
    clean = [number for number, item in enumerate(items) if not item.dirty]
    return [
        ExampleRow(
            question=items[number].question,
            answer=items[number].choices[items[number].answer],
            wrong=[text for place, text in enumerate(items[number].choices) if place != items[number].answer],
            right=(base[number], new[number]),
        )
        for number in clean[:EXAMPLES]
    ]


def count_answers(
    benchmark: str, way: str, items: Sequence[Quizzed], base: Sequence[bool], new: Sequence[bool]
) -> list[Answered]:
    """Count right answers over all questions and, if some are contaminated, separately over uncontaminated and
    contaminated questions."""
    rows = list(zip(items, base, new, strict=True))
    split = {word: [row for row in rows if row[0].dirty is flag] for word, flag in _FLAGS.items()}
    parts = {"all": rows, **(split if split["dirty"] else {})}  # without contaminated questions, all are clean
    return [
        Answered(
            benchmark,
            way,
            part,
            len(mine),
            (sum(b for _, b, _ in mine), sum(n for _, _, n in mine)),
            sum(b and not n for _, b, n in mine),
            sum(n and not b for _, b, n in mine),
        )
        for part, mine in parts.items()
        if mine
    ]


_FLAGS = {"clean": False, "dirty": True}


def guessing(items: Sequence[Quizzed]) -> dict[str, float]:
    """Accuracy of a random guess, and of always answering with the most frequent letter."""
    letters = Counter(item.answer for item in items)
    return {
        "random": math.fsum(1 / len(item.choices) for item in items) / len(items),
        "majority": max(letters.values()) / len(items),
    }


def compare_texts(base: DomainScore, new: DomainScore) -> TextPair:
    """The bits per byte of both models on the same documents, and their difference, with a paired-bootstrap interval if
    there are enough documents, or clusters that documents name."""
    bits, size = terms(*(one.items()["bits_per_byte"] for one in (new, base)))
    gap = bootstrap_ratio(bits, size)
    low, high = (gap.low, gap.high) if len(bits) >= LEAST_DOCUMENTS else (None, None)
    gaps = RatioGap(gap.value, low, high)
    clusters = None if base.clusters is None else len(bits)
    return TextPair(len(base.nats), sum(base.bytes), base.bits_per_byte, new.bits_per_byte, gaps, clusters)


def verdict(report: PairReport) -> str:
    """The verdict: on questions by option text (uncontaminated ones if known), then on texts, as far as intervals
    allow."""
    sentence = "; ".join([*_of_questions(report), *_of_texts(report)]) + "."
    return sentence[0].upper() + sentence[1:]


def _of_questions(report: PairReport) -> Iterator[str]:
    """Sentences on each benchmark, scored by option text: a model is better only if p < 0.05 after Holm's adjustment.

    Uncontaminated questions count, or all if contamination was not checked. If all are contaminated, there is no
    claim. Models below guessing are named.
    """
    judged: dict[str, Answered] = {}
    for name in report.guessing:
        rows = {row.part: row for row in report.questions if (row.benchmark, row.way) == (name, "text")}
        if "dirty" in rows and "clean" not in rows:
            given = f"training text contains {rows['dirty'].asked:,} of {rows['all'].asked:,}"
            yield f"no uncontaminated question of {name} is left ({given}), so there is no verdict"
            continue
        judged[name] = rows["clean"] if "clean" in rows else rows["all"]
    adjusted = holm([row.p for row in judged.values()])
    for (name, row), p in zip(judged.items(), adjusted, strict=True):
        base, new = (f"{100 * right / row.asked:.1f} %" for right in row.right)
        known = " uncontaminated" if row.part == "clean" or report.asked[name].checked else ""
        ahead = "better than" if row.won > row.lost else "worse than"
        how = ahead if p < 0.05 else "not significantly different from"
        among = f", {p:.2g} after Holm's correction over {len(judged)} benchmarks" if len(judged) > 1 else ""
        words = f"on {row.asked:,}{known} questions of {name} ({new} right) {report.new.name} is {how} "
        yield f"{words}{report.base.name} ({base}; McNemar p = {row.p:.2g}{among})"
        guess = report.guessing[name]["random"]
        models = (report.base.name, report.new.name)
        below = [model for model, (_, high) in zip(models, row.intervals, strict=True) if high < guess]
        if below:
            yield (
                f"{' and '.join(below)} answered fewer questions of {name} correctly than guessing would "
                f"({100 * guess:.1f} %), which suggests a fault of the benchmark or of the prompt"
            )


def _of_texts(report: PairReport) -> Iterator[str]:
    for name, text in report.texts.items():
        gap = text.difference
        value, low, high = gap.value, gap.low, gap.high
        if not math.isfinite(value):
            yield f"{name} is not judged: the loss of a model is not finite there"
            continue
        if low is None or high is None:
            yield f"{name} has too few documents to judge bits per byte ({value:+.4f}, {text.interval})"
            continue
        sure = "takes fewer" if value < 0 else "takes more"
        how = "shows no clear difference in" if low <= 0 <= high else sure
        yield f"{name} {how} bits per byte ({value:+.4f} {text.interval})"
