"""Small plots as inline SVG: drawn at the width of a phone, coloured by the page's CSS, described in words.

Text is 12 units high in a picture 360 units wide, so it stays legible where a scaled-down wide figure would not; on a
desk a page puts several side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 44
DASHES = ("none", "6 3", "2 3", "8 3 2 3", "4 2", "1 2")
SERIES = 8
"""Colours the page defines, `--series-0` (the control) to `--series-7`."""


@dataclass(frozen=True)
class Line:
    """A curve, with a band around it where `low` and `high` are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    series: int
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    marks: bool = True


@dataclass(frozen=True)
class Interval:
    """A point with its interval; without one, a point."""

    name: str
    value: float
    low: float | None
    high: float | None
    series: int


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between two others."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = size * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(number: float) -> str:
    """A tick's label: 1.5 M rather than 1500000."""
    if number == 0:
        return "0"
    for size, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.4g} {suffix}"
    return f"{number:.6g}".replace("-", "−")


def line_plot(
    lines: Sequence[Line], x_label: str, y_label: str, description: str, zero: bool = False, x_from_zero: bool = True
) -> str:
    """Curves over one axis; `zero` draws the line at y = 0."""
    xs = [x for line in lines for x in line.x if math.isfinite(x)]
    ys = [y for line in lines for part in (line.y, line.low or (), line.high or ()) for y in part if math.isfinite(y)]
    if not xs or not ys:
        return ""
    x_range = _range([*xs, 0.0] if x_from_zero else xs, margin=0.0)
    y_range = _range([*ys, 0.0] if zero else ys)
    frame = _Frame(x_range, y_range)
    body = [frame.axes(x_label, y_label)]
    if zero:
        body.append(frame.rule(0.0))
    bands = [_band(frame, line) for line in lines if line.low is not None and line.high is not None]
    return _svg([*body, *bands, *(_curve(frame, line) for line in lines)], description)


def interval_plot(intervals: Sequence[Interval], x_label: str, description: str) -> str:
    """One row per interval, and the line of no difference."""
    height = 34 * len(intervals) + BOTTOM + TOP
    values = [v for i in intervals for v in (i.value, i.low, i.high) if v is not None and math.isfinite(v)]
    low, high = _range([*values, 0.0])
    frame = _Frame((low, high), (0.0, 1.0), height=height, left=RIGHT + 4)
    body = [frame.axes(x_label, None)]
    body.append(f'<line class="zero" x1="{frame.x(0):.1f}" x2="{frame.x(0):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
    for row, item in enumerate(intervals):
        y = TOP + 34 * row + 24
        style = f"--c:var(--series-{item.series % SERIES})"
        anchor, at = ("start", frame.left) if item.value > (low + high) / 2 else ("end", WIDTH - RIGHT)
        label = f'<text class="name" x="{at}" y="{y - 9}" text-anchor="{anchor}">{escape(item.name)}</text>'
        bar = ""
        if item.low is not None and item.high is not None:
            bar = f'<line class="bar" x1="{frame.x(item.low):.1f}" x2="{frame.x(item.high):.1f}" y1="{y}" y2="{y}"/>'
        title = f"<title>{escape(item.name)}: {_interval_text(item)}</title>"
        mark = f'<circle class="mark" cx="{frame.x(item.value):.1f}" cy="{y}" r="4.5"/>'
        body.append(f'<g style="{style}">{title}{label}{bar}{mark}</g>')
    return _svg(body, description, height)


@dataclass(frozen=True)
class _Frame:
    """Data coordinates to picture coordinates."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    height: int = HEIGHT
    left: int = LEFT

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (WIDTH - RIGHT - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)

    def rule(self, value: float) -> str:
        y = self.y(value)
        return f'<line class="zero" x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'

    def axes(self, x_label: str, y_label: str | None) -> str:
        bottom = self.height - BOTTOM
        parts = []
        for tick in ticks(*self.x_range, count=4):
            x = self.x(tick)
            grid = f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            parts.append(f'{grid}<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{short(tick)}</text>')
        middle = (self.left + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{self.height - 8}" text-anchor="middle">{escape(x_label)}</text>')
        if y_label is None:
            return "".join(parts)
        for tick in ticks(*self.y_range, count=4):
            y = self.y(tick)
            grid = f'<line class="grid" x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            parts.append(f'{grid}<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
        center = (TOP + bottom) / 2
        turned = f'transform="rotate(-90 11 {center})"'
        parts.append(f'<text x="11" y="{center}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
        return "".join(parts)


def _curve(frame: _Frame, line: Line) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f'stroke-dasharray="{DASHES[line.series % len(DASHES)]}"'
    marks = [f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points] if line.marks else []
    style = f"--c:var(--series-{line.series % SERIES})"
    title = f"<title>{escape(line.name)}</title>"
    return f'<g style="{style}">{title}<polyline class="curve" points="{path}" {dash}/>{"".join(marks)}</g>'


def _band(frame: _Frame, line: Line) -> str:
    assert line.low is not None and line.high is not None
    rows = [row for row in zip(line.x, line.low, line.high, strict=True) if all(map(math.isfinite, row))]
    there = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in rows]
    back = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(rows)]
    style = f"--c:var(--series-{line.series % SERIES})"
    return f'<polygon class="band" style="{style}" points="{" ".join([*there, *back])}"/>'


def _svg(body: Sequence[str], description: str, height: int = HEIGHT) -> str:
    label = escape(description, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(body)}</svg>'


def _range(values: Sequence[float], margin: float = 0.06) -> tuple[float, float]:
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    return low - margin * span, high + margin * span if high > low or margin else high + span


def _interval_text(item: Interval) -> str:
    if item.low is None or item.high is None:
        return f"{item.value:+.4f}, no interval"
    return f"{item.value:+.4f}, 95 % interval {item.low:+.4f} to {item.high:+.4f}"
