"""Write an invented domain as files: documents, conversations, questions, general text. `make specialise` begins here.

    python examples/minerals.py specialise/world

Every fact is known, so what a model has learned, what leaked and what was forgotten can be measured exactly.
"""

import sys
from pathlib import Path

from fathom.corpus.synthetic import World, write_world

place = Path(sys.argv[1] if len(sys.argv) > 1 else "data/minerals")
world = World(seed=0, minerals=24)
write_world(place, world, questions=192, leaks=12, general=600)
for name in ("domain", "conversations", "questions"):
    with (place / f"{name}.jsonl").open(encoding="utf-8") as lines:
        print(f"     {place / name}.jsonl: {next(lines).strip()[:110]}…")
