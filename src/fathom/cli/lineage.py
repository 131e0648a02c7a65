"""`fathom lineage COMMAND ...`: each command is a typed function, whose parameters are its options.

Each calls a module of `lineage` or `lineage/publishing`, most of which have a similar name: `layers` is in
`lineage/ancestry.py`, `search` in `lineage/publishing/cards.py`, and `calibrate` writes with `lineage/nulls.py`. In
`lineage`, `weights.py` opens models, `comparison.py` decides which layers are read and which controls are used,
`evidence.py` has the p-values, and `verdict.py` the verdicts and their exit codes.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fathom import lineage
from fathom.checkpoints.places import is_file_with, require_file, require_folder
from fathom.cli.parser import Parser, add_parameters, call, examples
from fathom.report import PAGE
from fathom.report.files import asdict, write_json

if TYPE_CHECKING:
    from fathom.checkpoints.tensors import Array
    from fathom.lineage.comparison import Comparison, Pair

ACTIONS = {
    "compare": ("a", "b"),
    "layers": ("a", "b"),
    "direction": ("a", "b"),
    "shares": ("child", "parents"),
    "tree": ("models",),
    "portrait": ("a",),
    "card": ("a",),
    "search": ("a",),
    "identify": ("a",),
    "attack": ("a",),
    "commit": ("a",),
    "verify": ("statement", "a"),
    "calibrate": ("models",),
}
"""The commands: functions of this file, with the parameters that are given without a flag."""

EXAMPLES = ("fathom lineage compare model-a model-b --out report",)


def add(parser: Parser) -> None:
    """Add a parser for each action, whose options are made from the action's signature."""
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    for name, positional in ACTIONS.items():
        summary = (globals()[name].__doc__ or "").partition("\n")[0]
        action = actions.add_parser(name, help=(summary[0].lower() + summary[1:].rstrip(".")).replace("%", "%%"))
        action.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
        add_parameters(action, globals()[name], *positional)
        action.epilog = examples([_example(action)])


def _example(action: Parser) -> str:
    """An example command line of an action, with only its required arguments and options."""
    words = [action.prog]
    for one in action._actions:
        shown = str(one.metavar or one.dest.upper())
        if not one.option_strings and one.nargs != "?":
            words.append(shown)
        elif one.option_strings and one.required:
            words += [one.option_strings[0], shown]
    return " ".join(words)


def run(options: Namespace) -> int:
    """Run the action and print its result."""
    result: Result = call(globals()[options.action], options)
    return result.show(options.json)


@dataclass
class Result:
    """The result of a command: its exit code, the text to print, and the same content as data for JSON."""

    exit_code: int
    text: str
    data: Mapping[str, object] = field(default_factory=dict)

    def show(self, as_json: bool) -> int:
        """Print the result, as JSON if `as_json` is set, and return the exit code."""
        print(json.dumps(self.data, indent=1, default=_plain, allow_nan=False) if as_json else self.text)
        return self.exit_code


def _plain(value: object) -> object:
    """Convert a value for JSON: numpy's numbers and arrays to Python's, all else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """The progress line on standard error, if it is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    started = time.monotonic()
    with console.status("opening") as status:
        yield lambda what: status.update(f"{what} ({time.monotonic() - started:.0f} s)")


@dataclass(frozen=True)
class Choices:
    """The options of `compare`: how much of the two models it reads, and which samples it draws."""

    mode: str = "fast"
    """how much is compared: fast (768 channels, and only some layers of large models) or exact (all channels, scores of
    all layers)"""
    seed: int = 0
    """random seed that chooses the sampled channels"""
    nonce: int | None = None
    """number that seeds the samples of layers and neurons: the nonce of a report repeats the report's samples; drawn
    afresh by default"""
    adapter_base: str | None = None
    """base model of a PEFT adapter whose configuration names none"""


def compare(
    a: str,
    b: str,
    control: Sequence[str] = (),
    null: Path | None = None,
    out: Path | None = None,
    exit_code: bool = False,
    choices: Choices | None = None,
) -> Result:
    """Test whether one set of weights came from the other.

    Args:
        a: The first model: a directory, run, comparison, .safetensors, .gguf, PEFT adapter or org/name@revision.
        b: The second model; the order of the two does not say which came first.
        control: Unrelated models of the same kind, for reference; without control or null file no score counts as high.
        null: Null file of `fathom lineage calibrate` (scores of unrelated models), in place of or next to controls.
        out: Directory for report.json, report.html and the portraits.
        exit_code: End with an exit code for the verdict: 10 shared lineage, 11 partial, 12 inconclusive, 13 shared
            initialisation or lineage, 14 embedding agrees.
        choices: How much is read.
    """

    chosen = choices or Choices()
    options = lineage.Options(chosen.mode, chosen.seed, chosen.nonce)
    if out is not None:
        require_folder(out, "a lineage report")
    with _status() as say:
        models = [lineage.open_weights(where, chosen.adapter_base) for where in (a, b)]
        with lineage.comparison.holding(*models):
            found = lineage.comparison.compare(models[0], models[1], control, null, options, say)
            found.given = lineage.comparison.Given(null, chosen.adapter_base)
            if out is not None:
                say("hashes of the files")
            body = lineage.publishing.report.made(found, hashed=out is not None)
    if out is not None:
        lineage.publishing.page.write(out, found, body)
    code = found.verdict.exit_code if exit_code else 0
    return Result(code, _summary(found), asdict(body))


def _summary(found: Comparison) -> str:
    said = found.verdict
    lines = [f"{said.label.upper()}. {said.sentence}", said.meaning, "", "What else could explain it:"]
    lines += [f"- {item}" for item in said.alternatives]
    lines += ["", said.sure, ""]
    for name, label in lineage.comparison.SCORE_LABELS.items():
        if (value := found.pair.value(name)) is not None:
            null = found.null.scores.get(name, []) if found.null else []
            beside = f"   highest unrelated {max(null):.3f}" if null else ""
            lines.append(f"  {label:<36}{value:7.3f}{beside}")
    lines.append("")
    for test in found.tests:
        p, corrected = map(lineage.evidence.probability, (test.p, test.corrected))
        lines.append(f"  {test.name:<36}{test.statistic:9.4g}   p {p}, corrected {corrected}")
    lines += [
        "",
        *(f"- {sign}" for sign in found.tampering),
        *(f"- {reason}" for reason in found.verdict.reasons),
        *(f"- {why}" for why in found.skipped),
    ]
    lines += ["", f"Layers and neurons were drawn by the nonce {found.options.nonce}: --nonce repeats them."]
    lines += ["", "Not claimed:", *(f"- {item}" for item in found.verdict.not_claimed)]
    return "\n".join(lines)


def layers(a: str, b: str, seed: int = 0) -> Result:
    """Find which layer of B comes from which layer of A, with p-values; layers count from 0.

    Args:
        a: The model from which layers of B may come.
        b: The model whose layers are traced.
        seed: Random seed of all samples that the command draws.
    """

    with _status() as say:
        found = lineage.ancestry.sources(lineage.open_weights(a), lineage.open_weights(b), seed, say)
    lines = []
    for one in found:
        count = f"{one.paired:,} of {one.of:,} neurons match, p {lineage.evidence.probability(one.p)}"
        from_where = "none" if one.source is None else f"layer {one.source} of {a}"
        lines.append(f"layer {one.layer} of {b}: {from_where} ({count}; next best {one.second:,})")
    traced = sum(one.source is not None for one in found)
    lines.append(f"{traced} of {len(found)} layers have a source. Direction is not claimed.")
    return Result(0, "\n".join(lines), {"a": a, "b": b, "layers": [vars(one) for one in found]})


def direction(a: str, b: str) -> Result:
    """Find which of two related models came first, if the weights show it.

    Args:
        a: The first model.
        b: The second model, which `fathom lineage compare` found related to A.
    """

    with _status() as say:
        say("what was lost or repeated")
        found = lineage.direction.direction(lineage.open_weights(a), lineage.open_weights(b))
    return Result(0, str(found), vars(found))


def shares(child: str, parents: Sequence[str]) -> Result:
    """Estimate how much of each parent is in a merged model, with confidence intervals.

    Args:
        child: The model that may be a weighted mean of the parents.
        parents: At least two models that may be the parents, of the shape of CHILD.
    """

    with _status() as say:
        found = lineage.shares.shares(
            lineage.open_weights(child), [lineage.open_weights(parent) for parent in parents], say
        )
    fit = [vars(one) for one in found.shares]
    data = {"child": child, "shares": fit if found.is_merge else [], "fit": fit, "residual": found.residual}
    text = "\n".join(lineage.shares.in_words(child, found))
    return Result(0, text, {**data, "layers": found.layers, "is_merge": found.is_merge})


def tree(models: Sequence[str], seed: int = 0) -> Result:
    """Draw the family tree of many models, with the support of every edge.

    Args:
        models: At least two models; unrelated ones serve as controls of the others.
        seed: Random seed of all samples that the command draws.
    """

    with _status() as say:
        found = lineage.tree.tree(models, seed, say)
    return Result(0, lineage.tree.drawn(found), lineage.tree.as_json(found))


def portrait(a: str, out: Path | None = None) -> Result:
    """Draw the portrait of a model or of a card, and print its six words.

    Args:
        a: A model, or a card that `fathom lineage card` wrote.
        out: The PNG file to write; by default named after the model, in the current directory.
    """

    path = out or Path(f"{_name(a) or 'portrait'}.png")
    require_file(path, "a portrait", lineage.publishing.portrait.is_portrait)
    z = _sketch(a)
    image = lineage.publishing.portrait.pixels(z)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lineage.publishing.portrait.png(image))
    said = lineage.publishing.portrait.words(z)
    data = {
        "file": str(path),
        "words": said,
        "pixels_sha256": lineage.publishing.portrait.pixel_hash(image),
        "sketch_sha256": lineage.publishing.portrait.sketch_hash(z),
    }
    return Result(0, f"{path}\n{' '.join(said)}\n{lineage.publishing.portrait.CAPTION}", data)


def _is_card(path: Path) -> bool:
    return path.is_file() and path.suffix in {".json", ".card"}


def _name(where: str) -> str:
    """The name of a model or of a card."""
    path = Path(where)
    return path.stem if _is_card(path) else path.name


def _sketch(where: str) -> Array:
    path = Path(where)
    if _is_card(path):
        body = lineage.publishing.cards.read_card(path)
        return lineage.publishing.cards.sketch_bytes(body.sketches["z_last"])
    return lineage.publishing.cards.sketch(lineage.open_weights(where))


def card(a: str, out: Path, all_layers: bool = False) -> Result:
    """Write the card of a model: 512 bytes per sketch, six words, no weights.

    Args:
        a: A model.
        out: The card to write, a JSON file.
        all_layers: Add a second sketch, of all layers: it reads most of the model, and finds relatives better.
    """

    require_file(out, "a card", is_file_with("fathom_card"))
    body = lineage.publishing.cards.card(lineage.open_weights(a), all_layers)
    write_json(out, body)
    note = "\nfew anchor strings: compare with care" if body.low_coverage else ""
    return Result(0, f"{out}\n{' '.join(body.words)}{note}", asdict(body))


def search(a: Path, library: Path, top: int = 10) -> Result:
    """Rank the cards of a directory by similarity to one card. Use `compare` on the candidates.

    Args:
        a: A card.
        library: Directory of cards.
        top: Number of cards to list.
    """

    if top < 1:
        raise lineage.ModelError(f"--top {top}: allowed: 1 or more")
    query = lineage.publishing.cards.read_card(a)
    found = lineage.publishing.cards.search(query, library)[:top]
    rows = [f"{hit.cosine:7.3f}  {hit.name}  ({hit.file})" for hit in found]
    return Result(0, "\n".join(rows), {"found": [vars(hit) for hit in found]})


def identify(
    a: str,
    library: Path,
    top: int = 5,
    out: Path | None = None,
    exit_code: bool = False,
    choices: Choices | None = None,
) -> Result:
    """Find the models of a library that a model may come from: search the cards, then compare with the nearest.

    Args:
        a: The model to identify, named as in `fathom lineage compare`.
        library: Directory of cards, each of which names its model; models of the same shape serve as controls.
        top: Number of nearest models to compare.
        out: Directory for report.json and report.html.
        exit_code: End with the exit code of the strongest verdict; the codes are those of `fathom lineage compare`.
        choices: How much is read.
    """

    if top < 1:
        raise lineage.ModelError(f"--top {top}: allowed: 1 or more")
    identification, chosen = lineage.publishing.identification, choices or Choices()
    options = lineage.Options(chosen.mode, chosen.seed, chosen.nonce, extras=False)
    if out is not None:
        require_folder(out, "candidates of a lineage")
    with _status() as say:
        weights = lineage.open_weights(a, chosen.adapter_base)
        found = identification.identify(weights, library, top, options, say)
    data = asdict(found)
    if out is not None:
        identification.write(out, found)
    lines = [found.sentence, f"{found.searched:,} cards were searched.", ""]
    lines.append("  ".join(f"{name:>10}" for name in identification.COLUMNS[2:]))
    lines += [
        "  ".join(f"{cell:>12}" for cell in row[2:]) + f"  {row[0]}: {row[1]}" for row in identification.rows(found)
    ]
    lines += ["", *(f"- {note}" for note in found.notes)]
    return Result(found.exit_code if exit_code else 0, "\n".join(lines), data)


def attack(a: str, out: Path, kind: Sequence[str], seed: int = 0, dtype: str = "float32") -> Result:
    """Write a copy of a model that computes the same function with other weights, to test a detector.

    Args:
        a: A local model.
        out: Directory to create.
        kind: Changes to make, in the given order: any of permute, rotate, gain, plane, head, neuron, scale.
        seed: Random seed of the changes of --kind.
        dtype: Precision of the copy: float32 or float64.
    """

    if out.exists():
        raise lineage.ModelError(f"{out} exists already")
    if seed < 0:
        raise lineage.ModelError(f"--seed {seed}: allowed: 0 or more")
    lineage.attacks.attack(lineage.open_weights(a), list(kind), out, seed, dtype)
    return Result(0, f"{out}: {', '.join(kind)}", {"out": str(out), "kinds": list(kind), "seed": seed})


def commit(
    a: str,
    out: Path,
    owner: str | None = None,
    date: str | None = None,
    blind: bool = False,
    key_out: Path | None = None,
) -> Result:
    """Fix a model's weights by a hash, so that a later claim can be checked by recomputation.

    Args:
        a: A model.
        out: The file for the commitment, which you publish.
        owner: Name of who commits; the root hash covers the name.
        date: Date to write into the commitment, such as 2026-11-25; today by default. Fathom does not verify it.
        blind: Write a root hash that reveals nothing about the weights until you show its key.
        key_out: The file for the key of a blinded commitment. Keep the key: verification needs it.
    """

    if blind and key_out is None:
        raise lineage.ModelError("--blind needs --key-out: a blinded commitment cannot be opened without its key")
    if key_out is not None and not blind:
        raise lineage.ModelError(f"--key-out {key_out} needs --blind")
    if key_out is not None and key_out.absolute() == out.absolute():
        raise lineage.ModelError(f"--key-out {key_out} is the same file as --out")
    require_file(out, "a commitment", is_file_with("fathom_commitment"))
    if key_out is not None:
        require_file(key_out, "empty: it may hold the key of another commitment", lambda _: False)
    body, key = lineage.publishing.commitments.commit(lineage.open_weights(a), blind, owner, date)
    if key is not None and key_out is not None:  # before the commitment, which is useless without its key
        key_out.parent.mkdir(parents=True, exist_ok=True)
        key_out.touch(mode=0o600)
        key_out.write_text(key + "\n")
    write_json(out, body)
    return Result(0, f"{out}\nroot {body['root']}", body)


def verify(statement: Path, a: str | None = None, key: Path | None = None) -> Result:
    """Recompute a commitment from weights, or a report from its models, and compare.

    Args:
        statement: The file to verify: a commitment, or a report.json of `fathom lineage compare`.
        a: The model that a commitment is about; leave it out for a report, which names its own models.
        key: File with the key of a blinded commitment.
    """

    body = lineage.publishing.verification.read_statement(statement)
    if "fathom_lineage_report" in body:
        if a is not None or key is not None:
            raise lineage.ModelError(f"{statement} is a report, which names its own models: give neither A nor --key")
        page = statement.with_name(PAGE)
        text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else None
        done = lineage.publishing.verification.verify(body, str(statement), text)
    elif a is None:
        raise lineage.ModelError(f"{statement}: name the model to compare the commitment with")
    else:
        done = lineage.publishing.commitments.verify(lineage.open_weights(a), body, _read_key(key), str(statement))
    lines = ["holds" if done.holds else "does not hold", *(f"- {line}" for line in done.findings)]
    lines += [f"not recomputed: {what}" for what in done.not_recomputed]
    return Result(0 if done.holds else 1, "\n".join(lines), vars(done))


def _read_key(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise lineage.ModelError(f"--key {file}: not a key") from None


def calibrate(models: Sequence[str], out: Path, mode: str = "fast", seed: int = 0) -> Result:
    """Measure all pairs of unrelated models, and write a null file for `compare --null`.

    Args:
        models: At least two unrelated models; the strictest null file comes from models that differ only in seeds.
        out: The null file to write, with the scores of the unrelated models.
        mode: How much is compared: fast (768 channels, and only some layers of large models) or exact (all channels,
            scores of all layers).
        seed: Random seed of all samples that the command draws.
    """

    if len(models) < 2:
        raise lineage.ModelError("a null distribution needs at least two unrelated models")
    require_file(out, "a null file", is_file_with("fathom_null"))
    opened = [lineage.open_weights(where) for where in models]
    groups: dict[str, list[Pair]] = {}
    with _status() as say:
        for i, first in enumerate(opened):
            for second in opened[i + 1 :]:
                say(f"{first.name} against {second.name}")
                pair = lineage.comparison.measure(first, second, lineage.Options(mode=mode, seed=seed))
                groups.setdefault(lineage.nulls.structure_class(first, second), []).append(pair)
    body = lineage.nulls.write(out, groups)
    rows = [f"{kind}: {len(pairs)} pairs" for kind, pairs in groups.items()]
    return Result(0, "\n".join([str(out), *rows]), body)
