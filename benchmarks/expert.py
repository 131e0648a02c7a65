"""The documents of `make expert`, and its log.

    python benchmarks/expert.py documents expert --domain FILES --replay FILES
    python benchmarks/expert.py log expert --out benchmarks/results/expert.json

`documents` writes an examination from the domain (`fathom.corpus.questions`) and the invented minerals. `log` reads
what the runs left behind: seconds, losses, contamination, and both reports.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fathom.corpus.questions import documents_of, write_examination
from fathom.corpus.synthetic import World, write_world
from fathom.report.files import read_json, write_json
from fathom.report.provenance import provenance

MINERALS, ASKED, LEAKS = 24, 192, 12
RUNS = ("continued", "expert", "control")
REPORTS = {"base": "report/report.json", "control": "control.json"}


def documents(place: Path, domain: list[str], replay: list[str]) -> None:
    """Write both domains, their questions and conversations, and the replay."""
    found = write_examination(place / "world", documents_of(domain), documents_of(replay))
    write_world(place / "minerals", World(seed=0, minerals=MINERALS), ASKED, LEAKS, general=0)
    print("     " + ", ".join(f"{name} {count:,}" for name, count in found.items()))


def log(place: Path, note: str = "") -> dict[str, Any]:
    """What a finished `make expert` left behind, and what somebody has to say of the run."""
    corpus = read_json(place / "corpus" / "run.json")
    stages = corpus["stages"]
    runs = {}
    for name in RUNS:
        result = read_json(place / name / "result.json")
        runs[name] = {key: result.get(key) for key in ("step", "tokens", "seconds", "evaluation")}
    reports = {against: read_json(place / file) for against, file in REPORTS.items()}
    keys = ("verdict", "texts", "questions", "asked", "guessing")
    return {
        **vars(provenance()),
        "note": note,
        "corpus": {name: stage.get("counts") for name, stage in stages.items()},
        "corpus_seconds": sum(stage.get("seconds", 0) for stage in stages.values()),
        "runs": runs,
        "reports": {against: {key: one[key] for key in keys} for against, one in reports.items()},
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("documents", help="write the documents and the questions")
    make.add_argument("place", type=Path)
    make.add_argument("--domain", nargs="+", required=True, help="files, directories and globs of documents to learn")
    make.add_argument("--replay", nargs="+", required=True, help="those that the model must not forget")
    write = commands.add_parser("log", help="write the log of a finished run")
    write.add_argument("place", type=Path)
    write.add_argument("--out", type=Path, required=True)
    write.add_argument("--note", default="", help="what the log does not know, such as kills")
    options = parser.parse_args()
    if options.command == "documents":
        documents(options.place, options.domain, options.replay)
    else:
        write_json(options.out, log(options.place, options.note))


if __name__ == "__main__":
    main()
