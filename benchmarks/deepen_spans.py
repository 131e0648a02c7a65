"""Which layers of a real model cost least to run again: every span as a loop, nothing trained.

    python benchmarks/deepen_spans.py MODEL --text [NAME=]INPUT... --scores DIR --out FILE.json

Loops of 2 over all spans of 2 to 6 layers with damping ½ and 1 are scored on 12 documents, and the best 20 on 40
others. The scores are kept in DIR, so a run that was stopped continues; FILE.json is written when it is complete.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fathom.checkpoints.runs import open_source
from fathom.deepen.spans import Search, search
from fathom.report.provenance import provenance


def main() -> None:
    """Search, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=512, help="of each document (default: 512)")
    parser.add_argument("--documents", type=int, nargs=2, default=(12, 40), help="of both sets (default: 12 40)")
    parser.add_argument("--dampings", type=float, nargs="+", default=(0.5, 1.0), help="(default: 0.5 1)")
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    opened = open_source(options.model)
    assert opened.tokenizer is not None
    asked = Search(tokens=options.tokens, documents=tuple(options.documents), dampings=tuple(options.dampings))
    ranked = search(opened.model.float(), opened.tokenizer, options.text, asked, options.scores)
    found = {"provenance": vars(provenance()), "asked": vars(asked), "spans": [row.to_dict() for row in ranked]}
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in ranked[: asked.keep]:
        print(row.candidate, row.gap, row.again)


if __name__ == "__main__":
    main()
