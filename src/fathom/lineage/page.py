"""The report as one HTML page that loads nothing, for phone and desk, in the reader's light or dark theme.

Charts are SVG drawn here, because their colours must follow the theme.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.lineage import evidence, huref, portrait
from fathom.lineage.comparison import ALIGNMENTS, NAMES, SCORE_LABELS, Comparison
from fathom.lineage.report import CANONICAL_STEPS

STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --card: #fff; --ink: #1c1d22; --soft: #63656e; --line: #e2e0d8;
  --accent: #1d5fc4; --band: #9aa0ad; --bad: #b3261e; --good: #1b6e3c; --amber: #8a5a00 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #121317; --card: #1b1d23; --ink: #eceae4; --soft: #a3a5ae; --line: #32353e;
    --accent: #7fb0ff; --band: #6c7280; --bad: #ff8a80; --good: #7fd6a0; --amber: #f0c060 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 64px }
h1 { font-size: 15px; font-weight: 600; color: var(--soft); margin: 0 0 18px }
h2 { font-size: 19px; margin: 0 0 4px }
p { margin: 0 0 10px }
ul { margin: 6px 0; padding-left: 20px }
li { margin: 3px 0 }
code, pre { font-size: 13px; overflow-wrap: anywhere }
pre { white-space: pre-wrap; background: var(--paper); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px }
.lead { font-size: clamp(22px, 4.2vw, 32px); line-height: 1.25; font-weight: 650; margin: 10px 0 14px;
  text-wrap: balance }
.label { display: inline-block; border: 1.5px solid; border-radius: 99px; padding: 2px 12px; font-size: 14px;
  font-weight: 600 }
.found { color: var(--bad) }
.unsure { color: var(--amber) }
.clear { color: var(--good) }
.soft { color: var(--soft); font-size: 14px }
.name { overflow-wrap: anywhere; font-weight: 600 }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px;
  margin-top: 16px; min-width: 0 }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); gap: 0 16px }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; max-width: 620px }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: 15px }
th { font-weight: 600; text-align: left; color: var(--soft); font-size: 13px }
td, th { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top }
tr:last-child td { border-bottom: 0 }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
th.n { text-align: right }
.bar { position: relative; height: 8px; border-radius: 4px; background: var(--line); max-width: 420px; margin: 6px 0 }
.bar i { position: absolute; inset: 0 auto 0 0; border-radius: 4px; background: var(--accent) }
.bar b { position: absolute; top: -4px; bottom: -4px; width: 2px; background: var(--soft) }
svg { display: block; width: 100%; height: auto }
svg.map { max-width: 440px; margin: 0 auto }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
img { width: 100%; border-radius: 12px; display: block; margin: 8px 0 }
@media (max-width: 560px) {
  .tests thead { display: none }
  .tests tr { display: block; border-bottom: 1px solid var(--line); padding: 8px 0 }
  .tests td { display: inline-block; border: 0; padding: 1px 14px 1px 0; text-align: left; white-space: normal }
  .tests td:first-child, .tests td[data-head="null"] { display: block }
  .tests td[data-head]::before { content: attr(data-head) ": "; color: var(--soft) }
}
"""


def text(value: object) -> str:
    """Escaped text."""
    return html.escape(str(value))


def el(name: str, *children: str, **attributes: object) -> str:
    """An element; children are markup, `cls` is its class, underscores in attribute names become hyphens."""
    given = "".join(
        f' {"class" if key == "cls" else key.replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{given}>{''.join(children)}</{name}>"


def render(found: Comparison, body: dict[str, Any], portraits: dict[str, Array] | None = None) -> str:
    """The page of a comparison; `body` is its JSON report."""
    verdict = found.verdict
    colour = {evidence.SHARED: "found", evidence.INITIALISATION: "found", evidence.NONE: "clear"}.get(
        verdict.label, "unsure"
    )
    content = [
        el("h1", "Fathom lineage report"),
        el("span", text(verdict.label), cls=f"label {colour}"),
        el("p", text(verdict.sentence), cls="lead"),
        bullets(verdict.reasons),
        el("div", *(_model(item) for item in body["inputs"]), cls="two"),
        section("Signs of tampering", bullets(found.tampering)) if found.tampering else "",
        el("div", section("Layer against layer", _map(found)), section("Layer by layer", _curve(found)), cls="two"),
        section("Scores", _scores(found)),
        section("Tests", _tests(found)),
        section("Controls", _controls(found, body)),
        section("Portraits", _portraits(portraits)),
        section("Not claimed", bullets(verdict.not_claimed)),
        section("How to reproduce", _reproduce(found, body)),
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    title = el("title", f"Lineage: {text(verdict.label)}")
    return f"{head}{title}<style>{STYLE}</style></head><body>{el('main', *content)}</body></html>\n"


def section(title: str, *content: str) -> str:
    """A titled card."""
    return el("section", el("h2", title), *content)


def soft(*content: str) -> str:
    """A paragraph in the quiet voice."""
    return el("p", *content, cls="soft")


def bullets(items: Iterable[str]) -> str:
    """A quiet list of plain sentences."""
    return el("ul", *(el("li", text(item)) for item in items), cls="soft")


def table(head: Iterable[tuple[str, str]], rows: Iterable[str], cls: str = "") -> str:
    """A table that scrolls sideways on its own; head is (title, class)."""
    top = el("thead", el("tr", *(el("th", title, cls=kind) for title, kind in head)))
    return el("div", el("table", top, el("tbody", *rows), cls=cls), cls="wide")


def size(count: int) -> str:
    """Bytes for people."""
    power = min(int(math.log(max(count, 1), 1000)), 4)
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {['B', 'kB', 'MB', 'GB', 'TB'][power]}"


def number(value: float) -> str:
    """Three decimals, and no negative zero."""
    return f"{round(value, 3) + 0.0:.3f}"


def bar(value: float, mark: float | None = None) -> str:
    """A bar from 0 to 1, with a tick where the highest unrelated score is."""

    def share(number: float) -> str:
        return f"{100 * min(max(number, 0), 1):.1f}%"

    tick = "" if mark is None else el("b", style=f"left:{share(mark)}")
    return el("div", el("i", style=f"width:{share(value)}"), tick, cls="bar")


def _model(item: dict[str, Any]) -> str:
    shape = item["structure"]
    revision = f" at {item['revision']}" if item["revision"] else ""
    outline = f"{shape['model_type']}: {shape['layers']} layers, width {shape['width']}, "
    outline += f"{shape['heads']} heads on {shape['kv_heads']} keys"
    read = f"{size(item['bytes_read'])} read, {size(item['file_bytes'])} in all; headers "
    digest = el("code", item["headers_sha256"][:16])
    return el("section", el("p", text(item["origin"] + revision), cls="name"), soft(text(outline)), soft(read, digest))


def _map(found: Comparison) -> str:
    """Layer × layer similarity; fuller colour is closer, matched pairs are outlined."""
    name, pair = found.pair.best, found.pair
    if name is None:
        return soft("No alignment was possible.")
    scores = pair.scores[name]
    rows, columns = scores.map.shape
    side = 360 / max(rows, columns)
    cells = [_cell(found, scores.map, i, j, side, (i, j) in scores.pairs) for i in range(rows) for j in range(columns)]
    across = [(46 + (j + 0.5) * side, 14.0, pair.layers[1][j] + 1, "middle") for j in _ticks(columns)]
    down = [(40.0, 24 + (i + 0.5) * side, pair.layers[0][i] + 1, "end") for i in _ticks(rows)]
    labels = [el("text", str(label), x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=to) for x, y, label, to in across + down]
    frame = {"width": f"{columns * side:.1f}", "height": f"{rows * side:.1f}", "fill": "none", "stroke": "var(--line)"}
    box = f"0 0 410 {rows * side + 26:.0f}"
    drawing = el("svg", el("rect", x=46, y=20, **frame), *cells, *labels, viewBox=box, cls="map", role="img")
    legend = (
        f"{text(SCORE_LABELS[name])}. Down: {el('code', text(pair.a.name))}; across: {el('code', text(pair.b.name))}. "
    )
    return soft(legend, "Full colour is 1, none is 0; matched layers are outlined.") + drawing


def _cell(found: Comparison, values: Array, i: int, j: int, side: float, paired: bool) -> str:
    value = float(values[i, j])
    if value < 0.004 and not paired:
        return ""
    (layers_a, layers_b), edge = found.pair.layers, {"stroke": "var(--ink)"} if paired else {}
    return el(
        "rect",
        el("title", f"layers {layers_a[i] + 1} and {layers_b[j] + 1}: {value:.3f}"),
        x=f"{46 + j * side:.1f}",
        y=f"{20 + i * side:.1f}",
        width=f"{side * 0.94:.1f}",
        height=f"{side * 0.94:.1f}",
        fill="var(--accent)",
        fill_opacity=f"{max(value, 0):.3f}",
        **edge,
    )


def _ticks(count: int) -> list[int]:
    return list(range(0, count, max(1, math.ceil(count / 8))))


def _curve(found: Comparison) -> str:
    """Score of each matched layer, with what controls gave behind it."""
    name, pair = found.pair.best, found.pair
    if name is None or not pair.scores[name].pairs:
        return soft("No layers were matched.")
    scores = pair.scores[name]
    values, band = scores.per_layer, null_band(found, name, len(scores.pairs))
    floor = math.floor(min(0.0, *values, *(low for low, _ in band)) * 5 + 0.25) / 5

    def place(at: int, value: float) -> tuple[float, float]:
        across = 0.5 if len(values) == 1 else at / (len(values) - 1)
        return 40 + across * 344, 14 + (1 - value) * 250 / (1 - floor)

    parts = [_rule(place, t / 5) for t in range(round(floor * 5), 6)]
    if band:
        upper = [place(i, high) for i, (_, high) in enumerate(band)]
        lower = [place(i, low) for i, (low, _) in enumerate(band)]
        style = {"fill": "var(--band)", "fill_opacity": 0.4, "stroke": "var(--band)", "stroke_width": 2}
        parts.append(el("polygon", points=_points([*upper, *lower[::-1]]), **style))
    published = pair.scores.get("awm")
    if published and len(published.per_layer) == len(values):
        dashes = {"stroke": "var(--soft)", "stroke_width": 1.5, "stroke_dasharray": "4 4", "fill": "none"}
        parts.append(el("polyline", points=_points([place(i, v) for i, v in enumerate(published.per_layer)]), **dashes))
    line = [place(i, v) for i, v in enumerate(values)]
    parts.append(el("polyline", points=_points(line), fill="none", stroke="var(--accent)", stroke_width=2.5))
    for (x, y), value, (_, j) in zip(line, values, scores.pairs, strict=True):
        hint = el("title", f"layer {pair.layers[1][j] + 1}: {value:.3f}")
        parts.append(el("circle", hint, cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.5, fill="var(--accent)"))
    for i in _ticks(len(values)):
        label = str(pair.layers[1][scores.pairs[i][1]] + 1)
        parts.append(el("text", label, x=f"{place(i, 0)[0]:.1f}", y=284, text_anchor="middle"))
    null = "The grey band is what the controls gave." if band else "No controls were given, so there is no null band."
    legend = f"Solid: {text(SCORE_LABELS[name])}. Dashed: AWM as published. {null} Across: layers of "
    return soft(legend, el("code", text(pair.b.name)), ".") + el("svg", *parts, viewBox="0 0 400 290", role="img")


def _rule(place: Callable[[int, float], tuple[float, float]], value: float) -> str:
    y = place(0, value)[1]
    line = el("line", x1=40, x2=384, y1=f"{y:.1f}", y2=f"{y:.1f}", stroke="var(--line)")
    return line + el("text", f"{value:g}", x=32, y=f"{y + 4:.1f}", text_anchor="end")


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def null_band(found: Comparison, name: str, count: int) -> list[tuple[float, float]]:
    """Lowest and highest control score at each relative depth."""
    curves = [curve for curve in (found.null.per_layer.get(name, []) if found.null else []) if curve]
    if not curves or not count:
        return []
    at = np.linspace(0, 1, count)
    spread = np.stack([np.interp(at, np.linspace(0, 1, len(curve)), curve) for curve in curves])
    return [(float(low), float(high)) for low, high in zip(spread.min(0), spread.max(0), strict=True)]


def _scores(found: Comparison) -> str:
    rows = []
    for name, label in SCORE_LABELS.items():
        value = found.pair.value(name)
        if value is None:
            continue
        null = found.null.scores.get(name, []) if found.null else []
        highest = max(null) if null else None
        unrelated = "–" if highest is None else number(highest)
        cells = [
            el("td", text(label), bar(value, highest)),
            el("td", number(value), cls="n"),
            el("td", unrelated, cls="n"),
        ]
        rows.append(el("tr", *cells))
    out = table([("Score", ""), ("this pair", "n"), ("highest unrelated", "n")], rows)
    if found.verdict.drift is not None and found.verdict.threshold is not None:
        out += soft(
            f"Minimum detectable drift: weights that moved by more than {found.verdict.drift:.1f} times their own norm "
            f"fall below the threshold of {found.verdict.threshold:.3f} and would not be seen by these scores."
        )
    return out + (bullets(found.pair.skipped) if found.pair.skipped else "")


def _tests(found: Comparison) -> str:
    rows = []
    for test in found.tests:
        corrected = evidence.probability(test.corrected) if test.decides else "not used"
        cells = [
            el("td", text(test.name), el("div", text(test.assumptions), cls="soft")),
            el("td", f"{test.statistic:,.4g}", cls="n", data_head="statistic"),
            el("td", text(test.null), data_head="null"),
            el("td", evidence.probability(test.p), cls="n", data_head="p"),
            el("td", corrected, cls="n", data_head="corrected"),
            el("td", text(test.kind), data_head="kind"),
        ]
        rows.append(el("tr", *cells))
    head = [("Test", ""), ("statistic", "n"), ("null", ""), ("p", "n"), ("corrected", "n"), ("kind", "")]
    note = "H₀: independent random initialisations, whatever the data or the teacher. Corrected by Holm's method."
    return soft(note) + table(head, rows, "tests")


def _controls(found: Comparison, body: dict[str, Any]) -> str:
    if found.null is None:
        return el(
            "p",
            "None were given. Without unrelated models of the same kind a score cannot be called high: add ",
            el("code", "--control MODEL"),
            ".",
        )
    names = [name for name in ("awm", *NAMES.values(), "ics_canonical") if found.pair.value(name) is not None]
    rows = []
    for control, pairs in found.controls:
        for pair in pairs:
            other = pair.a.name if pair.b.name == control else pair.b.name
            cells = [
                el(
                    "td",
                    el("code", text(control)),
                    el("div", "against ", text(other), cls="soft"),
                    style="min-width:9em",
                )
            ]
            values = [pair.value(name) for name in names]
            cells += [el("td", "" if value is None else number(value), cls="n") for value in values]
            rows.append(el("tr", *cells))
    bound = body["bounds"]
    note = (
        f"Null: {found.null.origin}. {bound['unrelated_pairs']} unrelated pairs of {bound['models']} models bound the "
    )
    note += f"false-positive rate below {bound['false_positive_rate_below']:.0%}: a {bound['note']}."
    return table([("Control", ""), *((name, "n") for name in names)], rows) + soft(text(note))


def _portraits(portraits: dict[str, Array] | None) -> str:
    if not portraits:
        return soft("Not drawn in this mode: ", el("code", "fathom lineage portrait MODEL"), " draws one.")
    drawn = [
        el(
            "div",
            el("p", text(name), cls="name"),
            f'<img alt="Portrait of {text(name)}" src="{_data(portrait.pixels(z))}">',
            soft(text(" · ".join(portrait.words(z)))),
        )
        for name, z in portraits.items()
    ]
    first, *rest = portraits.values()
    likeness = huref.sketch_cosine(first, rest[0] if rest else first)
    said = el("p", f"Sketch correlation {likeness:.3f}")
    return el("div", *drawn, cls="pair") + said + bar(likeness) + soft(text(portrait.CAPTION))


def _data(image: Array) -> str:
    """A compressed PNG as a data address; unlike `portrait.png` it need not be byte-identical everywhere."""
    lines = b"".join(b"\0" + line.tobytes() for line in image)
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2, 0, 0, 0)
    out = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")):
        out += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return "data:image/png;base64," + base64.b64encode(out).decode()


def _reproduce(found: Comparison, body: dict[str, Any]) -> str:
    facts = [
        f"Fathom {body['tool']['version']}, numpy {body['tool']['numpy']}, {body['tool']['platform']}",
        f"{found.pair.shared:,} embedding rows paired by {found.pair.pairing}; seed {found.options.seed}; "
        f"{found.pair.seconds:.0f} s for the pair",
        "scores repeat to about 1e-4 on other hardware",
        *CANONICAL_STEPS,
    ]
    return el("pre", text(body["tool"]["command"] or command(found))) + bullets(facts)


def command(found: Comparison) -> str:
    """The command line that makes this report again."""
    pair, options = found.pair, found.options
    first, second = (pair.b, pair.a) if pair.swapped else (pair.a, pair.b)
    words = ["fathom lineage compare", first.name, second.name, f"--mode {options.mode}", f"--seed {options.seed}"]
    words += [f"--control {name}" for name, _ in found.controls]
    if options.align != ALIGNMENTS:
        words.append(f"--align {','.join(options.align)}")
    if options.layers is not None:
        words.append(f"--layers {options.layers}")
    return " ".join(words + (["--reorder"] if options.reorder else []))
