"""Five disguises that defeated an earlier version, and the edits directed at the blind frame, by command.

    python benchmarks/lineage/named.py MODEL --controls A B C D --directory named --rows rows.jsonl --out named.json

Each disguise of the model is compared by `fathom lineage compare` with 0, 2 and 4 controls, each time with a new nonce.
A further run with the same --rows goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import neutral
import numpy as np
import torch
from neutral import Copy, Draw
from strangers import commit

DISGUISES = {
    "rotation and cipher": ("junk rows", "rotate", "cipher"),
    "rotation, decoys and loud heads": ("triple", "mute heads", "rotate"),
    "decoys in two layers": ("two layers", "rotate"),
    "constant keys and junk rows": ("constant keys", "junk rows", "rotate", "cipher"),
    "no gate as it was, mixed heads": ("flip", "mixed heads", "rotate", "cipher"),
    "layers cut in two": ("cut layers", "rotate", "cipher"),
    "twice the channels": ("widen", "rotate", "cipher"),
}
ABOVE = ", above 2 GB"


def two_layers(copy: Copy, draw: Draw) -> None:
    """Decoys as in `triple`, in the first and the last layer; the neurons of the others get zeros."""
    before, layers = dict(copy.tensors), list(copy.layers())
    neutral.triple(copy, draw)
    for at in layers[1:-1]:
        for role, axis in (("gate", 0), ("up", 0), ("down", 1)):
            plain = before[f"{at}mlp.{role}_proj.weight"]
            copy.tensors[f"{at}mlp.{role}_proj.weight"] = torch.cat([plain, 0 * plain, 0 * plain], axis)


def made(model: Path, kinds: tuple[str, ...], path: Path, large: bool) -> tuple[Path, float]:
    """The disguised copy and how far its logits moved; in float64 for a large pair, else in float32."""
    note = path / "change"
    if note.exists():
        return path, float(note.read_text())
    work = path.with_name(f"{path.name}-work")
    neutral.clean(work)
    last = neutral.composed(model, list(kinds), work, np.random.default_rng(len(path.name)))
    change = float((neutral.logits(model) - neutral.logits(last)).abs().max())
    shutil.rmtree(path, ignore_errors=True)
    copy = Copy.read(last)
    copy.tensors = {name: value if large else value.float() for name, value in copy.tensors.items()}
    copy.write(path)
    shutil.rmtree(work)
    note.write_text(str(change))
    return path, change


def asked(a: Path, b: Path, controls: list[Path]) -> dict[str, Any]:
    """What the command says, and its processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "fathom", "lineage", "compare", str(a), str(b), "--json"]
    words += [word for path in controls for word in ("--control", str(path))]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"label": found["verdict"]["label"], "CPU seconds": round(spent, 1)}


def main(words: list[str] | None = None) -> int:
    """Make, compare, tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--controls", type=Path, nargs="*", default=[])
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 2, 4], help="how many controls")
    parser.add_argument("--only", nargs="+", choices=DISGUISES, default=list(DISGUISES), help="these disguises")
    parser.add_argument("--large", action="store_true", help="both models in float64, for pairs above 2 GB")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600, help="of processor time, after which this run ends")
    parser.add_argument("--rows", type=Path, required=True, help="one line a comparison; a further run adds its own")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    neutral.EDITS["two layers"] = two_layers
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    known = {(row["model"], row["disguise"], row["controls"]) for row in rows}
    for disguise, count in itertools.product(options.only, options.counts):
        name, large = disguise + ABOVE * options.large, options.large
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime + time.process_time()
        if (options.model.name, name, count) not in known and count <= len(options.controls) and used < options.seconds:
            first = made(options.model, (), options.directory / "wide", True)[0] if large else options.model
            copy, change = made(options.model, DISGUISES[disguise], options.directory / name.replace(" ", "-"), large)
            found = asked(first, copy, options.controls[:count])
            rows.append({"model": options.model.name, "disguise": name, "controls": count, "logits": change, **found})
            with options.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    body = {
        "command": "python benchmarks/lineage/named.py " + " ".join(words or sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
