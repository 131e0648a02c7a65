"""`python docs/sentences.py SEED` draws sixty sentences at random, for a reader who has not seen the project.

The reader writes down what each one means. What was misunderstood is rewritten.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from words import GENERATED, ROOT, paragraphs

SAMPLE = {"README": 10, "docs": 15, "help": 10, "errors": 10, "docstrings": 15}
"""Sentences of each kind."""
FEWEST_WORDS = 6


def place(path: Path) -> str:
    """A file's path below the repository."""
    return str(path.relative_to(ROOT))


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`*])", " ".join(text.split()))


def of_pages(pages: list[Path]) -> Iterator[tuple[str, str]]:
    """Sentences of Markdown pages, outside tables and code."""
    for page in pages:
        for _, paragraph in paragraphs(page.read_text(encoding="utf-8")):
            if not paragraph.startswith("<"):
                yield from ((place(page), one) for one in sentences(paragraph))


def of_lists(page: Path) -> Iterator[tuple[str, str]]:
    """Items of the generated lists: options of commands and keys of recipes."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("- `"):
            yield place(page), line.removeprefix("- ")


def text_of(node: ast.expr) -> str:
    """A message as its source has it, with an ellipsis for every value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(one) for one in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def of_errors(tree: ast.Module) -> Iterator[str]:
    """Messages of the errors that a file raises."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield text_of(node.exc.args[0])


def of_docstrings(tree: ast.Module) -> Iterator[str]:
    """The first sentence of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield sentences(text)[0]


def pools() -> dict[str, set[tuple[str, str]]]:
    """(File, sentence) of every kind."""
    docs = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "results"]
    code = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src" / "fathom").rglob("*.py")}
    found = {
        "README": of_pages([ROOT / "README.md"]),
        "docs": of_pages([page for page in docs if page.name not in GENERATED]),
        "help": (row for page in docs if page.name in GENERATED[1:] for row in of_lists(page)),
        "errors": ((place(path), one) for path, tree in code.items() for one in of_errors(tree)),
        "docstrings": ((place(path), one) for path, tree in code.items() for one in of_docstrings(tree)),
    }
    return {kind: {one for one in drawn if len(one[1].split()) >= FEWEST_WORDS} for kind, drawn in found.items()}


def main(seed: int) -> None:
    """Print the sample as a numbered list."""
    chance, kinds = random.Random(seed), pools()
    drawn = [(kind, *one) for kind, count in SAMPLE.items() for one in chance.sample(sorted(kinds[kind]), count)]
    for number, (kind, file, sentence) in enumerate(drawn, 1):
        print(f"{number}. [{kind}, {file}] {sentence}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
