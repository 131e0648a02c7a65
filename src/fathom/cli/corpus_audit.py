"""`fathom corpus audit INPUT ... --benchmark NAME=PATH`.

`corpus/audit.py` searches, and `run` here sets the exit code.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fathom.cli.parser import Parser
from fathom.errors import SettingsError
from fathom.report import PAGE
from fathom.report.results import to_json

EXAMPLES = (
    "fathom corpus audit my-texts --benchmark arc=arc/test.jsonl",
    "fathom corpus audit chats.jsonl --benchmark mmlu=mmlu/test.parquet --json",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files, folders or globs of text or of records, such as JSONL, to search",
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a benchmark whose questions are searched for: its file, or a folder of its files; may be repeated",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("audit"), metavar="DIR", help="output directory (default: audit)"
    )
    parser.add_argument(
        "--plants",
        type=int,
        default=20,
        metavar="N",
        help="questions planted per form of a leak and length of question, to measure recall (default: 20)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed that chooses the planted questions (default: 0)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: one for each core)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def run(options: Namespace) -> int:
    """Search the inputs for benchmark questions; return exit code 1 if any question was found in them, else 0."""
    from fathom.corpus.audit import audit

    if not options.benchmark:
        raise SettingsError("--benchmark: name at least one")
    if options.plants < 0:
        raise SettingsError(f"--plants: {options.plants} (allowed: 0 or more)")
    if options.workers is not None and options.workers < 1:
        raise SettingsError(f"--workers: {options.workers} (allowed: 1 or more)")
    found = audit(options.inputs, options.benchmark, options.out, options.plants, options.seed, options.workers)
    print(to_json(found) if options.json else f"{found}\n{options.out / PAGE}")
    return int(bool(found.findings))
