"""How far `make specialise` scatters over threads and seeds: the log, the picture and the sentence that quote it.

    python benchmarks/spread.py --work WORK --threads 1 2 --seeds 0 1 2

Makes the corpus once, then base, expert and report for each number of threads and each training seed, as `make
specialise` does. Run again it resumes. From the log alone (`--log`) it writes the picture and the sentence again.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from fathom.report.files import read_json, write_atomically, write_json
from fathom.report.plots import IntervalMark, interval_plot, svg_file
from fathom.report.provenance import provenance

ROOT = Path(__file__).parent.parent
LOG = ROOT / "benchmarks" / "results" / "specialise-spread.json"
PICTURE = ROOT / "docs" / "pictures" / "specialise.svg"
PAGE = ROOT / "docs" / "tutorials" / "specialise.md"
BEGIN, END = "<!-- benchmarks/spread.py writes this -->\n", "<!-- to here -->\n"
RUNS = {"base": "base.yaml", "continued": "continue.yaml", "expert": "tune.yaml"}


def fathom(place: Path, threads: int, *words: str) -> None:
    """One command, in a folder, with a number of threads."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, *words], cwd=place, env=environment, check=True, stdout=subprocess.DEVNULL)


def corpus(work: Path) -> Path:
    """The folder in which the corpus is made, as the target of the Makefile makes it."""
    place = work / "corpus"
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "recipes").exists():
        (place / "recipes").symlink_to(ROOT / "recipes")
    fathom(place, 1, str(ROOT / "examples" / "minerals.py"), "specialise/world")
    fathom(place, 1, "-m", "fathom", "corpus", "recipes/specialise/corpus.yaml", "--out", "specialise/corpus")
    return place / "specialise" / "corpus"


def cell(work: Path, made: Path, threads: int, seed: int) -> dict[str, Any]:
    """One base, one expert, and what they answer."""
    place = work / f"threads-{threads}-seed-{seed}"
    report = place / "specialise" / "report" / "report.json"
    if not report.is_file():
        (place / "specialise").mkdir(parents=True, exist_ok=True)
        for link, target in ((place / "recipes", ROOT / "recipes"), (place / "specialise" / "corpus", made)):
            if not link.exists():
                link.symlink_to(target)
        for run, recipe in RUNS.items():
            words = ("train", f"recipes/specialise/{recipe}", f"train.seed={seed}", "--run", f"specialise/{run}")
            fathom(place, threads, "-m", "fathom", *words)
        pair = ("specialise/base", "specialise/expert", "--benchmark", "specialise/corpus/benchmark")
        fathom(place, threads, "-m", "fathom", "evaluate", "tuned", *pair, "--out", "specialise/report")
    found = read_json(report)
    (row,) = (one for one in found["questions"] if (one["way"], one["part"]) == ("text", "clean"))
    keys = ("asked", "right", "intervals", "p")
    return {"threads": threads, "seed": seed, **{key: row[key] for key in keys}, "hardware": found["hardware"]}


def sentence(log: dict[str, Any]) -> str:
    """What the docs say of a log."""
    shares = [[100 * count / row["asked"] for count in row["right"]] for row in log["cells"]]
    base, expert = zip(*shares, strict=True)
    seeds, threads = ({row[key] for row in log["cells"]} for key in ("seed", "threads"))
    better = sum(row["p"] < 0.05 and row["right"][1] > row["right"][0] for row in log["cells"])
    words = " and ".join(map(str, sorted(threads))) + (" thread" if threads == {1} else " threads")
    return (
        f"In {len(shares)} runs ({len(seeds)} training seed{'s' * (len(seeds) > 1)}, {words}) the expert answers "
        f"{min(expert):.1f} to {max(expert):.1f} % of the {log['cells'][0]['asked']} uncontaminated questions rightly "
        f"(mean {sum(expert) / len(expert):.1f} %), the base {min(base):.1f} to {max(base):.1f} %. "
        f"The expert is significantly better in {better} of {len(shares)} runs."
    )


def picture(log: dict[str, Any]) -> str:
    """Shares of right answers of every run, with Wilson's intervals."""
    marks = []
    for row in log["cells"]:
        for number, name in enumerate(("base", "expert")):
            low, high = (100 * end for end in row["intervals"][number])
            label = f"{name}, {row['threads']} thread{'s' * (row['threads'] > 1)}, seed {row['seed']}"
            marks.append(IntervalMark(label, 100 * row["right"][number] / row["asked"], low, high, number))
    return svg_file(interval_plot(marks, "% right", "Right answers of every run, with 95 % intervals.", line=25.0))


def write(log: dict[str, Any]) -> None:
    """The picture and the sentence of a log."""
    write_atomically(PICTURE, picture(log))
    text = PAGE.read_text(encoding="utf-8")
    block = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    shown = f"{sentence(log)}\n\n![Right answers of every run](../pictures/specialise.svg)\n"
    if not block.search(text):
        raise SystemExit(f"{PAGE}: no place for the sentence")
    write_atomically(PAGE, block.sub(lambda _: BEGIN + shown + END, text))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where runs are kept")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--log", action="store_true", help="write picture and sentence of the log that is there")
    options = parser.parse_args()
    if not options.log:
        work = options.work.resolve()
        made = corpus(work)
        cells = [cell(work, made, threads, seed) for seed in options.seeds for threads in options.threads]
        write_json(LOG, {**vars(provenance()), "cells": cells})
    log = read_json(LOG)
    write(log)
    print(sentence(log))


if __name__ == "__main__":
    main()
