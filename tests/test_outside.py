"""Ordinary runs leave the outside tests alone, and their page lists what their list accepts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fathom.models.registry import DEFAULTS, MECHANISMS
from tests.outside.accepted import ACCEPTED

ROOT = Path(__file__).parents[1]
COLLECT = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "tests/outside"]
ROW = re.compile(r"^\| (`test_[^|]*) \| ([^|]*) \|", re.MULTILINE)


def test_an_ordinary_run_does_not_look_inside() -> None:
    """Not even to import what only their own environment has: exit code 5 is that nothing was collected."""
    done = subprocess.run(COLLECT, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 5, done.stdout + done.stderr


def listed(page: str) -> dict[str, set[str]]:
    """By mechanism: the tests that the page says are accepted to fail."""
    found: dict[str, set[str]] = {case: set() for case in ACCEPTED}
    for tests, where in ROW.findall(page):
        every = found.keys() - {"qwen3"} if where == "all" else re.findall(r"`(\w+)`", where)
        for case in every:
            found[case] |= set(re.findall(r"`(\w+)`", tests))
    return found


def test_the_list_has_every_mechanism() -> None:
    assert ACCEPTED.keys() == {"qwen3", "vanilla", *MECHANISMS} - set(DEFAULTS.values())


def test_the_page_lists_what_is_accepted() -> None:
    page = (ROOT / "docs" / "how-to" / "outside.md").read_text(encoding="utf-8")
    assert listed(page) == {case: set(names) for case, names in ACCEPTED.items()}
    assert listed(page.replace("| `ponder2`, `ponder3` |", "| `ponder2` |")) != listed(page), "a row less is seen"
