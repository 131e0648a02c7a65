"""A function fits on a screen: at most 60 lines of code and 8 parameters."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "fathom"
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
FIXED = {"Attention.forward", "FathomModel.forward", "FathomForCausalLM.forward"}
"""Whose parameters are those of transformers, and a few."""
KERNEL = "triton.jit"
"""What it decorates takes every pointer, size and constant by itself: a launch passes no records."""


def too_large(sources: dict[str, str]) -> list[str]:
    """Functions of more than 60 lines of code, or of more than 8 parameters."""
    found = []
    for name, source in sources.items():
        lines, tree = source.splitlines(), ast.parse(source)
        owner = {id(f): f"{c.name}." for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
        functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
        for function in functions:
            first = function.body[0]
            said = set(range(first.lineno, first.end_lineno + 1)) if ast.get_docstring(function) else set()
            body = (n for n in range(function.lineno, function.end_lineno + 1) if n not in said)
            code = [n for n in body if lines[n - 1].strip() and not lines[n - 1].strip().startswith("#")]
            given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            called = owner.get(id(function), "") + function.name
            fixed = called in FIXED or any(ast.unparse(d).startswith(KERNEL) for d in function.decorator_list)
            few = fixed or sum(argument.arg not in ("self", "cls", "ctx") for argument in given) <= 8
            if len(code) > 60 or not few:
                found.append(f"{name}: {called}")
    return found


def test_functions_fit_on_a_screen():
    assert too_large(SOURCES) == []


@pytest.mark.parametrize(
    "planted",
    [
        "def long():\n" + "    x = 1\n" * 60,
        "async def long():\n" + "    x = 1\n" * 60,
        "def wide(a, b, c, d, e, f, g, *, h, i):\n    return a\n",
        "@functools.cache\ndef wide(a, b, c, d, e, f, g, *, h, i):\n    return a\n",
        "@triton.jit\ndef long():\n" + "    x = 1\n" * 60,
    ],
)
def test_a_planted_function_is_seen(planted):
    assert len(too_large({"planted.py": planted})) == 1


def test_a_docstring_is_no_code():
    said = "def long():\n" + '    """' + "Words.\n\n    " * 60 + '"""\n    return 1\n'
    assert too_large({"planted.py": said}) == []
