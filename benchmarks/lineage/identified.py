"""A library of cards: how long is a search, and which members of planted families are traced to their first model?

    python benchmarks/lineage/identified.py --directory families --out lineage-identified.json

Takes the directory of families.py. The library holds the first model of each family, and as many random cards as make
ten thousand. Every other member is searched for by its card; of each family one member is identified as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
from strangers import commit

from fathom.lineage import huref, open_weights
from fathom.lineage.comparison import Options
from fathom.lineage.publishing import cards, identification
from fathom.report.files import write_json

CARDS = 10_000


def library(directory: Path, where: Path) -> None:
    """Cards of the first models and random ones."""
    for number in range(families.FAMILIES):
        first = cards.card(open_weights(directory / str(number) / "base"))
        write_json(where / f"{number}.json", first)
    draw = np.random.default_rng(0)
    for at in range(CARDS - families.FAMILIES):
        z = draw.integers(-127, 128, huref.SKETCH).astype(np.int8)
        write_json(
            where / f"random-{at}.json", replace(first, name=f"random-{at}", sketches={"z_last": z.tobytes().hex()})
        )


def main(words: list[str] | None = None) -> int:
    """Search, identify, count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600, help="of processor time, after which this run ends")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    ranks: dict[str, list[int]] = {}
    seconds, labels = [], Counter[str]()
    with tempfile.TemporaryDirectory() as made:
        where = Path(made)
        library(options.directory, where)
        for number in range(families.FAMILIES):
            if time.process_time() > options.seconds:
                break
            first, *others = families.planted(number).models
            if not all((options.directory / str(number) / name).exists() for name in others):
                continue  # families.py was stopped before it
            for name in others:
                query = cards.card(open_weights(options.directory / str(number) / name))
                started = time.process_time()
                found = cards.search(query, where)
                seconds.append(time.process_time() - started)
                place = next(at for at, hit in enumerate(found, 1) if hit.file == str(where / f"{number}.json"))
                ranks.setdefault(name, []).append(place)
            model = open_weights(options.directory / str(number) / others[number % len(others)])
            said = identification.identify(model, where, options=Options(extras=False, nonce=number))
            base = str(options.directory / str(number) / first)
            labels[next((one.label for one in said.candidates if one.name == base), "not among the five")] += 1
    places = [place for some in ranks.values() for place in some]
    body: dict[str, Any] = {
        "command": "python benchmarks/lineage/identified.py " + " ".join(words or sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "cards": CARDS,
        "CPU seconds of a search": {"median": float(np.median(seconds)), "most": max(seconds)},
        "members searched for": len(places),
        "first model is the nearest": sum(place == 1 for place in places),
        "first model is among the five nearest": sum(place <= identification.NEAREST for place in places),
        "by member": {
            name: f"{sum(p <= identification.NEAREST for p in some)} of {len(some)}" for name, some in ranks.items()
        },
        "verdict on the first model, one member a family": dict(labels),
    }
    options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
