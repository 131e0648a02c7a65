"""`fathom generate MODEL PROMPT`, or `--prompts FILE [--out FILE]`.

`inference/settings.py` combines the options with `generation_config.json`, `inference/generate.py` generates and prints
the speed line, `inference/prompt_file.py` answers a file of prompts and resumes, and `kvcache/policy.py` chooses the
cache of `--kvcache`. If all prompts of a file fail, `_report` below returns the exit code 1.
"""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.cli.parser import Parser, add_control_tokens, add_kernels, add_kvcache, add_opening, add_speculate, chosen
from fathom.errors import SettingsError
from fathom.report.results import to_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fathom.inference.prompt_file import FileSummary
    from fathom.inference.settings import Sampling

EXAMPLES = (
    'fathom generate runs/mine "It was" --max-new-tokens 50',
    "fathom generate runs/mine --prompts prompts.jsonl --out answers.jsonl",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", help="a model directory, a run, or a comparison (its best run)")
    parser.add_argument(
        "prompt",
        nargs="?",
        help="the prompt; - or a pipe reads it from standard input; without a prompt the model begins a new document",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSONL file with a prompt on each line: {"prompt": "..."} or {"messages": [...]}',
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSONL file for the outputs of --prompts (default: print them); the same command resumes",
    )
    parser.add_argument("--batch-size", type=int, help="batch size for --prompts (default: 8 on a CPU, else 32)")
    add_sampling(parser)
    parser.add_argument(
        "--compile", action="store_true", help="compile decoding with torch.compile, with a static KV cache"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    parser.needs("--prompts", "--out", "--batch-size", "--allow-control-tokens")


def add_sampling(parser: Parser) -> None:
    """Add the options that `ready` reads: sampling, the cache, and how the model is opened."""
    parser.add_argument("--max-new-tokens", type=int, default=128, help="maximum new tokens (default: 128)")
    own = "default: the checkpoint's"
    parser.add_argument("--temperature", type=float, help=f"temperature; 0 is greedy ({own}, or 0.8)")
    parser.add_argument("--top-k", type=int, help=f"sample from the k likeliest tokens; 0 for all ({own}, or 0)")
    parser.add_argument(
        "--top-p", type=float, help=f"sample from the likeliest tokens with this total probability ({own}, or 0.95)"
    )
    parser.add_argument(
        "--set",
        dest="options",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="other options of transformers' GenerationConfig, such as min_p=0.05 num_beams=4 repetition_penalty=1.1",
    )
    parser.add_argument("--seed", type=int, help="random seed, for reproducible samples")
    parser.add_argument(
        "--max-trips", type=int, metavar="N", help="maximum loop iterations per token (default: the model's)"
    )
    add_speculate(parser)
    add_control_tokens(parser)
    add_kvcache(parser)
    add_opening(parser)
    add_kernels(parser)
    parser.set_defaults(compile=False)


def ready(options: Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Sampling]:
    """The model, its tokenizer and the sampling settings; impossible options are refused before the model is loaded."""
    from fathom.checkpoints.open import Opening
    from fathom.inference.generate import check_drafts
    from fathom.inference.settings import Sampling, read_options
    from fathom.iterations import check_chunks, check_trips
    from fathom.kernels import use
    from fathom.kvcache.policy import CacheOptions, choose

    sampling = Sampling(
        options.max_new_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        options.seed,
        read_options(options.options),
        options.compile,
        allow_control=options.allow_control_tokens,
        speculate=options.speculate,
    )
    use(options.kernels, options.device)
    model, tokenizer = chosen(Opening, options).open(options.model)
    check_trips(model, options.max_trips)
    check_chunks(model, sampling.options.get("prefill_chunk_size", model.generation_config.prefill_chunk_size))
    check_drafts(model, options.speculate, options.max_trips)
    memory = choose(model, options.kvcache, CacheOptions.of(options), static=options.compile)
    return model, tokenizer, replace(sampling, memory=memory, max_trips=options.max_trips)


def run(options: Namespace) -> int:
    """Continue a prompt, or answer a file of prompts; the decoding speed is printed to standard error."""
    from fathom.inference.generate import generate, report_speed
    from fathom.inference.prompt_file import check_files, generate_file

    _check(options)
    prompt = "" if options.prompts is not None else prompt_of(options.prompt)
    if options.prompts is not None:
        check_files(options.prompts, options.out)
    model, tokenizer, sampling = ready(options)
    if options.prompts is not None:
        done = generate_file(model, tokenizer, options.prompts, options.out, sampling, options.batch_size)
        return _report(done, options)
    if options.json:
        made = generate(model, tokenizer, prompt, sampling)
        print(json.dumps({"prompt": prompt, **vars(made), "tokens_per_second": made.tokens_per_second}))
    else:
        to_terminal(prompt)
        try:
            made = generate(model, tokenizer, prompt, sampling, to_terminal)
        finally:  # messages start on a line of their own
            print(flush=True)
    report_speed(made.tokens, made.seconds, made.trips, made.acceptance)
    return 0


def _report(summary: FileSummary, options: Namespace) -> int:
    """Print how many prompts of a file were answered and how fast; returns the exit code."""
    from fathom.inference.generate import report_speed

    report_speed(summary.tokens, summary.seconds)
    prompts, errors = summary.prompts, summary.errors
    told = f"{prompts - errors} completions" + (f", {errors} errors" if errors else "")
    if options.out is None:
        print(told, file=sys.stderr)
    else:
        print(to_json(summary) if options.json else f"{options.out}: {told}")
    return 1 if prompts and errors == prompts else 0


def _check(options: Namespace) -> None:
    """Reject contradictory options before anything is loaded."""
    if options.prompt is not None and options.prompts is not None:
        raise SettingsError("a prompt and --prompts FILE exclude each other")
    if options.json and options.prompts is not None and options.out is None:
        raise SettingsError("--json with --prompts needs --out, because answers and summary would both be printed")
    if not_text(options.prompt):
        raise SettingsError("the prompt is not UTF-8")
    if options.batch_size is not None and options.batch_size < 1:
        raise SettingsError(f"--batch-size {options.batch_size}: allowed: 1 or more")
    if options.weights != "stored" and options.compile:
        raise SettingsError(f"--weights {options.weights} does not work with --compile")


def not_text(word: str | None) -> bool:
    """Whether a command-line argument contains undecodable bytes."""
    return any("\ud800" <= letter <= "\udfff" for letter in word or "")


def to_terminal(text: str) -> None:
    """Print without buffering."""
    sys.stdout.write(text)
    sys.stdout.flush()


def prompt_of(word: str | None) -> str:
    """The prompt: the argument, or all of standard input if the argument is `-`, or is missing and input is a pipe or
    file."""
    if word is not None and word != "-":
        return word
    if word is None and not _fed():
        return ""
    if sys.stdin is None:
        raise SettingsError("the prompt - stands for standard input, which is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SettingsError(f"standard input is not UTF-8 (byte {error.start})") from None


def _fed() -> bool:
    """Whether standard input is a pipe or a file, not a terminal, closed or the null device."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, io.UnsupportedOperation, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
