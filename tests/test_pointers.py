"""A file that a docstring or comment names exists, and has the function that is named with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fathom
import fathom.models

PACKAGE = Path(fathom.__file__).parent
ROOT = Path(__file__).parent.parent
TEXTS = {path: path.read_text("utf-8") for path in PACKAGE.rglob("*.*") if path.suffix in (".py", ".js", ".j2")}
# `loop.py`, `training/loop.py`, with what is named of it: `loop.py` (`train`), `train` in `loop.py`.
FILE = r"`([\w./]+\.(?:py|js|j2))`"
POINTER = re.compile(rf"(?:`([\w.]+)`\s+in\s+)?{FILE}(?:\s+\(`([\w.]+)`)?")


def named(name: str, here: Path) -> list[Path]:
    """The files that a name may mean: the one beside the text, else those of the package that end with it, else one of
    the repository."""
    if name.startswith(("benchmarks/", "tests/", "examples/")):
        return [ROOT / name] if (ROOT / name).exists() else []
    beside = (here / name).resolve()
    if beside in TEXTS:
        return [beside]
    return [path for path in TEXTS if path.as_posix().endswith(f"/{name.lstrip('./')}")]


def defines(path: Path, member: str) -> bool:
    """Whether a file defines a function, class, method or constant."""
    word = member.split(".")[-1]
    definition = rf"\b(?:def|class|function|const) {word}\b|^\s*(?:self\.)?{word}\b[^=\n]*[:=]"
    return bool(re.search(definition, TEXTS[path], re.M))


def faults(text: str, here: Path = PACKAGE / "training") -> list[str]:
    """What a text in a folder names and is not there."""
    found = []
    for before, name, after in POINTER.findall(text):
        files = named(name, here)
        if not files:
            found.append(name)
        for member in (before, after):
            if files and member and not any(defines(path, member) for path in files):
                found.append(f"{name} ({member})")
    return found


def test_files_and_functions_that_are_named_exist() -> None:
    sources = {path: text for path, text in TEXTS.items() if path.suffix == ".py"}
    assert not {path.name: found for path, text in sources.items() if (found := faults(text, path.parent))}


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
        ("`Path` in `loop.py`, `signal_number` in `loop.py`", ["loop.py (Path)", "loop.py (signal_number)"]),
        ("`benchmarks/nothing.py`", ["benchmarks/nothing.py"]),
        ("`build.py`\n(`nobody_wrote_this`)", ["build.py (nobody_wrote_this)"]),
    ],
)
def test_a_wrong_pointer_is_seen(text: str, wrong: list[str]) -> None:
    assert faults(text) == wrong
