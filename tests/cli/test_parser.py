"""What the library calls a parameter, the command line calls by its flag."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import fathom
from fathom.cli.parser import Parser

HOUSE = Path(fathom.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z]")
WHOLE_COMMANDS = {
    *("report/provenance.py", "inference/vllm_model.py", "lineage/publishing/report.py"),
    *("deepen/heal.py", "deepen/search_page.py", "experiments/ladder.py", "experiments/budget.py", "training/loop.py"),
}
"""Files that write a command out in full, ours or another program's."""


@pytest.mark.parametrize(
    ("command", "message", "shown"),
    [
        ("evaluate", "context=0: allowed: 1 or more", "--context 0: allowed: 1 or more"),
        ("evaluate", "num_fewshot=-1: allowed: 0 or more", "--num-fewshot -1: allowed: 0 or more"),
        ("generate", "`kvcache` grows: leave out `batch_size`", "--kvcache grows: leave out --batch-size"),
        ("generate", "`options` num_beams=x: allowed", "--set num_beams=x: allowed"),
        ("export", "export it with `form=fathom`", "export it with --as fathom"),
        ("deepen", "mechanism=loop+ponder: two values", "--with loop+ponder: two values"),
        ("train", "branch it: `origin=runs/a` with `run_dir`", "branch it: --from runs/a with --run"),
        ("lineage", "give it with `adapter_base`", "give it with --adapter-base"),
        (
            "train",
            "`generate_batch` or `kvcache=full` is no flag here",
            "`generate_batch` or `kvcache=full` is no flag here",
        ),
        ("train", "train.steps=0: allowed: 1 or more", "train.steps=0: allowed: 1 or more"),
        ("generate", "the seed and compile=x in the middle stay", "the seed and compile=x in the middle stay"),
        ("generate", "model=x: a positional argument has no flag", "model=x: a positional argument has no flag"),
    ],
)
def test_parameters_are_shown_as_flags(command: str, message: str, shown: str) -> None:
    parser = Parser(prog=command)
    import_module(f"fathom.cli.{command}").add(parser)
    assert parser.in_flags(message) == shown


def _texts(code: str) -> Iterator[str]:
    """Strings of a file that are no docstrings, the constant parts of f-strings among them."""
    tree = ast.parse(code)
    documents = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documents:
            yield node.value


def test_the_library_names_no_flag() -> None:
    files = {file.relative_to(HOUSE).as_posix(): file.read_text(encoding="utf-8") for file in HOUSE.rglob("*.py")}
    found = [
        f"{name}: {text}"
        for name, code in files.items()
        if not name.startswith("cli/") and name not in WHOLE_COMMANDS and FLAG.search(code)
        for text in _texts(code)
        if FLAG.search(text)
    ]
    assert not found
    assert len(files) > 300 and [text for text in _texts('"""--a"""\nx = f"--out {y}"') if FLAG.search(text)] == [
        "--out "
    ]
