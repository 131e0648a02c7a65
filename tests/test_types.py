"""A mechanism's options are read through their dataclass, not by a key of a dictionary."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "fathom"


def by_name(source: str) -> list[str]:
    """Where a mechanism's option is looked up in its dictionary by a name that is spelled out."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            owner, key = node.value, node.slice
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_options.get"):
            owner, key = node.func.value, node.args[0]
        else:
            continue
        options = isinstance(owner, ast.Attribute) and owner.attr.endswith("_options")
        found += [ast.unparse(node)] if options and isinstance(key, ast.Constant) else []
    return found


def test_options_are_read_by_their_dataclass():
    found = {str(path.relative_to(ROOT)): lines for path in ROOT.rglob("*.py") if (lines := by_name(path.read_text()))}
    # Training fills in the seed of whatever recurrence has one.
    assert found == {"training/build.py": ["config.recurrence_options['seed']"]}
    assert by_name("w = config.mixer_options['stride']\nv = self.config.mixer_options.get('stride', 1)") == [
        "config.mixer_options['stride']",
        "self.config.mixer_options.get('stride', 1)",
    ]
