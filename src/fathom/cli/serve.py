"""`fathom serve MODEL --port 8000`."""

from __future__ import annotations

import dataclasses
import os
from argparse import ArgumentTypeError, Namespace

from fathom.cli.parser import Parser, add_kernels, add_kvcache, add_opening, add_speculate
from fathom.errors import SettingsError, to_install

LONGEST_GRACE = 86_400
UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", help="a model directory, a run, or a comparison (its best arm)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    parser.add_argument("--name", help="what clients call the model (default: the directory's name)")
    parser.add_argument(
        "--api-key", default=os.environ.get("FATHOM_API_KEY"), help="clients must send it (default: $FATHOM_API_KEY)"
    )
    add_opening(parser)
    add_kernels(parser)
    add_kvcache(parser)
    parser.add_argument("--max-trips", type=int, metavar="N", help="trips per token at most, unless a request says so")
    add_speculate(parser)
    parser.add_argument(
        "--compile",
        type=int,
        metavar="TOKENS",
        help="compile decoding, for texts of TOKENS tokens at most, prompt included; the start then takes longer",
    )
    parser.add_argument(
        "--no-pack",
        dest="pack",
        action="store_false",
        help="on a CPU, leave the weights of a float32 model as they are; several requests at once are then slower",
    )
    parser.add_argument(
        "--cache-memory",
        type=size,
        metavar="SIZE",
        help="for keys and values of all requests: 2GiB, 512MiB (default: a quarter of the free memory; of a GPU most)",
    )
    parser.add_argument(
        "--prefix-memory",
        type=lambda text: 0 if text == "0" else size(text),
        metavar="SIZE",
        help="for prompts that were read, so that others that begin alike read only their rest (default: a quarter of "
        "--cache-memory, beside it); 0 for none",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a site whose pages may call the server, as https://app.example; * for all; repeatable (default: none)",
    )
    parser.add_argument(
        "--allow-control-tokens",
        action="store_true",
        help="let message texts write the chat template's control tokens, as <|im_end|> (default: as plain text)",
    )
    parser.add_argument("--lens", action="store_true", help="offer the lens at /lens")
    parser.add_argument(
        "--grace", type=float, default=20.0, help="seconds to finish requests when told to stop (default: 20)"
    )


def size(text: str) -> int:
    """Bytes from a number with `KiB`, `MiB`, `GiB` or nothing behind it."""
    number = text.strip().lower()
    unit = next((name for name in UNITS if number.endswith(name)), "")
    try:
        found = int(float(number.removesuffix(unit)) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ArgumentTypeError(f"{text}: expected a size above 0, as 2GiB or 512MiB")
    return found


def run(options: Namespace) -> int:
    """Serve until told to stop."""
    try:
        from fathom.inference.launch import ServeOptions, serve
        from fathom.kernels import use
        from fathom.lens.live import add_lens
        from fathom.recipe import CacheWishes
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is not installed: {to_install('serve')}") from error

    if not 0 <= options.grace <= LONGEST_GRACE:
        raise SettingsError(f"--grace {options.grace}: allowed: seconds from 0 to {LONGEST_GRACE}")
    use(options.kernels, options.device)
    options.wishes = CacheWishes.of(options)
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(ServeOptions)}
    serve(options.model, options.host, options.port, add_lens if options.lens else None, ServeOptions(**given))
    return 0
