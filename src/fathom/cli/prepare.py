"""`fathom prepare INPUT ... --tokenizer T --out DIR`.

`corpus/prepare.py` runs the command; its parameters are the options. `data/sources.py` tells files, globs, URLs and
`hf:` apart and reads them, `data/tokenizer.py` trains a tokenizer, and `data/shards.py` decides which documents are
held out (`choose_split`). `data/cloud.py` copies the corpus for `--upload`.
"""

from __future__ import annotations

from argparse import Namespace

from fathom.cli.corpus import UPLOAD
from fathom.cli.following import after_prepare, following
from fathom.cli.parser import Parser, add_parameters, call
from fathom.corpus.prepare import Summary, prepare
from fathom.report.results import to_json

EXAMPLES = (
    "fathom prepare my.txt --train-tokenizer 4096 --held-out 0.1 --out data/mine",
    "fathom prepare code=src prose=docs --tokenizer gpt2 --out data/mixed",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--upload", metavar="URL", help=UPLOAD)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    add_parameters(parser, prepare, "inputs")


def run(options: Namespace) -> int:
    """Prepare the shards and print a summary."""
    from fathom.data.cloud import check_upload, upload

    if options.upload:
        check_upload(options.upload)
    made: Summary = call(prepare, options)
    if options.upload:
        upload(made.directory, options.upload)
    print(to_json(made) if options.json else f"{made}\n{following(*after_prepare(made, options.tokenizer))}")
    return 0
