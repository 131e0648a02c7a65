"""Types are said: `Any` stays rare, so that what a function takes and returns can be read."""

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


def test_a_planted_any_is_seen():
    planted = 'from typing import Any\n\n\ndef f(x: Any) -> "int":\n    """Any number."""  # Any\n    return x\n'
    assert count(planted) == 2
