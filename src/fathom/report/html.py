"""Building blocks of a report: one HTML file that needs nothing else and reads well on a phone, by day and by night.

Blocks are strings of HTML; text given to them is escaped, so that a name from the command line cannot break a page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fathom.report.files import finite, write_atomically
from fathom.report.plots import DASHES, SERIES

STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf7;--card:#fff;--ink:#1c2126;--soft:#59636e;--line:#dcdad3;--accent:#0b5c8a;
--series-0:#5f6873;--series-1:#0b6fb3;--series-2:#c2500a;--series-3:#0a7f5f;--series-4:#a83a86;--series-5:#8a6d00;
--series-6:#5a4fcf;--series-7:#b3261e}
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--card:#1b2025;--ink:#e8eaec;--soft:#a3adb8;--line:#343b43;
--accent:#7cc4f0;--series-0:#a9b2bc;--series-1:#5eb5f2;--series-2:#f2995c;--series-3:#4fcda4;--series-4:#e58cc8;
--series-5:#dcc04a;--series-6:#a49cf5;--series-7:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:28px 20px 56px}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 .3em}h2{font-size:1.14rem;margin:2.4em 0 .5em}
p{max-width:76ch;margin:.5em 0}.verdict{font-size:1.16rem;line-height:1.5;max-width:70ch;margin:.9em 0 1.2em;
padding-left:14px;border-left:4px solid var(--accent)}
.note{color:var(--soft);font-size:.9rem}code,pre{font:.86em/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
code{overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;margin:.8em 0;overflow:hidden}
.scroll{overflow-x:auto}
.scroll:focus-visible,summary:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
.caption{padding:10px 12px 2px;margin:0;color:var(--soft);font-size:.9rem}
th,td{padding:7px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
thead th{border-top:0;color:var(--soft);font-weight:600;font-size:.86rem;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
tbody th{font-weight:600}
td.text{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:12em}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:14px;
align-items:start;margin:1em 0}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 12px 8px;
max-width:540px;width:100%}
figcaption{font-size:.9rem;margin-bottom:6px}figcaption b{display:block}figcaption span{color:var(--soft)}
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font:12px system-ui,sans-serif}
svg .name{fill:var(--c);font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:4px}
svg .grid{stroke:var(--line)}svg .zero{stroke:var(--soft);stroke-dasharray:3 3}
svg .curve{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}svg .mark{fill:var(--c)}
svg .bar{stroke:var(--c);stroke-width:3;stroke-linecap:round}svg .band{fill:var(--c);opacity:.16}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;margin:.6em 0;font-size:.92rem}
.legend svg{display:inline-block;width:30px;height:10px;margin-right:6px;vertical-align:middle}
ul.plain{padding-left:1.2em;max-width:76ch}ul.plain li{margin:.35em 0}
details{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 14px;margin:.8em 0}
summary{cursor:pointer;font-weight:600}pre{overflow-x:auto;margin:.6em 0}
@media (max-width:520px){main{padding:18px 14px 40px}
tbody th{white-space:normal;min-width:8em}th,td{padding:6px 8px}table{font-size:.86rem}
h1{font-size:1.3rem}.verdict{font-size:1.06rem}}
@media print{.card,figure,details{break-inside:avoid}}
"""


def page(title: str, verdict: str, *blocks: str, note: str = "") -> str:
    """A whole document: a title, the one sentence that says what the evidence shows, and the blocks."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style>'
    )
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    top = f'<h1>{escape(title)}</h1><p class="verdict">{escape(verdict)}</p>{below}'
    body = "\n".join(block for block in blocks if block)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{top}\n{body}\n</main></body></html>\n'


def section(heading: str, *blocks: str) -> str:
    """A heading and what belongs to it; nothing if nothing does."""
    body = "\n".join(block for block in blocks if block)
    return f"<section><h2>{escape(heading)}</h2>\n{body}</section>" if body else ""


def paragraph(text: str, quiet: bool = False) -> str:
    """A paragraph; `quiet` for what only the careful reader needs."""
    return f'<p class="note">{escape(text)}</p>' if quiet else f"<p>{escape(text)}</p>"


def bullets(items: Sequence[str]) -> str:
    """A list of sentences."""
    return f'<ul class="plain">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>'


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows whose first cell is their header. A table too wide scrolls by itself, with the keyboard too."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(_row(row) for row in rows)
    return _scrolling(caption, f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>", visible=True)


def figure(title: str, svg: str, caption: str = "") -> str:
    """A plot with its title and what to know when reading it; nothing without a plot."""
    if not svg:
        return ""
    words = f"<b>{escape(title)}</b><span>{escape(caption)}</span>"
    return f"<figure><figcaption>{words}</figcaption>{svg}</figure>"


def figures(*items: str) -> str:
    """Figures side by side where there is room."""
    shown = [item for item in items if item]
    return f'<div class="figures">{"".join(shown)}</div>' if shown else ""


def legend(names: Sequence[str]) -> str:
    """Which line is whose: the first name has the first colour and dash of every plot."""
    items = []
    for i, name in enumerate(names):
        line = f'<line class="curve" x1="0" x2="30" y1="5" y2="5" stroke-dasharray="{DASHES[i % len(DASHES)]}"/>'
        svg = f'<svg viewBox="0 0 30 10" aria-hidden="true" style="--c:var(--series-{i % SERIES})">{line}</svg>'
        items.append(f"<li>{svg}{escape(name)}</li>")
    return f'<ul class="legend" aria-label="Legend">{"".join(items)}</ul>'


def details(summary: str, text: str) -> str:
    """Preformatted text that opens on demand."""
    body = f'<pre tabindex="0" aria-label="{escape(summary, quote=True)}">{escape(text)}</pre>'
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def facts(values: Mapping[str, str]) -> str:
    """Names and values, one a line."""
    rows = (
        f'<tr><th scope="row">{escape(name)}</th><td class="text">{escape(value)}</td></tr>'
        for name, value in values.items()
    )
    return _scrolling("Provenance", f"<tbody>{''.join(rows)}</tbody>")


def write(directory: Path, values: Mapping[str, Any], html: str) -> tuple[Path, Path]:
    """Put `report.json` and `report.html` in place, each whole or not at all."""
    paths = directory / "report.json", directory / "report.html"
    write_atomically(paths[0], json.dumps(finite(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_atomically(paths[1], html)
    return paths


def _scrolling(label: str, inside: str, visible: bool = False) -> str:
    """A table in a region that scrolls; its caption stays outside, where a narrow screen cannot cut it."""
    name = f'aria-label="{escape(label, quote=True)}"'
    caption = f'<p class="caption" aria-hidden="true">{escape(label)}</p>' if visible else ""
    region = f'<div class="scroll" tabindex="0" role="region" {name}><table {name}>{inside}</table></div>'
    return f'<div class="card">{caption}{region}</div>'


def _row(cells: Sequence[str]) -> str:
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
    return f'<tr><th scope="row">{escape(cells[0])}</th>{rest}</tr>'
