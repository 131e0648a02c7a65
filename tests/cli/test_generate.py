"""`fathom generate` as a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from fathom.checkpoints.find import find_model
from fathom.cli.main import main
from tests.inference.talker import export_talker, write
from tests.tiny import export_tiny


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_talker(tmp_path_factory.mktemp("run") / "model")


def test_a_run_and_a_comparison_lead_to_their_model(exported: Path, tmp_path: Path) -> None:
    assert find_model(exported.parent) == exported
    runs = [{"loss": 2.0, "directory": "elsewhere"}, {"loss": 1.0, "directory": "arms/b/seed-1"}]
    first = {"name": "a", "loss": 3.0, "runs": [{"loss": 3.0, "directory": "arms/a/seed-0"}]}
    arms = [first, {"name": "b", "loss": 1.5, "runs": runs}]
    (tmp_path / "report.json").write_text(json.dumps({"arms": arms}))
    (tmp_path / "arms/b").mkdir(parents=True)
    (tmp_path / "arms/b/seed-1").symlink_to(exported.parent)
    assert find_model(tmp_path) == tmp_path / "arms/b/seed-1/model"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere"], "no such directory"),
        (["."], "neither a model directory"),
        (["MODEL", "--top-p", "0"], "--top-p 0.0: allowed"),
        (["MODEL", "--temperature", "-1"], "--temperature -1.0: allowed"),
        (["MODEL", "--max-new-tokens", "0"], "--max-new-tokens 0: allowed"),
        (["MODEL", "a", "--set", "tempratur=1"], "--set tempratur: transformers' GenerationConfig has no such option"),
        (
            ["MODEL", "a", "--set", "token_healing=true"],
            "--set token_healing: transformers' GenerationConfig has no such",
        ),
        (["MODEL", "a", "--set", "min_p"], "--set min_p: expected key=value"),
        (["MODEL", "a", "--prompts", "x.jsonl"], "exclude each other"),
        (["MODEL", "a", "--allow-control-tokens"], "--allow-control-tokens needs --prompts FILE"),
        (["MODEL", "--out", "x.jsonl"], "--out x.jsonl needs --prompts FILE"),
        (["MODEL", "--prompts", "x.jsonl", "--json"], "--json with --prompts needs --out"),
        (["MODEL", "a", "--set", "min_p=7"], "min_p=7: allowed: a number"),
        (
            ["MODEL", "a", "--set", "repetition_penalty=1e-320"],
            "repetition_penalty=1e-320: allowed: a number from 1e-6 to",
        ),
        (
            ["MODEL", "a", "--set", "encoder_repetition_penalty=1e308"],
            "encoder_repetition_penalty=1e+308: allowed: a number",
        ),
        (["MODEL", "a", "--set", "repetition_penalty=Infinity"], "repetition_penalty=inf: allowed: a number from"),
        (["MODEL", "a", "--seed", "9" * 23], f"--seed {'9' * 23}: allowed: "),
        (["MODEL", "a", "--set", "top_p=2"], "top_p=2: allowed: a number from 0, up to 1"),
        pytest.param(
            ["MODEL", "a", "--set", "cache_implementation=offloaded"],
            "--set cache_implementation: transformers: ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can do it"),
        ),
        (["MODEL", "a", "--set", "num_beams=0"], "--set num_beams=0: allowed: a whole number, 1 or more"),
        (["MODEL", "a", "--set", "num_beams=two"], "--set num_beams=two: allowed: a whole number, 1 or more"),
        (["MODEL", "a", "--set", "num_beams=2.5"], "--set num_beams=2.5: allowed"),
        (["MODEL", "a", "--set", "min_new_tokens=two"], "--set min_new_tokens=two: allowed: a whole number, 0 or more"),
        (["MODEL", "a", "--set", "eos_token_id=end"], "--set eos_token_id=end: allowed: a token id"),
        (["MODEL", "a", "--set", "suppress_tokens=3"], "--set suppress_tokens=3: allowed: a list"),
        (["MODEL", "a", "--batch-size", "4"], "--batch-size 4: allowed: 1 or more, with --prompts"),
        (["MODEL", "--prompts", "x", "--out", "y", "--batch-size", "0"], "--batch-size 0: allowed: 1 or more"),
        (["MODEL", "\udcff"], "the prompt is not UTF-8"),
        (["MODEL", "a", "--set", "max_time=a"], "--set max_time: transformers: "),
        (["MODEL", "a", "--set", "num_beams=2", "length_penalty=a"], "--set num_beams length_penalty: transformers: "),
        (["MODEL", "a", "--set", "forced_eos_token_id=99999"], "--set forced_eos_token_id: transformers: "),
        (["MODEL", "a", "--device", "cuda:99"], "--device cuda:99: "),
        (["MODEL", "a", "--device", "gpu"], "--device gpu: "),
    ],
)
def test_errors_are_one_line(exported: Path, tmp_path: Path, monkeypatch, capsys, words: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    device = [] if "--device" in words else ["--device", "cpu"]
    assert main(["generate", *(str(exported) if word == "MODEL" else word for word in words), *device]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fathom: ")]
    assert len(said) == 1 and message in said[0]


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
        (["--max-trips", "1"], "of one trip, as --max-trips or the checkpoint has it, there is nothing to draft with"),
        (["--set", "num_beams=2"], "each row is one text; leave out beams"),
    ):
        assert main([*command, *words]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"fathom: --speculate 1: {message}"
