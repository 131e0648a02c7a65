"""`fathom check MODEL`."""

from __future__ import annotations

import textwrap
from argparse import Namespace
from typing import TYPE_CHECKING

from fathom.cli.parser import Parser, add_ignore_keys
from fathom.report.results import to_json
from fathom.report.tables import PlainTable, line_width, print_report

if TYPE_CHECKING:
    from fathom.checkpoints.same_logits import Check, Comparison

MORE = """
Both open a small copy of config.json with the same random weights, and run the
same texts. The model's own weights are not used."""
EXAMPLES = (
    "fathom check path/to/model",
    "fathom check Qwen/Qwen3-0.6B  # needs config.json alone",
)
EXIT_CODES = """exit code: 0 if all logits agree, 1 if some differ, 2 if Fathom does not open the model \
or there is no class to compare with"""
WIDTH = 100
"""Characters of a line of prose."""


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = f"{parser.description or ''}\n{MORE}".strip()
    parser.epilog = EXIT_CODES
    parser.add_argument(
        "model", help="a model directory, a directory with a config.json alone, or org/name[@revision] on the Hub"
    )
    add_ignore_keys(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def run(options: Namespace) -> int:
    """Print the comparisons of the two models' logits; return exit code 1 if any of them disagrees, else 0."""
    from fathom.checkpoints.same_logits import check

    found = check(options.model, options.ignore_keys)
    if options.json:
        print(to_json(found))
    else:
        print_report([_table(found)], "\n\n".join(_filled(found)), None)
    return 0 if found.agrees else 1


def _table(found: Check) -> PlainTable:
    """The table of comparisons: a row for each way of running the models, a column for each dtype."""
    rows: dict[str, dict[str, str]] = {}
    for one in found.comparisons:
        rows.setdefault(one.way, {})[one.dtype] = _cell(one)
    dtypes = list(dict.fromkeys(one.dtype for one in found.comparisons))
    caption = f"Fathom and {found.compared_with}: largest difference of a logit"
    return caption, ["", *dtypes], [[way, *(cells.get(dtype, "") for dtype in dtypes)] for way, cells in rows.items()]


def _cell(one: Comparison) -> str:
    if one.difference == 0:
        return "equal"
    return f"{one.difference:.1e}" + ("" if one.agrees else " DIFFERS")


def _filled(found: Check) -> list[str]:
    """The remarks on the comparison and its verdict, as paragraphs that fit the terminal."""
    width = min(line_width(), WIDTH)
    return [
        textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        for text in (*_remarks(found), _verdict(found))
    ]


def _remarks(found: Check) -> list[str]:
    """Remarks on what was compared, and on what was left out of the comparison."""
    crossed = f" They are longer than {' and '.join(found.crossed)}." if found.crossed else ""
    texts = f"Texts of {found.tokens} tokens, on a small copy of config.json with random weights.{crossed}"
    differences = [one for one in found.comparisons if one.difference]
    if differences:
        texts += " Differences are relative to the largest logit."
    if found.rounding and any(one.agrees for one in differences):
        texts += f" Rounding differs: {found.rounding}."
    left_out = f"{', '.join(found.left_out)}: not compared, because the copy's weights are not quantised."
    return [texts, *([left_out] if found.left_out else [])]


def _verdict(found: Check) -> str:
    if found.agrees:
        weights = "its weights were not read" if found.weights else "the directory has no weights"
        return f"{found.model}: Fathom computes what {found.compared_with} computes ({weights})."
    return f"{found.model}: Fathom computes something else than {found.compared_with}."
