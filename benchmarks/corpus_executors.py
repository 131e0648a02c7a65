"""Whether a corpus has the same bytes from another executor: `python benchmarks/corpus_executors.py RECIPE --out LOG`.

Makes the corpus of a recipe by this machine's pool and by `--executor` (`ray`, by default), and compares all files but
those that say when and how long.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from fathom.corpus.pipeline import build
from fathom.corpus.recipe import load_corpus_recipe
from fathom.report.files import digest, write_json
from fathom.report.provenance import provenance

OF_THE_RUN = {"times.json", "run.json", "recipe.yaml", ".digests.json"}


def hashes(folder: Path) -> dict[str, str]:
    """The hash of every file that does not depend on the run."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in OF_THE_RUN)
    return {
        str(path.relative_to(folder)): digest(path).sha256
        for path in files
        if path.relative_to(folder).parts[0] != "logs"
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--executor", default="ray")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    made, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("local", options.executor):
            words = [f"executor.name={name}", "executor.workers=2", "executor.memory_gb=1"]
            began = time.perf_counter()
            build(load_corpus_recipe(options.recipe, [*options.overrides, *words]), Path(folder) / name)
            seconds[name] = round(time.perf_counter() - began, 1)
            made[name] = hashes(Path(folder) / name)
        logs = Path(folder) / options.executor / "logs"
        sent = sorted(path.name for path in logs.iterdir()) if logs.is_dir() else []
    one, other = made.values()
    differ = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    shards = sum(key.startswith("shards/") for key in one)
    found = {"files": len(one), "shards": shards, "differ": differ, "seconds": seconds, "stages_sent": sent}
    print(found)
    if options.out:
        write_json(options.out, {**vars(provenance()), **found})
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
