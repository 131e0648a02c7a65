"""One name, one class: a word that two rooms use for two things has to be explained twice."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "fathom"
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def namesakes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class names that stand for two things, and the files; `Name = list[int]` at the top of a file is one of them. A
    name with an underscore is its file's own."""
    found, written = defaultdict(list), set()
    for path, source in sources.items():
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
                written.add(node.name)
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
                found[ast.unparse(node.targets[0])].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1 and name in written and name[0] != "_"}


def test_no_class_shares_its_name():
    assert namesakes(SOURCES) == {}


def test_a_planted_namesake_is_seen():
    for planted in ("class View:\n    pass\n", "View = dict[str, int]\n"):
        assert namesakes({**SOURCES, "planted.py": planted}) == {"View": ["models/roles.py", "planted.py"]}
