"""`fathom chat MODEL`: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import Namespace
from collections.abc import Iterator

from fathom.cli.generate import add_sampling, not_text, to_terminal
from fathom.cli.parser import Parser, add_kernels, add_kvcache, add_opening
from fathom.errors import SettingsError


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", help="a model directory, a run, or a comparison (its best run) with a chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--allow-control-tokens",
        action="store_true",
        help="let message texts write the chat template's control tokens, as <|im_end|> (default: as plain text)",
    )
    add_sampling(parser)
    add_kvcache(parser)
    add_opening(parser)
    add_kernels(parser)


def run(options: Namespace) -> int:
    """Answer each line; the speed goes to standard error."""
    from fathom.checkpoints.open import Opening
    from fathom.evaluation.budgets import check_trips
    from fathom.inference.conversation import chat
    from fathom.inference.generate import check_drafts
    from fathom.inference.settings import Sampling, read_options
    from fathom.kernels import use
    from fathom.kvcache.policy import CacheOptions, choose

    if not_text(options.system):
        raise SettingsError("--system is not UTF-8")
    given = (options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.seed)
    Sampling(*given, read_options(options.options), speculate=options.speculate)  # before the model is loaded
    use(options.kernels, options.device)
    names = ("device", "dtype", "trust_remote_code", "verify", "weights")
    model, tokenizer = Opening(**{name: getattr(options, name) for name in names}).open(options.model)
    check_trips(model, options.max_trips)
    check_drafts(model, options.speculate, options.max_trips)
    sampling = Sampling(
        *given,
        read_options(options.options),
        memory=choose(model, options.kvcache, CacheOptions.of(options)),
        max_trips=options.max_trips,
        allow_control=options.allow_control_tokens,
        speculate=options.speculate,
    )
    chat(model, tokenizer, sampling, typed_lines(), to_terminal, options.system)
    return 0


def typed_lines() -> Iterator[str]:
    """Lines from the terminal, with a prompt, or from a pipe, without."""
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
