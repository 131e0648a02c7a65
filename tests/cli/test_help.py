"""Every command's help fits 80 columns and ends with commands that can be typed."""

from __future__ import annotations

import shlex

import pytest

from fathom.cli.lineage import ACTIONS
from fathom.cli.main import COMMANDS, main
from tests.test_docs import check_arguments

NAMES = ["", *COMMANDS, *(f"lineage {name}" for name in ACTIONS)]


def help_of(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_and_has_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(name, monkeypatch, capsys)
    assert max(map(len, shown.splitlines())) <= 80
    if not name:
        assert "NO_COLOR" in shown and "with examples" in shown
        return
    after = shown.partition("\nexamples:\n")[2].partition("\n\n")[0].splitlines()
    assert after and all(line.startswith(f"  fathom {name}") for line in after)
    for line in after:
        check_arguments(shlex.split(line, comments=True)[1:])


def test_an_example_that_cannot_be_typed_is_caught() -> None:
    """The negative control: a folded line, and a flag that is not there."""
    for line in ("train --from runs/mine@step-120 --run", "evaluate runs/a --perplexities data"):
        with pytest.raises(AssertionError):
            check_arguments(shlex.split(line))


def test_evaluate_has_groups_and_prepare_its_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of("evaluate", monkeypatch, capsys)
    for group in ("tasks of lm-eval", "held-out text", "how the models are opened"):
        assert f"\n{group}:\n" in shown
    prepared = help_of("prepare", monkeypatch, capsys)
    assert "(default: 0.01)" in prepared and "the output directory\n" in prepared
