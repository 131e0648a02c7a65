"""Answers of Cisco's Model Provenance Kit, inside its own environment: a pair of paths a line in, an answer a line out.

    env/bin/python benchmarks/lineage/court_kit.py CACHE

It imports nothing of Fathom. The kit keeps the features of a model that it has seen, as it does for its users.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> int:
    """Read pairs, print answers."""
    from provenancekit.config.settings import Settings
    from provenancekit.core.scanner import ModelProvenanceScanner

    out, sys.stdout = sys.stdout, sys.stderr  # the kit logs to standard output
    scanner = ModelProvenanceScanner(settings=Settings(cache_dir=sys.argv[1]))
    for line in sys.stdin:
        a, b = json.loads(line)
        started = time.process_time()
        try:
            scores = scanner.compare(a, b).scores
            answer = {
                "score": scores.pipeline_score,
                "weights alone": scores.identity_score,
                "said": scores.provenance_decision,
            }
        except Exception as error:  # whatever the kit cannot read is an abstention
            answer = {"score": None, "said": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps({**answer, "seconds": time.process_time() - started}), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
