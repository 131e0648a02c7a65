"""`fathom chat` at a terminal and over a pipe."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fathom.cli.main import main


@pytest.fixture(scope="module")
def exported(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(talker, tmp_path_factory.mktemp("chat") / "model")


def test_lines_of_a_pipe_are_turns(exported: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "lines").write_text("how deep\n/reset\nhow deep\n/help\n")
    with (tmp_path / "lines").open(encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["chat", str(exported), "--max-new-tokens", "4", "--temperature", "0", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    first, second, *rest = printed.out.split("\n")
    assert first == second and rest[0].startswith("/help") and "tokens/s" in printed.err


@pytest.mark.slow
def test_a_conversation_is_longer_than_its_cache(exported: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """The full cache ends with the model's context; a compressed one says the same until then, and goes on."""
    (tmp_path / "lines").write_text("how deep\nwhy\nhow deep\n")
    answers = {}
    for cache in ("full", "drop 4096", "drop 32", "drop+int8 32"):
        method, *window = cache.split()
        words = ["--kvcache", method, *(["--kvcache-window", *window] if window else [])]
        with (tmp_path / "lines").open(encoding="utf-8") as file:
            monkeypatch.setattr(sys, "stdin", file)
            command = ["chat", str(exported), "--max-new-tokens", "24", "--temperature", "0", "--device", "cpu", *words]
            assert main(command) == 0, capsys.readouterr().err
        answers[cache] = capsys.readouterr().out
    first, ended = answers["full"].split("\n")[0], "this model's context is"
    assert ended in answers["full"] and first and answers["drop 4096"].startswith(first)
    assert not any(ended in answers[cache] for cache in answers if cache != "full")
    assert answers["drop 32"] != answers["drop 4096"]


def test_a_conversation_on_an_input_that_is_no_text(exported: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "lines").write_bytes(b"the depth\n\xff\n")
    command = ["chat", str(exported), "--max-new-tokens", "2", "--device", "cpu"]
    with (tmp_path / "lines").open(encoding="utf-8") as file:
        for stdin, message in ((file, "standard input is not UTF-8"), (None, "a conversation reads standard input")):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(command) == 2
            assert message in capsys.readouterr().err.splitlines()[-1]


LINES = "from fathom.cli.chat import typed_lines; print([ascii(line) for line in typed_lines()])"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(("typed", "said"), [("é".encode(), "\\xe9"), (b"\xe9", "standard input is not UTF-8")])
def test_typed_lines_are_text_in_every_locale(typed: bytes, said: str, terminal: bool) -> None:
    """In the locale C, Python lets bytes in that are no text."""
    keyboard, ours = pytest.importorskip("pty").openpty() if terminal else os.pipe()[::-1]
    ends = {"stdin": ours, "stdout": ours if terminal else subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = subprocess.Popen([sys.executable, "-c", LINES], env={**os.environ, "LC_ALL": "C"}, **ends)
    os.close(ours)
    shown = b""
    while terminal and b"> " not in shown:
        shown += os.read(keyboard, 1000)
    os.write(keyboard, b"caf" + typed + b"\n" + b"\x04" * terminal)
    if terminal:
        with contextlib.suppress(OSError):  # the end of a terminal
            while some := os.read(keyboard, 1000):
                shown += some
    os.close(keyboard)
    if not terminal:
        shown = running.communicate(timeout=60)[0]
    running.wait(60)
    assert said in shown.decode(errors="replace"), shown
