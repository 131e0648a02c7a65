"""The tests pass whatever a checkout is called: `git clone` names it fathom, and people put blanks in paths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Tests that look at file names, walk the tree, start processes in it or name its files on a command line.
SENSITIVE = (
    "tests/gpu/test_waiting.py::test_packed_documents_wait_once[vanilla]",
    "tests/gpu/test_waiting.py::test_a_planted_read_is_seen",
    "tests/models/test_imports.py",
)
FOLDERS = ("benchmarks", "docs", "examples", "recipes", "src", "tests")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["src/tests/with blank/fathom", "src", "tests", "a clone"])
def test_a_checkout_of_any_name(name: str, tmp_path: Path) -> None:
    """The first name has all of the others on its path."""
    checkout = tmp_path / name
    checkout.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.is_dir() and path.name in FOLDERS:
            shutil.copytree(path, checkout / path.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif path.is_file():
            shutil.copy2(path, checkout)
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *SENSITIVE]
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
