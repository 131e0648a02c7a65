"""Every paper's tiny table: made once, and once more by a command that is killed half-way and given again.

    python benchmarks/papers_tiny.py depth-attention/table1 ponderlm/top_k --log benchmarks/results/papers-tiny.json

Reads demo/data in the directory where it is started (`make demo` writes it). Without names it makes all tables. A
table that is in the log already is left out, so the command resumes. The second run is sent SIGKILL, with all its
processes, after half of its models are trained and the next one has written a checkpoint. Then tables, weights,
configurations, results and logs of the two directories are compared, without seconds and bytes of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fathom.report.provenance import hardware, provenance

TIMES = ("seconds", "tokens_per_second", "memory_bytes", "eta_seconds")
"""What logs and results say of the machine."""
CHECKPOINTS = "train.checkpoint_every=5"
"""Of the run that is killed, so that it resumes inside a model's training."""


def main() -> int:
    """Make the tables that the log lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="PAPER/TABLE")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no table after so long")
    options = parser.parse_args()
    began = time.monotonic()
    for name in options.tables or every_table():
        late = time.monotonic() - began > 60 * options.minutes
        if not late and name not in read(options.log)["tables"]:
            made = twice(name)
            log = read(options.log)  # another process may have made another table
            log["tables"][name] = made
            options.log.write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
            print(name, json.dumps(made), flush=True)
    log = read(options.log)
    return int(any(one["exit_code"] or one["resumed_equal"] is False for one in log["tables"].values()))


def every_table() -> list[str]:
    """The recipes' names."""
    found = Path(__file__).parents[1] / "recipes/papers"
    return sorted(str(path.relative_to(found).with_suffix("")) for path in found.glob("*/*.yaml"))


def read(log: Path) -> dict[str, Any]:
    """The log so far."""
    if not log.exists():
        return {"command": "python benchmarks/papers_tiny.py", **vars(provenance()), "tables": {}}
    found: dict[str, Any] = json.loads(log.read_text(encoding="utf-8"))
    return found


def twice(name: str) -> dict[str, Any]:
    """Make a table, make it with a kill in the middle, and compare."""
    source = provenance()
    with tempfile.TemporaryDirectory() as place:
        alone, killed = Path(place) / "alone", Path(place) / "killed"
        before, began = spent(), time.monotonic()
        code = make(name, alone).wait()
        seconds, wall = spent() - before, time.monotonic() - began
        models = finished_runs(alone)
        finished = kill(name, killed, models // 2)
        again = make(name, killed, CHECKPOINTS).wait()
        differ = apart(alone, killed)
        return {
            "command": f"fathom compare papers/{name}",
            "cpu_seconds": round(seconds, 1),
            "wall_seconds": round(wall, 1),
            "exit_code": code,
            "models": models,
            "killed_after": finished,
            "exit_code_resumed": again,
            "files_compared": len(contents(alone)),
            "resumed_equal": not differ,
            "differ": differ,
            "date": source.date,
            "commit": source.commit,
            "processor": hardware()["cpu"],
        }


def make(name: str, out: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """The command, in a process group of its own."""
    command = [sys.executable, "-m", "fathom", "compare", f"papers/{name}", "--out", str(out), *overrides]
    return subprocess.Popen(
        command, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )


def kill(name: str, out: Path, half: int) -> int:
    """Start the command and kill it inside the run after `half` models; how many it had finished."""
    process = make(name, out, CHECKPOINTS)
    while process.poll() is None and not inside(out, half):
        time.sleep(0.05)
    if process.poll() is not None:
        raise SystemExit(f"{name}: finished before it was killed")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return finished_runs(out)


def finished_runs(out: Path) -> int:
    """How many models have a result."""
    return sum(1 for _ in out.rglob("seed-*/result.json"))


def inside(out: Path, half: int) -> bool:
    """Whether `half` models are trained and the next has a checkpoint."""
    unfinished = (path.parent for path in out.rglob("seed-*/latest") if not (path.parent / "result.json").exists())
    return finished_runs(out) >= half and any(unfinished)


def spent() -> float:
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def contents(out: Path) -> dict[str, object]:
    """What each file says of the models: tables, weights and configurations whole, logs and results without times."""
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.name in ("table.json", "config.json", "model.safetensors"):
            found[name] = path.read_bytes()
        elif path.name in ("result.json", "metrics.jsonl"):
            text = path.read_text(encoding="utf-8")
            rows = [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
            found[name] = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
    return found


def apart(one: Path, other: Path) -> list[str]:
    """Files that differ."""
    first, second = contents(one), contents(other)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


if __name__ == "__main__":
    raise SystemExit(main())
