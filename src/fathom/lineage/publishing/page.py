"""The report as one HTML page that loads nothing, for narrow and wide screens, in light or dark.

`report.py` decides what the report holds, and `verification.py` compares a page word by word.
"""

from __future__ import annotations

import base64
from pathlib import Path

from fathom.lineage import evidence, huref, nulls, verdict
from fathom.lineage.comparison import Comparison
from fathom.lineage.pairs import NAMES, SCORE_LABELS
from fathom.lineage.publishing import portrait
from fathom.lineage.publishing.cards import sketch_bytes
from fathom.lineage.publishing.report import CANONICAL_STEPS
from fathom.lineage.publishing.results import LineageReport, ModelEntry, PortraitEntry
from fathom.report import html
from fathom.report.numbers import DASH, size
from fathom.report.plots import Axis, Line, cell_plot, line_plot
from fathom.report.templates import render as render_template

TONES = {verdict.SHARED: "found", verdict.NONE: "clear"}
"""The colour of a verdict; all others are amber."""
GLOSSARY = {
    "channel": "one of the numbers that every layer of a model reads and hands on; a model has hundreds or thousands",
    "neuron": "a unit of a layer that reads all channels and writes to all of them",
    "initialisation": "the random numbers that a model starts training with; a public seed makes them repeatable",
    "control": "a model that is known to be unrelated, scored next to the pair: what it reaches, chance reaches",
    "score": "how alike the weights are, 1 for a copy and about 0 for strangers; a score is not a probability",
    "p-value": "the probability of a coincidence at least this large between unrelated models; not the probability "
    "that somebody is innocent. Under 1e-300 means: smaller than a computer can write as a number",
    "corrected": "the p-value after allowing for the number of tests (Holm)",
    "AWM, HuRef": "two published methods of comparing weights; repaired: disguises that they miss are undone",
    "null": "what unrelated pairs gave: the controls, or the pairs of a calibration file",
    "nonce": "a number drawn for this comparison, which chose the layers and neurons that were looked at",
    "Poisson": "the law of rare coincidences: how often k of them happen where a few are expected",
}
"""Words of the page, for readers who do not build models."""


def write(out: Path, found: Comparison, body: LineageReport) -> None:
    """Write report, page and portraits into a directory."""
    out.mkdir(parents=True, exist_ok=True)
    html.write(out, body, render(found, body))
    for side, item in zip("ab", body.portraits.values(), strict=False):
        (out / f"portrait-{side}.png").write_bytes(portrait.png(portrait.pixels(sketch_bytes(item.sketch))))


def render(found: Comparison, body: LineageReport) -> str:
    """The page of a comparison; `body` is its report."""
    said = found.verdict
    return render_template(
        "lineage/publishing/page.html.j2",
        title=f"Lineage: {said.label}",
        verdict=said,
        tone=TONES.get(said.label, "unsure"),
        glossary=GLOSSARY,
        models=[_model(item) for item in body.inputs],
        tampering=found.tampering,
        pictures=html.figures(_map(found), _curve(found)),
        scores=_scores(found),
        drift=_drift(found),
        skipped=found.skipped,
        tests=[_test(test) for test in found.tests],
        controls=_controls(found, body),
        portraits=[_portrait(name, item) for name, item in body.portraits.items()],
        likeness=_likeness(body.portraits) if body.portraits else None,
        caption=portrait.CAPTION,
        command=body.tool.command,
        facts=_facts(found, body),
    )


def number(value: float) -> str:
    """A number as text with three decimals, and never with a negative zero."""
    return f"{round(value, 3) + 0.0:.3f}"


def share(value: float) -> str:
    """The width of a bar's filled part, in percent."""
    return f"{100 * min(max(value, 0), 1):.1f}"


def _model(item: ModelEntry) -> dict[str, str]:
    shape = item.structure
    revision = f" at {item.revision}" if item.revision else ""
    outline = f"{shape['model_type']}: {shape['layers']} layers, width {shape['width']}, "
    root = item.content and item.content.root
    return {
        "name": item.origin + revision,
        "outline": outline + f"{shape['heads']} query and {shape['kv_heads']} key-value heads",
        "read": f"{size(item.bytes_read)} read, with tokenizer and headers; the weights are {size(item.file_bytes)}",
        "digest": root[:16] if root else "",
    }


def _map(found: Comparison) -> str:
    """Layer × layer similarity."""
    name, pair = found.pair.best, found.pair
    if name is None:
        return ""
    scores = pair.scores[name]
    down, across = (Axis("layer", list(layers)) for layers in pair.layers)
    words = f"{SCORE_LABELS[name]} of each layer of {pair.a.name} with each of {pair.b.name}"
    matched = [(int(i), int(j)) for i, j in scores.pairs]
    caption = f"{SCORE_LABELS[name]}. Down: {pair.a.name}; across: {pair.b.name}. "
    caption += "Full colour is 1, none is 0; matched layers are outlined."
    return html.figure("Layer against layer", cell_plot(scores.map.tolist(), down, across, matched, words), caption)


def _curve(found: Comparison) -> str:
    """A plot of the score of each matched layer, over the range of the controls' scores."""
    name, pair = found.pair.best, found.pair
    if name is None or not pair.scores[name].pairs:
        return ""
    scores = pair.scores[name]
    order = sorted(range(len(scores.pairs)), key=lambda i: scores.pairs[i][1])
    layers = [pair.layers[1][scores.pairs[i][1]] for i in order]
    lines = []
    if band := nulls.band(found.null, name, len(order)):
        low, high = zip(*band, strict=True)
        lines.append(Line("controls, lowest to highest", layers, high, 0, low, high, marks=False))
    lines.append(Line(SCORE_LABELS[name], layers, [scores.per_layer[i] for i in order], len(lines)))
    published = pair.scores.get("awm")
    if name != "awm" and published and len(published.per_layer) == len(order):
        own = [published.per_layer[i] for i in order]
        lines.append(Line(SCORE_LABELS["awm"], layers, own, len(lines), marks=False))
    ends = "; ".join(f"{line.name} from {min(line.y):.3f} to {max(line.y):.3f}" for line in lines)
    caption = "The band is what the controls gave." if band else "No controls were given, so there is no null band."
    plot = line_plot(lines, "layer", "score", f"Score by layer: {ends}", zero=True, x_from_zero=False, top=1.0)
    legend = html.legend([line.name for line in lines])
    return html.figure("Layer by layer", legend + plot, f"{caption} Across: layers of {pair.b.name}.")


def _scores(found: Comparison) -> list[dict[str, str | None]]:
    rows: list[dict[str, str | None]] = []
    for name, label in SCORE_LABELS.items():
        value = found.pair.value(name)
        if value is None:
            continue
        null = found.null.scores.get(name, []) if found.null else []
        rows.append(
            {
                "label": label,
                "value": number(value),
                "share": share(value),
                "unrelated": number(max(null)) if null else DASH,
                "mark": share(max(null)) if null else None,
            }
        )
    return rows


def _drift(found: Comparison) -> str:
    drift, threshold = found.verdict.minimum_detectable_drift, found.verdict.threshold
    if drift is None or threshold is None:
        return ""
    return (
        f"Minimum detectable drift: weights that moved by more than {drift:.1f} times their own norm "
        f"fall below the threshold of {threshold:.3f} and would not be seen by these scores."
    )


def _test(test: evidence.Test) -> dict[str, str]:
    return {
        "name": test.name,
        "assumptions": test.assumptions,
        "statistic": f"{test.statistic:,.4g}",
        "null": test.null,
        "p": evidence.probability(test.p),
        "corrected": evidence.probability(test.corrected),
        "kind": test.kind,
    }


def _controls(found: Comparison, body: LineageReport) -> dict[str, object] | None:
    if found.null is None:
        return None
    every = [pair for _, pairs in found.controls for pair in pairs]
    names = [n for n in ("awm", *NAMES.values(), "ics_canonical") if any(pair.value(n) is not None for pair in every)]
    rows = []
    for control, pairs in found.controls:
        for pair in pairs:
            other = pair.a.name if pair.b.name == control else pair.b.name
            values = ["" if (value := pair.value(name)) is None else number(value) for name in names]
            rows.append({"control": control, "other": other, "values": values})
    bound = body.bounds
    return {
        "names": names,
        "rows": rows,
        "note": f"Null: {found.null.origin}. {bound.unrelated_pairs} unrelated pairs of {bound.models} models "
        f"bound the false-positive rate below {bound.false_positive_rate_below:.0%}: a {bound.note}.",
    }


def _portrait(name: str, item: PortraitEntry) -> dict[str, str]:
    image = base64.b64encode(portrait.png(portrait.pixels(sketch_bytes(item.sketch)), stored=False)).decode()
    return {"name": name, "image": f"data:image/png;base64,{image}", "words": " · ".join(item.words)}


def _likeness(portraits: dict[str, PortraitEntry]) -> dict[str, str]:
    first, *rest = (sketch_bytes(item.sketch) for item in portraits.values())
    found = float(huref.sketch_cosine(first, rest[0] if rest else first))
    return {"value": f"{found:.3f}", "share": share(found)}


def _facts(found: Comparison, body: LineageReport) -> list[str]:
    return [
        f"Fathom {body.tool.version}, numpy {body.tool.numpy}, {body.tool.platform}",
        f"{found.pair.aligned.shared:,} embedding rows paired by {found.pair.aligned.pairing}; "
        f"seed {found.options.seed}, nonce {found.options.nonce}; {found.pair.seconds:.0f} s for the pair",
        "scores repeat to about 1e-4 on other hardware",
        *CANONICAL_STEPS,
    ]
