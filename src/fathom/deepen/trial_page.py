"""The page of `fathom try`: the verdict, the held-out scores, both training curves, the time, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fathom.checkpoints.file_names import RECIPE
from fathom.deepen.trial import Finding
from fathom.evaluation.results import ScoresReport
from fathom.report import REPORT, html
from fathom.report.files import read_json, write_json
from fathom.report.plots import Line
from fathom.report.provenance import provenance
from fathom.report.results import restored
from fathom.report.tables import PlainTable
from fathom.training import read_metrics
from fathom.training.results import CROSS_ENTROPY

RUNS = ("healed", "control")
NAMED = {"healed": "deepened", "control": "control"}
WORDS = {
    "deeper": "add the mechanism",
    "data": "text to tokens",
    "healed": "train the deepened model",
    "control": "train the control",
    "report": "score all three",
}
HOW = (
    "The control is the same model with the same training, without the mechanism; if the mechanism has learned "
    "gates, the control has as many gains. The deepened model minus the control is what the mechanism gave; the "
    "deepened model minus the base is mostly what the training gave."
)


def write(finding: Finding, following: Sequence[str]) -> Path:
    """Write `report.html` and `report.json`; returns the page."""
    name = Path(finding.trial.model).name
    how, speed = html.paragraph(HOW, quiet=True), finding.compared.speed
    decoding = html.paragraph(speed.sentence(finding.compared.control)) if speed else ""
    scores = html.section("On held-out text", html.table(*score_table(finding)), how, decoding)
    curves = html.section("Training", html.legend([NAMED[run] for run in RUNS]), plots(finding.out))
    page = html.page(
        f"{finding.trial.mechanism} on {name}",
        finding.verdict,
        scores,
        curves,
        html.section("Time", html.table(*time_table(finding))),
        html.section("What next", html.commands(following)),
        html.section("Where the numbers come from", html.source(provenance())),
        html.details("The recipe of both trainings", (finding.out / "healed" / RECIPE).read_text(encoding="utf-8")),
    )
    write_json(finding.out / "verdict.json", {**vars(finding), "verdict": finding.verdict})
    path = finding.out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def score_table(finding: Finding) -> PlainTable:
    """The table of the bits per byte of the base, deepened and control models, with the deepened model's differences
    from the others."""
    scores = restored(ScoresReport, read_json(finding.out / "report" / REPORT)).checkpoints
    gaps = {effect.against: effect.gap for effect in finding.compared.effects}
    rows = []
    for name, entry in scores.items():
        found, gap = entry.perplexity[entry.text], gaps.get(name)
        rows.append([name, f"{found.bits_per_byte:.4f}", f"{found.perplexity:.3f}", "" if gap is None else str(gap)])
    columns = ["model", "bits per byte", "perplexity", "deepened minus this model, bits per byte"]
    return "Lower is better; * is significant at 5 %", columns, rows


def plots(out: Path) -> str:
    """Plots of the training losses of the deepened model and its control and of their difference, smoothed over a tenth
    of the steps."""
    steps, losses = [], {}
    for run in RUNS:
        lines = [line for line in read_metrics(out / run) if "loss" in line]
        steps, losses[run] = [line["step"] for line in lines], [line.get(CROSS_ENTROPY, line["loss"]) for line in lines]
    smoothed = {run: _smooth(values) for run, values in losses.items()}
    both = [
        Line(NAMED[run], steps, values, series, marks=False) for series, (run, values) in enumerate(smoothed.items())
    ]
    gap = [deeper - control for deeper, control in zip(*(smoothed[run] for run in RUNS), strict=True)]
    means, axes = "means of a tenth of the steps", ("step", "nats per token")
    return html.figures(
        html.plot("Loss of both trainings", both, axes, "loss by step", means),
        html.plot("Deepened minus control", [Line("", steps, gap, 0, marks=False)], axes, "by step", means, zero=True),
    )


def _smooth(values: Sequence[float]) -> list[float]:
    """Trailing means of the values, each over a tenth of their number."""
    width = max(1, len(values) // 10)
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def time_table(finding: Finding) -> PlainTable:
    """Minutes of every step."""
    spent = finding.spent
    rows = [[WORDS[name], minutes(spent[name].seconds), minutes(spent[name].processor_seconds)] for name in spent]
    whole = sum(one.seconds for one in spent.values()), sum(one.processor_seconds for one in spent.values())
    return "Minutes", ["step", "by the clock", "of processor time"], [*rows, ["all", *map(minutes, whole)]]


def minutes(seconds: float) -> str:
    """Minutes with one decimal."""
    return f"{seconds / 60:.1f}"
