"""`fathom export RUN --to DIR`.

`checkpoints/export.py` has the forms of an export and writes directories, `checkpoints/to_gguf.py` a GGUF file.
"""

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
        help="a run, finished or not; a run's checkpoint, as RUN@step-N; a comparison, for its best run; or a "
        "model directory",
    )
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="DIR",
        help="output directory, or FILE.gguf for --as gguf; replaces an earlier export at the same path",
    )
    parser.add_argument(
        "--as",
        dest="form",
        default="fathom",
        metavar="FORM",
        help=(
            "format: fathom (default) holds any mechanism and its Python code; native is the model's own family, for "
            "models without mechanisms; unrolled writes a loop as an equal, deeper model of its family; gguf writes a "
            "native or unrolled model as FILE.gguf for llama.cpp; or name a family such as llama or gpt_neox"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def run(options: Namespace) -> int:
    """Write the directory."""
    from transformers.utils import logging

    from fathom.checkpoints.export import export

    logging.disable_progress_bar()
    directory = export(options.source, options.to, form=options.form)
    print(json.dumps({"directory": str(directory), "form": options.form}) if options.json else directory)
    return 0
