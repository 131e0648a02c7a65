"""A file that a docstring or comment names exists, and has the function that is named with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fathom
import fathom.models

PACKAGE = Path(fathom.__file__).parent
ROOT = Path(__file__).parent.parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.*") if path.is_file()}
# `loop.py`, `training/loop.py`, and the function that may follow: `loop.py` (`train`).
POINTER = re.compile(r"`([\w./]+\.(?:py|js|j2))`(?:\s+\(`([\w.]+)`)?")


def named(name: str) -> list[Path]:
    """The files that a name may mean: those of the package that end with it, else one of the repository."""
    if name.startswith(("benchmarks/", "tests/", "examples/")):
        return [ROOT / name] if (ROOT / name).exists() else []
    return [path for found, path in FILES.items() if f"/{found}".endswith(f"/{name.removeprefix('../')}")]


def faults(text: str) -> list[str]:
    """What is named in a text and is not there."""
    found = []
    for name, member in POINTER.findall(text):
        files = named(name)
        if not files:
            found.append(name)
        elif member and not any(re.search(rf"\b{member.split('.')[-1]}\b", one.read_text()) for one in files):
            found.append(f"{name} ({member})")
    return found


def test_files_and_functions_that_are_named_exist() -> None:
    sources = {name: path.read_text() for name, path in FILES.items() if path.suffix == ".py"}
    assert not {name: found for name, text in sources.items() if (found := faults(text))}


def test_backward_passes_by_hand_are_listed() -> None:
    """In `models/__init__.py`; those that leave compiled code to the compiler apart from the others."""
    found = {"eager": set[str](), "compiled": set[str]()}
    for path in (PACKAGE / "models").rglob("*.py"):
        text = path.read_text()
        if "autograd.Function)" in text:
            found["eager" if "compiler.is_compiling()" in text else "compiled"].add(path.name)
    listed = re.search(r"eager training only:(.*?); in compiled code too:(.*?)\.\n", fathom.models.__doc__ or "", re.S)
    assert listed
    assert [*found.values()] == [set(re.findall(r"`(.+?)`", part)) for part in listed.groups()]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`loop.py` and `training/build.py` (`build_training`)", []),
        ("`lop.py` decides", ["lop.py"]),
        ("`training/modeling.py`", ["training/modeling.py"]),
        ("`benchmarks/nothing.py`", ["benchmarks/nothing.py"]),
        ("`build.py`\n(`nobody_wrote_this`)", ["build.py (nobody_wrote_this)"]),
    ],
)
def test_a_wrong_pointer_is_seen(text: str, wrong: list[str]) -> None:
    assert faults(text) == wrong
