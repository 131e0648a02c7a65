"""The documents of `make expert`, and its log.

    python benchmarks/expert.py documents expert --domain FILES --replay FILES
    python benchmarks/expert.py log expert --out benchmarks/results/expert.json

`documents` writes an examination from the domain and the invented minerals. `log` reads
what the runs left behind: seconds, losses, contamination, and both reports.

In an examination some documents are held out, and questions are made of their sentences alone.
A question is the beginning of a sentence, preceded by the previous sentence. The choices are the end of this sentence
and the ends of three other sentences of the same document. Nobody has to write or check the questions, and any
documents are enough. The questions measure how well a model reads the domain. Conversations are made from the documents
that are not held out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fathom.data.sources import Reading, find_sources
from fathom.errors import FathomError
from fathom.report.files import read_json, write_atomically, write_json
from fathom.report.provenance import provenance

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from minerals import World, write_world

MINERALS, ASKED, LEAKS = 24, 192, 12
RUNS = ("continued", "expert", "control")
REPORTS = {"base": "report/report.json", "control": "control.json"}
CHOICES = 4
SHORTEST, LONGEST = 12, 40
"""Words of a sentence that is asked for."""
BEGINNING = 0.55
"""The share of a sentence's words that the question shows."""
LEAST_HELD_OUT = 20
"""Documents below which the difference of two models on their text has no interval."""
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z“\"'`])")
MARKUP = re.compile(r"^(\.\. |[-*#|>+]|:\w|\d+\.\s|\s)|::$|(?m:^[=\-~^*#\"']{3,}$)|`_|\|\s")


def documents_of(inputs: Iterable[str]) -> Iterator[str]:
    """The texts of files, directories and globs, in order."""
    reading = Reading()
    for source in find_sources(list(inputs), reading):
        yield from (document.text for document in source.documents(reading) if document is not None)


def is_held_out(text: str, one_in: int) -> bool:
    """Whether a document is held out, decided by its own text alone, so independent of order and of other documents."""
    return zlib.crc32(text.encode()) % one_in == 0


def paragraphs(text: str) -> Iterator[list[str]]:
    """The sentences of every paragraph of prose, without headings, lists, tables and code."""
    for block in re.split(r"\n\s*\n", text):
        if not MARKUP.search(block) and re.search(r"[.?!][\"'”)]?$", block):
            yield [" ".join(one.split()) for one in SENTENCE.split(block)]


def halves(sentence: str) -> tuple[str, str] | None:
    """The beginning and the end of a sentence; None if it is too short or too long for a question."""
    words = sentence.split()
    if not SHORTEST <= len(words) <= LONGEST:
        return None
    cut = round(BEGINNING * len(words))
    return " ".join(words[:cut]), " ".join(words[cut:])


def questions_of(name: str, text: str, most: int) -> Iterator[dict[str, object]]:
    """Questions made of one document.

    Args:
        name: Its name, with which the ids of its questions begin.
        text: What it says.
        most: How many there may be.
    """
    chance = random.Random(f"fathom questions {zlib.crc32(text.encode())}")
    asked = [
        (f"{before} {both[0]}".strip(), both[1])
        for sentences in paragraphs(text)
        for before, sentence in zip(["", *sentences], sentences, strict=False)
        if (both := halves(sentence)) is not None
    ]
    ends = list(dict.fromkeys(end for _, end in asked))
    for number, (question, end) in enumerate(chance.sample(asked, len(asked))[:most] if len(ends) >= CHOICES else []):
        near = sorted((one for one in ends if one != end), key=lambda one: abs(len(one) - len(end)))
        choices = [end, *chance.sample(near[: 3 * CHOICES], CHOICES - 1)]
        chance.shuffle(choices)
        yield {"id": f"{name}-{number}", "question": question, "choices": choices, "answer": choices.index(end)}


def conversation_of(text: str) -> dict[str, object] | None:
    """The title (first line) as a question, and the first paragraph of prose as its answer."""
    title = text.strip().partition("\n")[0].strip()
    first = next((" ".join(some) for some in paragraphs(text) if len(" ".join(some).split()) >= SHORTEST), None)
    if not 0 < len(title) <= 120 or first is None or first.startswith(title):
        return None
    said = [{"role": "user", "content": f"What is “{title}” about?"}, {"role": "assistant", "content": first}]
    return {"messages": said}


def passage_of(text: str, characters: int) -> str:
    """The beginning of a text, ending with a paragraph if one ends within the number of characters."""
    end = text.rfind("\n\n", characters // 2, characters)
    return text[: end if end > 0 else characters]


def write_examination(
    folder: Path,
    domain: Iterable[str],
    general: Iterable[str],
    *,
    one_in: int = 10,
    questions: int = 240,
    replay: int = 2000,
    passages: tuple[int, int] = (30, 2500),
) -> dict[str, int]:
    """Write the training data and the questions of an expert as files; returns the number of lines of each.

    Args:
        folder: Where.
        domain: The documents to learn.
        general: What the base must not forget: replayed, and partly held out, too.
        one_in: One document in this many is held out.
        questions: Maximum number of questions, spread evenly over the held-out documents.
        replay: Maximum number of documents read from `general`.
        passages: Maximum number of held-out passages of each kind for the perplexity, and characters per passage.
    """
    read, held = _split(domain, one_in)
    everyday, held_general = _split(islice(general, replay), one_in)
    if min(len(held), len(held_general)) < LEAST_HELD_OUT:
        raise FathomError(
            f"{len(held)} of {len(read) + len(held):,} documents and {len(held_general)} of "
            f"{len(everyday) + len(held_general):,} of replay are held out; {LEAST_HELD_OUT} are needed of each"
        )
    each = -(-questions // len(held))
    asked = [row for number, text in enumerate(held) for row in questions_of(str(number), text, each)]
    drawn = random.Random("fathom examination").sample(asked, min(questions, len(asked)))
    count, characters = passages
    rows: dict[str, Sequence[Mapping[str, object]]] = {
        "domain": [{"text": text} for text in read],
        "general": [{"text": text} for text in everyday],
        "conversations": [row for text in read if (row := conversation_of(text)) is not None],
        "questions": drawn,
        "held-domain": [{"text": passage_of(text, characters)} for text in held[:count]],
        "held-general": [{"text": passage_of(text, characters)} for text in held_general[:count]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines)
        write_atomically(folder / f"{name}.jsonl", text)
    return {name: len(lines) for name, lines in rows.items()}


def _split(texts: Iterable[str], one_in: int) -> tuple[list[str], list[str]]:
    """The documents to train on, and the held-out ones."""
    read: list[str] = []
    held: list[str] = []
    for text in texts:
        (held if is_held_out(text, one_in) else read).append(text)
    return read, held


def documents(place: Path, domain: list[str], replay: list[str]) -> None:
    """Write both domains, their questions and conversations, and the replay."""
    found = write_examination(place / "world", documents_of(domain), documents_of(replay))
    write_world(place / "minerals", World(seed=0, minerals=MINERALS), ASKED, LEAKS, general=0)
    print("     " + ", ".join(f"{name} {count:,}" for name, count in found.items()))


def log(place: Path, note: str = "") -> dict[str, Any]:
    """What a finished `make expert` left behind, and what somebody has to say of the run."""
    corpus = read_json(place / "corpus" / "run.json")
    stages = corpus["stages"]
    runs = {}
    for name in RUNS:
        result = read_json(place / name / "result.json")
        runs[name] = {key: result.get(key) for key in ("step", "tokens", "seconds", "evaluation")}
    reports = {against: read_json(place / file) for against, file in REPORTS.items()}
    keys = ("verdict", "texts", "questions", "asked", "guessing")
    return {
        **vars(provenance()),
        "note": note,
        "corpus": {name: stage.get("counts") for name, stage in stages.items()},
        "corpus_seconds": sum(stage.get("seconds", 0) for stage in stages.values()),
        "runs": runs,
        "reports": {against: {key: one[key] for key in keys} for against, one in reports.items()},
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("documents", help="write the documents and the questions")
    make.add_argument("place", type=Path)
    make.add_argument("--domain", nargs="+", required=True, help="files, directories and globs of documents to learn")
    make.add_argument("--replay", nargs="+", required=True, help="those that the model must not forget")
    write = commands.add_parser("log", help="write the log of a finished run")
    write.add_argument("place", type=Path)
    write.add_argument("--out", type=Path, required=True)
    write.add_argument("--note", default="", help="what the log does not know, such as kills")
    options = parser.parse_args()
    if options.command == "documents":
        documents(options.place, options.domain, options.replay)
    else:
        write_json(options.out, log(options.place, options.note))


if __name__ == "__main__":
    main()
