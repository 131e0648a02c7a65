"""Our deduplication beside datatrove's MinHash, our filter inside datasets.filter, on the same documents. Prints JSON.

    python benchmarks/corpus_peers.py datatrove wiki=wiki/train-00*.jsonl.xz --documents 4000
    python benchmarks/corpus_peers.py datasets wiki=wiki/train-00*.jsonl.xz --documents 4000

Among the documents are copies with words replaced, exact copies, and pages of a table that differ in numbers alone. A
removed document is *wrongly removed* if no other document has a Jaccard similarity of 0.8 or more with it, by exact
comparison with every document that shares a run of five words. Seconds are of processor time, both in one process, in
turn, A B B A. datatrove gets words by splitting at blanks, since its own splitter needs spaCy and takes longer;
`datasets` has no rules, so it is given ours.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from corpus import GROUPS, edited, found_share, named, texts_of
from fathom.corpus.documents import read_lines
from fathom.corpus.minhash import jaccard, run_set
from fathom.corpus.pipeline import build
from fathom.corpus.quality import broken_rules
from fathom.corpus.recipe import Filter, parse_corpus_recipe
from fathom.corpus.stage import Workspace
from fathom.corpus.words import words_of
from fathom.report.provenance import provenance

OURS = ("signatures", "exact", "candidates", "verify", "duplicates")
THRESHOLD = 0.8


@dataclass
class Planted:
    """Documents, of which it is known what is a copy of what."""

    texts: list[str]
    pairs: list[tuple[float, int, int]]
    """About how similar, and which two."""
    pages: set[int]
    """Pages of a table, no two of which have a number in common."""


def documents(words: list[str], count: int, planted: int, chance: random.Random) -> Planted:
    """Texts of 100 words and more, copies of some, and pages of a table, in random order."""
    files = [file for word in words for file in named(word)[1]]
    texts = list(islice((text for text in texts_of(files) if len(text.split()) >= 100), count))
    pairs = []
    for number, origin in enumerate(chance.sample(range(len(texts)), 5 * planted)):
        group = [1.0, *GROUPS][number % 5]
        pairs.append((group, origin, len(texts)))
        texts.append(texts[origin] if group == 1.0 else edited(texts[origin], GROUPS[group], chance))
    pages = set(range(len(texts), len(texts) + planted))
    for _ in range(planted):
        texts.append(
            " ".join(f"station {chance.randrange(10**6)} depth {chance.randrange(10**5)} m" for _ in range(60))
        )
    order = chance.sample(range(len(texts)), len(texts))
    place = {old: new for new, old in enumerate(order)}
    moved = [(group, place[one], place[other]) for group, one, other in pairs]
    return Planted([texts[n] for n in order], moved, {place[n] for n in pages})


def nearest(texts: list[str], wanted: Iterable[int]) -> dict[int, float]:
    """Of some documents the similarity with the one most like it, exactly."""
    sets = [run_set(words_of([text]), 5) for text in texts]
    places: dict[int, list[int]] = defaultdict(list)
    for number, runs in enumerate(sets):
        for run in runs.tolist():
            places[run].append(number)
    found = {}
    for number in wanted:
        near = {other for run in sets[number].tolist() for other in places[run]} - {number}
        found[number] = max((jaccard(sets[number], sets[other]) for other in near), default=0.0)
    return found


def ours(file: Path, out: Path) -> tuple[set[int], float]:
    """Numbers of the documents removed, and seconds."""
    off = {key: None for key in vars(Filter()) if key.startswith(("min_", "max_"))}
    recipe = parse_corpus_recipe(
        {
            "collections": {"all": {"inputs": [str(file)]}},
            "filter": off,
            "tokenize": {"tokenizer": str(_bytes(out.parent))},
            "executor": {"workers": 1},
        }
    )
    stages = build(recipe, out).stages
    rows = [
        row
        for one in Workspace(out, recipe).outputs("duplicates", "duplicates.jsonl")
        for row in read_lines(out / one.path)
    ]
    return {int(row["path"].rpartition(":")[2]) - 1 for row in rows}, sum(
        stages[name].times["cpu_seconds"] for name in OURS
    )


def _bytes(place: Path) -> Path:
    """A tokenizer that costs nothing, since none is measured."""
    from fathom.data.tokenizer import save_tokenizer, train_bpe

    if not (place / "tokenizer").is_dir():
        save_tokenizer(train_bpe(["a"], 258), place)
    return place / "tokenizer"


def datatrove(file: Path, out: Path, numbers: bool) -> tuple[set[int], float]:
    """The same by datatrove, with its 14 buckets of 8; `numbers` is its own default, all numbers being one."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter
    from datatrove.utils.text import TextNormConfig
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Blanks(WordTokenizer):
        """Words between blanks."""

        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return text.splitlines()

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    config = MinhashConfig(norm_config=TextNormConfig(norm_numbers=numbers))
    reader = JsonlReader(str(file.parent), glob_pattern=file.name, id_key="id")
    folders = {name: str(out / name) for name in ("signatures", "buckets", "clusters", "kept", "removed")}
    writer = JsonlWriter(folders["removed"], compression=None)
    keep = JsonlWriter(folders["kept"], compression=None)
    stages: list[tuple[list[Any], int]] = [
        ([reader, MinhashDedupSignature(folders["signatures"], config=config, language=Blanks())], 1),
        ([MinhashDedupBuckets(folders["signatures"], folders["buckets"], config=config)], config.num_buckets),
        ([MinhashDedupCluster(folders["buckets"], folders["clusters"], config=config)], 1),
        ([reader, MinhashDedupFilter(folders["clusters"], exclusion_writer=writer), keep], 1),
    ]
    started = time.process_time()
    for number, (pipeline, tasks) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(out / f"logs-{number}")).run()
    seconds = time.process_time() - started
    files = list(Path(folders["removed"]).rglob("*.jsonl"))
    return {int(json.loads(line)["id"]) for one in files for line in one.read_text().splitlines()}, seconds


def judged(removed: set[int], planted: Planted, likeness: dict[int, float]) -> dict[str, Any]:
    """What a tool removed: of planted pairs those of which it left one, beside MinHash's theory, and what else."""
    groups = {}
    for wanted in (1.0, *GROUPS):
        mine = [(likeness_of(planted.texts, *pair), pair) for group, *pair in planted.pairs if group == wanted]
        above = [(value, pair) for value, pair in mine if value >= THRESHOLD]
        groups[str(wanted)] = {
            "pairs": len(mine),
            "above_threshold": len(above),
            "found_above": sum(bool(removed & set(pair)) for _, pair in above),
            "expected_above": round(sum(found_share(value) for value, _ in above), 1),
            "found_below": sum(bool(removed & set(pair)) for value, pair in mine if value < THRESHOLD),
        }
    return {
        "removed": len(removed),
        "wrongly_removed": sum(likeness[number] < THRESHOLD for number in removed),
        "pages_removed": [len(removed & planted.pages), len(planted.pages)],
        "pairs": groups,
    }


def likeness_of(texts: list[str], one: int, other: int) -> float:
    """The exact similarity of two documents."""
    return jaccard(*(run_set(words_of([texts[number]]), 5) for number in (one, other)))


def write(planted: Planted, file: Path) -> None:
    """The documents as JSON lines."""
    rows = (json.dumps({"id": str(number), "text": text}) for number, text in enumerate(planted.texts))
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")


def compare_deduplication(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    planted = documents(arguments.collections, arguments.documents, arguments.planted, random.Random(0))
    file = place / "input" / "all.jsonl"
    file.parent.mkdir()
    write(planted, file)
    tools: dict[str, Callable[[Path], tuple[set[int], float]]] = {
        "fathom": lambda out: ours(file, out),
        "datatrove": lambda out: datatrove(file, out, numbers=True),
        "datatrove, norm_numbers=False": lambda out: datatrove(file, out, numbers=False),
    }
    removed, seconds = in_turn(tools, arguments.rounds, place)
    likeness = nearest(planted.texts, set().union(*removed.values()))
    found = {name: {**judged(removed[name], planted, likeness), **timed(name, seconds)} for name in tools}
    return {"documents": len(planted.texts), "tools": found, "datatrove": version("datatrove")}


def in_turn(
    tools: dict[str, Callable[[Path], tuple[set[int], float]]], rounds: int, place: Path
) -> tuple[dict[str, set[int]], dict[str, list[float]]]:
    """What every tool answers, and its seconds, one after the other and back again."""
    answers: dict[str, set[int]] = {}
    seconds: dict[str, list[float]] = defaultdict(list)
    order = list(tools) * rounds
    for number, name in enumerate([*order, *reversed(order)]):
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            answers[name], spent = tools[name](place / f"out-{number}")
        seconds[name].append(round(spent, 2))
    return answers, seconds


def timed(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """A tool's seconds, and how many of ours they are."""
    ratio = statistics.median(seconds[name]) / statistics.median(seconds["fathom"])
    return {"cpu_seconds": seconds[name], "times_fathoms_seconds": round(ratio, 2)}


def compare_filtering(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    planted = documents(arguments.collections, arguments.documents, arguments.planted, random.Random(0))
    file = place / "all.jsonl"
    write(planted, file)

    def by_datasets(out: Path) -> tuple[set[int], float]:
        started = time.process_time()
        rows = datasets.Dataset.from_json(str(file), cache_dir=str(out / "cache"))
        found = rows.filter(lambda row: not broken_rules(row["text"], Filter()), load_from_cache_file=False)
        ids = {int(one) for one in found["id"]}
        return ids, time.process_time() - started

    def by_fathom(out: Path) -> tuple[set[int], float]:
        values = {
            "collections": {"all": {"inputs": [str(file)]}},
            "deduplicate": {"exact": False, "near": False},
            "tokenize": {"tokenizer": str(_bytes(place))},
            "executor": {"workers": 1},
        }
        recipe = parse_corpus_recipe(values)
        stages = build(recipe, out).stages
        dropped = [
            row
            for one in Workspace(out, recipe).outputs("clean", "dropped.jsonl")
            for row in read_lines(out / one.path)
        ]
        gone = {int(row["path"].rpartition(":")[2]) - 1 for row in dropped}
        return set(range(len(planted.texts))) - gone, sum(
            stages[name].times["cpu_seconds"] for name in ("ingest", "clean")
        )

    kept, seconds = in_turn({"fathom": by_fathom, "datasets": by_datasets}, arguments.rounds, place)
    every = set().union(*kept.values())
    return {
        "documents": len(planted.texts),
        "tools": {
            name: {"kept": len(ids), "kept_by_the_other_alone": len(every - ids), **timed(name, seconds)}
            for name, ids in kept.items()
        },
        "datasets": version("datasets"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("datatrove", "datasets"))
    parser.add_argument("collections", nargs="+", metavar="NAME=GLOB", help="JSON lines with a field text, .xz or not")
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--planted", type=int, default=100, help="copies of each similarity, and pages of a table")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    arguments = parser.parse_args()
    compare = {"datatrove": compare_deduplication, "datasets": compare_filtering}[arguments.peer]
    with tempfile.TemporaryDirectory() as folder:
        result = compare(arguments, Path(folder))
    print(json.dumps({**result, **vars(provenance())}, indent=1))


if __name__ == "__main__":
    main()
