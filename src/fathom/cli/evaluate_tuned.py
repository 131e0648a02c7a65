"""`fathom evaluate tuned BASE TUNED --benchmark DIR`.

`evaluation/tuned.py` reads the questions, asks them and judges; `tuned_page.py` next to it makes the table,
`report.html` and `card.md`.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fathom.cli.evaluate import add_asking, add_running, add_texts
from fathom.cli.parser import Parser, chosen
from fathom.report.results import to_json

EXAMPLES = ("fathom evaluate tuned base expert --benchmark corpora/expert/benchmark",)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("base", metavar="BASE", help="the model before tuning")
    parser.add_argument(
        "tuned", metavar="TUNED", help="the model after tuning; BASE and TUNED may be NAME=MODEL, to name them"
    )
    questions = parser.add_argument_group("questions")
    questions.add_argument(
        "--benchmark",
        type=Path,
        metavar="DIR",
        required=True,
        help="a directory of question files (*.jsonl) in a corpus; the held-out text of that corpus is scored too",
    )
    add_asking(questions)
    questions.add_argument("--limit", type=int, help="for a trial run: ask only this many questions, drawn at random")
    add_texts(parser, own=True)
    add_running(parser)


def run(options: Namespace) -> int:
    """Score, store, print."""
    from fathom.evaluation.scoring import EvaluationSettings
    from fathom.evaluation.tuned import evaluate_pair
    from fathom.evaluation.tuned_page import show
    from fathom.kernels import use

    use(options.kernels, options.device)
    settings = chosen(EvaluationSettings, options)
    report = evaluate_pair((options.base, options.tuned), options.benchmark, settings)
    if options.json:
        print(to_json(report))
    else:
        show(report, options.out)
    return 0
