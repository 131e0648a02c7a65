"""`fathom deepen MODEL --with MECHANISM --out DIR`; `--search` ranks layers to loop, `--screen` scores gates, and
`--exit` sets an exit threshold.

In `deepen/`, `request.py` reads `--with`, `write.py` writes the model, compares its logits and keeps an edited
`heal.yaml`, `heal.py` makes the recipe and the commands, `spans.py` does `--search`, `screen.py` `--screen` and
`exits.py` `--exit`.
"""

from __future__ import annotations

import sys
import typing
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fathom.cli.following import following
from fathom.cli.parser import Parser
from fathom.errors import SettingsError
from fathom.report.results import to_json
from fathom.settings import convert, show
from fathom.values import allowed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fathom.deepen.exits import Chosen
    from fathom.deepen.heal import Road
    from fathom.deepen.request import Request
    from fathom.deepen.write import Deepened
    from fathom.models.modeling import FathomForCausalLM

N = TypeVar("N", int, float)
RECIPE = ("--steps", "--lora")
EXAMPLES = (
    "fathom deepen MODEL --with depth_attention --out deeper",
    "fathom deepen MODEL --with loop:damping=0.5 --layers 12-16 --out deep",
    "fathom deepen MODEL --with loop --search --text TEXT --out spans",
    "fathom deepen MODEL --screen --text TEXT --out screen",
    "fathom deepen --exit RUN --loss 0.01 --text TEXT --out exiting",
)
EPILOG = """It prints the commands that prepare a corpus and train the model further. `fathom mechanisms` lists the \
mechanisms, and which of them start as the model."""


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model", help="the model to deepen: a model directory of any family, a GGUF file, a run, or org/name on the Hub"
    )
    parser.add_argument(
        "--with",
        dest="mechanism",
        metavar="MECHANISM[:KEY=VALUE,...]",
        help="the mechanisms to add, joined by +, each with its options",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output directory")
    parser.add_argument(
        "--layers", metavar="A-B", help="first and last layer of a loop, counted from 0 (default: all layers)"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="rank spans of layers by the held-out loss of a loop over them, without training",
    )
    parser.add_argument(
        "--screen",
        action="store_true",
        help="score every mechanism in every layer and head by the gradients of its closed gates, without training",
    )
    parser.add_argument(
        "--exit",
        action="store_true",
        help="let tokens of a trained loop stop iterating early, so that the loss rises by at most --loss",
    )
    parser.add_argument(
        "--loss",
        type=float,
        help="for --exit: largest allowed rise of the loss, in nats per token averaged over documents (default: 0.01)",
    )
    parser.add_argument(
        "--test",
        choices=("betting", "t"),
        help="for --exit: the statistical test of the bound on the loss: betting (default) holds for any number of "
        "documents, Student's t only asymptotically",
    )
    parser.add_argument(
        "--shifted",
        nargs="+",
        default=(),
        metavar="[NAME=]INPUT",
        help="for --exit: text of another kind, on which the rise of the loss is measured but not guaranteed",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=(),
        metavar="[NAME=]INPUT",
        help="held-out text for --search, --screen and --exit; a text file is one document",
    )
    parser.add_argument(
        "--sizes", metavar="A-B", help="for --search: smallest and largest number of layers in a loop (default: 2-6)"
    )
    parser.add_argument(
        "--documents",
        metavar="N[,M]",
        help="number of documents to score. --search: N for all loops, and M others for the best 20 loops "
        "(default: 12,40); --screen: N (default: 32); --exit: N (default: 1000)",
    )
    parser.add_argument(
        "--tokens", type=int, help="tokens to read of each document (default: 512, or 256 with --screen)"
    )
    parser.add_argument(
        "--lora",
        action="store_true",
        help="write a recipe that trains LoRA adapters (needs peft) instead of all weights",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="training steps of the recipe that is written; over the first half of them mechanisms without learned "
        "gates are blended in (default: 600)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    parser.epilog = EPILOG
    parser.mode(
        "--screen", "scores all mechanisms and trains nothing", "--with", "--layers", "--search", "--exit", *RECIPE
    )
    parser.mode("--search", "ranks layers and writes no recipe", "--layers", "--exit", *RECIPE)
    parser.mode("--exit", "changes a trained loop", "--with", "--layers", *RECIPE)
    parser.needs("--search", "--sizes")
    parser.needs("--exit", "--loss", "--test", "--shifted")
    for flag in ("--search", "--screen", "--exit"):
        parser.needs(flag, "--text", "--documents", "--tokens")


def run(options: Namespace) -> int:
    """Write the deepened model, or do what `--search`, `--screen` or `--exit` asks for instead."""
    from fathom.deepen.heal import Healing, Road
    from fathom.deepen.request import parse_request
    from fathom.deepen.write import deepen

    if options.screen:
        return _screen(options)
    if options.exit:
        return _exit(options)
    if options.mechanism is None:
        raise SettingsError("give --with (the mechanism to add), --screen, or --exit (for a trained loop)")
    request = parse_request(options.mechanism, options.layers)
    if options.search:
        return _search(options, request)
    healing = Healing(lora=options.lora) if options.steps is None else Healing(options.steps, options.lora)
    made = deepen(options.model, request, options.out, healing)
    print(to_json(made) if options.json else _words(made, Road(options.out, options.model)))
    return 0


def _words(made: Deepened, road: Road) -> str:
    """The summary of the written model, and the commands that train this model."""
    base, deeper = made.base, made.deeper
    rows = {
        "model": f"{made.directory}, {made.mechanism}",
        "read back": _start(made),
        "parameters": f"{deeper.parameters:,} (+{deeper.parameters - base.parameters:,})",
        "FLOPs per token": f"{deeper.flops_per_token:,.0f} ({deeper.flops_per_token / base.flops_per_token - 1:+.1%}), "
        f"mean over a context of {deeper.context:,} tokens",
        "cache per token": f"{deeper.cache_bytes_per_token:,} bytes (bf16) "
        f"({deeper.cache_bytes_per_token / base.cache_bytes_per_token - 1:+.1%})",
    }
    if not made.tokenizer:
        rows["tokenizer"] = f"none: the base model has none; put one into {made.directory} first"
    if made.opened:
        rows["opened too"] = f"{', '.join(made.opened)}, which the base model holds closed: the recipe opens it as well"
    if made.kept:
        rows["kept"] = f"{made.kept}, the recipe that was there"
    said = [f"{name:<16} {value}" for name, value in rows.items()]
    return "\n".join([*said, following(road.prepare, road.train)])


def _start(made: Deepened) -> str:
    if made.deviation == 0:
        return "logits equal the base model's to the last bit"
    largest = f"logits differ from the base model's by up to {made.deviation:.2g}"
    return largest if made.exact else f"{largest}: {made.mechanism} does not start closed"


def _exit(options: Namespace) -> int:
    """Choose the confidence at which tokens stop looping, and write the model with this confidence."""
    from fathom.deepen.exits import Bound, set_exit

    if not options.text:
        raise SettingsError("--exit needs --text, text that the model was not trained on")
    given = {"loss": options.loss, "test": options.test, "tokens": options.tokens}
    if options.documents is not None:
        given["documents"] = _number(int, "documents", {"documents": options.documents})
    bound = Bound(**{name: value for name, value in given.items() if value is not None})
    _require_text(options.text)
    if options.shifted:
        _require_text(options.shifted)
    made = set_exit(options.model, options.out, options.text, bound, options.shifted)
    print(to_json(made.to_dict()) if options.json else _exit_words(made))
    return 0


def _exit_words(made: Chosen) -> str:
    """The chosen exit confidence as text, with the loss that it costs and the loop iterations that it saves."""
    bound = made.bound
    held = "" if bound.test == "betting" else ", asymptotically"
    claim = f"loss at most {bound.loss:g} above all trips, with {1 - bound.level:.0%} confidence over documents{held}"
    if bound.test == "betting":
        claim += f"; a document's difference is clipped at {bound.clip:g}"
    rows = {"model": str(made.directory), "bound": claim}
    if made.exit_confidence is None:
        rows["exit"] = f"none keeps the bound on {bound.documents:,} documents: every token makes {made.trips} trips"
    for name, found in (("exit", made.tested), ("on other text", made.shifted)):
        for one in found:
            if one.exit_confidence == made.exit_confidence:
                measured = f"{one.trips:.2f} of {made.trips} trips, loss {one.loss:+.4f}"
                rows[name] = f"exit_confidence {one.exit_confidence:g}: {measured}"
    if made.shifted:
        rows["on other text"] += " (measured; nothing is guaranteed there)"
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())


def _require_text(text: Sequence[str]) -> None:
    """Refuse unreadable text early, because opening a model may take minutes."""
    from fathom.evaluation.perplexity import read_domains

    read_domains(text, limit=1)


def _opened(name: str) -> tuple[FathomForCausalLM, PreTrainedTokenizerBase]:
    """Open a model as a `FathomForCausalLM`, with its tokenizer; refuse other families."""
    from fathom.checkpoints.open import open_checkpoint
    from fathom.models.modeling import FathomForCausalLM

    model, tokenizer = open_checkpoint(name)
    if not isinstance(model, FathomForCausalLM):
        raise SettingsError(f"{name} opens as a {type(model).__name__}; this command needs a FathomForCausalLM")
    return model, tokenizer


def _screen(options: Namespace) -> int:
    """Score every mechanism at every possible gate of the model, and write the report page."""
    from fathom.checkpoints.places import require_folder
    from fathom.deepen.screen import Screen, screen
    from fathom.deepen.screen_page import show, values, write

    if not options.text:
        raise SettingsError("--screen needs --text, documents to score")
    sizes = {"tokens": options.tokens}
    if options.documents is not None:
        sizes["documents"] = _number(int, "documents", {"documents": options.documents})
    asked = Screen(**{name: value for name, value in sizes.items() if value is not None})
    require_folder(options.out, "a search")
    _require_text(options.text)
    model, tokenizer = _opened(options.model)
    found = screen(model, tokenizer, options.text, asked)
    write(options.out, options.model, found)
    if options.json:
        print(to_json(values(found)))
    else:
        show(options.out, found, sys.stdout)
    return 0


def _search(options: Namespace, request: Request) -> int:
    from fathom.checkpoints.places import require_folder
    from fathom.deepen.search_page import show, write
    from fathom.deepen.spans import Search, search

    given = request.options.get("loop", {})
    if request.name != "loop" or given.keys() - {"trips", "damping"}:
        raise SettingsError("--search ranks the layers of --with loop, whose options may be trips and damping")
    if not options.text:
        raise SettingsError("--search needs --text, held-out text to score")
    asked = Search(
        sizes=_pair(options.sizes, "-", "--sizes") if options.sizes else Search().sizes,
        trips=_number(int, "trips", given) if "trips" in given else Search().trips,
        dampings=(_number(float, "damping", given),) if "damping" in given else Search().dampings,
        documents=_pair(options.documents, ",", "--documents") if options.documents else Search().documents,
        tokens=Search().tokens if options.tokens is None else options.tokens,
    )
    require_folder(options.out, "a search")
    _require_text(options.text)
    model, tokenizer = _opened(options.model)
    if options.sizes is None:
        layers = model.config.num_hidden_layers
        asked = replace(asked, sizes=(min(asked.sizes[0], layers), min(asked.sizes[1], layers)))
    ranked = search(model, tokenizer, options.text, asked, options.out)
    write(options.out, options.model, asked, ranked)
    if options.json:
        print(to_json([row.to_dict() for row in ranked]))
    else:
        show(options.model, options.out, asked, ranked, sys.stdout)
    return 0


def _number(kind: type[N], name: str, given: Mapping[str, object]) -> N:
    """Convert the value of a numeric option to `kind`; an invalid value raises a `SettingsError`."""
    try:
        return typing.cast("N", convert(kind, given[name]))
    except ValueError:
        raise SettingsError(f"{name}={show(given[name])}: allowed: {allowed(kind)}") from None


def _pair(text: str, sign: str, flag: str) -> tuple[int, int]:
    """Parse two whole numbers that are written as `A-B` or `N,M`."""
    words = text.split(sign)
    if len(words) != 2 or not all(word.strip().isdigit() for word in words):
        raise SettingsError(f"{flag} {text}: allowed: two whole numbers, as in 2{sign}6")
    return int(words[0]), int(words[1])
