"""The command line: find the command's file, parse, run, and report the caller's errors in one line.

`errors.py` has the exit codes of Fathom's errors; those of Ctrl-C and of system errors are here. The other exit codes
are what `run` of a command returns, such as that of a stopped run in `train.py`. A command imports torch and
transformers when it runs, if at all: `corpus`, `prepare` and `lineage` need neither.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import io
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType

from fathom._version import __version__
from fathom.cli.parser import Parser, examples
from fathom.errors import FathomError, SettingsError

COMMANDS = {
    "train": "train a recipe, or continue its run",
    "prepare": "turn text into token shards",
    "corpus": "turn documents into a deduplicated, decontaminated, mixed corpus with a card",
    "corpus audit": "search any text for the questions of benchmarks, and print what the search would miss",
    "report": "write a page for a run, or for a folder of runs",
    "recipes": "list the recipes that come with Fathom, or copy one",
    "deepen": "add mechanisms to a pretrained model without changing its output, and write a recipe to train it",
    "try": "add a mechanism to a model, train it and a control, and compare the two, in one command",
    "export": "write a run or a model as a Hugging Face directory",
    "check": "compare Fathom with transformers' own class on a model's configuration",
    "mechanisms": "list the mechanisms, and what each would add to a model",
    "compare": "compare mechanisms fairly: same tokens, same initial values, several seeds",
    "ladder": "compare mechanisms at several model sizes: the compute that would match them, and its trend",
    "generate": "generate from a prompt, or from a file of prompts",
    "chat": "talk with a model in the terminal",
    "evaluate": "score checkpoints on lm-eval's tasks and on any text, with paired differences",
    "evaluate deepened": "report the effect of a mechanism: a base, its deepened model, and a control",
    "evaluate tuned": "compare a base with a tuned model on the questions and the held-out text of its corpus",
    "evaluate samples": "paired differences of lm-eval runs made elsewhere, from their --log_samples files",
    "evaluate caches": "compare KV caches: loss by length, questions, bytes and time",
    "lens": "write a page with a model's depth weights and its predictions after every layer",
    "serve": "serve a model with an OpenAI-compatible API",
    "new": "start a mixer, a model family or a cache method in a checkout of Fathom",
    "lineage": "test whether one model's weights come from another's",
}
"""Commands and their summaries. Each is a file in this folder with `add(parser)` and `run(options)`."""
TERMINAL = "NO_COLOR=1 turns colours off, and COLUMNS=80 sets the width."
PLACES = {
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}
"""System errors about an unusable path: exit code 2. All others, such as a full disk, give 1."""
SYSTEM = re.compile(r"I/O error|\(os error \d+\)$")
"""The end of a system error of safetensors or of tokenizers, which raises a bare `Exception`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 if all went well, 1 if it failed, 2 if the request was wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _print_anything()
    try:
        return _dispatch(words)
    except FathomError as error:
        return _complain(error, error.exit_code)
    except KeyboardInterrupt:
        return _complain(Exception("interrupted"), 130)
    except BrokenPipeError:  # the reader of our output closed the pipe
        sys.stderr.close()
        return 1
    except FileNotFoundError as error:
        if not _named(error.filename, words):
            raise  # the user did not name this file: a bug
        return _complain(Exception(f"{error.filename}: {error.strerror}"), 2)
    except OSError as error:  # a file where a directory is needed, no permission to write; a full disk
        place = error.filename2 or error.filename  # the destination of a copy
        where = f"{place}: " if place else ""
        return _complain(Exception(f"{where}{error.strerror or error}"), 2 if error.errno in PLACES else 1)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        return _complain(Exception("not enough memory"), 1)
    except Exception as error:
        if not SYSTEM.search(str(error)) or type(error).__name__ not in ("SafetensorError", "Exception"):
            raise
        return _complain(error, 1)  # a full disk; safetensors is not imported here, to keep --help fast


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs that writes `\\uXXXX`, as JSON does."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _print_anything() -> None:
    """Print characters that the output's encoding lacks, as in a pipe on Windows, as escapes, instead of failing."""
    codecs.register_error("fathom", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="fathom")


@contextmanager
def _plain_warnings(parser: Parser) -> Iterator[None]:
    """Show each warning once, in one line without a file name, as errors are shown."""
    before, shown = warnings.formatwarning, set[str]()

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        text = parser.in_flags(" ".join(str(message).split()))
        repeated = text in shown
        shown.add(text)
        return "" if repeated else f"fathom: warning: {text}\n"

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before


def _named(file: object, words: Sequence[str]) -> bool:
    """Whether a path is named on the command line, or is a parent folder of a named path."""
    if not isinstance(file, str):
        return False
    named = [Path(place).absolute() for word in words for place in (word, word.partition("=")[2]) if place]
    return any(Path(file).absolute() in (place, *place.parents) for place in named)


def module_of(name: str) -> str:
    """The module of a command."""
    return f"fathom.cli.{name.replace(' ', '_')}"


def _dispatch(words: Sequence[str]) -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="fathom",
        usage="fathom COMMAND ...",
        description="Decoder language models whose depth does more work.",
        epilog=f"commands:\n{listing}\n\nfathom COMMAND --help describes a command, with examples. {TERMINAL}",
    )
    parser.add_argument("--version", action="version", version=f"fathom {__version__}")
    parser.add_argument("command", help=argparse.SUPPRESS)
    if not words:
        parser.print_help()
        return 0
    parser.refuse_unknown(words[:1])
    name = parser.parse_args(words[:1]).command
    name, rest = (both, words[2:]) if (both := " ".join(words[:2])) in COMMANDS else (name, words[1:])
    if name not in COMMANDS:
        close = get_close_matches(name.lower(), COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        raise SettingsError(f"{name}: no such command; {hint}")
    summary = COMMANDS[name]
    inner = Parser(prog=f"fathom {name}", description=summary[0].upper() + summary[1:] + ".")
    inner.elsewhere = lambda flag: _command_with(flag, name)
    with _plain_warnings(inner):
        command = _command(name)
        command.add(inner)
        inner.epilog = "\n\n".join(filter(None, [examples(getattr(command, "EXAMPLES", ())), inner.epilog]))
        try:
            return int(command.run(inner.parse(rest)))
        except FathomError as error:
            error.args = (inner.in_flags(str(error)),)
            raise


def _command(name: str) -> ModuleType:
    return import_module(module_of(name))


def _command_with(flag: str, name: str) -> str | None:
    """The subcommand of `name` that accepts `flag`, such as `fathom evaluate caches`; None if no subcommand accepts
    it."""
    for other in (other for other in COMMANDS if other.startswith(f"{name} ")):
        parser = Parser(prog=other)
        _command(other).add(parser)
        if flag in parser._option_string_actions:
            return f"fathom {other}"
    return None


def _complain(error: BaseException, code: int) -> int:
    print(f"fathom: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return code
