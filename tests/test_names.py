"""One name, one class: a word that two rooms use for two things has to be explained twice."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "fathom"
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


@cache
def named(source: str) -> list[tuple[str, bool]]:
    """Names of types in a file, and whether each is a class: `Name = list[int]` at its top is none, but a type."""
    tree = ast.parse(source)
    classes = [(node.name, True) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    given = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript))
    return classes + [(ast.unparse(node.targets[0]), False) for node in given]


def namesakes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class names that stand for two things, and the files. A name with an underscore is its file's own."""
    found, classes = defaultdict(list), set()
    for path, source in sources.items():
        for name, is_class in named(source):
            found[name].append(path)
            classes |= {name} if is_class and name[0] != "_" else set()
    return {name: paths for name, paths in found.items() if len(paths) > 1 and name in classes}


def test_no_class_shares_its_name():
    assert namesakes(SOURCES) == {}


def test_a_planted_namesake_is_seen():
    for planted in ("class View:\n    pass\n", "View = dict[str, int]\n"):
        assert namesakes({**SOURCES, "planted.py": planted}) == {"View": ["models/roles.py", "planted.py"]}
