"""The keys of a ladder's section, as the command's help lists them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from fathom.cli.main import main
from fathom.experiments.rules import Rules, ladders_folder


def test_help_lists_every_key_and_every_ladder_that_comes_with_fathom(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["ladder", "--help"])
    shown = capsys.readouterr().out
    assert all(f"\n  ladder.{field.name} " in shown for field in fields(Rules))
    assert "ladder.layers needed  (a list of integers)" in shown and "ladder.tune_points = [4, 3]" in shown
    words = " ".join(shown.partition("options:")[0].split())
    assert all(path.stem in words for path in ladders_folder().glob("*.yaml")) and "directory of a ladder" in words
