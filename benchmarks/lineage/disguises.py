"""Random compositions of edits that keep the function: found, flagged, or missed?

    python benchmarks/lineage/disguises.py MODEL ... --rows rows.jsonl --out lineage-compositions.json

Takes very small models, such as those that strangers.py and bystanders.py trained. Each disguise is one to six edits of
neutral.py in random order. The logits of every copy are compared with the original's; a copy counts only if no logit
changed by more than 1e-3. A further run with the same --rows goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import neutral
import numpy as np
import torch
from strangers import commit
from transformers.utils import logging

from fathom.lineage import comparison, open_weights, verdict

MISSED = {verdict.NONE, verdict.INCONCLUSIVE}


def tried(source: Path, number: int, work: Path) -> dict[str, Any]:
    """One composition of one model: what changed, and the verdict."""
    neutral.clean(work)
    draw = np.random.default_rng([0, number])
    family = json.loads((source / "config.json").read_text())["model_type"]
    kinds = neutral.drawn(draw, family)
    copy = neutral.composed(source, kinds, work, draw)
    change = float((neutral.logits(source) - neutral.logits(copy)).abs().max())
    quiet = comparison.Options(extras=False, nonce=number)
    pair = comparison.measure(open_weights(source), open_weights(copy), quiet)
    found = comparison.judge(pair, [], None, quiet)
    said = {"label": found.verdict.label, "signs": found.tampering, "reasons": found.verdict.reasons}
    return {"number": number, "model": source.name, "family": family, "kinds": kinds, "logits": change, **said}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Verdicts of the copies that kept the function, and every composition that was missed."""
    kept = [row for row in rows if row["logits"] <= neutral.KEPT]
    return {
        "compositions": len(rows),
        "function kept": len(kept),
        "largest change of a logit": max((row["logits"] for row in kept), default=0.0),
        "labels": dict(Counter(row["label"] for row in kept)),
        "labels by family": {
            family: dict(Counter(row["label"] for row in kept if row["family"] == family))
            for family in sorted({row["family"] for row in kept})
        },
        "compositions with each edit": dict(Counter(kind for row in kept for kind in row["kinds"])),
        "with signs": sum(bool(row["signs"]) for row in kept),
        "missed": [row for row in kept if row["label"] in MISSED],
        "every": [[row["number"], row["model"], ", ".join(row["kinds"]), row["label"]] for row in kept],
    }


def main(words: list[str] | None = None) -> int:
    """Make, check, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=3600, help="of processor time, after which this run ends")
    parser.add_argument("--rows", type=Path, required=True, help="one line a composition; a further run adds its own")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    work = Path(tempfile.mkdtemp())
    known = options.rows.read_text().splitlines() if options.rows.exists() else []
    rows = [json.loads(line) for line in known]
    for number in sorted({*range(options.count)} - {row["number"] for row in rows}):
        if time.process_time() > options.seconds:
            break
        rows.append(tried(options.models[number % len(options.models)], number, work))
        with options.rows.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    shutil.rmtree(work)
    body = {
        "command": "python benchmarks/lineage/disguises.py " + " ".join(words or sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        **summary(rows),
    }
    if options.out:
        options.out.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(body, indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
