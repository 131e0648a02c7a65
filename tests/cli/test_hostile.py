"""A model directory of a stranger's ends a command in one line, or does no harm: no traceback, no hang, no code run."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.cli import hostile

BLOCK = 20
BLOCKS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 21))]
FOUND = [50, 303, 412, 715, 1167, 1267, 1902, 1946, 2608, 3265, 4329]
"""Cases that ended in a traceback once."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    hostile.make_bases(folder)
    return folder


@pytest.mark.parametrize("block", BLOCKS)
def test_every_end_is_one_line(block: int, place: Path) -> None:
    ends = [hostile.try_case(place, number) for number in range(block * BLOCK, (block + 1) * BLOCK)]
    assert [end for end in ends if end.fault] == []
    assert {0, 2} <= {end.code for end in ends}, "some changes do no harm, most do"


@pytest.mark.parametrize("number", FOUND)
def test_what_was_found_is_refused(number: int, place: Path) -> None:
    end = hostile.try_case(place, number)
    assert (end.code, end.fault) == (2, "")


def test_good_directories_do_what_they_are_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control: unchanged, every command ends with 0, and every family opens."""
    (place / "out").mkdir(exist_ok=True)
    for family in hostile.FAMILIES:
        commands = hostile.commands(place, place / family)
        for name in ("generate", "evaluate", "lens", "lineage") if family == "qwen3" else ("generate",):
            assert hostile.main(commands[name]) == 0, commands[name]


def test_bad_ends_are_seen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that does each of the forbidden things."""

    def ends(fault: object) -> str:
        monkeypatch.setattr(hostile, "main", fault)
        return hostile.try_case(place, 0).fault

    def bomb(words: list[str]) -> int:
        exec(compile(hostile.BOMB, Path(words[1]) / "evil.py", "exec"), {"__file__": str(Path(words[1]) / "evil.py")})
        return 0

    def program(words: list[str]) -> int:
        subprocess.run(["true"], check=True)
        return 0

    def failing(words: list[str]) -> int:
        raise KeyError("evil")

    monkeypatch.setattr(hostile, "SECONDS", 1)
    assert "KeyError" in ends(failing)
    assert ends(bomb) == "code of the directory ran"
    assert "subprocess.Popen" in ends(program)
    assert ends(lambda words: time.sleep(1.9) or 0) == "hangs"
    assert ends(lambda words: 1) == "exit code 1"
    assert ends(lambda words: 2) == "no line of Fathom's"
    assert ends(lambda words: 0) == ""
