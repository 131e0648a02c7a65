"""What a corpus costs, this checkout against another commit: processor seconds of every stage, in turns A B B A.

    python benchmarks/corpus_against.py 1156794 wiki=wiki/train-*.jsonl.xz arxiv=arxiv/train-*.jsonl.xz \
        --benchmark arc=arc_easy/validation.jsonl.xz --tokenizer gpt2 --megabytes 12 --out LOG

Each turn makes the whole corpus anew from the same documents. This checkout's first turn has one worker and its second
two, and their files are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from corpus import limited, named
from corpus_kills import compared
from fathom.report.files import read_json, write_json
from fathom.report.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent


def made(source: Path, recipe: Path, out: Path, workers: int) -> dict[str, float]:
    """Processor seconds of every stage of a corpus."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    words = ["-m", "fathom", "corpus", str(recipe), f"executor.workers={workers}", "--out", str(out)]
    subprocess.run([sys.executable, *words], env=environment, cwd=out.parent, check=True, capture_output=True)
    stages = read_json(out / "run.json")["stages"]
    return {name: round(stage["times"]["cpu_seconds"], 2) for name, stage in stages.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("collections", nargs="+", metavar="NAME=GLOB", help="JSON lines with a field text, .xz or not")
    parser.add_argument("--benchmark", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--megabytes", type=int, default=12, help="of text, an equal share of each collection")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        archive = subprocess.run(["git", "archive", options.commit, "src"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        sources = {"here": ROOT / "src", options.commit: place / "src"}
        room, collections = options.megabytes * 10**6 // len(options.collections), {}
        for name, files in map(named, options.collections):
            limited(files, room, place / f"{name}.jsonl")
            collections[name] = {"inputs": [str(place / f"{name}.jsonl")]}
        quizzes = {name: str(Path(files[0]).resolve()) for name, files in map(named, options.benchmark)}
        tokenizer = Path(options.tokenizer)
        recipe = {
            "collections": collections,
            "filter": {"max_words": None},
            "decontaminate": {"benchmarks": quizzes},
            "tokenize": {"tokenizer": str(tokenizer.resolve()) if tokenizer.exists() else options.tokenizer},
        }
        (place / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
        turns: list[dict[str, Any]] = []
        for number, side in enumerate(("here", options.commit, options.commit, "here")):
            workers = 1 + number // 2
            spent = made(sources[side], place / "recipe.yaml", place / f"turn-{number}", workers)
            turns.append(
                {"side": side, "workers": workers, "cpu_seconds": round(sum(spent.values()), 2), "stages": spent}
            )
            print(turns[-1], file=sys.stderr, flush=True)
        same = compared(place / "turn-0", place / "turn-3")
        seconds = {side: sum(turn["cpu_seconds"] for turn in turns if turn["side"] == side) for side in sources}
        found = {
            **vars(provenance()),
            "megabytes": options.megabytes,
            "ratio": round(seconds["here"] / seconds[options.commit], 3),
            "turns": turns,
            "one and two workers": same,
        }
    print(json.dumps(found, indent=1))
    if options.out:
        write_json(options.out, found)


if __name__ == "__main__":
    main()
