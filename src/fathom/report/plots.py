"""Small plots as inline SVG, drawn at the width of a phone, coloured by the page's CSS, with a text description.

Text is 12 units high in a picture 360 units wide, so it is legible where a wide figure would be scaled down. On a wide
screen a page puts several side by side.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fathom.report.numbers import short
from fathom.report.templates import macro

WIDTH, HEIGHT = 360, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 44
ROW = 34
"""Height of one interval with its label, in pixels like all sizes here."""
LETTER = 7.0
"""Width of a letter of a name, on average; its font is 12 high and bold."""
CELLS_LEFT, CELLS_TOP = 40, 24
FAINTEST = 0.004
"""Matrix cells below this value are not drawn."""
TEMPLATE = "report/plots.html.j2"
DASHES = ("none", "6 3", "2 3", "8 3 2 3", "4 2", "1 2")
UNSEEN = "1 4"
"""Dash pattern of a line beyond what was observed."""
SERIES = 8
"""Colours the page defines, `--series-0` (the control) to `--series-7`."""
Pairs = Collection[tuple[int, int]]


@dataclass(frozen=True)
class Line:
    """A curve, with a band around it if `low` and `high` are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    series: int
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    marks: bool = True
    joined: bool = True
    """Whether a line joins its points; else only marks are drawn."""
    dashed: bool = False
    """Whether it is drawn dashed, as a fit or a forecast beyond what was observed."""


@dataclass(frozen=True)
class IntervalMark:
    """A point with its confidence interval; only a point if it has none."""

    name: str
    value: float
    low: float | None
    high: float | None
    series: int

    @property
    def words(self) -> str:
        """The value and its interval as text, for a screen reader."""
        if self.low is None or self.high is None:
            return f"{self.value:+.4f}, no interval"
        return f"{self.value:+.4f}, 95 % interval {self.low:+.4f} to {self.high:+.4f}"


@dataclass(frozen=True)
class Axis:
    """The label of one side of a matrix plot, and the number of each row or column."""

    name: str
    numbers: Sequence[int]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between `low` and `high`, for the ticks of an axis."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = size * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def ends(lines: Iterable[Line], form: str) -> str:
    """A description in words of the values at which curves end."""
    return "; ".join(f"{line.name} ends at {line.y[-1]:{form}}" for line in lines)


def reach(lines: Iterable[Line], form: str) -> str:
    """A description in words of the values at which curves begin and end."""
    return "; ".join(f"{line.name} from {line.y[0]:{form}} to {line.y[-1]:{form}}" for line in lines)


def line_plot(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    description: str,
    zero: bool = False,
    x_from_zero: bool = True,
    top: float | None = None,
) -> Markup:
    """Curves over one axis.

    Args:
        lines: The curves.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        description: The plot in words, for a screen reader.
        zero: Draw the line at y = 0.
        x_from_zero: Start the x axis at 0.
        top: The y axis reaches at least this value.
    """
    xs = [x for line in lines for x in line.x if math.isfinite(x)]
    ys = [y for line in lines for part in (line.y, line.low or (), line.high or ()) for y in part if math.isfinite(y)]
    if not xs or not ys:
        return Markup()
    x_range = _range([*xs, 0.0] if x_from_zero else xs, margin=0.0)
    y_range = _range([*ys, *([0.0] if zero else []), *([] if top is None else [top])])
    longest = max((len(short(tick)) for tick in ticks(*y_range, count=4)), default=0)
    left = LEFT + round(LETTER * max(0, longest - 4))  # the label of the axis stands left of the numbers
    frame = _Frame(x_range, y_range, left=left, whole=all(float(x).is_integer() for x in xs))
    bands = [
        {"series": line.series % SERIES, "points": _outline(frame, line.x, line.low, line.high)}
        for line in lines
        if line.low is not None and line.high is not None
    ]
    curves = [
        {
            "name": line.name,
            "series": line.series % SERIES,
            "dash": UNSEEN if line.dashed else DASHES[line.series % len(DASHES)],
            "joined": line.joined,
            "points": [frame.place(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)],
            "marks": line.marks or len(line.x) < 2,  # a line of one point shows nothing
        }
        for line in lines
    ]
    at_zero = frame.y(0.0) if zero else None
    return macro("lines", TEMPLATE, frame, x_label, y_label, description, at_zero, bands, curves)


def interval_plot(intervals: Sequence[IntervalMark], x_label: str, description: str, line: float = 0.0) -> Markup:
    """A plot with one row for each interval, and a vertical line at `line` that marks no difference or the expected
    value."""
    values = [v for i in intervals for v in (i.value, i.low, i.high) if v is not None and math.isfinite(v)]
    low, high = _range([*values, line])
    frame = _Frame((low, high), (0.0, 1.0), height=ROW * len(intervals) + BOTTOM + TOP, left=RIGHT + 4)
    at = frame.x(line)
    rows = []
    right = _right_of(at, frame, [item.name for item in intervals])
    for number, item in enumerate(intervals):
        rows.append(
            {
                "name": item.name,
                "label": fitted(item.name, frame.right - at if right else at - frame.left),
                "words": item.words,
                "series": item.series % SERIES,
                "anchor": "end" if right else "start",
                "label_x": frame.right if right else frame.left,
                "x": frame.x(item.value),
                "y": TOP + ROW * number + 24,
                "ends": None if item.low is None or item.high is None else (frame.x(item.low), frame.x(item.high)),
            }
        )
    return macro("intervals", TEMPLATE, frame, x_label, description, at, rows)


def _right_of(at: float, frame: _Frame, names: Sequence[str]) -> bool:
    """Whether all names are placed to the right of the vertical line: this is so if they do not fit to its left, and
    its right has more room. No name crosses the line."""
    left, right = at - frame.left, frame.right - at
    return max(map(width_of, names), default=0.0) > left and right > left


def width_of(text: str) -> float:
    """The approximate width of a name and of the space after it."""
    return LETTER * (len(text) + 1)


def fitted(text: str, room: float) -> str:
    """A name, shortened at its end if it is wider than `room`."""
    return text if width_of(text) <= room else text[: max(1, int(room / LETTER) - 2)] + "…"


def cell_plot(values: Sequence[Sequence[float]], down: Axis, across: Axis, outlined: Pairs, description: str) -> Markup:
    """A plot of a matrix of shares (0 to 1), whose cells range from no colour at 0 to full colour at 1.

    Args:
        values: `[rows, columns]`; below 0 counts as 0.
        down: What rows are, and the number of each.
        across: The same of columns.
        outlined: Cells (row, column) to draw an edge around.
        description: The picture in words, for a screen reader.
    """
    rows, columns = len(down.numbers), len(across.numbers)
    side = (WIDTH - CELLS_LEFT - RIGHT) / max(rows, columns)
    squares = [
        {
            "x": round(CELLS_LEFT + column * side, 1),
            "y": round(CELLS_TOP + row * side, 1),
            "side": round(side * 0.94, 1),
            "opacity": f"{min(max(value, 0.0), 1.0):.3f}",
            "outlined": (row, column) in outlined,
            "title": f"{down.name} {down.numbers[row]}, {across.name} {across.numbers[column]}: {value:.3f}",
        }
        for row, line in enumerate(values)
        for column, value in enumerate(line)
        if value >= FAINTEST or (row, column) in outlined
    ]
    top = [(round(CELLS_LEFT + (i + 0.5) * side, 1), 16, across.numbers[i], "middle") for i in every(columns)]
    left = [(CELLS_LEFT - 6, round(CELLS_TOP + (i + 0.5) * side + 4, 1), down.numbers[i], "end") for i in every(rows)]
    edge = {"x": CELLS_LEFT, "y": CELLS_TOP, "width": round(columns * side, 1), "height": round(rows * side, 1)}
    height = round(CELLS_TOP + rows * side + 6)
    return macro("cells", TEMPLATE, height, description, edge, squares, [*top, *left])


def every(count: int, most: int = 8) -> list[int]:
    """The indices of ticks to label: at most `most` of `count`, evenly spaced."""
    return list(range(0, count, max(1, math.ceil(count / most))))


def svg_file(plot: Markup) -> str:
    """A plot as an SVG file of its own for documentation, with namespace, colours and background."""
    return str(macro("file", TEMPLATE, plot))


@dataclass(frozen=True)
class _Frame:
    """Maps data coordinates to picture coordinates, rounded to a tenth."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    whole: bool = False  # x values are whole numbers: ticks at layers and steps, not between them

    @property
    def bottom(self) -> int:
        """y of the x axis."""
        return self.height - BOTTOM

    @property
    def middle(self) -> float:
        """The x coordinate half-way between the left and right edge."""
        return (self.left + self.right) / 2

    @property
    def centre(self) -> float:
        """The y coordinate half-way between the top and bottom edge."""
        return (self.top + self.bottom) / 2

    def x(self, value: float) -> float:
        """The x coordinate in the picture of a data value."""
        low, high = self.x_range
        return round(self.left + (value - low) / (high - low) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        """The y coordinate in the picture of a data value."""
        low, high = self.y_range
        return round(self.bottom - (value - low) / (high - low) * (self.bottom - self.top), 1)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The picture coordinates of a point."""
        return self.x(x), self.y(y)

    def x_ticks(self) -> list[tuple[float, float, str]]:
        """Positions of the ticks, and positions and texts of their labels, which stay within the picture."""
        found = [tick for tick in ticks(*self.x_range, count=4) if not self.whole or tick.is_integer()]
        return [(self.x(one), min(self.x(one), WIDTH - LETTER * len(short(one)) / 2), short(one)) for one in found]

    def y_ticks(self) -> list[tuple[float, str]]:
        """Positions and labels of the ticks."""
        return [(self.y(tick), short(tick)) for tick in ticks(*self.y_range, count=4)]


def _outline(
    frame: _Frame, x: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> list[tuple[float, float]]:
    """The outline of a band: forward along one edge, back along the other."""
    rows = [row for row in zip(x, low, high, strict=True) if all(map(math.isfinite, row))]
    return [frame.place(at, top) for at, _, top in rows] + [frame.place(at, bottom) for at, bottom, _ in reversed(rows)]


def _range(values: Sequence[float], margin: float = 0.06) -> tuple[float, float]:
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    return low - margin * span, high + margin * span if high > low or margin else high + span
