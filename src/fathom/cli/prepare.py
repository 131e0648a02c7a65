"""`fathom prepare INPUT ... --tokenizer T --out DIR`."""

from __future__ import annotations

from argparse import Namespace

from fathom.cli.parser import Parser, add_parameters, call
from fathom.data.prepare import prepare


def add(parser: Parser) -> None:
    """Arguments."""
    add_parameters(parser, prepare, "inputs")


def run(options: Namespace) -> int:
    """Prepare, and print what was written."""
    print(call(prepare, options))
    return 0
