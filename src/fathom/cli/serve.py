"""`fathom serve MODEL --port 8000`.

`inference/launch.py` starts and stops the server, decides what SIGTERM and a failure of the engine do, and has the
default of `--prefix-memory`. Next to it, `server.py` has the routes, `gate.py` checks keys and limits, `access_log.py`
writes the log, `engine.py` runs the requests, `cache_memory.py` has the default of `--cache-memory`, `drafting.py`
decides when to draft, and `packed_or_plain.py` whether weights are packed. `checkpoints/open.py` opens the model.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from fathom.cli.parser import Parser, add_control_tokens, add_kernels, add_kvcache, add_opening, add_speculate, chosen
from fathom.errors import SettingsError, to_install

LONGEST_GRACE = 86_400
UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

EXAMPLES = (
    "fathom serve my-model --port 8000",
    "fathom serve my-model --weights int8 --prefix-memory 1GiB",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", help="a model directory, a run, or a comparison (its best run)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 picks a free one (default: 8000)")
    parser.add_argument("--name", help="the model's name in the API (default: the directory's name)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("FATHOM_API_KEY"),
        help="key that clients must send (default: $FATHOM_API_KEY)",
    )
    parser.add_argument(
        "--api-keys", type=Path, metavar="FILE", help="file of accepted API keys, with a name and a key on each line"
    )
    parser.add_argument(
        "--requests-per-key",
        type=int,
        metavar="N",
        help="maximum simultaneous requests of one API key (default: no limit)",
    )
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="maximum seconds that an answer may take (default: no limit)"
    )
    parser.add_argument(
        "--access-log", action="store_true", help="write one line of JSON to stderr for each request, with its id"
    )
    add_opening(parser)
    add_kernels(parser)
    add_kvcache(parser)
    parser.add_argument(
        "--max-trips",
        type=int,
        metavar="N",
        help="maximum loop iterations per token, for requests that set no max_trips",
    )
    add_speculate(parser)
    parser.add_argument(
        "--lookup",
        action="store_true",
        help="speculative decoding by lookup: draft the tokens that followed the same tokens earlier in the "
        "text, wherever this is faster; the output is unchanged",
    )
    parser.add_argument(
        "--layout",
        choices=("auto", "packed", "plain"),
        default="auto",
        help="layout of float32 weights on a CPU: packed is oneDNN's, plain is as stored; auto (default) times "
        "both at the start",
    )
    parser.add_argument(
        "--cache-memory",
        type=size,
        metavar="SIZE",
        help="memory for keys and values, such as 2GiB (default: a quarter of the free memory; on a GPU, 80 %% of it)",
    )
    parser.add_argument(
        "--prefix-memory",
        type=lambda text: 0 if text == "0" else size(text),
        metavar="SIZE",
        help="memory for the prefix cache, in addition to --cache-memory (default: a quarter of "
        "--cache-memory); 0 for none",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help=(
            "a website whose pages may call the server, such as https://app.example; * for all; repeatable (default: "
            "none)"
        ),
    )
    add_control_tokens(parser)
    parser.add_argument("--lens", action="store_true", help="also serve the lens page, at /lens")
    parser.add_argument(
        "--grace", type=float, default=20.0, help="seconds for running requests to finish after SIGTERM (default: 20)"
    )


def size(text: str) -> int:
    """Parse a number of bytes with an optional unit `KiB`, `MiB` or `GiB`."""
    number = text.strip().lower()
    unit = next((name for name in UNITS if number.endswith(name)), "")
    try:
        found = int(float(number.removesuffix(unit)) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ArgumentTypeError(f"{text}: expected a size above 0, such as 2GiB or 512MiB")
    return found


def run(options: Namespace) -> int:
    """Serve until a signal arrives."""
    try:
        from fathom.inference.launch import ServeOptions, serve
        from fathom.kernels import use
        from fathom.kvcache.policy import CacheOptions
        from fathom.lens.live import add_lens
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is not installed: {to_install('serve')}") from error

    if not 0 <= options.grace <= LONGEST_GRACE:
        raise SettingsError(f"--grace {options.grace}: allowed: seconds from 0 to {LONGEST_GRACE}")
    use(options.kernels, options.device)
    options.cache = CacheOptions.of(options)
    pages = add_lens if options.lens else None
    serve(options.model, options.host, options.port, pages, chosen(ServeOptions, options))
    return 0
