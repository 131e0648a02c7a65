"""`fathom evaluate caches MODEL [MODEL ...] --kvcache METHODS`.

`evaluation/caches/evaluate.py` runs the command; `page.py` next to it makes the tables and the verdict. `fathom
evaluate --tasks NAMES --kvcache METHODS` is `evaluation/scoring.py`.
"""

from __future__ import annotations

from argparse import Namespace

from fathom.cli.evaluate import add_models, add_running, add_texts
from fathom.cli.parser import CACHES, Parser, add_kvcache, chosen
from fathom.report.results import to_json

WINDOWS = "1x,2x,4x,8x"

EXAMPLES = ("fathom evaluate caches my-model --kvcache full,snapkv --kvcache-window 512",)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    add_models(parser)
    caches = parser.add_argument_group("KV caches")
    add_kvcache(caches, f"to compare: full, full_static, full_fp8, {CACHES}", required=True)
    caches.add_argument(
        "--at",
        metavar="LENGTHS",
        default=WINDOWS,
        help=f"lengths of text to score, in multiples of the cache's window (default: {WINDOWS})",
    )
    asked = parser.add_argument_group("questions")
    asked.add_argument(
        "--tasks", metavar="NAMES", help="comma-separated synthetic tasks of RULER to ask; ruler means all of them"
    )
    asked.add_argument(
        "--questions", type=int, metavar="N", help="total number of questions for each cache (default: 300)"
    )
    asked.add_argument(
        "--compressions",
        metavar="LIST",
        help="numbers of compressions that the cache goes through before an answer (default: 1,2,4)",
    )
    asked.add_argument(
        "--needles",
        choices=["tokens", "natural"],
        help=(
            "kind of needles, facts that are planted in a text and asked for later: tokens (default) are random "
            "tokens; natural are sentences in the text of --perplexity, with questions in words"
        ),
    )
    asked.add_argument("--no-needles", action="store_true", help="do not run the needle retrieval test")
    add_texts(parser, windows=False)
    parser.add_argument(
        "--limit", type=int, help="for a trial run: score only this many documents of each --perplexity text"
    )
    add_running(parser, batches=False)
    parser.mode("--no-needles", "skips them", "--needles")


def run(options: Namespace) -> int:
    """Score, store, print."""
    from fathom.evaluation.caches.evaluate import ask, evaluate_caches
    from fathom.evaluation.caches.page import show
    from fathom.evaluation.scoring import EvaluationSettings
    from fathom.kernels import use
    from fathom.kvcache.policy import CacheOptions

    use(options.kernels, options.device)
    asked = ask(
        options.kvcache,
        CacheOptions.of(options),
        options.at,
        questions=options.questions,
        compressions=options.compressions,
        needles=None if options.no_needles else options.needles or "tokens",
        tasks=options.tasks,
    )
    named = {**vars(options), "tasks": None}  # here the tasks of `ask`
    report = evaluate_caches(options.checkpoints, chosen(EvaluationSettings, Namespace(**named)), asked)
    if options.json:
        print(to_json(report))
    else:
        show(report, options.out)
    return 0
