"""How many packages Fathom brings with it, and how many more each extra does: pip's own plan, nothing is installed.

    python benchmarks/install_size.py --torch torch==2.13.0 --out benchmarks/results/install-size.json

`pip install --dry-run` plans an empty environment for the core and for the core with each extra. `--torch` chooses the
build: that for CUDA brings packages of its own, and is what pip takes on Linux where its index has no other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from fathom.report.files import write_json
from fathom.report.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
NAME = "fathom-lm"


def planned(extra: str, torch: str) -> tuple[set[str], list[str]]:
    """Names of what pip would install, without Fathom; and the names of Fathom's extras."""
    where = f"{ROOT}[{extra}]" if extra else str(ROOT)
    quiet = ["--dry-run", "--quiet", "--ignore-installed", "--disable-pip-version-check", "--report", "-"]
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "install", *quiet, torch, where], capture_output=True, text=True
    )
    if asked.returncode:
        raise SystemExit(f"{extra or 'core'}: {asked.stderr.strip().splitlines()[-1]}")
    chosen = {one["metadata"]["name"].lower(): one["metadata"] for one in json.loads(asked.stdout)["install"]}
    return chosen.keys() - {NAME}, chosen[NAME].get("provides_extra", [])


def main() -> None:
    """The core, then every extra."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch", metavar="REQUIREMENT")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    core, extras = planned("", options.torch)
    more = {}
    for extra in extras:
        packages, _ = planned(extra, options.torch)
        more[extra] = len(packages - core)
        print(f"{extra}: {more[extra]}", file=sys.stderr, flush=True)
    found = {**vars(provenance()), "core": sorted(core), "core_packages": len(core), "more_with_extra": more}
    print(json.dumps(found, indent=1))
    if options.out:
        write_json(options.out, found)


if __name__ == "__main__":
    main()
