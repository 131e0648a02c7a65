"""The outside tests know every mechanism."""

from __future__ import annotations

from fathom.models.registry import DEFAULTS, MECHANISMS
from tests.outside.accepted import ACCEPTED


def test_the_list_has_every_mechanism() -> None:
    known = {"qwen3", "vanilla", *MECHANISMS} - set(DEFAULTS.values())
    assert ACCEPTED.keys() == known, "a line for each in tests/outside/accepted.py"
