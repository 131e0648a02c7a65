"""What data costs: tokenisation, verification, and loading as a share of a training step. Prints JSON.

    python benchmarks/data.py --step-ms 250 --rows 32 --sequence-length 1024

The corpus is the standard library's sources. A step of `--step-ms` is simulated by sleeping, as a GPU's would look to
the process that feeds it; `waiting` is what the step then still waits for its batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

from fathom.corpus.prepare import PrepareOptions, prepare
from fathom.data.batches import BatchPlan
from fathom.data.shards import TokenDataset

SKIP = PrepareOptions(undecodable="skip")


def tokenisation(folder: Path, worker_counts: list[int]) -> dict[str, object]:
    library = Path(sysconfig.get_path("stdlib"))
    inputs = [f"{library}/*.py", f"{library}/[a-s]*/*.py"]
    result: dict[str, object] = {}
    for workers in worker_counts:
        summary = prepare(inputs, folder / str(workers), train_tokenizer=4096, workers=workers, options=SKIP)
        size = sum(counts["bytes"] for domains in summary.splits.values() for counts in domains.values())
        result[f"{workers} workers"] = {
            "megabytes_per_second": round(size / summary.seconds / 1e6, 2),
        }
    return result


def verification(directory: Path) -> dict[str, float]:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        dataset = TokenDataset.open(directory)
        seconds.append(time.perf_counter() - started)
    size = dataset.num_tokens * dataset.dtype.itemsize + dataset.num_documents * 16
    return {"megabytes": size / 1e6, "milliseconds": 1e3 * statistics.median(seconds)}


def loading(plan: BatchPlan, step_ms: float, steps: int) -> dict[str, float]:
    building, waiting = [], []
    for step in range(steps):
        started = time.perf_counter()
        plan.batch(step)
        building.append(time.perf_counter() - started)
    batches = plan.prefetch(0, steps)
    next(batches)
    for _ in range(steps - 1):
        time.sleep(step_ms / 1e3)
        started = time.perf_counter()
        next(batches)
        waiting.append(time.perf_counter() - started)
    built, waited = 1e3 * statistics.median(building), 1e3 * statistics.median(waiting)
    return {
        "building_ms": round(built, 4),
        "building_share_of_step": round(built / step_ms, 6),
        "waiting_ms": round(waited, 4),
        "waiting_share_of_step": round(waited / step_ms, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=250.0)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, object] = {"cores": cores, **vars(arguments)}
        result["tokenisation"] = tokenisation(Path(folder), sorted({1, cores}))
        result["verification"] = verification(Path(folder) / "1")
        dataset = TokenDataset.open(Path(folder) / "1")
        for packing in ("windows", "documents"):
            plan = BatchPlan(dataset, arguments.sequence_length, arguments.rows, seed=0, packing=packing)
            result[packing] = loading(plan, arguments.step_ms, arguments.steps)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
