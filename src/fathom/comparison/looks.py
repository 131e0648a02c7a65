"""Looks at a comparison: the seeds of every report with results, so that seeds added after a look are noticed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fathom.checkpoints.layout import LOOKS, REPORT
from fathom.comparison.results import ComparisonResults, Look
from fathom.recipe import RecipeError
from fathom.report.files import read_json, write_json


def awaited(report: ComparisonResults) -> list[int]:
    """Planned seeds without a result yet, except those whose control, or every other arm, has failed."""
    lost = {(row["arm"], row["seed"]) for row in report.get("failed", [])}
    control, *others = (arm["name"] for arm in report["arms"])
    gone = {
        seed
        for seed in report["seeds_planned"]
        if (control, seed) in lost or all((name, seed) in lost for name in others)
    }
    return [seed for seed in report["seeds_planned"] if seed not in {*report["seeds"], *gone}]


def read_looks(out: Path) -> list[Look]:
    """The looks so far; in a directory without `looks.json`, the one of its last report."""
    path = out / LOOKS
    try:
        if path.exists():
            looks: list[Look] = read_json(path)["looks"]
            return looks
        path = out / REPORT
        return _look(read_json(path)) if path.exists() else []
    except (ValueError, KeyError):
        raise RecipeError(f"{path} is damaged: delete it, and the looks so far are forgotten") from None


def with_this(looks: Sequence[Look], report: ComparisonResults) -> list[Look]:
    """The looks with this report added, if it is a new look."""
    known = [(look["seeds"], look["planned"]) for look in looks]
    return [*looks, *(look for look in _look(report) if (look["seeds"], look["planned"]) not in known)]


def record(out: Path, report: ComparisonResults) -> None:
    """Write the looks of a report that is about to be written."""
    if report["looks"]:
        write_json(out / LOOKS, {"looks": report["looks"]})


def changed(report: ComparisonResults) -> bool:
    """Whether the planned seeds changed after a look."""
    return any(set(look["planned"]) != set(report["seeds_planned"]) for look in report.get("looks", []))


def warning(report: ComparisonResults) -> str:
    """The end of a sentence about seeds that were planned after the first look; empty if there are none.

    A plan that is carried out as it was has one chance of a false claim, however often it was looked at on the way. One
    that is changed after a look, or stopped early, has a chance at each look and at the end of each plan.
    """
    coming, looks = awaited(report), report.get("looks", [])
    if not looks or not (coming or changed(report)):
        return ""
    seen = list(dict.fromkeys(frozenset(look["seeds"]) for look in looks))
    chances = {*seen, *(frozenset([*look["seeds"], *look["awaited"]]) for look in looks)}
    many = "1 look" if len(seen) == 1 else f"{len(seen)} looks"
    *before, last = (str(len(seeds)) for seeds in seen)
    at = f"({many}, at {', '.join(before)}{' and ' if before else ''}{last} seeds)"
    risk = f"up to {min(100, 5 * len(chances))} %, not 5 %"
    if not changed(report):
        done = f"{len(report['seeds'])} of {len(report['seeds']) + len(coming)} planned seeds are done"
        return f"; {done} {at}, and to stop here for what they say makes the chance of a false claim {risk}"
    added = all(set(look["planned"]) <= set(report["seeds_planned"]) for look in looks)
    what = "seeds were added" if added else "the planned seeds changed"
    return f"; {what} after a report had been written {at}, so that the chance of a false claim is {risk}"


def _look(report: ComparisonResults) -> list[Look]:
    """The look that a report amounts to; none for a report of one seed, which claims nothing."""
    if len(report["seeds"]) < 2:
        return []
    planned, date = report["seeds_planned"], report["date"]
    return [{"seeds": report["seeds"], "awaited": awaited(report), "planned": planned, "date": date}]
