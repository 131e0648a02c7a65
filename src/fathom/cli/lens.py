"""`fathom lens MODEL TEXT -o lens.html`.

`lens/look.py` computes the numbers, `lens/page.py` makes the page, and `lens/lens.js` draws it. No code of the model's
directory is run, because `trust_remote_code` is not set here.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.checkpoints.places import is_page, require_file
from fathom.cli.parser import Parser
from fathom.errors import SettingsError
from fathom.report.files import write_atomically
from fathom.report.progress import ProgressBar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXAMPLES = (
    'fathom lens runs/mine "A model reads earlier layers." -o lens.html',
    "fathom lens runs/a --compare runs/b --file poem.txt",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", help="an exported directory, a run, or a checkpoint of a family that Fathom opens")
    parser.add_argument("text", nargs="?", help="the text to analyse")
    parser.add_argument("--file", type=Path, metavar="FILE", help="file whose text to analyse, instead of TEXT")
    parser.add_argument("-o", "--out", type=Path, help="HTML file to write (default: lens.html, or none with --json)")
    parser.add_argument("--compare", metavar="MODEL", help="a second model with the same tokenizer, shown side by side")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=2000,
        help="maximum tokens of the text to analyse, at most the model's context (default: 2000)",
    )
    parser.add_argument(
        "--top", type=int, default=5, help="number of likeliest tokens to show after every layer (default: 5)"
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda if available)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def run(options: Namespace) -> int:
    """Analyse the text with the model, write the page, and print the page's path."""
    from fathom.checkpoints.find import name_of
    from fathom.checkpoints.open import open_checkpoint
    from fathom.lens.look import LensData, look, same_tokenizer
    from fathom.lens.page import lens_page
    from fathom.models import FathomForCausalLM

    if (options.text is None) == (options.file is None):
        raise SettingsError("give a text or --file FILE, one of the two")
    out = options.out or (None if options.json else Path("lens.html"))
    if out is not None and not out.parent.is_dir():
        raise SettingsError(f"{out}: {out.parent} is not a directory")
    if out is not None:
        require_file(out, "a page of Fathom's", is_page)
    text = options.text if options.file is None else _read(options.file)
    looked: list[LensData] = []
    first: PreTrainedTokenizerBase | None = None
    for path in filter(None, (options.model, options.compare)):
        model, tokenizer = open_checkpoint(path, options.device)
        if first is not None and not same_tokenizer(first, tokenizer, text):
            raise SettingsError(
                f"{options.compare} and {options.model} have different tokenizers; --compare needs the same tokenizer"
            )
        first = first or tokenizer
        if not isinstance(model, FathomForCausalLM):
            raise SettingsError(f"the lens needs a FathomForCausalLM, but {path} is a {type(model).__name__}")
        visits = sum(map(len, model.model.plan_of(model.model.served_trips)))
        with ProgressBar(f"looking through {name_of(path)}", visits) as bar:
            looked.append(look(model, tokenizer, text, options.top, options.max_tokens, name_of(path), bar.update))
    if len({len(data.tokens) for data in looked}) > 1:  # the contexts differ
        shortest = min(len(data.tokens) for data in looked)
        raise SettingsError(f"one of the models has a context of {shortest} tokens; give --max-tokens {shortest}")
    if out is not None:
        write_atomically(out, lens_page(looked[0], compare=looked[1] if looked[1:] else None))
    if options.json:
        print(json.dumps({"models": [data.to_dict() for data in looked]}))
        return 0
    for data in looked:
        depth = f", {sum(data.trips) / len(data.trips):.2f} iterations per token" if data.halts else ""
        bits = f"{data.bits_per_token:.2f} bits per token" if len(data.tokens) > 1 else "none of them predicted"
        print(f"{data.model}: {data.read}, {bits}{depth}")
    if out is not None:
        print(f"{out}: {out.stat().st_size / 1e3:,.0f} KB")
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: not UTF-8 text") from error
