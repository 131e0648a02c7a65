"""`fathom evaluate samples FOLDER FOLDER [FOLDER ...]`.

`evaluation/samples.py` pairs the runs and decides which metrics are shown.
"""

from __future__ import annotations

from argparse import Namespace

from fathom.cli.parser import Parser
from fathom.data.sources import CLUSTER
from fathom.report.results import to_json

EXAMPLES = (
    "fathom evaluate samples out/before out/after",
    "fathom evaluate samples base=out/a/gpt2 tuned=out/b/tuned --cluster subject",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    help = "folders of lm-eval's --log_samples files; all others are compared with the first; NAME=FOLDER names one"
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help=help)
    parser.add_argument(
        "--cluster",
        default=CLUSTER,
        metavar="FIELD",
        help=f"a field of the documents: documents with the same value form one cluster of dependent samples "
        f"(default: {CLUSTER})",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def run(options: Namespace) -> int:
    """Read, pair, print."""
    from fathom.evaluation.samples import compare_samples, show

    report = compare_samples(options.folders, options.cluster)
    if options.json:
        print(to_json(report))
    else:
        show(report)
    return 0
