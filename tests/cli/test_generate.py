"""`fathom generate` as a command."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from fathom.checkpoints.find import find_model
from fathom.cli.main import main
from tests.inference.talker import write
from tests.tiny import export_tiny


@pytest.fixture(scope="module")
def exported(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(talker, tmp_path_factory.mktemp("run") / "model")


def test_a_run_and_a_comparison_lead_to_their_model(exported: Path, tmp_path: Path) -> None:
    assert find_model(exported.parent) == exported
    runs = [{"loss": 2.0, "directory": "elsewhere"}, {"loss": 1.0, "directory": "arms/b/seed-1"}]
    first = {"name": "a", "loss": 3.0, "runs": [{"loss": 3.0, "directory": "arms/a/seed-0"}]}
    arms = [first, {"name": "b", "loss": 1.5, "runs": runs}]
    (tmp_path / "report.json").write_text(json.dumps({"arms": arms}))
    (tmp_path / "arms/b").mkdir(parents=True)
    (tmp_path / "arms/b/seed-1").symlink_to(exported.parent)
    assert find_model(tmp_path) == tmp_path / "arms/b/seed-1/model"


def test_the_command(exported: Path, capsys, monkeypatch) -> None:
    words = ["generate", str(exported), "the", "--max-new-tokens", "5", "--seed", "1", "--device", "cpu"]
    assert main([*words, "--set", "min_p=0.01", "repetition_penalty=1.1"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("the") and "tokens/s" in printed.err
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 5


def test_a_file_of_errors_alone_ends_with_one(exported: Path, tmp_path: Path, capsys) -> None:
    long, command = {"prompt": "the depth " * 70}, ["generate", str(exported), "--max-new-tokens", "2"]
    for name, prompts, code, told in (
        ("bad", [long, long], 1, "0 completions, 2 errors"),
        ("mixed", [long, {"prompt": "a"}], 0, "1 completions, 1 errors"),
    ):
        file, out = write(tmp_path / f"{name}.jsonl", prompts), tmp_path / f"{name}.out"
        for _ in range(2):  # the second finds it done
            assert main([*command, "--prompts", str(file), "--out", str(out), "--device", "cpu"]) == code
            assert capsys.readouterr().out == f"{out}: {told}\n"


@pytest.mark.parametrize("words", [["-"], []])
def test_standard_input_is_a_prompt(exported: Path, tmp_path: Path, capsys, monkeypatch, words: list[str]) -> None:
    (tmp_path / "prompt").write_bytes("the depth — é\n".encode("utf-8-sig"))
    command = ["generate", str(exported), *words, "--max-new-tokens", "2", "--json", "--device", "cpu"]
    with (tmp_path / "prompt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "the depth — é"
    (tmp_path / "prompt").write_bytes(b"\xff")
    with (tmp_path / "prompt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(command) == 2
    assert capsys.readouterr().err == "fathom: standard input is not UTF-8 (byte 0)\n"


def test_a_closed_or_null_input_is_a_new_document(exported: Path, capsys, monkeypatch) -> None:
    command = ["generate", str(exported), "--max-new-tokens", "2", "--json", "--device", "cpu"]
    with open("/dev/null") as null:
        for stdin in (null, None):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(command) == 0
            assert json.loads(capsys.readouterr().out)["prompt"] == ""


def test_drafts_are_refused_before_anything_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"recurrence": "loop", "recurrence_options": {"trips": 2}}
    once, loop = export_tiny(tmp_path / "once"), export_tiny(tmp_path / "loop", **shape)
    for directory, message in (
        (once, "has no loop iterations"),
        (loop, "draft_trips must be between 1 and 1"),
    ):
        assert main(["generate", str(directory), "deep", "--speculate", "9", "--device", "cpu"]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith("fathom: --speculate 9: ") and message in shown.err
    command = ["generate", str(loop), "deep", "--device", "cpu", "--json", "--speculate"]
    for words, message in (
        (["--max-trips", "1"], "drafting needs two iterations or more; --max-trips or the checkpoint allows one"),
        (["--set", "num_beams=2"], "each row is one text; leave out beams"),
    ):
        assert main([*command, *words]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"fathom: --speculate 1: {message}"
