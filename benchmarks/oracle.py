"""Random models on random backbones in random use, compared with the numpy oracle of `tests/models`, in processes.

    python benchmarks/oracle.py --first 19200 --count 1600 --processes 2 --out benchmarks/results/oracle-backbones.json

A seed is a case: `python -m tests.models.test_oracle SEED` runs one again. From 20,000 on the newer variants
are drawn too, from 22,000 on only loops and what their trips share.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models.test_oracle import NAMES, TOLERANCE, draw, is_right, judge, rounding, undecided

from fathom.report.provenance import provenance

Values = dict[str, Any]


def run_case(seed: int) -> Values:
    """One case, and how far it is off."""
    case = draw(seed)
    found: Values = {
        **{"seed": seed, "backbone": case.backbone, "use": case.kind, "precision": case.precision},
        **{axis: case.config[axis] for axis in NAMES},
    }
    try:
        worst, margin, slope = judge(case)
    except Exception as error:  # a case that cannot run is a finding, and the others are run
        return found | {"error": f"{type(error).__name__}: {error}"}
    found |= {"deviation": float(worst), "slope": float(slope), "undecided": bool(undecided(case, margin))}
    if worst > TOLERANCE[case.precision] and not found["undecided"]:
        found |= {"right": is_right(case, worst), "rounding": float(rounding(case))}
    return found


def summary(cases: list[Values]) -> Values:
    """Counts, and the worst of those that are decided."""
    judged = [case for case in cases if "error" not in case and not case["undecided"]]
    deviating = [case for case in judged if not case.get("right", True)]
    right = [case for case in judged if "right" not in case]

    def worst(key: str) -> Values:
        return {
            kind: max((case[key] for case in right if case["precision"] == kind), default=None) for kind in TOLERANCE
        }

    names = ("backbone", "use", "precision", *NAMES)
    return {
        "cases": len(cases),
        "compositions": len({tuple(case[axis] for axis in NAMES) for case in cases}),
        "undecided": sum(case.get("undecided", False) for case in cases),
        "deviating": deviating,
        "rounding_amplified": [case for case in judged if case.get("right")],
        "errors": [case for case in cases if "error" in case],
        "tolerance": TOLERANCE,
        "worst_deviation": worst("deviation"),
        "worst_derivative": worst("slope"),
        "by": {name: dict(sorted(Counter(case[name] for case in cases).items())) for name in names},
    }


def main() -> None:
    """Run the seeds and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=19_200, help="first seed; from 10,000 on backbones are drawn")
    parser.add_argument("--count", type=int, default=2000, help="number of cases")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="where to write the log")
    args = parser.parse_args()
    start, cases = time.monotonic(), []
    with ProcessPoolExecutor(args.processes) as pool:
        for case in pool.map(run_case, range(args.first, args.first + args.count), chunksize=8):
            cases.append(case)
            if len(cases) % 100 == 0:
                passed = time.monotonic() - start
                print(f"{len(cases)} of {args.count} cases, {passed:.0f} s", file=sys.stderr, flush=True)
    found = {
        **vars(provenance()),
        "seeds": [args.first, args.first + args.count - 1],
        "seconds": round(time.monotonic() - start),
        **summary(cases),
    }
    text = json.dumps(found, indent=1) + "\n"
    if args.out:
        args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
