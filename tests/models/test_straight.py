"""A model of one trip runs in `FathomModel.forward`, top to bottom; and no function of `models/` outgrows a screen."""

import ast
from pathlib import Path

import pytest

from fathom import models
from fathom.models import modeling, slots

from .cases import CASES, build, config_of, tokens

SOURCES = {path.name: path.read_text() for path in Path(models.__file__).parent.glob("*.py")}
FIXED = {"Attention.forward", "FathomModel.forward", "FathomForCausalLM.forward"}
"""Whose parameters are those of transformers, and a few."""


def too_large(sources: dict[str, str]) -> list[str]:
    """Functions of more than 60 lines of code, or of more than 8 parameters."""
    found = []
    for name, source in sources.items():
        lines, tree = source.splitlines(), ast.parse(source)
        owner = {id(f): f"{c.name}." for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            first = function.body[0]
            said = set(range(first.lineno, first.end_lineno + 1)) if ast.get_docstring(function) else set()
            body = (n for n in range(function.lineno, function.end_lineno + 1) if n not in said)
            code = [n for n in body if lines[n - 1].strip() and not lines[n - 1].strip().startswith("#")]
            given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            called = owner.get(id(function), "") + function.name
            few = sum(argument.arg not in ("self", "cls", "ctx") for argument in given) <= 8 or called in FIXED
            if len(code) > 60 or not few:
                found.append(f"{name}: {called}")
    return found


def test_functions_fit_on_a_screen():
    assert too_large(SOURCES) == []


@pytest.mark.parametrize(
    "planted", ["def long():\n" + "    x = 1\n" * 60, "def wide(a, b, c, d, e, f, g, *, h, i):\n    return a\n"]
)
def test_a_planted_function_is_seen(planted):
    assert len(too_large({"planted.py": planted})) == 1


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if "pon" not in name])
def test_one_trip_needs_no_driver(case, monkeypatch):
    model = build(config_of(case))

    def driven(*args, **kwargs):
        raise AssertionError("driven")

    monkeypatch.setattr(modeling, "run_trips", driven)
    for name in ("sweep", "jacobi"):
        monkeypatch.setattr(slots, name, driven)
    if model.config.recurrence == "once":
        assert model(tokens(1, 3)).logits.isfinite().all()
    else:
        with pytest.raises(AssertionError, match="driven"):
            model(tokens(1, 3))
