"""`fathom export RUN --to DIR`."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from fathom.cli.parser import Parser

EXAMPLES = (
    "fathom export runs/mine --to my-model",
    "fathom export runs/mine --to my-model.gguf --as gguf",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source",
        type=Path,
        help="a run, finished or not, its RUN@step-N, a comparison (its best run), or a model directory",
    )
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="DIR",
        help="output directory, or FILE.gguf for gguf; an earlier export there is replaced",
    )
    parser.add_argument(
        "--as",
        dest="form",
        default="fathom",
        metavar="FORM",
        help=(
            "fathom: any mechanism, with its code (default); native: the model's own family, without mechanisms; "
            "unrolled: a loop as the equal, deeper native model; gguf: native or unrolled as FILE.gguf for llama.cpp; "
            "or a family such as llama or gpt_neox"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the result for a program")


def run(options: Namespace) -> int:
    """Write the directory."""
    from transformers.utils import logging

    from fathom.checkpoints.export import export

    logging.disable_progress_bar()
    directory = export(options.source, options.to, form=options.form)
    print(json.dumps({"directory": str(directory), "form": options.form}) if options.json else directory)
    return 0
