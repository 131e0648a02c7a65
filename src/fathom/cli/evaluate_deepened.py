"""`fathom evaluate deepened BASE DEEPER CONTROL --tasks NAMES --perplexity FILES`.

`evaluation/deepened.py` writes the sentences and decides which differences count; `evaluation/paired.py` has the
intervals over documents.
"""

from __future__ import annotations

from argparse import Namespace

from fathom.cli.evaluate import add_limit, add_running, add_tasks, add_texts
from fathom.cli.following import following, using
from fathom.cli.parser import Parser, chosen
from fathom.data.sources import split_name
from fathom.report.results import to_json

EXAMPLES = ("fathom evaluate deepened base deep-healed deep-control --perplexity data",)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("base", metavar="BASE", help="the original model, before it was deepened")
    parser.add_argument("deeper", metavar="DEEPER", help="the deepened model, after training")
    parser.add_argument(
        "control",
        metavar="CONTROL",
        help="BASE after the same training as DEEPER, without the mechanism; all three may be NAME=MODEL, to name them",
    )
    add_tasks(parser)
    add_texts(parser)
    add_limit(parser)
    add_running(parser)


def run(options: Namespace) -> int:
    """Score, store, print."""
    from fathom.checkpoints.find import find_model
    from fathom.evaluation.deepened import compare
    from fathom.evaluation.scoring import EvaluationSettings, show
    from fathom.evaluation.scoring import run as score
    from fathom.kernels import use

    use(options.kernels, options.device)
    models = (options.base, options.deeper, options.control)
    checkpoints, report = score(models, chosen(EvaluationSettings, options))
    deepened = compare(checkpoints, options.out)
    if options.json:
        print(to_json({**vars(report), "deepened": deepened}))
    else:
        show(report, options.out)
        print("".join(f"\n{sentence}" for sentence in deepened.sentences))
        if options.perplexity:
            _, name = split_name(options.deeper)
            print(following(using(name, find_model(name))))
    return int(any(entry.failed for entry in report.checkpoints.values()))
