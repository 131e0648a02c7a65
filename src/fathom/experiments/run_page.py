"""`fathom report`: one page for a run, from what the run left behind; and a front page for a folder of runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from fathom.checkpoints.file_names import METRICS, RECIPE, RESULT, WEIGHT_HASHES
from fathom.checkpoints.find import finished_model
from fathom.checkpoints.runs import config_of
from fathom.errors import FathomError, SettingsError
from fathom.recipe import Distill, Recipe, differences, load_recipe, values_of
from fathom.report import html
from fathom.report.files import write_atomically
from fathom.report.numbers import DASH, short, signed
from fathom.report.plots import Line
from fathom.report.provenance import provenance
from fathom.report.tables import PlainTable
from fathom.training import read_history, read_metrics
from fathom.training.distill import teacher_of
from fathom.training.estimate import Estimate, estimate
from fathom.training.probe import Probe, figures, is_probe, read_probe
from fathom.training.results import CROSS_ENTROPY, RunResult

PAGE, INDEX = "report.html", "index.html"
CURVES = {
    "loss": ("Loss", "nats per token"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "lr": ("Learning rate", "learning rate"),
    "tokens_per_second": ("Throughput", "tokens per second"),
}
"""Columns of metrics.jsonl that are drawn: title and axis."""
SMOOTHED = 50
"""Points of a curve; each is the mean of as many steps as that takes."""


@dataclass(frozen=True)
class Sample:
    """A prompt, and the text with which the finished model continues it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run's directory."""

    directory: Path
    recipe: Recipe
    cost: Estimate
    metrics: list[dict[str, float]]
    result: RunResult | None
    """None if the run is unfinished."""

    @property
    def step(self) -> int:
        """Steps so far."""
        return int(max((line["step"] for line in self.metrics), default=0))

    @property
    def tokens(self) -> float:
        """Tokens so far; lines of a hook's own numbers have none."""
        return max((line["tokens"] for line in self.metrics if "tokens" in line), default=0)

    @property
    def verdict(self) -> str:
        """A sentence on the run's progress, and another on the result if the run is a learning-rate probe."""
        return "\n".join([self._standing, *([] if self.probe is None else [self.probe.sentence])])

    @property
    def _standing(self) -> str:
        steps, tokens = self.recipe.train.steps, self.tokens
        if self.result is None:
            skipped = list(takewhile(bool, (line["skipped"] for line in self.metrics[::-1] if "skipped" in line)))
            lost = f" The last {len(skipped)} were skipped: their loss was not finite, or their gradient too large."
            said = f"The run is unfinished: {self.step} of {steps} steps, {short(tokens)} tokens."
            said += " Only its result is missing." if self.step == steps else ""
            return said + (lost if skipped else "")
        score = self.result.evaluation
        held = "The corpus has no held-out split." if score is None else (
            f"Held-out loss {score.loss:.4f} nats per token, {score.bits_per_byte:.4f} bits per byte, perplexity "
            f"{score.perplexity:.2f}{score.how}."
        )  # fmt: skip
        return f"{self.cost.mechanism}, {short(self.cost.parameters)} parameters, {short(tokens)} tokens. {held}"

    @cached_property
    def probe(self) -> Probe | None:
        """The result of a learning-rate probe; None if the run is no probe or has too few steps."""
        try:
            return read_probe(self.directory) if is_probe(self.recipe) else None
        except ValueError:
            return None


@dataclass
class Extras:
    """Optional parts of a page, beyond the run's own files."""

    against: RunFacts | None = None
    samples: Sequence[Sample] = ()
    lens: Path | None = None
    """A page of the lens, next to this one."""
    following: Sequence[str] = field(default_factory=list)


def read_run(directory: Path) -> RunFacts:
    """Read the directory of a run, which may be unfinished."""
    if not (directory / RECIPE).is_file() or not (directory / METRICS).is_file():
        raise SettingsError(f"{directory}: not a run of fathom train, which would have {RECIPE} and {METRICS}")
    recipe = load_recipe(directory / RECIPE)
    result = RunResult.of(directory) if (directory / RESULT).is_file() else None
    return RunFacts(directory, recipe, estimate(_here(directory, recipe)), read_metrics(directory), result)


def _here(directory: Path, recipe: Recipe) -> Recipe:
    """The recipe of a run; if the run has a finished model, without a teacher that is gone, and with this model in
    place of its `from_pretrained` source, which may be gone but has the same shape."""
    source, model = recipe.model.get("from_pretrained"), finished_model(directory)
    if model is None:
        return recipe
    if not _has_teacher(recipe):
        recipe = replace(recipe, distill=Distill())
    if source is None:
        return recipe
    return replace(recipe, model={**recipe.model, "from_pretrained": str(model)})


def _has_teacher(recipe: Recipe) -> bool:
    """Whether the recipe's teacher, if it names one, can still be found."""
    try:
        return teacher_of(recipe) is None or bool(config_of({"from_pretrained": recipe.distill.teacher}))
    except (FathomError, OSError):
        return False


def difference(run: RunFacts, other: RunFacts) -> list[str]:
    """The difference of two runs' held-out losses, in a sentence; empty if one of the runs has no held-out loss."""
    return [*_gap([run, other], _names([run, other]))]


def run_page(run: RunFacts, extras: Extras) -> str:
    """The page of one run."""
    runs = [run] if extras.against is None else [run, extras.against]
    names = _names(runs)
    legend = html.legend(names) if len(runs) > 1 else ""
    recipe = (run.directory / RECIPE).read_text(encoding="utf-8")
    probe = [] if run.probe is None else figures(run.probe)
    return html.page(
        f"Training run {' compared with '.join(names)}",
        "\n".join([run.verdict, *_gap(runs, names)]),
        html.section("Learning-rate probe", *probe),
        html.section("Training", legend, html.figures(*(_curve(runs, names, key) for key in CURVES))),
        html.section("Held-out text", legend, _by_position(runs, names), html.table(*_domains(run))),
        html.section("Samples", *map(_sample, extras.samples), _lens(extras)),
        html.section("Cost", html.facts("Cost of this run", _cost(run))),
        html.section("Difference", _difference(runs, names)),
        html.section("History", _listed(_history(run))),
        html.section("What next", html.commands(extras.following)),
        html.section("Weights", html.table(*_hashes(run), prose=("hash",))),
        html.section("Where this page comes from", html.source(provenance())),
        html.details("The recipe", recipe),
    )


def _listed(items: Iterable[str]) -> str:
    found = list(items)
    return html.bullets(found) if found else ""


def write_run_page(run: RunFacts, extras: Extras, out: Path | None = None) -> Path:
    """Write a run's page, by default into its directory."""
    path = out or run.directory / PAGE
    write_atomically(path, run_page(run, extras))
    return path


def runs_in(folder: Path) -> list[Path]:
    """The runs directly in a folder, by name."""
    return sorted(path.parent for path in folder.glob(f"*/{RECIPE}") if (path.parent / METRICS).is_file())


def write_front_page(folder: Path, say: Callable[[str], None]) -> Path:
    """Write a page for each run of a folder whose page is missing or older than its numbers, and a front page that
    lists all runs."""
    runs = []
    for directory in runs_in(folder):
        try:
            run = read_run(directory)
        except ValueError as error:
            say(f"{directory}: left out ({error})")
            continue
        if not _current(directory):
            write_run_page(run, Extras())
        runs.append(run)
    if not runs:
        raise SettingsError(f"{folder}: no runs of fathom train there")
    columns = ["run", "mechanism", "parameters", "tokens", "held-out loss", "bits per byte", "state"]
    cells = [_row(run) for run in runs]
    table = html.table(
        "Each run has a page", columns, cells, note="Bits per byte compare across tokenizers; losses do not."
    )
    page = html.page(f"Training runs in {folder.resolve().name}", _overview(runs), table)
    write_atomically(folder / INDEX, page)
    return folder / INDEX


def _overview(runs: Sequence[RunFacts]) -> str:
    """Sentences on how many runs are finished, and on which run predicts the held-out text best, if all were scored on
    the same text."""
    finished = [(run, run.result.evaluation) for run in runs if run.result is not None]
    words = [f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {len(finished)} finished."]
    known = [(score, run) for run, score in finished if score is not None and math.isfinite(score.bits_per_byte)]
    if len({score.bytes for score, _ in known}) > 1:
        words.append("They were scored on different held-out text, so none is called the best.")
    elif len(known) > 1:
        least, best = min(((score.bits_per_byte, run) for score, run in known), key=lambda pair: pair[0])
        words.append(f"{best.directory.name} has the fewest bits per byte, {least:.4f}.")
    return " ".join(words)


def _current(directory: Path) -> bool:
    page = directory / PAGE
    return page.is_file() and page.stat().st_mtime >= (directory / METRICS).stat().st_mtime


def _row(run: RunFacts) -> list[str]:
    score = None if run.result is None else run.result.evaluation
    numbers = [DASH, DASH] if score is None else [f"{score.loss:.4f}", f"{score.bits_per_byte:.4f}"]
    tokens = short(run.tokens)
    state = "finished" if run.result else f"step {run.step} of {run.recipe.train.steps}"
    name = html.link(run.directory.name, f"{run.directory.name}/{PAGE}")
    return [name, run.cost.mechanism, short(run.cost.parameters), tokens, *numbers, state]


def _names(runs: Sequence[RunFacts]) -> list[str]:
    names = [run.directory.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [os.fspath(run.directory) for run in runs]


def _curve(runs: Sequence[RunFacts], names: Sequence[str], key: str) -> str:
    """A plot of one of the metrics over the steps, smoothed; for the loss it also shows the held-out loss, dashed."""
    lines = []
    for series, (run, name) in enumerate(zip(runs, names, strict=True)):
        points = [(line["step"], _value(line, key)) for line in run.metrics if key in line]
        if points:
            lines.append(Line(name, *_smoothed(points), series, marks=len(points) == 1))
        held = [(line["step"], line["val/loss"]) for line in run.metrics if "val/loss" in line]
        if key == "loss" and held:
            x, y = zip(*held, strict=True)
            lines.append(Line(f"{name}, held out", x, y, series, dashed=True))
    title, axis = CURVES[key]
    caption = "Dots mark the loss of held-out text." if any(line.dashed for line in lines) else ""
    return html.plot(title, lines, ("step", axis), f"{axis} by step", caption) if lines else ""


def _value(line: Mapping[str, float], key: str) -> float:
    """A number of a step. The loss is that of the next token, also of a distilled run, which minimises a mixture."""
    return line.get(CROSS_ENTROPY, line[key]) if key == "loss" else line[key]


def _smoothed(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Points averaged over equally many neighbours each, so that at most `SMOOTHED` remain."""
    width = -(-len(points) // SMOOTHED)
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [group[-1][0] for group in groups], [sum(y for _, y in group) / len(group) for group in groups]


def _by_position(runs: Sequence[RunFacts], names: Sequence[str]) -> str:
    """Loss by position in the context: whether the model uses what it has read."""
    lines = []
    for series, (run, name) in enumerate(zip(runs, names, strict=True)):
        score = None if run.result is None else run.result.evaluation
        parts = [] if score is None else [(i, loss) for i, loss in enumerate(score.position_loss) if loss is not None]
        if score is not None and len(parts) > 1:
            width = run.recipe.data.sequence_length / len(score.position_loss)  # parts without targets count too
            lines.append(Line(name, [(i + 1) * width for i, _ in parts], [loss for _, loss in parts], series))
    axes = ("position in the context", "nats per token")
    return html.plot("Loss by position", lines, axes, "held-out loss by position") if lines else ""


def _domains(run: RunFacts) -> PlainTable:
    score = None if run.result is None else run.result.evaluation
    found = {} if score is None or len(score.domains) < 2 else score.domains
    rows = [[name, f"{one.loss:.4f}", f"{one.bits_per_byte:.4f}", f"{one.tokens:,}"] for name, one in found.items()]
    return "By domain", ["domain", "nats per token", "bits per byte", "tokens"], rows


def _sample(sample: Sample) -> str:
    return html.figure(sample.prompt, html.quotation(sample.text), "the prompt, and how the model continues it")


def _lens(extras: Extras) -> str:
    if extras.lens is None:
        return ""
    return html.paragraph(html.link("The lens: what each layer reads and predicts", extras.lens.name))


def _cost(run: RunFacts) -> dict[str, str]:
    cost, result, context = run.cost, run.result, run.recipe.data.sequence_length
    without = "" if _has_teacher(run.recipe) else ", without the teacher's, which is gone"
    found = {
        "parameters": f"{cost.parameters:,}",
        "FLOPs per token, forward": f"{short(cost.flops_per_token)}, mean over a context of {context:,} tokens",
        "FLOPs of the training": f"{short(cost.training_flops)}{without}",
        "bytes of cache per token": f"{cost.cache_bytes_per_token:,} in bfloat16",
    }
    if result is not None:
        found |= {"seconds in steps": f"{result.seconds:,.0f}", "epochs": f"{result.epochs:.3g}"}
    return found


def _gap(runs: Sequence[RunFacts], names: Sequence[str]) -> Iterator[str]:
    """A sentence on the difference of two runs' held-out losses."""
    scores = [None if run.result is None else run.result.evaluation for run in runs]
    if len(scores) == 2 and scores[0] is not None and scores[1] is not None:
        if scores[0].bytes != scores[1].bytes:
            sizes = " and ".join(f"{score.bytes:,}" for score in (scores[0], scores[1]))
            yield f"They were scored on different held-out text ({sizes} bytes), so no difference is given."
            return
        gap = scores[0].bits_per_byte - scores[1].bits_per_byte
        if not math.isfinite(gap):
            return
        words = f"{names[0]} minus {names[1]}: {signed(gap)} bits per byte on the held-out split, without an interval."
        yield f"{words} `fathom evaluate` pairs them by document."


def _difference(runs: Sequence[RunFacts], names: Sequence[str]) -> str:
    """The keys in which two recipes differ."""
    if len(runs) < 2:
        return ""
    ours, theirs = (values_of(run.recipe) for run in runs)
    keys = differences(runs[0].recipe, runs[1].recipe, ignore=())
    rows = [[key, str(ours.get(key, DASH)), str(theirs.get(key, DASH))] for key in keys]
    built = [run.cost.mechanism for run in runs]
    rows = [["mechanism, as built", *built], *rows] if len(set(built)) > 1 else rows
    return html.table("Keys that differ", ["key", *names], rows) or html.paragraph("The recipes are equal.")


def _history(run: RunFacts) -> Iterator[str]:
    for line in read_history(run.directory):
        changes = ", ".join(line["changes"]) or "nothing"
        yield f"Began at step {line['step']} of {line['from']}; changed: {changes}. {line['command']}"


def _hashes(run: RunFacts) -> PlainTable:
    """The SHA-256 of a run's weight files, as recorded next to the weights."""
    model = finished_model(run.directory)
    path = None if model is None else model / WEIGHT_HASHES
    lines = path.read_text(encoding="utf-8").split("\n") if path is not None and path.is_file() else []
    rows = [[name, digest] for digest, _, name in (line.partition("  ") for line in lines) if name]
    return "SHA-256 of the weights", ["file", "hash"], rows
