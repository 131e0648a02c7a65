"""A whole corpus made twice: left alone, and killed at random moments. Speeds by stage, memory, what was found.

    python benchmarks/corpus_kills.py wiki=wiki/train-*.jsonl.xz books=books/train-*.jsonl.xz shakespeare=input.txt.xz \
        --benchmark arc=arc_easy/validation.jsonl --tokenizer gpt2 --share wiki=0.7 --share books=0.3 --out LOG

Into the documents go the copies and leaks of `corpus.py`. The moments are drawn, before the second run, from the time
that the first took: each is a number of finished tasks and the seconds since the last of them, and at that point of the
work every process is sent SIGKILL. Then the same command goes on, and at the end both directories are compared file by
file, without what says when, how long or with how many workers (`run.json`, `times.json`, `recipe.yaml`). Memory is
the resident memory of all processes together, twice a second, which counts what they share more than once, and the
peak of any one as the system counts it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpus import found_copies, found_leaks, named, plant, texts_of
from fathom.corpus.benchmarks import read_items
from fathom.corpus.recipe import CorpusRecipe, parse_corpus_recipe
from fathom.corpus.stage import DRAFT, STAGES, TASK, TIMES, Workspace
from fathom.report.files import read_json, write_json
from fathom.report.provenance import provenance

APART = {"run.json", "recipe.yaml", TIMES}
"""Files that say when a corpus was made, how long it took, and with how many workers."""
PAGE = os.sysconf("SC_PAGE_SIZE")
SAMPLED = 20
"""Of so many documents one may be copied; the others are not held in memory."""


@dataclass
class Watch:
    """A run, seen from outside."""

    out: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    before: set[Path] = field(default_factory=set)
    """Drafts that an earlier run left."""
    history: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and finished tasks, whenever these became more."""
    resident: int = 0
    """Most bytes of all processes together."""

    def look(self, memory: bool = True) -> tuple[float, int]:
        """Seconds since the start, and finished tasks."""
        seconds, done = time.monotonic() - self.began, finished(self.out)
        if not self.history or done > self.history[-1][1]:
            self.history.append((seconds, done))
        if memory:
            self.resident = max(self.resident, resident(self.process.pid))
        return seconds, done

    def in_work(self) -> set[str]:
        """The stages whose tasks this run has begun and not finished."""
        return {path.parent.name for path in drafts(self.out) - self.before}


def main() -> int:
    """One run undisturbed, one under fire, compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", nargs="+", metavar="NAME=GLOB", help="JSON lines with a field text, or text")
    parser.add_argument("--benchmark", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--share", action="append", default=[], metavar="NAME=SHARE", help="of the mixture")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--planted", type=int, default=200, help="copies in each group of similarity")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hunted-workers", type=int, help="of the run that is killed (default: as many)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="where both corpora go, and stay (default: a temporary directory)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        values, planted = recipe_of(options, work)
        recipe = parse_corpus_recipe(values)
        (work / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
        alone, hunted = work / "alone", work / "hunted"
        for place in (alone, hunted):
            shutil.rmtree(place, ignore_errors=True)
        workers = options.hunted_workers or options.workers
        first = undisturbed(work, alone, options.workers)
        found = {**vars(provenance()), "workers": options.workers, "hunted_workers": workers}
        found |= facts_of(alone, recipe, first, planted)
        points = moments(first, options.kills, random.Random(options.seed))
        kills = hunt(work, hunted, points, first.history[-1][1], workers)
        last = undisturbed(work, hunted, workers)
        found |= {"kills": kills, "seconds_of_the_run_after_them": round(last.history[-1][0], 1)}
        found |= compared(alone, hunted)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        write_json(options.out, found)
    return 0 if not found["different"] and len(kills) == options.kills else 1


def recipe_of(options: argparse.Namespace, work: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The recipe's values, and what was planted."""
    chance = random.Random(options.seed)
    named_files = dict(map(named, options.collections))
    lines = [file for files in named_files.values() for file in files if ".jsonl" in file]
    texts = list(itertools.islice(texts_of(lines), 0, None, SAMPLED))
    quizzes = {name: files[0] for name, files in map(named, options.benchmark)}
    items = [item for name, file in quizzes.items() for item in read_items(Path(file), name)[:100]]
    long = [item for item in items if len(item.stem.split()) >= 14]
    planted = plant(texts, long, work / "planted.jsonl", chance, options.planted)
    collections: dict[str, Any] = {name: {"inputs": files, "priority": 1} for name, files in named_files.items()}
    collections["planted"] = {"inputs": [str(work / "planted.jsonl")]}
    return {
        "collections": collections,
        "filter": {"max_words": None},
        "decontaminate": {"benchmarks": quizzes},
        "tokenize": {"tokenizer": options.tokenizer},
        "mix": {"shares": {name: float(share) for name, _, share in (one.partition("=") for one in options.share)}},
        "executor": {"workers": options.workers},
    }, planted


def start(work: Path, out: Path, workers: int) -> Watch:
    """The command, in a process group of its own."""
    command = [sys.executable, "-m", "fathom", "corpus", str(work / "recipe.yaml"), f"executor.workers={workers}"]
    command += ["--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (work / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log)
    return Watch(out, process, before=drafts(out))


def undisturbed(work: Path, out: Path, workers: int) -> Watch:
    """A run to its end."""
    watch = start(work, out, workers)
    while watch.process.poll() is None:
        watch.look()
        time.sleep(0.5)
    if watch.process.returncode:
        raise SystemExit(f"{out.name} ended with {watch.process.returncode}: {work / 'log.txt'}")
    seconds, done = watch.look(memory=False)
    watch.history.append((seconds, done))
    return watch


def moments(first: Watch, kills: int, chance: random.Random) -> list[tuple[int, float]]:
    """Points of the work at random moments of a run: tasks finished, and seconds since the last of these."""
    found = []
    for moment in sorted(chance.uniform(first.history[0][0], first.history[-1][0]) for _ in range(kills)):
        seconds, done = max(one for one in first.history if one[0] <= moment)
        found.append((done, moment - seconds))
    return found


def hunt(work: Path, out: Path, points: list[tuple[int, float]], total: int, workers: int) -> list[dict[str, Any]]:
    """Kill every process of a run at each of these points; what was done, and what was in work.

    A run is killed when it is at work again, or when all tasks are done and it writes the corpus.
    """
    kills: list[dict[str, Any]] = []
    for target, wait in points:
        watch, reached, before = start(work, out, workers), None, finished(out)
        while watch.process.poll() is None:
            seconds, done = watch.look(memory=False)
            at_work = done > before or watch.in_work() or done == total
            if reached is None and done >= target and at_work:
                reached = seconds
            if reached is not None and (seconds - reached >= wait or done > target):
                break
            time.sleep(0.05)
        if watch.process.poll():
            raise SystemExit(f"the corpus ended with {watch.process.returncode} before kill {len(kills) + 1}")
        if watch.process.poll() is not None:  # faster than the first run, it was through
            continue
        os.killpg(watch.process.pid, signal.SIGKILL)
        watch.process.wait()
        while resident(watch.process.pid):
            time.sleep(0.05)
        tasks = {"tasks_finished": finished(out), "in_work": sorted(watch.in_work())}
        kills.append({"after_seconds": round(seconds, 1), **tasks})
        print(f"kill {len(kills)}: {kills[-1]}", file=sys.stderr, flush=True)
    return kills


def finished(out: Path) -> int:
    """Tasks whose results are in place."""
    return sum(not path.parent.name.startswith(".") for path in out.glob(f"{STAGES}/*/*/{TASK}"))


def drafts(out: Path) -> set[Path]:
    """Folders of tasks that are not finished."""
    return set(out.glob(f"{STAGES}/*/.*{DRAFT}"))


def resident(group: int) -> int:
    """Bytes in memory of the processes of a group."""
    found = 0
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getpgid(int(place.name)) == group:
                found += int((place / "statm").read_text().split()[1]) * PAGE
    return found


def facts_of(out: Path, recipe: CorpusRecipe, watch: Watch, planted: list[dict[str, Any]]) -> dict[str, Any]:
    """Speeds and memory of a run, and what it found."""
    run, workspace = read_json(out / "run.json"), Workspace(out, recipe)
    counts = run["stages"]["ingest"]["counts"]
    megabytes, wall = counts["bytes"] / 1e6, watch.history[-1][0]
    stages = {}
    for name, stage in run["stages"].items():
        busy = max(stage["times"]["cpu_seconds"], 1e-3)
        stages[name] = {
            "tasks": stage["tasks"],
            "wall_seconds": stage["seconds"],
            "cpu_seconds": round(busy, 2),
            "documents_per_cpu_second": round(counts["documents"] / busy, 1),
            "megabytes_per_cpu_second": round(megabytes / busy, 2),
            "peak_megabytes": round(stage["times"]["peak_bytes"] / 1e6, 1),
            "counts": {key: value for key, value in stage["counts"].items() if value},
        }
    mixture = read_json(out / "mixture.json")
    return {
        "documents": counts["documents"],
        "megabytes": round(megabytes, 1),
        "tokens": run["stages"]["tokenize"]["counts"]["tokens"],
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(sum(stage["cpu_seconds"] for stage in stages.values()), 1),
        "megabytes_per_second_of_wall": round(megabytes / wall, 2),
        "peak_megabytes_of_all_processes": round(watch.resident / 1e6, 1),
        "peak_megabytes_of_a_process": max(stage["peak_megabytes"] for stage in stages.values()),
        "mixture": {key: mixture[key] for key in ("tokens", "rows", "weights", "epochs")},
        "stages": stages,
        "planted_copies": found_copies(workspace, planted),
        "planted_leaks": found_leaks(workspace, planted),
    }


def compared(one: Path, other: Path) -> dict[str, Any]:
    """The files that are in both with the same bytes, and those that are not."""
    first, second = (dict(hashed(place)) for place in (one, other))
    different = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    same = [name for name in first if first[name] == second.get(name)]
    kinds: dict[str, int] = {}
    for name in same:
        kind = "stages" if name.startswith(f"{STAGES}/") else name.split("/")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    size = sum((one / name).stat().st_size for name in same)
    return {"same_files": kinds, "same_megabytes": round(size / 1e6, 1), "different": different}


def hashed(place: Path) -> Iterator[tuple[str, str]]:
    """Every file of a corpus that is to be the same whenever it is made, with its SHA-256."""
    for path in sorted(place.rglob("*")):
        if path.is_file() and path.name not in APART:
            with path.open("rb") as file:
                digest = hashlib.sha256()
                while block := file.read(1 << 22):
                    digest.update(block)
            yield path.relative_to(place).as_posix(), digest.hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
