"""`fathom chat MODEL`: a conversation in the terminal, or over a pipe.

`inference/conversation.py` answers the lines: it has commands such as `/reset` and `/set`, and keeps an answer that
Ctrl-C stops. `wrapping.py` breaks lines between words. The options of sampling are in `cli/generate.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator

from fathom.cli.generate import add_sampling, not_text, ready, to_terminal
from fathom.cli.parser import Parser
from fathom.cli.wrapping import Wrapped
from fathom.errors import SettingsError
from fathom.report.tables import line_width

EXAMPLES = ('fathom chat my-model --system "Answer briefly." --temperature 0.7',)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", help="a model directory, a run, or a comparison (its best run) with a chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser)


def run(options: Namespace) -> int:
    """Answer each line of standard input; the decoding speed is printed to standard error."""
    from fathom.inference.conversation import chat

    if not_text(options.system):
        raise SettingsError("--system is not UTF-8")
    # a pipe gets the text as it is
    shown = sys.stdout.isatty() or "COLUMNS" in os.environ
    chat(*ready(options), typed_lines(), Wrapped(to_terminal, line_width) if shown else to_terminal, options.system)
    return 0


def typed_lines() -> Iterator[str]:
    """Yield the lines of standard input: from a terminal with a prompt for each line, from a pipe without a prompt."""
    if sys.stdin is None:
        raise SettingsError("a conversation reads standard input, which is closed")
    typed = sys.stdin.isatty()
    encoding = sys.stdin.encoding if typed else "utf-8-sig"
    if isinstance(sys.stdin, io.TextIOWrapper):  # the locale C would accept bytes that are not text
        sys.stdin.reconfigure(encoding=encoding, errors="strict")
    try:
        yield from _typed() if typed else sys.stdin
    except UnicodeDecodeError:
        raise SettingsError(f"standard input is not {encoding.removesuffix('-sig').upper()}") from None


def _typed() -> Iterator[str]:
    """Lines from the terminal."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history)
    print("Type; /help lists commands, Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            print()
            return
