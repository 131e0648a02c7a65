"""`fathom evaluate MODEL [MODEL ...] --tasks NAMES --perplexity FILES`.

`evaluation/scoring.py` runs the command: it opens models, stores results (`--out`) and records tasks that fail, for
which `run` below returns the exit code 1. Next to it, `tasks.py` finds tasks and their documents, `harness.py` runs
lm-eval, `perplexity.py` reads texts and scores them, and `paired.py` computes differences.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fathom.cli.following import following, using
from fathom.cli.parser import CACHES, Group, Parser, add_kernels, add_kvcache, add_opening, chosen
from fathom.data.sources import split_name
from fathom.report.results import to_json

EXAMPLES = (
    "fathom evaluate runs/a runs/b --perplexity data/mine",
    "fathom evaluate my-model --tasks arc_easy,hellaswag --limit 100",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    add_models(parser)
    add_tasks(parser)
    add_texts(parser)
    parser.add_argument(
        "--max-trips",
        metavar="N[,N...]",
        help="score a looped or pondering model once for each of these maximum numbers of iterations",
    )
    caches = parser.add_argument_group("KV caches")
    add_kvcache(caches, f"to compare on --tasks: full, {CACHES}")
    add_limit(parser)
    add_running(parser)
    parser.epilog = "see also: fathom evaluate deepened, tuned, samples and caches"


def add_models(parser: Parser) -> None:
    """Add the positional argument for one or more models; all are compared with the first."""
    help = "model directories, runs or comparisons; all others are compared with the first; NAME=MODEL names one"
    parser.add_argument("checkpoints", nargs="+", metavar="MODEL", help=help)


def add_tasks(parser: Parser) -> None:
    """Add lm-eval's tasks."""
    tasks = parser.add_argument_group("tasks of lm-eval")
    tasks.add_argument(
        "--tasks",
        metavar="NAMES",
        help="comma-separated lm-eval tasks, groups, tags or patterns; choice:FILE or cloze:FILE for your own JSONL",
    )
    tasks.add_argument(
        "--include", type=Path, metavar="PATH", help="a folder of your own task definitions in lm-eval's YAML format"
    )
    tasks.add_argument(
        "--task-data", type=Path, metavar="DIR", help="a folder with the tasks' documents, for use without a network"
    )
    add_asking(tasks)
    parser.needs("--tasks", "--include", "--task-data", "--num-fewshot", "--apply-chat-template")


def add_asking(parser: Group) -> None:
    """Add how questions are put."""
    parser.add_argument("--num-fewshot", type=int, help="number of few-shot examples (default: the task's)")
    parser.add_argument(
        "--apply-chat-template", action="store_true", help="format prompts with the model's chat template"
    )


def add_texts(parser: Parser, windows: bool = True, own: bool = False) -> None:
    """Add the options for held-out text; if `windows` is set, also those that cut a long text into windows. If `own` is
    set, the command also has a text of its own, so these options need no `--perplexity`."""
    text = parser.add_argument_group("held-out text")
    text.add_argument(
        "--perplexity",
        nargs="+",
        metavar="[NAME=]INPUT",
        help="held-out text to score: text, JSONL or Parquet files, directories, globs, hf:..., or prepared "
        "corpora; NAME= names the domain; a text file is one document",
    )
    text.add_argument("--split", default="val", help="which split of prepared corpora to score (default: val)")
    text.add_argument(
        "--text-field", default="text", help="JSON field or Parquet column that holds the text (default: text)"
    )
    text.add_argument("--domain-field", help="JSON field or Parquet column that names the domain of a document")
    if windows:
        text.add_argument(
            "--context", type=int, help="context length in tokens (default: the model's, but at most 2048 for text)"
        )
        text.add_argument(
            "--stride",
            type=int,
            help="tokens from the start of one window of text to the start of the next (default: the context)",
        )
    if not own:
        parser.needs("--perplexity", "--split", "--text-field", "--domain-field", *(["--stride"] if windows else []))


def add_limit(parser: Parser) -> None:
    """Add `--limit`, the maximum number of documents of each task and text."""
    parser.add_argument(
        "--limit",
        type=int,
        help="for a trial run: score only this many documents of each --tasks task and --perplexity text",
    )


def add_running(parser: Parser, batches: bool = True) -> None:
    """Add the options that say how models are opened and where results are stored."""
    opening = parser.add_argument_group("how the models are opened")
    add_opening(opening)
    add_kernels(opening)
    if batches:
        opening.add_argument(
            "--batch-size", type=int, help="batch size (default: as large as memory allows; on a CPU, a fixed size)"
        )
    parser.add_argument("--out", type=Path, metavar="DIR", help="store results here; the same command resumes")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def run(options: Namespace) -> int:
    """Score, store, print."""
    from fathom.checkpoints.find import find_model
    from fathom.evaluation.scoring import EvaluationSettings, show
    from fathom.evaluation.scoring import run as score
    from fathom.kernels import use

    use(options.kernels, options.device)
    _, report = score(options.checkpoints, chosen(EvaluationSettings, options))
    if options.json:
        print(to_json(report))
    else:
        show(report, options.out)
        if options.perplexity:
            _, name = split_name(options.checkpoints[-1])
            print("\n" + following(using(name, find_model(name))))
    # A failed task was reported when it failed; the other results are printed and stored.
    return int(any(entry.failed for entry in report.checkpoints.values()))
