"""Who imports whom in an export's flat folder: one way only, at the top of a file, and no mechanism another one."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from fathom.models.packages import FILES, exported
from fathom.models.registry import MECHANISMS

SOURCES = {name: exported(name) for name in FILES}
MECHANISM_FILES = {m.build.__module__.rpartition(".")[2] for m in MECHANISMS.values()} - {"roles"}


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST) -> set[str]:
    """The siblings that a file imports when it runs, wherever the import stands."""
    found = {node.module} if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module else set()
    for child in ast.iter_child_nodes(node):
        if not for_types_only(node) or child not in node.body:
            found |= imports(child)
    return found


@cache
def read(source: str) -> tuple[set[str], dict[str, set[str]]]:
    """The siblings that a file imports, and those that each of its functions does."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return imports(tree), {one.name: inside for one in functions if (inside := imports(one))}


def faults(sources: dict[str, str]) -> list[str]:
    found, graph = [], {}
    for name, source in sources.items():
        graph[name], functions = read(source)
        found += [f"{name}.{one} imports {', '.join(sorted(inside))}" for one, inside in functions.items()]
        if name in MECHANISM_FILES and (others := graph[name] & MECHANISM_FILES):
            found.append(f"{name} imports the mechanism {', '.join(sorted(others))}")
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        found.append(f"a circle: {' <- '.join(error.args[1])}")
    return found


def test_imports_go_one_way():
    assert len(MECHANISM_FILES) >= 12 and set(SOURCES) >= MECHANISM_FILES
    assert faults(SOURCES) == []


@pytest.mark.parametrize(
    "name,line,says",
    [
        ("looping", "def cost():\n    from .slots import plan\n", "looping.cost imports slots"),
        ("roles", "from .registry import ALL\n", "a circle: "),
        ("draws", "if True:\n    from .modeling import Attention\n", "a circle: "),
        ("uniform_depth", "from .depth_attention import mix\n", "uniform_depth imports the mechanism depth_attention"),
    ],
)
def test_a_planted_import_is_seen(name, line, says):
    assert any(fault.startswith(says) for fault in faults({**SOURCES, name: f"{SOURCES[name]}\n{line}"}))


def test_imports_for_types_are_none():
    assert faults({**SOURCES, "roles": f"{SOURCES['roles']}\nif TYPE_CHECKING:\n    from .registry import ALL\n"}) == []
