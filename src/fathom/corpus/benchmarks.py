"""Benchmarks: reads items in several file formats, and checks a benchmark for faults of its own.

`contamination.py` lists the faults and marks `dirty` items; `publish.py` puts both into `benchmark/`. `leak_rules.py`
leaves out labels that several questions share, and says which questions are too short to find. `evaluation/tuned.py`
asks models the questions. Outside the package, `benchmarks/expert.py` makes questions from documents.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fathom.corpus.conversations import messages_of
from fathom.corpus.normalization import normalize
from fathom.corpus.words import lower, words_of
from fathom.data.sources import ALL_FIELDS, JSON, Reading, lines_of, reader_of, suffix_of
from fathom.errors import DataError

QUESTIONS = (
    "question",
    "question_stem",
    "stem",
    "query",
    "goal",
    "premise",
    "sentence",
    "ctx",
    "prompt",
    "text",
    "sentence_good",
    "problem",
    "input",
)
ANSWERS = (
    *("answer", "answerKey", "gold", "label", "correct_answer", "target", "answers", "completion", "response"),
    *("solution", "output", "canonical_solution", "best_answer"),
)
FINAL = "#### "
"""What stands before the last line of a worked answer, which alone is an answer too."""
CONTEXTS = ("context", "passage", "support")
LETTERS = string.ascii_uppercase
OPTION = re.compile(r"(?:^|\s)\(?([A-J])[.):]\s+")
BLANK = re.compile(r"(?<!\w)_+(?!\w)")
TRUTHS = {"true": ("True", "False"), "false": ("True", "False"), "yes": ("Yes", "No"), "no": ("Yes", "No")}
"""The choices of a question with such an answer and no choices of its own."""
MARKS = {
    **dict.fromkeys(("t", "right", "correct", "√", "✓", "✔"), True),
    **dict.fromkeys(("f", "wrong", "incorrect", "×", "✗", "✘"), False),
}
"""Other answers of true/false questions; only where all open answers of a benchmark are such."""
SHOWN = 20
"""Most faults of one kind that a report lists."""


@dataclass(frozen=True)
class Item:
    """One question of a benchmark."""

    id: str
    stem: str
    choices: tuple[str, ...] = ()
    answer: int | None = None
    """Index of the right choice; None if there are no choices, or none of them is right."""
    gold: str = ""
    """The right answer's text."""
    context: str = ""
    accepted: tuple[str, ...] = ()
    """Other texts that count as the right answer."""

    def cannot_be_asked(self) -> str:
        """Why `fathom evaluate` cannot ask this multiple-choice question; empty if it can, or if the item has no right
        choice."""
        if not self.choices or self.answer is None:
            return ""
        if not all(self.choices):
            return "with an empty option"
        return (
            "" if 2 <= len(self.choices) <= len(LETTERS) else f"with fewer than 2 or more than {len(LETTERS)} options"
        )

    def golds(self) -> list[str]:
        """Every text that counts as the right answer."""
        return [self.gold, *self.accepted] if self.gold else []


def filled(item: Item, stem: str) -> str:
    """The question with its blank filled in by the answer; empty if it has no blank or no answer."""
    return BLANK.sub(lambda _: item.gold, stem) if item.gold and BLANK.search(stem) else ""


def plain(text: str) -> str:
    """The words of a text in lower case, separated by single spaces."""
    return plain_all([text])[0]


def plain_all(texts: Sequence[str]) -> list[str]:
    """`plain` of each."""
    words = words_of(texts)
    starts, ends, bounds = words.starts.tolist(), words.ends.tolist(), words.bounds.tolist()
    return [
        " ".join(lower(text[a:b]) for a, b in zip(starts[low:high], ends[low:high], strict=True))
        for text, low, high in zip(texts, bounds, bounds[1:], strict=False)
    ]


def read_items(path: Path, name: str, question: str | None = None) -> list[Item]:
    """The items of a benchmark's file: JSON lines, a JSON list, or an object of columns; `#KEY` selects a part."""
    items = []
    for number, row in enumerate(_rows(path, name)):
        if not isinstance(row, Mapping):
            raise DataError(
                f"decontaminate.benchmarks.{name}: item {number + 1} is {type(row).__name__}, not a JSON object"
            )
        try:
            items.append(item_of(row, number, question))
            json.dumps(asdict(items[-1]), ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
            half = f"{error.object[error.start]!a} is half a character, which UTF-8 lacks"
            raise DataError(f"decontaminate.benchmarks.{name}: {path}: item {number + 1}: {half}") from None
        except (KeyError, ValueError) as error:
            said = error.args[0] if error.args else error
            raise DataError(f"decontaminate.benchmarks.{name}: item {number + 1}: {said}") from None
    if not items:
        raise DataError(f"decontaminate.benchmarks.{name}: {path} holds no item")
    return _judged(items)


def _judged(items: list[Item]) -> list[Item]:
    """Convert items without choices to true/false questions, if every answer of these items is a mark such as T or
    F."""
    marks = [None if one.choices else MARKS.get(one.gold.rstrip(".").lower()) for one in items]
    if any(mark is None and not one.choices for mark, one in zip(marks, items, strict=True)):
        return items
    return [
        one if mark is None else _of_truth(one, _truth_choices(one.stem), mark)
        for mark, one in zip(marks, items, strict=True)
    ]


def _truth_choices(stem: str) -> tuple[str, str]:
    return TRUTHS["yes" if stem.rstrip().endswith("?") else "true"]


def _of_truth(item: Item, choices: tuple[str, str], holds: bool) -> Item:
    """A true/false item without choices, as a question with two choices, the first of which says that the statement is
    true."""
    other = TRUTHS["true" if choices[0] == "Yes" else "yes"][not holds]
    accepted = dict.fromkeys((*item.golds(), *item.accepted, other))
    gold = choices[not holds]
    return replace(
        item, choices=choices, answer=int(not holds), gold=gold, accepted=tuple(one for one in accepted if one != gold)
    )


def _rows(path: Path, name: str) -> Iterator[Any]:
    place, _, key = str(path).partition("#")
    path = Path(place)
    try:
        if suffix_of(path) == JSON and path.suffix == JSON:
            try:
                values = json.loads(path.read_bytes())
            except ValueError:
                values = None  # JSON lines under another name
            if values is not None:
                yield from _of_json(values, key)
                return
        reader = reader_of(path)
        if reader is not None and reader.gives == "rows":
            yield from reader.records(path, Reading(ALL_FIELDS))
            return
        for line in lines_of(path):
            if line and line.strip():
                yield json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        said = " ".join(str(error).split())
        where = "" if said.startswith(str(path)) else f"{path}: "
        raise DataError(f"decontaminate.benchmarks.{name}: {where}{said}") from None


def _of_json(values: object, key: str) -> Iterator[Any]:
    if key:
        if not isinstance(values, Mapping) or key not in values:
            raise ValueError(f"no key {key!r}")
        values = values[key]
    if isinstance(values, Mapping):
        columns = {name: column for name, column in values.items() if isinstance(column, list)}
        if not columns or len({len(column) for column in columns.values()}) != 1:
            raise ValueError("expected a list of items, or columns of equal length; FILE#KEY selects a part of a file")
        yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return
    if not isinstance(values, list):
        raise ValueError("expected a list of items, or columns of equal length; FILE#KEY selects a part of a file")
    yield from values


def item_of(row: Mapping[str, object], number: int, question: str | None = None) -> Item:
    """A benchmark item, read from a row in any of the usual benchmark formats."""
    row = _of_chat(row)
    inner = row.get("question")
    if isinstance(inner, Mapping):  # ARC: {"question": {"stem": ..., "choices": [...]}, "answerKey": ...}
        row = {**row, **inner, "question": inner.get("stem")}
    key = question or next((key for key in QUESTIONS if isinstance(row.get(key), str)), None)
    if key is None or not isinstance(row.get(key), str):
        raise ValueError(f"no question: name the field of the question; the fields are {', '.join(row)}")
    stem = str(row[key])
    choices, labels = _choices(row)
    if not choices:
        stem, choices, labels = _flat(stem)
    given, *accepted = _given(next((row[name] for name in ANSWERS if row.get(name) is not None), None), choices)
    answer, gold = _gold(given, choices, labels, row)
    context = next((str(row[name]) for name in CONTEXTS if isinstance(row.get(name), str)), "")
    item = Item(
        str(row.get("id", number)), normalize(stem), tuple(map(normalize, choices)), answer, normalize(gold),
        normalize(context), tuple(normalize(str(one)) for one in accepted),
    )  # fmt: skip
    if choices or accepted:
        return item
    if isinstance(given, bool):
        return _of_truth(replace(item, gold=""), _truth_choices(stem), given)
    word = item.gold.strip().rstrip(".").lower()
    return _of_truth(item, TRUTHS[word], word in ("true", "yes")) if word in TRUTHS else item


def _of_chat(row: Mapping[str, object]) -> Mapping[str, object]:
    """Turn a row of chat messages, in any chat format, into its last question and answer; rows without messages stay
    unchanged."""
    if not any(isinstance(row.get(key), list) for key in ("messages", "conversations")) and "instruction" not in row:
        return row
    try:
        messages = messages_of(row)
    except DataError as error:
        raise ValueError(str(error)) from None
    answers = [number for number, one in enumerate(messages) if one["role"] == "assistant"] or [len(messages)]
    questions = [one["content"] for one in messages[: answers[-1]] if one["role"] == "user"]
    if not questions:
        raise ValueError("no message of a user before the last answer")
    answer = messages[answers[-1]]["content"] if answers[-1] < len(messages) else None
    return {key: row[key] for key in ("id",) if key in row} | {"question": questions[-1], "answer": answer}


def _given(given: object, choices: Sequence[str]) -> list[object]:
    """The right answer and other accepted answers, read from an answer field that holds a text, a list or a JSON
    object."""
    if isinstance(given, Mapping):  # TriviaQA: {"value": ..., "aliases": [...]}; SQuAD: {"text": [...]}
        texts = given.get("text", given.get("aliases"))
        given = [*([given["value"]] if "value" in given else []), *(texts if isinstance(texts, list) else [])]
    if isinstance(given, list) and not choices:
        return list(dict.fromkeys(map(str, given))) or [None]
    if isinstance(given, str) and FINAL in given and not choices:  # GSM8K
        return [given, given.rpartition(FINAL)[2].strip()]
    return [given]


def _choices(row: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """The choices of an item and their labels."""
    found = row.get("choices", row.get("options", row.get("endings")))
    if isinstance(found, Mapping):  # {"text": [...], "label": [...]}, or {"A": ..., "B": ...}
        if isinstance(found.get("text"), list):
            return list(map(str, found["text"])), list(map(str, found.get("label", LETTERS)))
        return list(map(str, found.values())), list(map(str, found))
    if isinstance(found, list):
        if all(isinstance(one, Mapping) for one in found):
            return [str(one.get("text", "")) for one in found], [str(one.get("label", "")) for one in found]
        return ["" if one is None else str(one) for one in found], list(LETTERS[: len(found)])
    if "correct_answer" in row:
        wrong = sorted(key for key in row if re.fullmatch(r"distractor\d", key))
        return [str(row["correct_answer"]), *(str(row[key]) for key in wrong)], []
    for pattern in (r"sol\d", r"choice\d", r"option\d", r"[A-J]"):
        if keys := sorted(key for key in row if re.fullmatch(pattern, key)):
            return [str(row[key]) for key in keys], keys
    return [], []


def _flat(question: str) -> tuple[str, list[str], list[str]]:
    """Question, choices and labels of a question whose text lists its choices, as in `… Choose from: A. … B. …`."""
    begins = list(OPTION.finditer(question))
    letters = [match[1] for match in begins]
    first = _first_option(letters)
    if first is None:
        return question, [], []
    begins, letters = begins[first:], letters[first:]
    ends = [*(match.start() for match in begins[1:]), len(question)]
    stem = re.sub(r"\s*(?:choose from|options)\s*:?\s*$", "", question[: begins[0].start()], flags=re.IGNORECASE)
    options = [question[match.end() : end].strip() for match, end in zip(begins, ends, strict=True)]
    in_order = sorted(zip(letters, options, strict=True))
    return stem, [option for _, option in in_order], [letter for letter, _ in in_order]


def _first_option(letters: Sequence[str]) -> int | None:
    """The index of the first option: from it on, the labels are A, B, … in order, or each of these letters occurs
    once."""
    starts = range(len(letters) - 1)
    wanted = [list(LETTERS[: len(letters) - start]) for start in starts]
    in_order = (start for start in starts if list(letters[start:]) == wanted[start])
    in_any = (start for start in starts if sorted(letters[start:]) == wanted[start])
    return next(in_order, next(in_any, None))


def _gold(
    given: object, choices: Sequence[str], labels: Sequence[str], row: Mapping[str, object]
) -> tuple[int | None, str]:
    """Index and text of the right choice; the text alone if there are no choices."""
    if given is None:
        return None, ""
    if not choices:
        return None, str(given)
    text = str(given).strip()
    if text in choices and "correct_answer" in row:
        return choices.index(text), text
    if text in labels:
        place = labels.index(text)
    elif isinstance(given, int) and not isinstance(given, bool):
        first = 1 if any(re.fullmatch(r"\D+1", label) for label in labels[:1]) and "label" not in row else 0
        place = given - first
    elif text in choices:
        place = choices.index(text)
    elif text.isdigit():
        place = int(text) - (1 if any(re.fullmatch(r"option1", label) for label in labels[:1]) else 0)
    else:
        place = LETTERS.find(text.rstrip(".").upper()) if len(text.rstrip(".")) == 1 else -1
    return (place, choices[place]) if 0 <= place < len(choices) else (None, "")


@dataclass(frozen=True)
class SelfCheck:
    """Faults of a benchmark: for each fault, the number of items and the first few of them; also the score of
    guessing."""

    items: int
    questions: int
    question_answer_pairs: int
    with_choices: int
    letters: dict[str, int]
    majority_score: float | None
    counts: dict[str, int]
    faults: dict[str, Sequence[object]]
    left_out: dict[str, int]
    """Number of items that cannot be asked, by reason."""


def self_check(items: Sequence[Item]) -> SelfCheck:
    """Check a benchmark for faults, and compute what guessing would score."""
    stems: dict[str, list[Item]] = {}
    whole: dict[tuple[str, tuple[str, ...]], list[Item]] = {}
    golds = plain_all([item.gold for item in items])
    options = iter(plain_all([choice for item in items for choice in item.choices]))
    answers: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for item, stem, gold in zip(items, plain_all([item.stem for item in items]), golds, strict=True):
        key = stem, tuple(sorted(next(options) for _ in item.choices))
        stems.setdefault(stem, []).append(item)
        whole.setdefault(key, []).append(item)
        answers.setdefault(key, set()).add(gold)
    # Open answers in other words are not a contradiction; only different choices among the same options are.
    contradictory = [same for key, same in whole.items() if same[0].choices and len(answers[key] - {""}) > 1]
    place = _addresses(items)
    with_choices = [item for item in items if item.choices]
    faults: dict[str, Sequence[object]] = {
        "duplicate_stems": [[place[id(item)] for item in same] for same in stems.values() if len(same) > 1],
        "contradictory": [[place[id(item)] for item in same] for same in contradictory],
        "repeated_options": [
            place[id(item)] for item in with_choices if len(set(map(_key, item.choices))) < len(item.choices)
        ],
        "empty_options": [
            place[id(item)] for item in with_choices if not all(choice.strip() for choice in item.choices)
        ],
        "answer_out_of_range": [place[id(item)] for item in with_choices if item.answer is None],
        "unread_options": [place[id(item)] for item in items if _lists_options(item)],
    }
    letters = Counter(
        LETTERS[item.answer] for item in with_choices if item.answer is not None and item.answer < len(LETTERS)
    )
    return SelfCheck(
        items=len(items),
        questions=len(whole),
        question_answer_pairs=sum(map(len, answers.values())),
        with_choices=len(with_choices),
        letters=dict(sorted(letters.items())),
        majority_score=round(max(letters.values()) / len(with_choices), 6) if letters else None,
        counts={name: len(found) for name, found in faults.items()},
        faults={name: found[:SHOWN] for name, found in faults.items()},
        left_out=dict(sorted(Counter(why for item in items if (why := item.cannot_be_asked())).items())),
    )


def _lists_options(item: Item) -> bool:
    """Whether an item that was read without choices lists choices in its text, and its answer is the letter of one."""
    letters = [match[1] for match in OPTION.finditer(item.stem)]
    return not item.choices and len(letters) > 1 and item.gold.strip().rstrip(".") in letters


def _addresses(items: Sequence[Item]) -> dict[int, str]:
    """A name for each item: its id, followed by the item's number (from 1) if several items have the same id."""
    often = Counter(item.id for item in items)
    return {id(one): one.id if often[one.id] == 1 else f"{one.id} (item {n})" for n, one in enumerate(items, 1)}


def _key(choice: str) -> str:
    """A key by which two choices are compared: it ignores case and extra white space, but not punctuation."""
    return " ".join(choice.lower().split())
