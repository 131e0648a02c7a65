"""Numbers formatted for people."""

from __future__ import annotations

DASH = "–"
"""Placeholder for a missing number."""


def signed(value: float, half_width: float | None = None) -> str:
    """A difference as text with its sign, followed by the half-width of its interval if there is one: `−0.0210 ±
    0.0300`."""
    width = "" if half_width is None else f" ± {half_width:.4f}"
    return f"{value:+.4f}{width}".replace("-", "−")


def short(number: float, digits: int = 4, space: str = " ", whole: float = 1e3) -> str:
    """1.5 M rather than 1500000.

    Args:
        number: The number.
        digits: Significant digits.
        space: Between number and prefix.
        whole: Numbers below this are written out.
    """
    if number == 0:
        return "0"
    shown = abs(float(f"{number:.{digits}g}")) if abs(number) >= whole else 0.0  # 999,999 is 1 M, not 1e+03 k
    for size, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if shown >= size:
            return f"{number / size:.{digits}g}{space}{prefix}"
    return f"{number:.6g}".replace("-", "−")


def size(count: int) -> str:
    """Bytes: 1.5 MB."""
    return f"{short(count)}B" if count >= 1000 else f"{count} B"


def in_words(number: float) -> str:
    """1.5 million."""
    shown = float(f"{number:.3g}")
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if shown >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
