"""`fathom try MODEL`: add one mechanism to a model that you have, train it and its control, and compare, in one
command.

`deepen/trial.py` runs the steps, and `deepen/trial_page.py` writes the page.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.cli.following import following, using
from fathom.cli.parser import Parser
from fathom.report.results import to_json

if TYPE_CHECKING:
    from fathom.deepen.trial import Trial

EXAMPLES = (
    "fathom try HuggingFaceTB/SmolLM2-135M-Instruct",
    "fathom try my-model --with loop --layers 12-16 --text my.txt",
)
EPILOG = """It deepens the model, trains it and a control on the same text, and compares the two on held-out \
documents. Ctrl-C stops it, and the same command resumes. One seed and a short training compare two models; \
`fathom compare` judges a mechanism, on small models that it trains from scratch."""


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model", help="the model to deepen: a model directory of any family, a GGUF file, a run, or org/name on the Hub"
    )
    parser.add_argument(
        "--with",
        dest="mechanism",
        default="depth_attention:blend=learned",
        metavar="MECHANISM[:KEY=VALUE,...]",
        help="the mechanisms to add, joined by +, each with its options (default: depth_attention:blend=learned)",
    )
    parser.add_argument(
        "--layers", metavar="A-B", help="first and last layer of a loop, counted from 0 (default: all layers)"
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=(),
        metavar="INPUT",
        help="text to train on; a tenth of it is held out (default: the Python language reference)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("tried"), metavar="DIR", help="output directory (default: tried)"
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="optimizer steps of each of the two trainings (default: 120)"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens per optimizer step (default: 256)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    parser.epilog = EPILOG


def run(options: Namespace) -> int:
    """Try, and report."""
    from fathom.checkpoints.find import find_model
    from fathom.deepen.trial import Trial, attempt
    from fathom.deepen.trial_page import score_table, time_table, write
    from fathom.report.tables import print_report

    trial = Trial(options.model, options.mechanism, options.layers, tuple(options.text), options.steps, options.tokens)
    finding = attempt(trial, options.out, lambda line: print(line, file=sys.stderr, flush=True))
    healed = options.out / "healed"
    more = [using(healed, find_model(healed)), _compare(trial, options.out)]
    page = write(finding, more)
    if options.json:
        print(to_json({**dataclasses.asdict(finding), "verdict": finding.verdict, "page": page}))
        return 0
    print_report([score_table(finding), time_table(finding)], finding.verdict, page)
    print(following(*more))
    return 0


def _compare(trial: Trial, out: Path) -> str:
    """The `fathom compare` command that can judge the mechanism, with the options tried here: it trains small models
    from scratch on the trial's text. Layers are numbers of the tried model, so all are looped."""
    from fathom.data.shards import read_index
    from fathom.deepen.request import parse_request
    from fathom.settings import assignment, show

    asked = parse_request(trial.mechanism)
    chosen = [
        f"model.{part.axis}_options.{key}={show(value)}"
        for part in asked.parts
        for key, value in asked.options[part.name].items()
        if key not in ("prelude", "coda")
    ]
    arm = ";".join([f"{asked.name}={asked.name}", *chosen]) if chosen else asked.name
    data = [assignment("data.directory", out / "data"), f"model.vocab_size={read_index(out / 'data').vocab_size}"]
    return shlex.join(["fathom", "compare", "tiny", *data, "--arms", f"vanilla,{arm}", "--seeds", "5"])
