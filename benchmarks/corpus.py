"""What a corpus costs and finds: documents and bytes per second by stage, memory, copies and leaks. Prints JSON.

    python benchmarks/corpus.py wiki=wiki/train-*.jsonl.xz books=books/train-*.jsonl.xz \
        --benchmark arc=arc_easy/validation.jsonl --tokenizer gpt2 --megabytes 200

Into the documents go copies with words replaced, in four groups of similarity, exact copies, and items of the
benchmarks in the midst of documents. Recall of the copies stands beside 1 - (1 - J^8)^14 of each pair's exact
similarity J, that of the leaks beside their number. Speeds are per second of processor time of one core, so that what
else runs on the machine counts little; `wall` is by the clock.
"""

from __future__ import annotations

import argparse
import glob
import json
import lzma
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fathom.corpus.benchmarks import read_items
from fathom.corpus.documents import read_lines
from fathom.corpus.minhash import band_numbers, jaccard, run_set
from fathom.corpus.pipeline import build
from fathom.corpus.quality import broken_rules
from fathom.corpus.recipe import Filter, parse_corpus_recipe
from fathom.corpus.stage import Workspace, grouped
from fathom.corpus.words import words_of
from fathom.report.provenance import provenance

GROUPS = {0.91: 0.0095, 0.83: 0.0185, 0.69: 0.037, 0.51: 0.068}
"""Similarity, about, and the share of words that is replaced for it."""


def found_share(similarity: float, bands: int = 14, rows: int = 8) -> float:
    """The probability that two documents of this similarity agree in at least one band."""
    return float(1 - (1 - similarity**rows) ** bands)


def named(word: str) -> tuple[str, list[str]]:
    name, _, pattern = word.partition("=")
    return name, sorted(glob.glob(pattern)) or [pattern]


def texts_of(files: list[str]) -> Iterator[str]:
    for file in files:
        with (lzma.open if file.endswith(".xz") else open)(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def limited(files: list[str], room: int, target: Path) -> list[str]:
    """The first documents of so many bytes, as plain JSON lines."""
    texts = []
    with target.open("w", encoding="utf-8") as out:
        for text in texts_of(files):
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            texts.append(text)
            room -= len(text.encode())
            if room <= 0:
                break
    return texts


def edited(text: str, share: float, chance: random.Random) -> str:
    """A text in which this share of the words is another, evenly spread."""
    words = text.split(" ")
    step = 1 / share
    for number in range(int(len(words) * share)):
        words[int((number + chance.random() * 0.5) * step)] = f"edit{chance.randrange(10**9)}"
    return " ".join(words)


def plant(texts: list[str], items: list[Any], target: Path, chance: random.Random, count: int) -> list[dict[str, Any]]:
    """Documents that are to be found, and what is known of each."""
    candidates = [text for text in texts if 200 <= len(text.split()) <= 2000]
    chance.shuffle(candidates)
    sound = (text for text in candidates if not broken_rules(text, Filter()))  # what a filter drops, none can find
    chosen = list(islice(sound, 5 * count + len(items)))
    planted = []
    for number, text in enumerate(chosen[: 5 * count]):
        group = [1.0, *GROUPS][number % 5]
        copy = text if group == 1.0 else edited(text, GROUPS[group], chance)
        exact = jaccard(*(run_set(words_of([one]), 5) for one in (text, copy)))
        planted.append({"text": copy, "kind": "copy", "group": group, "jaccard": exact})
    for item, text in zip(items, chosen[5 * count :], strict=False):
        words = text.split(" ")
        middle = len(words) // 2
        leaked = f"{item.stem} {item.gold}".upper()
        fresh = edited(" ".join(words), 0.3, chance).split(" ")  # so that it is no copy of its original
        planted.append({"text": " ".join([*fresh[:middle], leaked, *fresh[middle:]]), "kind": "leak", "item": item.id})
    target.write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in planted), encoding="utf-8")
    return planted


def found_copies(workspace: Workspace, planted: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each group how many were found, and how many should be."""
    removed = {
        row["path"]: row
        for one in workspace.outputs("duplicates", "duplicates.jsonl")
        for row in read_lines(workspace.path(one))
    }
    pairs = np.concatenate([np.load(workspace.path(one)) for one in workspace.outputs("candidates", "pairs.npy")])
    result = {}
    for group in (1.0, *GROUPS):
        mine = [(n, row) for n, row in enumerate(planted, 1) if row["kind"] == "copy" and row["group"] == group]
        over = [row["jaccard"] for _, row in mine if row["jaccard"] >= 0.8]
        result[str(group)] = {
            "pairs": len(mine),
            "mean_jaccard": round(float(np.mean([row["jaccard"] for _, row in mine])), 4),
            "above_threshold": len(over),
            "expected_removed": round(sum(map(found_share, over)), 1),
            "removed": sum(f"planted.jsonl:{number}" in removed for number, _ in mine),
        }
    result["candidate_pairs"] = len(np.unique(pairs, axis=0))
    result["removed_in_all"] = len(removed)
    return result


def found_leaks(workspace: Workspace, planted: list[dict[str, Any]]) -> dict[str, int]:
    """How many of the planted leaks were found, and what else was."""
    hits = [row for one in workspace.outputs("contamination", "hits.jsonl") for row in read_lines(workspace.path(one))]
    paths = {f"planted.jsonl:{n}" for n, row in enumerate(planted, 1) if row["kind"] == "leak"}
    return {
        "planted": len(paths),
        "found": len(paths & {row["path"] for row in hits}),
        "other_documents": len({row["path"] for row in hits} - paths),
        "dirty_items": workspace.manifest("flags").counts.get("dirty", 0),
    }


def hashing(texts: list[str], documents: int) -> dict[str, float]:
    """Documents of 300 words to band numbers, words found beforehand and not."""
    words = " ".join(texts[: documents // 2]).split()
    pieces = [" ".join(words[at : at + 300]) for at in range(0, min(len(words), 300 * documents), 300)]
    groups = list(grouped(pieces, len, 1 << 18))
    started = time.process_time()
    ready = [words_of(group) for group in groups]
    split = time.process_time() - started
    for group in ready:
        band_numbers(group, 5, 14, 8, 0)
    total = time.process_time() - started
    return {
        "documents": len(pieces),
        "documents_per_second": round(len(pieces) / total, 1),
        "with_words_found_beforehand": round(len(pieces) / (total - split), 1),
    }


def recall(texts: list[str], count: int, chance: random.Random) -> dict[str, dict[str, float]]:
    """Pairs that meet in a band, beside theory, for each similarity."""
    pieces = [" ".join(text.split()[:300]) for text in texts if len(text.split()) >= 300][:count]
    result = {}
    for group, share in GROUPS.items():
        copies = [edited(text, share, chance) for text in pieces]
        similar = [
            jaccard(run_set(words_of([one]), 5), run_set(words_of([other]), 5))
            for one, other in zip(pieces, copies, strict=True)
        ]
        one, other = (band_numbers(words_of(group_), 5, 14, 8, 0) for group_ in (pieces, copies))
        expected = [found_share(value) for value in similar]
        result[str(group)] = {
            "pairs": len(pieces),
            "mean_jaccard": round(float(np.mean(similar)), 4),
            "met": round(float((one == other).any(axis=0).mean()), 4),
            "theory": round(float(np.mean(expected)), 4),
            "standard_error": round(float(np.sqrt(sum(p * (1 - p) for p in expected)) / len(pieces)), 4),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", nargs="+", metavar="NAME=GLOB", help="JSON lines with a field text, .xz or not")
    parser.add_argument("--benchmark", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--megabytes", type=int, default=200, help="of text, an equal share of each collection")
    parser.add_argument("--planted", type=int, default=200, help="copies in each group of similarity")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        room = arguments.megabytes * 10**6 // len(arguments.collections)
        texts: list[str] = []
        collections: dict[str, Any] = {}
        for word in arguments.collections:
            name, files = named(word)
            mine = limited(files, room, place / f"{name}.jsonl")
            texts += mine
            collections[name] = {"inputs": [str(place / f"{name}.jsonl")], "priority": 1}
        quizzes = {name: files[0] for name, files in map(named, arguments.benchmark)}
        items = [item for name, file in quizzes.items() for item in read_items(Path(file), name)[:100]]
        items = [item for item in items if len(item.stem.split()) >= 14]
        planted = plant(texts, items, place / "planted.jsonl", chance, arguments.planted)
        collections["planted"] = {"inputs": [str(place / "planted.jsonl")]}
        dedup = {"hashing": hashing(texts, 4000), "recall": recall(texts, 1500, chance)}
        del texts
        recipe = parse_corpus_recipe(
            {
                "collections": collections,
                "filter": {"max_words": None},
                "decontaminate": {"benchmarks": quizzes},
                "tokenize": {"tokenizer": arguments.tokenizer},
                "executor": {"workers": arguments.workers},
            }
        )
        started = time.perf_counter()
        report = build(recipe, place / "out")
        wall = time.perf_counter() - started
        started = time.perf_counter()
        again = build(recipe, place / "out")
        workspace = Workspace(place / "out", recipe)
        read = report.stages["ingest"].counts
        result: dict[str, Any] = {
            "documents": read["documents"],
            "megabytes": round(read["bytes"] / 1e6, 1),
            "workers": arguments.workers,
            "wall_seconds": round(wall, 1),
            "megabytes_per_second_of_wall": round(read["bytes"] / 1e6 / wall, 2),
            "nothing_changed_seconds": round(time.perf_counter() - started, 2),
            "tasks_done_again": sum(stage.done for stage in again.stages.values()),
            "peak_megabytes_of_a_process": round(
                max(
                    *(stage.times["peak_bytes"] for stage in report.stages.values()),
                    resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
                )
                / 1e6,
                1,
            ),
            "stages": {
                name: {
                    "tasks": stage.tasks,
                    "cpu_seconds": round(stage.times["cpu_seconds"], 2),
                    "documents_per_cpu_second": round(read["documents"] / max(stage.times["cpu_seconds"], 1e-3), 1),
                    "megabytes_per_cpu_second": round(read["bytes"] / 1e6 / max(stage.times["cpu_seconds"], 1e-3), 2),
                    "peak_megabytes": round(stage.times["peak_bytes"] / 1e6, 1),
                    "counts": {key: value for key, value in stage.counts.items() if value},
                }
                for name, stage in report.stages.items()
            },
            "deduplication": {**dedup, "planted": found_copies(workspace, planted)},
            "contamination": found_leaks(workspace, planted),
        }
    print(json.dumps({**result, **vars(provenance())}, indent=1))


if __name__ == "__main__":
    main()
