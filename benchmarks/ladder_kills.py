"""A small ladder of real training runs, killed again and again: its report is the one of a ladder left alone.

    python benchmarks/ladder_kills.py --kills 20 --workers 2 --out benchmarks/results/ladder-kills.json

Two workers climb every stage, from tuning to the check at the top. All of them are sent SIGKILL at a random moment of
work, and the same command goes on; a kill counts if the ladder was not finished.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fathom.report.provenance import provenance

LADDER = Path(__file__).parents[1] / "recipes" / "ladders" / "toys.yaml"
ARMS = "vanilla,denseformer,loop=loop;model.recurrence_options.trips=2"
OVERRIDES = [
    "data.directory=puzzle:a5?elements=2",
    "data.sequence_length=3",
    "train.tokens_per_step=192",
    "train.micro_batch=64",
    "train.checkpoint_every=5",
    "train.log_every=5",
    "evaluate.every=0",
    "evaluate.tokens=600",
    "ladder.layers=[1, 1, 2]",
    "ladder.hidden=[32, 64, 64]",
    "ladder.seeds=[3, 3, 2]",
    "ladder.seed_control=[2]",
    "ladder.tune_points=[3]",
    "ladder.tune_seeds=[1]",
    "ladder.tune_domains=[]",
    "ladder.tokens=24000",
]
LATER = {"date", "command", "commit", "hardware", "versions"}
"""What a report says of the moment it was written."""


def main() -> int:
    """Climb undisturbed, climb under fire, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        alone, hunted = Path(place) / "ladder", Path(place) / "hunted" / "ladder"
        hunted.parent.mkdir()
        whole = climb(alone, options.workers).wait()
        if whole:
            raise SystemExit(f"the ladder that was left alone ended with {whole}")
        killed = hunt(hunted, options.workers, options.kills, chance)
        ends = [climb(hunted, options.workers).wait() for _ in range(2)]  # to the end, and once more with nothing to do
        differences = apart(bare(alone), bare(hunted))
        files = {str(path.relative_to(alone)) for path in alone.rglob("result.json")}
        found = {
            "command": " ".join(["python", *sys.argv]),
            **vars(provenance()),
            "kills": len(killed),
            "after_results": killed,
            "workers": options.workers,
            "runs": len(files),
            "exit_codes": ends,
            "same_runs": files == {str(path.relative_to(hunted)) for path in hunted.rglob("result.json")},
            "differences": differences,
        }
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if not differences and len(killed) == options.kills and ends == [0, 0] else 1


def climb(out: Path, workers: int) -> subprocess.Popen[bytes]:
    """The command, in a process group of its own."""
    plan = [str(LADDER), "--arms", ARMS, "--out", str(out), *OVERRIDES]
    first = [str(out)] if (out / "ladder.json").exists() else plan
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fathom", "ladder", *first, "--workers", str(workers)]
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def hunt(out: Path, workers: int, kills: int, chance: random.Random) -> list[int]:
    """Kill every process of the ladder so many times; how many runs were finished each time."""
    killed: list[int] = []
    while len(killed) < kills:
        before, climbing, deadline = trained(out), climb(out, workers), math.inf
        while time.monotonic() < deadline and climbing.poll() is None:
            if deadline == math.inf and trained(out) != before:  # until then there is nothing to lose
                deadline = time.monotonic() + chance.uniform(0, 3)
            time.sleep(0.02)
        ended = climbing.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(climbing.pid, signal.SIGKILL)
        climbing.wait()
        if ended:
            raise SystemExit(f"finished after {len(killed)} kills: give fewer, or a larger ladder")
        killed.append(sum(1 for _ in out.rglob("result.json")))
        print(f"kill {len(killed)}: {killed[-1]} runs finished", file=sys.stderr, flush=True)
    return killed


def trained(out: Path) -> int:
    """Bytes of all logs of training."""
    return sum(path.stat().st_size for path in out.rglob("metrics.jsonl"))


def bare(out: Path) -> Any:
    """The report without what it says of the moment it was written."""
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    del report["prediction"]["sha256"]  # of the results it stands on, which hold the seconds that they took
    return {key: value for key, value in report.items() if key not in LATER}


def apart(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two reports differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in apart(one[key], other[key], f"{place}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [found for i, pair in enumerate(zip(one, other, strict=True)) for found in apart(*pair, f"{place}/{i}")]
    return [] if one == other else [f"{place}: {str(one)[:60]} against {str(other)[:60]}"]


if __name__ == "__main__":
    raise SystemExit(main())
