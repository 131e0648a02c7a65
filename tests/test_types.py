"""Types are said: `Any` stays rare, so that what a function takes and returns can be read."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "fathom"
MOST = 150


def count(source: str) -> int:
    """How often `Any` stands in code; words in texts and comments are none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.NAME and token.string == "Any" for token in tokens)


def test_any_is_rare():
    found = {str(path.relative_to(ROOT)): count(path.read_text()) for path in ROOT.rglob("*.py")}
    assert sum(found.values()) <= MOST, sorted(found.items(), key=lambda item: -item[1])[:10]


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


def test_a_planted_any_is_seen():
    planted = 'from typing import Any\n\n\ndef f(x: Any) -> "int":\n    """Any number."""  # Any\n    return x\n'
    assert count(planted) == 2
