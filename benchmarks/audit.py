"""What the search of `fathom corpus audit` finds and misses, piece by piece, in a log that resumes.

    python benchmarks/audit.py DATA --out LOG recall      # form × length × benchmark: planted questions that are found
    python benchmarks/audit.py DATA --out LOG rows        # the rows of eight benchmarks' files in ten layouts
    python benchmarks/audit.py DATA --out LOG plain       # every document without plants, for 14 benchmarks
    python benchmarks/audit.py DATA --out LOG rivals      # the same plants, searched by the rules of other programs

DATA holds `eval/` and `corpora/`. Each piece is a benchmark or a file, and becomes a line of LOG; a piece that has its
line is not run again, and `--seconds` ends the command after the piece in which so much CPU time has passed. Rules of
others, restated: datatrove's (12 words in a row of question or answer, or over their border), lm-eval's (13 words in a
row, without punctuation), Tülu 3's (runs of 8 cover more than half of a question's words).
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import re
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from decontamination import FILES, as_question, read_benchmarks, rows_of, texts_of
from fathom.corpus.benchmarks import Item, item_of
from fathom.corpus.forms import ALL, FORMS, NEED_CHOICES, asked
from fathom.corpus.leak_rules import Matcher, build_index, groups_of
from fathom.corpus.planting import LENGTHS, Planting
from fathom.corpus.recipe import Decontaminate
from fathom.corpus.stage import grouped
from fathom.corpus.words import count_words
from fathom.data.sources import values_in
from fathom.report.provenance import provenance

Row = dict[str, Any]
Rule = Callable[[Item, str], bool]
PLANTS, RIVAL_PLANTS = 200, 20
MOST_ROWS = 2000
"""Rows of a benchmark's files that are searched in each layout."""
PARTS = 4
"""Pieces into which the forms of a benchmark are divided."""


def _csv(row: Row) -> str:
    out = io.StringIO()
    csv.writer(out).writerow([json.dumps(one) if isinstance(one, (dict, list)) else one for one in row.values()])
    return out.getvalue()


def _shown(form: str) -> Callable[[Row, Item], str]:
    """A row in another data set's layout, as the audit reads it: every field's text on a line."""
    return lambda _, item: "\n".join(values_in(json.loads(FORMS[form](item, random.Random(0)))))


LAYOUTS: dict[str, Callable[[Row, Item], str]] = {
    "every field": lambda row, _: "\n".join(values_in(row)),
    "raw line": lambda row, _: json.dumps(row),
    "raw line, keys sorted": lambda row, _: json.dumps(row, sort_keys=True),
    "CSV": lambda row, _: _csv(row),
    "TSV": lambda row, _: "\t".join(values_in(row)),
    "messages": _shown("row: messages"),
    "ShareGPT": _shown("row: ShareGPT"),
    "Alpaca": _shown("row: Alpaca"),
    "prompt, completion": _shown("row: prompt, completion"),
    "ARC's": _shown("row: ARC's"),
}


def recall(items: list[Item], covers: list[str], forms: dict[str, Any], plants: int) -> dict[str, Any]:
    """Planted and found, by form and length."""
    planting = Planting(items, Matcher([build_index(items, Decontaminate())[0]], [items]), covers)
    return {
        form: {length: planting.recall(form, length, plants, random.Random(f"{form} {length}")) for length in LENGTHS}
        for form in forms
    }


def rows(folder: Path, name: str) -> dict[str, Any]:
    """The rows of a benchmark's own files: how many of their questions each layout gives away."""
    lines = list(rows_of(folder, FILES[name]))
    items = [item_of(as_question(row), number) for number, row in enumerate(lines)]
    matcher = Matcher([build_index(items, Decontaminate())[0]], [items])
    groups = groups_of(items)
    long = [number for number, item in enumerate(items) if count_words(item.stem) >= 3]
    found: dict[str, Any] = {"rows": len(items), "of fewer than three words": len(items) - len(long)}
    long = random.Random(0).sample(long, min(MOST_ROWS, len(long)))
    for layout, written in LAYOUTS.items():
        texts = [written(lines[number], items[number]) for number in long]
        marked = [
            any(groups[hit.item] == groups[number] for _, hit in hits)
            for number, hits in zip(long, matcher.hits(texts), strict=True)
        ]
        missed = [asked(items[number])[-120:] for number, one in zip(long, marked, strict=True) if not one]
        found[layout] = {"rows": len(long), "found": sum(marked), "missed": missed[:5]}
    return found


def plain(matcher: Matcher, benchmarks: dict[str, list[Item]], place: Path) -> dict[str, Any]:
    """What is found in the documents of a file, every passage quoted."""
    names, passages = list(benchmarks), []
    documents = characters = hit_documents = 0
    texts = texts_of([place])
    for batch in grouped(texts, len, 1 << 18):
        for text, hits in zip(batch, matcher.hits(batch), strict=True):
            documents, characters, hit_documents = documents + 1, characters + len(text), hit_documents + bool(hits)
            for benchmark, number in sorted({(one, hit.item) for one, hit in hits}):
                spans = [hit for one, hit in hits if (one, hit.item) == (benchmark, number)]
                low, high = min(one.start for one in spans), max(one.end for one in spans)
                item = benchmarks[names[benchmark]][number]
                said = {"says": text[low:high][:300], "question": asked(item)[-300:], "answer": item.gold[:100]}
                passages.append({"benchmark": names[benchmark], **said})
    return {
        "documents": documents,
        "megacharacters": round(characters / 1e6, 1),
        "documents_hit": hit_documents,
        "passages": passages,
    }


PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))


def _words(text: str) -> list[str]:
    return text.lower().translate(PUNCTUATION).split()


def _runs(words: list[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


def datatrove(item: Item, text: str) -> bool:
    """Twelve words in a row of the answer or the question (`find_query_ngrams`), or across their border."""
    said, question = _words(re.sub(r"\d", "0", text)), _words(re.sub(r"\d", "0", asked(item)))
    answers = [_words(re.sub(r"\d", "0", answer)) for answer in item.golds()]
    wanted = _runs(question, 12).union(*(_runs(one, 12) for one in answers))
    wanted |= {run for one in answers for run in _runs([*question[-11:], *one[:11]], 12)}
    return not wanted.isdisjoint(_runs(said, 12))


def lm_eval(item: Item, text: str) -> bool:
    """Thirteen words in a row of the question."""
    return not _runs(_words(asked(item)), 13).isdisjoint(_runs(_words(text), 13))


def tulu(item: Item, text: str) -> bool:
    """Runs of eight words that stand in the text, too, cover more than half of the question's words."""
    question, said = re.findall(r"\w+", asked(item).lower()), _runs(re.findall(r"\w+", text.lower()), 8)
    covered = {
        place
        for at in range(len(question) - 7)
        if tuple(question[at : at + 8]) in said
        for place in range(at, at + 8)
    }  # fmt: skip
    return 2 * len(covered) > len(question)


RULES: dict[str, Rule] = {"datatrove's": datatrove, "lm-eval's": lm_eval, "Tülu 3's": tulu}


def rivals(items: list[Item], covers: list[str], forms: dict[str, Any], plants: int) -> dict[str, Any]:
    """By rule and length: plants, and those that the rule finds in a text that holds nothing else of the benchmark."""
    chance = random.Random(0)
    sizes = [count_words(item.stem) for item in items]
    found = {rule: {length: [0, 0] for length in LENGTHS} for rule in RULES}
    low = 0
    for length, most in LENGTHS.items():
        numbers = [n for n, item in enumerate(items) if low < sizes[n] <= most and item.gold]
        low = most
        for form, write in forms.items():
            able = [n for n in numbers if items[n].choices or not form.startswith(NEED_CHOICES)]
            for number in chance.sample(able, min(plants, len(able))):
                text = f"{chance.choice(covers)}\n{write(items[number], chance)}\n{chance.choice(covers)}"
                for rule, finds in RULES.items():
                    cell = found[rule][length]
                    found[rule][length] = [cell[0] + 1, cell[1] + finds(items[number], text)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("part", choices=("recall", "rows", "plain", "rivals"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40, help="CPU seconds after which no piece begins")
    parser.add_argument("--only", nargs="+", help="these pieces alone")
    parser.add_argument("--plants", type=int, help=f"of each cell; {PLANTS}, and {RIVAL_PLANTS} for other rules")
    options = parser.parse_args()
    done = {(row["part"], row["piece"]) for row in _lines(options.out) if "part" in row}
    folder, corpora = options.data / "eval", options.data / "corpora"
    benchmarks = read_benchmarks(folder, random.Random(1), more=options.part == "plain")
    covers = [text[:300] for text in texts_of([corpora / "arxiv" / "val.jsonl.xz"])][:300]
    files = [place for place in sorted(corpora.glob("*/*.xz"))]
    files += sorted((folder / "wikitext2").glob("*.xz"))
    pieces = [str(one.relative_to(options.data)) for one in files] if options.part == "plain" else list(benchmarks)
    pieces = list(FILES) if options.part == "rows" else pieces
    if options.part == "recall":
        pieces = [f"{name} {part}" for name in benchmarks for part in range(PARTS)]
    matcher: Matcher | None = None
    for piece in pieces:
        if (options.part, piece) in done or piece not in (options.only or pieces):
            continue
        if time.process_time() > options.seconds:
            print("more pieces are left: run the same command again")
            return 3
        began = time.process_time()
        if options.part == "rows":
            found = rows(folder, piece)
        elif options.part == "plain":
            matcher = matcher or Matcher(
                [build_index(items, Decontaminate())[0] for items in benchmarks.values()], list(benchmarks.values())
            )
            found = plain(matcher, benchmarks, options.data / piece)
        elif options.part == "recall":
            name, _, part = piece.rpartition(" ")
            forms = {form: ALL[form] for form in list(ALL)[int(part) :: PARTS]}
            found = recall(benchmarks[name], covers, forms, options.plants or PLANTS)
        else:
            found = rivals(benchmarks[piece], covers, ALL, options.plants or RIVAL_PLANTS)
        row = {"part": options.part, "piece": piece, **vars(provenance()), "cpu_seconds": 0.0, "found": found}
        row["cpu_seconds"] = round(time.process_time() - began, 1)
        with options.out.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(piece, row["cpu_seconds"], "s", flush=True)
    return 0


def _lines(place: Path) -> Iterator[Row]:
    if place.is_file():
        with place.open(encoding="utf-8") as log:
            yield from map(json.loads, log)


if __name__ == "__main__":
    raise SystemExit(main())
