"""Leaks by kind and benchmark: how many planted ones are found, and what is found where nothing was planted.

    python benchmarks/decontamination.py DATA/eval --plain DATA/corpora/wiki/train-*.jsonl.xz --judge 50 --out LOG

Each kind is a form in which a document may hold a question with its answer. A plant stands in the midst of a document
that holds no item. `siblings` counts other items that a plant marks, `contained` those of them whose question stands
whole in the planted one or in its answer. Then every document of `--plain` is searched for all benchmarks, without
plants: the share of documents and of items that are found, and `--judge` passages, at random. `--across` searches the
items of each benchmark, and of others in the folder, for those of the other benchmarks, in which nobody planted or
removed any. `--plants 0` leaves the plants out and searches for more benchmarks, those of `MORE`, too.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from fathom.corpus.benchmarks import Item, item_of, plain
from fathom.corpus.forms import ALL, NEED_CHOICES, asked
from fathom.corpus.leak_rules import Matcher, build_index
from fathom.corpus.planting import LENGTHS
from fathom.corpus.recipe import Decontaminate
from fathom.corpus.stage import grouped
from fathom.report.files import write_json
from fathom.report.provenance import provenance

FILES = {
    "openbookqa": ("openbookqa/validation", "openbookqa/train"),
    "arc_easy": ("arc_easy/validation", "arc_easy/train"),
    "arc_challenge": ("arc_challenge/validation", "arc_challenge/train"),
    "mmlu": ("mmlu/validation", "mmlu/dev"),
    "sciq": ("sciq/validation",),
    "piqa": ("piqa/validation",),
    "hellaswag": ("hellaswag/validation",),
    "boolq": ("boolq/validation",),
}
MORE = {
    "piqa": ("piqa/validation", "piqa/train_500"),
    "boolq": ("boolq/validation", "boolq/train_500"),
    "winogrande_xl": ("winogrande_xl/validation", "winogrande_xl/train_500"),
    "copa": ("copa/validation",),
    "lambada_openai": ("lambada_openai/test",),
    "basic_arithmetic": ("basic_arithmetic/validation",),
    "copycolors": ("copycolors/test",),
    "blimp": ("blimp/*",),
}
"""Benchmarks of another shape, and more items of some."""
NAMES = ("Ann", "Omar", "Lena", "Ravi", "Mei", "Jorge", "Ines", "Tom", "Aiko", "Paul")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "tickets", "shells", "pencils", "cards", "eggs")


STORY = "{who} had {a} {what} in {n} boxes on the shelf. Then {who} gave away {b} {what} to a neighbour of {other}."
TOLD = (
    "How many {what} does {who} have now?",
    "How many {what} were given away?",
    "How many {what} are in a box?",
)
OPEN = (
    "who wrote the song {name}",
    "when was the city of {name} founded",
    "what is the largest river in {name}",
    "who played {name} in the television series about {other} and its people",
)


def generated(shape: str, count: int, chance: random.Random) -> list[dict[str, Any]]:
    """Items in the shape of well-known benchmarks that are not here: open questions, and three questions to a story."""
    parts = ("BCDFGKLMNPRSTV", "aeiou", "lnrst", "aeiou", "dkmnrst")
    made = ["".join(map(chance.choice, parts)) + str(number) for number in range(count)]
    rows: list[dict[str, Any]] = []
    for number in range(count):
        other = chance.choice(made)
        if shape == "svamp":
            story = number // 3
            a, b = 10 + story % 80, 2 + story % 7
            names = {"who": NAMES[story % 10], "what": THINGS[story % 7], "a": a, "b": b, "n": 2 + story % 5}
            asked_now = f"{STORY} {TOLD[number % 3]}".format(other=made[story], **names)
            rows.append({"question": asked_now, "answer": str((a - b, b, a // 2)[number % 3])})
            continue
        stem = chance.choice(OPEN).format(name=made[number], other=other)
        answers = [f"{other.lower()} {chance.randrange(1000, 2000)}", f"the {other}"]
        if shape == "triviaqa":
            answer = {"value": answers[0], "aliases": answers}
            rows.append({"question": f"Question: {stem.capitalize()}?\nAnswer:", "answer": answer})
        else:
            rows.append({"question": stem, "answer": answers})
    return rows


def opened(place: Path) -> TextIO:
    return lzma.open(place, "rt", encoding="utf-8") if place.suffix == ".xz" else place.open(encoding="utf-8")


def rows_of(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for place in (place for name in names for place in sorted(folder.glob(f"{name}.jsonl*"))):
        with opened(place) as lines:
            yield from map(json.loads, lines)


def as_question(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a benchmark that asks no question: COPA's premise, LAMBADA's last word, BLiMP's good sentence."""
    if "premise" in row:
        return {**row, "question": row["premise"]}
    if "sentence_good" in row:
        return {"question": row["sentence_good"]}
    if set(row) == {"text"}:
        text, _, last = row["text"].rpartition(" ")
        return {"question": text, "answer": last}
    return row


def read_benchmarks(folder: Path, chance: random.Random, more: bool) -> dict[str, list[Item]]:
    files = {**FILES, **MORE} if more else FILES
    rows = {name: list(map(as_question, rows_of(folder, some))) for name, some in files.items()}
    if not more:
        rows |= {f"{shape} (generated)": generated(shape, 1200, chance) for shape in ("nq", "triviaqa", "svamp")}
    return {name: [item_of(row, number) for number, row in enumerate(found)] for name, found in rows.items()}


def texts_of(places: Sequence[Path]) -> Iterator[str]:
    """The documents of JSON lines, or a file of text."""
    for place in places:
        with opened(place) as lines:
            yield from (json.loads(line)["text"] for line in lines) if ".jsonl" in place.name else (lines.read(),)


def recall(items: Sequence[Item], covers: Sequence[str], plants: int, chance: random.Random) -> dict[str, Any]:
    """By kind: plants, those found, and other questions that were marked; and those found by length of the question.

    Plants are drawn from all questions with an answer, also from those that the card calls too short to find.
    """
    index, unfound = build_index(items, Decontaminate())
    matcher = Matcher([index], [items])
    numbers = [n for n, item in enumerate(items) if item.gold]
    sizes = [len(plain(asked(item)).split()) for item in items]
    lengths = {words: [0, 0] for words in LENGTHS}
    keys = [(item.stem, item.context, tuple(sorted(item.choices))) for item in items]
    cells: dict[str, Any] = {}
    for kind, form in ALL.items():
        if kind.startswith(NEED_CHOICES) and not any(item.choices for item in items):
            continue
        chosen = chance.sample(numbers, min(plants, len(numbers)))
        texts = [f"{chance.choice(covers)}\n{form(items[n], chance)}\n{chance.choice(covers)}" for n in chosen]
        found, siblings, worst, contained = 0, 0, 0, 0
        for number, hits in zip(chosen, matcher.hits(texts), strict=True):
            marked = {hit.item for _, hit in hits}
            found += number in marked
            cell = lengths[next(words for words, most in LENGTHS.items() if sizes[number] <= most)]
            cell[0], cell[1] = cell[0] + (number in marked), cell[1] + 1
            others = {keys[one]: one for one in marked if keys[one] != keys[number]}
            inside = sum(_holds(items[number], items[one]) for one in others.values())
            siblings, worst = siblings + len(others) - inside, max(worst, len(others) - inside)
            contained += inside
        facts = {"siblings": siblings, "most_siblings": worst, "contained": contained}
        cells[kind] = {"plants": len(chosen), "found": found, **facts}
    return {
        "items": len(items),
        "too_short": len(unfound.short),
        "template_only": len(unfound.template),
        "by_length": {words: {"found": found, "plants": planted} for words, (found, planted) in lengths.items()},
        "kinds": cells,
    }


def _holds(planted: Item, other: Item) -> bool:
    """Whether another question stands whole in a plant."""
    said = plain(" ".join([asked(planted), planted.gold, *planted.choices, planted.gold]))
    return f" {plain(asked(other))} " in f" {said} "


def everything(folder: Path) -> Iterator[tuple[str, str]]:
    """(benchmark, text) of all that stands in a folder of benchmarks: questions, passages and choices."""
    for place in sorted(folder.rglob("*.jsonl*")):
        for row in rows_of(place.parent, [place.name.partition(".")[0]]):
            item = [row.get(key) for key in ("support", "passage", "text", "query", "goal", "premise", "sentence")]
            question = row.get("question")
            stem = question.get("stem") if isinstance(question, dict) else question or row.get("question_stem")
            choices = row.get("choices") or row.get("endings")
            choices = choices.get("text") if isinstance(choices, dict) else choices
            item += [stem, *(choices if isinstance(choices, list) else ()), row.get("correct_answer")]
            item += [row.get(key) for key in ("sol1", "sol2", "choice1", "choice2", "sentence_good")]
            yield place.parent.name, "\n".join(one for one in item if isinstance(one, str))


def across(benchmarks: dict[str, list[Item]], folder: Path) -> dict[str, Any]:
    """What the items of one benchmark hold of the others'."""
    names, texts = list(benchmarks), list(everything(folder))
    matcher = Matcher(
        [build_index(items, Decontaminate())[0] for items in benchmarks.values()], list(benchmarks.values())
    )
    passages = []
    for start in range(0, len(texts), 500):
        some = texts[start : start + 500]
        for (name, text), hits in zip(some, matcher.hits([text for _, text in some]), strict=True):
            for benchmark, item in sorted({(b, hit.item) for b, hit in hits if names[b] != name}):
                spans = [hit for b, hit in hits if (b, hit.item) == (benchmark, item)]
                row = benchmarks[names[benchmark]][item]
                said = text[min(one.start for one in spans) : max(one.end for one in spans)]
                quoted = {"says": said[:300], "question": asked(row)[-300:], "answer": row.gold[:100]}
                passages.append({"document_of": name, "benchmark": names[benchmark], **quoted})
    size = sum(len(text) for _, text in texts)
    return {"documents": len(texts), "megacharacters": round(size / 1e6, 1), "hits": passages}


def unplanted(
    benchmarks: dict[str, list[Item]], texts: Iterator[str], judged: int, chance: random.Random
) -> dict[str, Any]:
    """What is found in documents without plants."""
    names, rules = list(benchmarks), Decontaminate()
    matcher = Matcher([build_index(items, rules)[0] for items in benchmarks.values()], list(benchmarks.values()))
    documents, characters, hit_documents, items = 0, 0, 0, set()
    by_benchmark: Counter[str] = Counter()
    passages = []
    began = time.process_time()
    for batch in grouped(texts, len, 1 << 18):
        for text, hits in zip(batch, matcher.hits(batch), strict=True):
            documents += 1
            characters += len(text)
            hit_documents += bool(hits)
            by_benchmark.update({names[benchmark] for benchmark, _ in hits})
            for benchmark, item in sorted({(benchmark, hit.item) for benchmark, hit in hits}):
                items.add((benchmark, item))
                spans = [hit for other, hit in hits if (other, hit.item) == (benchmark, item)]
                low, high = min(one.start for one in spans), max(one.end for one in spans)
                row = benchmarks[names[benchmark]][item]
                quoted = {"document": text[low:high][:300], "question": asked(row)[-300:], "answer": row.gold[:100]}
                passages.append({"benchmark": names[benchmark], **quoted})
    total = sum(map(len, benchmarks.values()))
    return {
        "documents": documents,
        "megacharacters": round(characters / 1e6, 1),
        "cpu_seconds": round(time.process_time() - began, 1),
        "documents_hit": hit_documents,
        "items": total,
        "items_hit": len(items),
        "by_benchmark": dict(by_benchmark),
        "passages": chance.sample(passages, min(judged, len(passages))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of benchmarks")
    parser.add_argument("--plain", type=Path, nargs="+", required=True, help="documents to search and to plant in")
    parser.add_argument("--documents", type=int, help="search so many documents at most")
    parser.add_argument("--plants", type=int, default=200)
    parser.add_argument("--judge", type=int, default=50)
    parser.add_argument("--across", action="store_true", help="search each benchmark for the others, too")
    parser.add_argument("--only", nargs="+", help="these benchmarks alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    benchmarks = read_benchmarks(options.folder, chance, more=not options.plants)
    benchmarks = {name: items for name, items in benchmarks.items() if name in (options.only or benchmarks)}
    covers = [text[:300] for text in islice(texts_of(options.plain), 300)]
    found: dict[str, Any] = {**vars(provenance()), "plants": options.plants, "recall": {}}
    for name, items in benchmarks.items() if options.plants else ():
        found["recall"][name] = one = recall(items, covers, options.plants, chance)
        cells = " ".join(f"{kind}={cell['found']}/{cell['plants']}" for kind, cell in one["kinds"].items())
        print(
            f"{name}: short {one['too_short']} template {one['template_only']} of {one['items']}: {cells}", flush=True
        )
    found["unplanted"] = unplanted(
        benchmarks, islice(texts_of(options.plain), options.documents), options.judge, chance
    )
    print(json.dumps(found["unplanted"], indent=1, ensure_ascii=False))
    if options.across:
        found["across"] = across({name: items for name, items in benchmarks.items() if "(" not in name}, options.folder)
        print(f"across: {len(found['across']['hits'])} hits in {found['across']['documents']:,} documents")
    if options.out:
        write_json(options.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
