"""The tree in docs/architecture.md is made of the modules' own first sentences.

python tests/test_tree.py     writes it anew
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "fathom"
BLOCK = re.compile(r"(?<=<!-- tree -->\n```text\n).*?(?=```\n)", re.DOTALL)
WIDTH = 118
ROOMS = (
    *("__init__.py", "__main__.py", "errors.py", "models", "kernels", "kvcache", "report", "checkpoints", "data"),
    *("recipe.py", "corpus", "training", "evaluation", "inference", "lens", "lineage", "comparison", "ladder", "cli"),
)
"""In the order in which they may import each other."""


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    return re.split(r"(?<=[^.].)\.(?: |$)|(?<=:) (?=class|def)", text)[0].replace("`", "")


def tree() -> str:
    """One line for each room and each file."""
    lines = []
    for name in ROOMS:
        place = SOURCE / name
        if place.is_file():
            lines.append(_line(name, sentence(place)))
            continue
        lines.append(_line(f"{name}/", sentence(place / "__init__.py")))
        for path in sorted(place.rglob("*.py")):
            inner = path.relative_to(place)
            if path.name != "__init__.py":
                lines.append(_line(f"  {inner.as_posix()}", sentence(path)))
            elif inner.parent != Path("."):
                lines.append(_line(f"  {inner.parent.as_posix()}/", sentence(path)))
    return "\n".join(lines) + "\n"


def _line(name: str, said: str) -> str:
    line = f"{name:<26}{said}"
    return line if len(line) <= WIDTH else line[: WIDTH - 1].rsplit(" ", 1)[0].rstrip(",;:") + " …"


def test_the_tree_is_what_the_modules_say() -> None:
    assert BLOCK.search(PAGE.read_text(encoding="utf-8"))[0] == tree(), "python tests/test_tree.py writes it anew"


def test_every_room_is_in_the_tree() -> None:
    here = {path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert here - {"_version.py"} == set(ROOMS)


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: tree(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
