"""What closed gates of a real model ask for, and whether sources of other documents stay at chance.

    python benchmarks/screen_smollm2.py MODEL --text wiki=FILE --out FILE.json [--draws 100]

The first part is `fathom deepen MODEL --screen`. In the second, every document reads the sources of another document of
its batch, drawn anew a hundred times: the content of such sources has a z² of chance if the screen is right.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from fathom.checkpoints.open import open_checkpoint
from fathom.deepen.screen import BATCH, Gradients, Screen, gradients, read_rows, scores, z_score
from fathom.deepen.screen_page import values
from fathom.models.modeling import FathomForCausalLM
from fathom.report.files import write_json
from fathom.report.provenance import provenance


def repaired(one: Gradients, draws: int) -> list[float]:
    """Mean z² over a mechanism's gates of the content of another document's sources, draw by draw."""
    numbers, found = np.random.default_rng(0), []
    for _ in range(draws):
        columns = numbers.integers(0, BATCH - 1, len(one.own[0]))
        squares = []
        for crossed in one.own:
            others = crossed[:, 1:]
            picked = others[np.arange(len(others)), columns]
            squares.append(z_score(picked - (others.sum(1) - picked) / (BATCH - 2)) ** 2)
        found.append(float(np.mean(squares)))
    return found


def main() -> None:
    """Screen, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--draws", type=int, default=100)
    options = parser.parse_args()
    model, tokenizer = open_checkpoint(options.model, "cpu", "float32")
    assert isinstance(model, FathomForCausalLM)
    rows = read_rows(tokenizer, options.text, Screen(documents=options.documents, tokens=options.tokens))
    begun = time.process_time()
    found = gradients(model, rows)
    made = scores(found, len(rows), time.process_time() - begun)
    draws = {name: repaired(one, options.draws) for name, one in found.items()}
    again = {
        name: {"draws": len(each), "mean_z2": float(np.mean(each)), "low": min(each), "high": max(each)}
        for name, each in draws.items()
    }
    write_json(options.out, {**vars(provenance()), **values(made), "repaired": again})
    for summary in made.summaries:
        print(summary, again[summary.mechanism])


if __name__ == "__main__":
    main()
