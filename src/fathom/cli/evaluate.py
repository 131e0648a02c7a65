"""`fathom evaluate MODEL [MODEL ...] --tasks NAMES --perplexity FILES --kvcache METHODS`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fathom.checkpoints.find import find_model
from fathom.cli.following import following, using
from fathom.cli.parser import Parser, add_kernels, add_kvcache, add_opening, chosen
from fathom.data.sources import split_name
from fathom.errors import SettingsError
from fathom.report.results import to_json

WINDOWS = "1x,2x,4x,8x"

EXAMPLES = (
    "fathom evaluate runs/a runs/b --perplexity data/mine",
    "fathom evaluate my-model --tasks arc_easy,hellaswag --limit 100",
    "fathom evaluate my-model --kvcache full,snapkv --perplexity book.txt",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="[NAME=]MODEL",
        help="model directories, runs or comparisons; all are compared with the first",
    )
    tasks = parser.add_argument_group("tasks of lm-eval")
    tasks.add_argument(
        "--tasks",
        metavar="NAMES",
        help=(
            "comma-separated lm-eval tasks, groups, tags or patterns; choice:FILE or cloze:FILE for your own JSONL; "
            "with --kvcache, RULER's synthetic tasks (ruler: all)"
        ),
    )
    tasks.add_argument("--include", type=Path, metavar="PATH", help="a folder of your own tasks in lm-eval's YAML")
    tasks.add_argument(
        "--task-data", type=Path, metavar="DIR", help="a folder with the tasks' documents, for use without a network"
    )
    tasks.add_argument("--num-fewshot", type=int, help="few-shot examples (default: the task's)")
    tasks.add_argument("--apply-chat-template", action="store_true", help="apply the chat template to prompts")
    text = parser.add_argument_group("held-out text")
    text.add_argument(
        "--perplexity",
        nargs="+",
        metavar="[NAME=]INPUT",
        help="text, JSONL or Parquet files, directories, globs, hf:..., or prepared corpora; NAME= names the domain",
    )
    text.add_argument("--split", default="val", help="split of prepared corpora (default: val)")
    text.add_argument("--text-field", default="text", help="field of JSONL and Parquet with the text (default: text)")
    text.add_argument("--domain-field", help="the field that names the domain")
    text.add_argument(
        "--context", type=int, help="context length in tokens (default: the model's; for text at most 2048)"
    )
    text.add_argument(
        "--stride", type=int, help="tokens between the starts of two windows of text (default: the context)"
    )
    compared = parser.add_argument_group("reports on one mechanism, or on a tuned model")
    compared.add_argument(
        "--deepened",
        action="store_true",
        help=(
            "report the effect of a mechanism: the checkpoints are BASE DEEPER CONTROL, and the control had the same "
            "training"
        ),
    )
    compared.add_argument(
        "--benchmark",
        type=Path,
        metavar="DIR",
        help=(
            "compare a base with a tuned model: a directory of questions (*.jsonl); the held-out text of its corpus "
            "is scored too"
        ),
    )
    compared.add_argument(
        "--max-trips", metavar="N[,N...]", help="score a recurrent model with each of these limits on its iterations"
    )
    caches = parser.add_argument_group("KV caches")
    add_kvcache(caches, several=True)
    caches.add_argument("--at", metavar="LENGTHS", help=f"lengths for --kvcache, in windows (default: {WINDOWS})")
    caches.add_argument("--questions", type=int, metavar="N", help="questions per cache in total (default: 300)")
    caches.add_argument("--compressions", metavar="LIST", help="compressions before an answer (default: 1,2,4)")
    caches.add_argument(
        "--needles",
        choices=["tokens", "natural"],
        help=(
            "kind of needles: random tokens (default), or sentences in the text of --perplexity with questions in words"
        ),
    )
    caches.add_argument("--no-needles", action="store_true", help="skip the needles")
    opening = parser.add_argument_group("how the models are opened")
    add_opening(opening)
    add_kernels(opening)
    opening.add_argument(
        "--batch-size", type=int, help="batch size (default: as large as memory allows; fixed on a CPU)"
    )
    parser.add_argument(
        "--limit",
        type=int,
        help="for a trial: score this many documents of each --tasks task and --perplexity text, or with --benchmark "
        "this many questions, drawn at random",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="store results here; the same command resumes")
    parser.add_argument("--json", action="store_true", help="print the report for a program")


def run(options: Namespace) -> int:
    """Score, store, print."""
    from fathom.evaluation.caches.evaluate import ask, evaluate_caches
    from fathom.evaluation.caches.page import show as show_caches
    from fathom.evaluation.deepened import compare, require_three
    from fathom.evaluation.pair_page import show as show_pair
    from fathom.evaluation.pairs import evaluate_pair
    from fathom.evaluation.scoring import EvaluationSettings, show
    from fathom.evaluation.scoring import run as score
    from fathom.kernels import use
    from fathom.kvcache.policy import CacheOptions

    use(options.kernels, options.device)
    settings = chosen(EvaluationSettings, options)
    schedule = CacheOptions.of(options)
    alone = [f"--kvcache-{name} {value}" for name, value in schedule.given().items()]
    for name in ("at", "questions", "compressions", "needles"):
        if getattr(options, name) is not None:
            alone.append(f"--{name} {getattr(options, name)}")
    alone += ["--no-needles"] if options.no_needles else []
    if not options.kvcache and alone:
        raise SettingsError(f"{alone[0]} needs --kvcache METHODS")
    if options.needles and options.no_needles:
        raise SettingsError("--needles and --no-needles exclude each other")
    for name in ("benchmark", "deepened"):
        if options.kvcache and getattr(options, name):
            raise SettingsError(f"--{name} and --kvcache exclude each other")
    if options.benchmark is not None:
        pair = evaluate_pair(options.checkpoints, options.benchmark, settings)
        if options.json:
            print(to_json(pair))
        else:
            show_pair(pair, options.out)
        return 0
    if options.kvcache:
        asked = ask(
            options.kvcache,
            schedule,
            options.at or WINDOWS,
            questions=options.questions,
            compressions=options.compressions,
            needles=None if options.no_needles else options.needles or "tokens",
            tasks=options.tasks,
        )
        caches = evaluate_caches(options.checkpoints, settings, asked)
        if options.json:
            print(to_json(caches))
        else:
            show_caches(caches, options.out)
        return 0
    if options.deepened:
        require_three(options.checkpoints)
    checkpoints, report = score(options.checkpoints, settings)
    deepened = compare(checkpoints, options.out) if options.deepened else None
    if options.json:
        print(to_json(report if deepened is None else {**vars(report), "deepened": deepened}))
    else:
        show(report, options.out)
        print("".join(f"\n{sentence}" for sentence in ([] if deepened is None else deepened.sentences)))
        if options.perplexity:
            _, name = split_name(options.checkpoints[1 if options.deepened else -1])
            print(following(using(name, find_model(name))))
    # A failed task was reported when it failed; the other results are printed and stored.
    return int(any(entry.failed for entry in report.checkpoints.values()))
