"""Only a mechanism's own file and the registry name it: the decoder knows the three roles."""

import ast
import re
from pathlib import Path

import pytest

import fathom.models
from fathom.models.registry import DEFAULTS, MECHANISMS

FOLDER = Path(fathom.models.__file__).parent
NAMES = set(MECHANISMS) - set(DEFAULTS.values())
OWN = {MECHANISMS[name].build.__module__.rpartition(".")[2] + ".py" for name in NAMES} | {"registry.py"}
EQUATIONS = ("modeling.py", "source_layers.py")


def mentioned(source):
    """Mechanisms that a text names anywhere, comments included."""
    return set(re.findall(r"\w+", source)) & NAMES


def compared(source):
    """Mechanisms that code names in a string of its own."""
    return {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)} & NAMES


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_equations_mention_no_mechanism(name):
    assert not mentioned(next(FOLDER.rglob(name)).read_text())


def test_no_other_file_compares_with_a_mechanism():
    assert len(OWN) == len(NAMES) + 1  # a file for each mechanism but the three defaults, and the registry
    others = [path for path in FOLDER.rglob("*.py") if path.name not in OWN]
    assert {path.name for path in others} > set(EQUATIONS)
    assert {path.name: found for path in others if (found := compared(path.read_text()))} == {}


def test_a_planted_name_is_found():
    planted = 'def forward(config):\n    return config.mixer == "depth_attention"  # as in a loop\n'
    assert mentioned(planted) == {"depth_attention", "loop"} and compared(planted) == {"depth_attention"}
