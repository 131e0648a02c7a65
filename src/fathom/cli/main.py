"""The command line: parse, call, print. A command is one decorated function; what it imports, it imports when run."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fathom._version import __version__
from fathom.errors import FathomError
from fathom.recipe import Recipe, RecipeError, describe, load_recipe

if TYPE_CHECKING:
    from fathom.models import FathomConfig

Action = Callable[["Parser", Sequence[str]], int]
COMMANDS: dict[str, tuple[str, Action]] = {}


class UsageError(FathomError):
    """A command line that means nothing."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all others here."""

    def error(self, message: str) -> NoReturn:
        """Complain without the usage, which `--help` prints."""
        raise UsageError(f"{message} ({self.prog} --help shows what there is)")


def command(summary: str) -> Callable[[Action], Action]:
    """Make a function `fathom NAME`; it gets a parser to add its arguments to, and the words to parse."""

    def register(action: Action) -> Action:
        COMMANDS[action.__name__] = (summary, action)
        return action

    return register


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if all went well, 1 if it failed, 2 if it was asked wrongly."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except FathomError as error:
        return _complain(error, error.exit_code)
    except FileNotFoundError as error:
        return _complain(error, 2)
    except KeyboardInterrupt:
        return _complain(Exception("interrupted"), 130)
    except BrokenPipeError:  # the reader of our output left
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, a directory that is a file, a place that may not be written
        where = f"{error.filename}: " if error.filename else ""
        return _complain(Exception(f"{where}{error.strerror or error}"), 1)


def _dispatch(words: Sequence[str]) -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {summary}" for name, (summary, _) in COMMANDS.items())
    parser = Parser(
        prog="fathom",
        usage="fathom COMMAND ...",
        description="Decoder language models whose depth does more work.",
        epilog=f"commands:\n{listing}\n\nfathom COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fathom {__version__}")
    parser.add_argument("command", help=argparse.SUPPRESS)
    name = parser.parse_args(words[:1]).command
    if name not in COMMANDS:
        raise UsageError(f"{name}: no such command; there are {', '.join(COMMANDS)}")
    summary, action = COMMANDS[name]
    description = summary[0].upper() + summary[1:] + "."
    # Raw, so that tables stay tables; abbreviations off, so that a new option never changes what an old script means.
    kind = argparse.RawDescriptionHelpFormatter
    return action(
        Parser(prog=f"fathom {name}", description=description, formatter_class=kind, allow_abbrev=False), words[1:]
    )


@command("train a recipe, or continue its run")
def train(parser: Parser, words: Sequence[str]) -> int:
    """`fathom train RECIPE [key=value ...]`."""
    _add_recipe(parser)
    parser.add_argument(
        "--run",
        "--out",  # torchrun takes --run for an option of its own
        type=Path,
        help="run directory (default: runs/ and the recipe's name); under torchrun write --out",
    )
    parser.add_argument("--new", action="store_true", help="refuse to continue a run that exists")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and what it costs, and stop")
    parser.add_argument("--json", action="store_true", help="print the result for a program")
    options = parser.parse_intermixed_args(words)
    recipe = load_recipe(options.recipe, options.overrides)
    if options.dry_run:
        return _dry_run(recipe, options.json)

    from fathom.training import train as run

    result = run(recipe, options.run or Path("runs") / Path(options.recipe).stem, resume=not options.new)
    evaluation = result.evaluation
    if os.environ.get("RANK", "0") != "0":
        return 0  # the first rank speaks for all
    if options.json:
        summary = {key: str(value) if isinstance(value, Path) else value for key, value in vars(result).items()}
        print(json.dumps({**summary, "evaluation": evaluation and evaluation.to_dict()}))
    elif evaluation is not None:
        print(
            f"{result.run_dir}: {result.step} steps, held-out loss {evaluation.loss:.4f}, "
            f"perplexity {evaluation.perplexity:.2f}, {evaluation.bits_per_byte:.4f} bits per byte"
        )
    return 0


@command("turn text into token shards")
def prepare(parser: Parser, words: Sequence[str]) -> int:
    """`fathom prepare INPUT ... --tokenizer T --out DIR`."""
    from fathom.data.prepare import prepare as call

    print(_call(call, parser, words, "inputs"))
    return 0


@command("write a run or a model as a Hugging Face directory")
def export(parser: Parser, words: Sequence[str]) -> int:
    """`fathom export RUN --to DIR`."""
    parser.add_argument("source", type=Path, help="a run, finished or not, or a model directory")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write; an earlier export goes")
    parser.add_argument(
        "--as",
        dest="form",
        default="fathom",
        choices=("fathom", "qwen3", "unrolled"),
        help="fathom: any mechanism, with its code; qwen3: a stock Qwen3, if every axis is at its first value; "
        "unrolled: a loop as the deeper stock Qwen3 that it equals (default: fathom)",
    )
    parser.add_argument("--json", action="store_true", help="print the result for a program")
    options = parser.parse_args(words)

    from transformers.utils import logging

    from fathom.checkpoints.export import export as write

    logging.disable_progress_bar()
    directory = write(options.source, options.to, form=options.form)
    print(json.dumps({"directory": str(directory), "form": options.form}) if options.json else directory)
    return 0


@command("show every mechanism and what it would add to a model")
def mechanisms(parser: Parser, words: Sequence[str]) -> int:
    """`fathom mechanisms [--config DIR|RECIPE]`."""
    parser.add_argument(
        "--config",
        metavar="MODEL",
        help="a checkpoint directory, a recipe file, or the name of one in recipes/ (default: Qwen3's default shape)",
    )
    parser.add_argument("--bytes-per-scalar", type=int, default=2, help="of cache and activations (default: 2, bf16)")
    parser.add_argument("--json", action="store_true", help="print the rows for a program")
    options = parser.parse_args(words)

    from fathom.cli.mechanisms import mechanism_rows, mechanism_table, vanilla_row

    config = _model_config(options.config)
    if options.json:
        rows = list(mechanism_rows(config, options.bytes_per_scalar))
        print(json.dumps({"vanilla": vanilla_row(config, options.bytes_per_scalar), "mechanisms": rows}))
        return 0
    from rich.console import Console

    Console().print(mechanism_table(config, options.bytes_per_scalar))
    return 0


def _model_config(name: str | None) -> FathomConfig:
    """The configuration that a directory, a recipe file or the name of a recipe describes."""
    from fathom.models import FathomConfig

    try:
        if name is None:
            return FathomConfig()
        if Path(name).is_dir():
            return FathomConfig.from_pretrained(name)
        recipe = Path(name) if Path(name).is_file() else Path("recipes") / f"{name}.yaml"
        if not recipe.is_file():
            raise UsageError(f"--config {name}: no such directory, recipe file or recipe in recipes/")
        return load_recipe(recipe).config()
    except (ValueError, OSError) as error:
        raise UsageError(f"--config {name}: {error}") from error


@command("compare mechanisms fairly: same tokens, same initial values, several seeds")
def compare(parser: Parser, words: Sequence[str]) -> int:
    """`fathom compare RECIPE --arms vanilla,depth_attention [key=value ...]`, or `fathom compare DIRECTORY`."""
    _add_recipe(parser)
    parser.add_argument(
        "--arms", help="MECHANISM or NAME=MECHANISM[;key=value...], comma between; the first is the control"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm (default: 3)")
    parser.add_argument(
        "--equal",
        choices=("tokens", "flops", "trips"),
        default="tokens",
        help="the budget arms share, in training: tokens, FLOPs, or tokens times their trips through the stack",
    )
    parser.add_argument(
        "--pairs", type=int, default=12, help="A B B A rounds when timing an arm; 0 for none (default: 12)"
    )
    parser.add_argument("--out", type=Path, help="directory (default: runs/ and the recipe's name, -compare)")
    parser.add_argument("--workers", type=int, default=1, help="processes on this machine; more may join from others")
    parser.add_argument("--threads", type=int, help="CPU threads of a worker (default: 1 if there are several)")
    parser.add_argument("--report", action="store_true", help="only write the report anew from what is finished")
    parser.add_argument(
        "--retry-failed", action="store_true", help="go on with runs that diverged; without it they stay left out"
    )
    parser.add_argument("--json", action="store_true", help="print the report for a program")
    options = parser.parse_intermixed_args(words)

    from fathom.cli.compare import run_compare

    return run_compare(options)


@command("continue a text, talk, or work through a file of prompts")
def generate(parser: Parser, words: Sequence[str]) -> int:
    """`fathom generate MODEL PROMPT`, `--chat`, or `--prompts FILE --out FILE`."""
    parser.add_argument("model", help="a model directory, a run, or a comparison (its best arm)")
    parser.add_argument("prompt", nargs="?", help="what to continue; without one a new document begins")
    parser.add_argument("--chat", action="store_true", help="a conversation on the terminal")
    parser.add_argument("--system", metavar="TEXT", help="how to answer, for --chat")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL: {"prompt": "..."} or {"messages": [...]}')
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSONL for --prompts; run again, it goes on")
    parser.add_argument("--batch-size", type=int, help="prompts of a file at once (default: 8 on a CPU, else 32)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens at most (default: 128)")
    own = "default: as the checkpoint says"
    parser.add_argument("--temperature", type=float, help=f"0 takes the likeliest token ({own}, or 0.8)")
    parser.add_argument("--top-k", type=int, help=f"draw from the k likeliest tokens; 0 for all ({own}, or 0)")
    parser.add_argument("--top-p", type=float, help=f"draw from so much probability ({own}, or 0.95)")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="any other option of transformers' GenerationConfig: min_p=0.05 num_beams=4 repetition_penalty=1.1 ...",
    )
    parser.add_argument("--seed", type=int, help="draw the same text every time")
    parser.add_argument("--max-trips", type=int, metavar="N", help="trips per token at most (default: all it may make)")
    parser.add_argument("--static-cache", action="store_true", help="reserve the cache for the whole text at once")
    parser.add_argument("--compile", action="store_true", help="compile decoding, with a static cache")
    _add_kvcache(parser)
    _add_opening(parser)
    parser.add_argument("--json", action="store_true", help="print text and speed for a program")
    options = parser.parse_args(words)

    from fathom.inference.generate import run_generate

    return run_generate(options)


@command("score checkpoints on lm-eval's tasks and on any text, with paired differences")
def evaluate(parser: Parser, words: Sequence[str]) -> int:
    """`fathom evaluate MODEL [MODEL ...] --tasks NAMES --perplexity FILES --kvcache METHODS`."""
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="[NAME=]MODEL",
        help="model directories, runs or comparisons; the first is what the others are held against",
    )
    parser.add_argument("--tasks", metavar="NAMES", help="lm-eval's tasks, groups and tags, comma between; * allowed")
    parser.add_argument("--task-data", type=Path, metavar="DIR", help="their documents, for work without a network")
    parser.add_argument("--num-fewshot", type=int, help="examples in the prompt (default: as the task says)")
    parser.add_argument("--apply-chat-template", action="store_true", help="put task prompts as messages")
    parser.add_argument(
        "--perplexity",
        nargs="+",
        metavar="[NAME=]INPUT",
        help="text, JSONL or Parquet files, directories, globs, hf:..., or prepared corpora; a name is a domain's",
    )
    parser.add_argument("--split", default="val", help="of corpora (default: val)")
    parser.add_argument("--text-field", default="text", help="of JSONL and Parquet (default: text)")
    parser.add_argument("--domain-field", help="the field that names the domain")
    parser.add_argument(
        "--context", type=int, help="tokens a prediction may see (default: the model's own; for text 2048 at most)"
    )
    parser.add_argument("--stride", type=int, help="tokens from window to window of text (default: the context)")
    parser.add_argument(
        "--max-trips", metavar="N[,N...]", help="score a model of several trips under each of these budgets"
    )
    _add_kvcache(parser, several=True)
    parser.add_argument(
        "--at", default="1x,2x,4x,8x", metavar="LENGTHS", help="windows read, for --kvcache (default: 1x,2x,4x,8x)"
    )
    parser.add_argument("--limit", type=int, help="documents of each task and domain; for trying out")
    parser.add_argument("--batch-size", type=int, help="rows at once (default: as many as fit; some on a CPU)")
    _add_opening(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep results here; run again, it goes on")
    parser.add_argument("--json", action="store_true", help="print the report for a program")
    options = parser.parse_args(words)

    from fathom.checkpoints.open import open_checkpoint
    from fathom.evaluation.scoring import run_evaluate
    from fathom.inference.generate import find_model

    return run_evaluate(options, find_model, open_checkpoint)


@command("see how deep a model looked: a page of its depth weights and of what it would say after every layer")
def lens(parser: Parser, words: Sequence[str]) -> int:
    """`fathom lens MODEL TEXT -o lens.html`."""
    parser.add_argument("model", help="an exported directory, a run, or any Qwen3")
    parser.add_argument("text", nargs="?", help="what to look at")
    parser.add_argument("--file", type=Path, metavar="FILE", help="look at a file's text instead")
    parser.add_argument("-o", "--out", type=Path, help="the page to write (default: lens.html, or none with --json)")
    parser.add_argument("--compare", metavar="MODEL", help="a second model of the same tokenizer, side by side")
    parser.add_argument("--max-tokens", type=int, default=2000, help="look at so many at most (default: 2000)")
    parser.add_argument("--top", type=int, default=5, help="predictions to keep after every layer (default: 5)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print the numbers for a program")
    options = parser.parse_args(words)

    from fathom.lens.look import run_lens

    return run_lens(options)


@command("serve a trained model to OpenAI's clients")
def serve(parser: Parser, words: Sequence[str]) -> int:
    """`fathom serve MODEL --port 8000`."""
    parser.add_argument("model", help="a model directory, a run, or a comparison (its best arm)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    parser.add_argument("--name", help="what clients call the model (default: the directory's name)")
    parser.add_argument(
        "--api-key", default=os.environ.get("FATHOM_API_KEY"), help="clients must send it (default: $FATHOM_API_KEY)"
    )
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 (default: auto, as stored)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    _add_kvcache(parser)
    parser.add_argument("--max-trips", type=int, metavar="N", help="trips per token at most, unless a request says so")
    parser.add_argument("--lens", action="store_true", help="offer the lens at /lens")
    parser.add_argument(
        "--grace", type=float, default=20.0, help="seconds to finish requests when told to stop (default: 20)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python files of the directory, for unknown architectures"
    )
    options = vars(parser.parse_args(words))
    try:
        from fathom.inference.server import serve as call
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'fathom-lm[serve]'") from error

    call(options.pop("model"), **options)
    return 0


LINEAGE = {
    "compare": ("a", "b"),
    "portrait": ("a",),
    "card": ("a",),
    "search": ("a",),
    "attack": ("a",),
    "commit": ("a",),
    "verify": ("statement", "a"),
    "calibrate": ("models",),
}


@command("tell whether one model's weights come from another's")
def lineage(parser: Parser, words: Sequence[str]) -> int:
    """`fathom lineage COMMAND ...`."""
    parser.usage = "fathom lineage COMMAND ..."
    parser.epilog = f"commands: {', '.join(LINEAGE)}\n\nfathom lineage COMMAND --help says more."
    parser.add_argument("command", help=argparse.SUPPRESS)
    name = parser.parse_args(words[:1]).command
    if name not in LINEAGE:
        raise UsageError(f"lineage {name}: no such command; there are {', '.join(LINEAGE)}")

    from fathom.cli import lineage as commands

    inner = Parser(prog=f"fathom lineage {name}", allow_abbrev=False)
    inner.add_argument("--json", action="store_true", help="print the result for a program")
    result: commands.Result = _call(getattr(commands, name), inner, words[1:], *LINEAGE[name], also=("json",))
    return result.show("--json" in words)


def _dry_run(recipe: Recipe, as_json: bool) -> int:
    from fathom.training.estimate import estimate

    cost = estimate(recipe)
    if as_json:
        print(json.dumps({"recipe": recipe.to_dict(), **cost.to_dict()}))
        return 0
    gib = 2**30
    print(recipe.to_yaml())
    rows = {
        "mechanism": cost.mechanism,
        "parameters": f"{cost.parameters:,}",
        "FLOPs per token": f"{cost.flops_per_token:,.0f} forward, {_training_multiple(cost.training_multiple)}",
        "cache per token": f"{cost.cache_bytes_per_token:,} bytes (bf16)",
        "tokens": f"{cost.tokens:,}",
        "FLOPs": f"{cost.training_flops:.3g}",
        "ranks": f"{cost.ranks}",
        "memory per rank": f"{cost.state_bytes / gib:.2f} GiB of weights, gradients and optimizer state, "
        f"and about {cost.activation_bytes / gib:.2f} GiB of activations",
    }
    if cost.compressions:
        rows["compressions"] = f"{cost.compressions} of each row's memory, {recipe.kvcache.method}"
    for name, value in rows.items():
        print(f"{name:<16} {value}")
    return 0


def _training_multiple(multiple: tuple[float, float, float]) -> str:
    least, mean, most = (f"{value:.3g}" for value in multiple)
    drawn = "" if least == most else f" ({least} to {most}, as rounds and trips are drawn)"
    return f"three times {mean} x vanilla{drawn} in training"


def _add_kvcache(parser: Parser, several: bool = False) -> None:
    """Which cache a model gets, and when it is compressed."""
    words = "METHOD[,METHOD...]" if several else "METHOD"
    parser.add_argument(
        "--kvcache",
        metavar=words,
        help="freqkv, average, drop, sinks, snapkv, key_norm: hold no more than a window; full: everything"
        + ("; compare these caches" if several else " (default)"),
    )
    tuned = "default: what the checkpoint was tuned for"
    parser.add_argument("--kvcache-window", type=int, metavar="N", help=f"entries that a cache may hold ({tuned})")
    parser.add_argument("--kvcache-sinks", type=int, metavar="S", help=f"never compressed ({tuned}, or 4)")
    parser.add_argument(
        "--kvcache-ratio", type=float, metavar="R", help=f"share that a compression leaves ({tuned}, or 0.5)"
    )


def _add_opening(parser: Parser) -> None:
    """How a model is opened."""
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 (default: auto, as stored)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python files of the directory, for unknown architectures"
    )


def _add_recipe(parser: Parser) -> None:
    """The arguments of a command that takes a recipe, and every key of one under `--help`."""
    parser.add_argument("recipe", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    if parser.epilog is None:
        lines = [f"  {k} = {default}  ({allowed})\n      {text}" for k, allowed, default, text in describe()]
        parser.epilog = "recipe keys:\n" + "\n".join(lines)


def _call(
    function: Callable[..., Any], parser: Parser, words: Sequence[str], *positional: str, also: Sequence[str] = ()
) -> Any:
    """Call a function whose typed, documented parameters are the command's options; some are words without a flag.

    Args:
        function: What to call.
        parser: Gets an argument for each parameter.
        words: To parse.
        positional: Parameters given without a flag, in this order; a sequence takes one word or more.
        also: Arguments that the parser has already and the function does not take.
    """
    import jsonargparse
    from docstring_parser import parse

    documented = parse(function.__doc__ or "")
    parser.description = documented.description
    help_ = {p.arg_name: (p.description or "").replace("\n", " ") for p in documented.params}
    hints = typing.get_type_hints(function)
    types = jsonargparse.ArgumentParser(exit_on_error=False)
    for name, parameter in inspect.signature(function).parameters.items():
        text = help_.get(name, "").replace("%", "%%")
        several = getattr(typing.get_origin(hints[name]), "__name__", "") in ("Sequence", "list")
        needed = parameter.default is inspect.Parameter.empty
        settings: dict[str, Any] = {"help": text, "default": None if needed else parameter.default}
        flag = "--" + name.replace("_", "-")
        if name in positional:
            many = "+" if several else None if needed else "?"
            metavar = name.upper().removesuffix("S") if several else name.upper()
            parser.add_argument(name, nargs=many, metavar=metavar, **settings)
        elif hints[name] is bool:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, required=needed, nargs="+" if several else None, **settings)
        types.add_argument("--" + name, type=hints[name])
    given = {name: value for name, value in vars(parser.parse_args(words)).items() if name not in also}
    for name, value in given.items():
        try:
            given[name] = getattr(types.parse_object({name: value}), name) if isinstance(value, str) else value
        except (jsonargparse.ArgumentError, TypeError, ValueError):
            raise RecipeError(f"--{name.replace('_', '-')} {value}: not a value of type {hints[name]}") from None
    return function(**given)


def _complain(error: BaseException, code: int) -> int:
    print(f"fathom: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
