"""The keys of a ladder's section, as the command's help lists them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from fathom.cli.main import main
from fathom.experiments.ladder_rules import Rules, ladders_folder


def test_every_key_and_every_ladder_that_comes_with_fathom_is_listed(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["ladder", "--keys"])
    keys = capsys.readouterr().out
    assert all(f"ladder.{field.name} = " in keys for field in fields(Rules))
    assert "ladder.layers = []  (a list of integers)" in keys and "ladder.tune_points = [4, 3]" in keys
    with pytest.raises(SystemExit):
        main(["ladder", "--help"])
    shown = capsys.readouterr().out
    words = " ".join(shown.partition("options:")[0].split())
    assert all(path.stem in words for path in ladders_folder().glob("*.yaml")) and "directory of a ladder" in words
