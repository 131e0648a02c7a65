"""The command line: fast, one line per error, exit codes that scripts can trust."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from safetensors import SafetensorError

from fathom import __version__
from fathom.checkpoints.find import find_model
from fathom.cli.main import COMMANDS, main
from fathom.errors import ModelError
from tests.processes import Command
from tests.tiny import tiny_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def test_help_is_fast_because_it_loads_no_torch() -> None:
    script = Path(sys.executable).with_name("fathom")
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True, env=environment)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "fathom.recipe" in imported
    assert not imported & {"torch", "transformers", "numpy"}
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_characters_that_the_output_s_encoding_lacks_are_escaped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pipe on Windows has no arrow, and UTF-8 no name that is not UTF-8: both ended in a traceback."""
    cases = ("cp1252", "\u2192", "\\u2192"), ("ascii", "\U0001f600", "\\ud83d\\ude00"), ("utf-8", "n\udcff", "n\\udcff")
    for encoding, name, shown in cases:
        output = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", output)
            patched.chdir(tmp_path)
            assert main(["recipes", "copy", "tiny", "--to", name]) == 0
        output.flush()
        assert output.buffer.getvalue().decode(encoding).strip() == shown  # type: ignore[attr-defined]


def test_no_command_s_help_loads_what_computes() -> None:
    """Parsers are built, and the help of lineage's actions printed, without torch, numpy, scipy or the Hub."""
    code = (
        "import sys, importlib; from fathom.cli import main; from fathom.cli.parser import Parser\n"
        "for name in main.COMMANDS:\n"
        "    importlib.import_module(main.module_of(name)).add(Parser(prog=name))\n"
        "    print(name, *({'torch', 'scipy', 'transformers'} & set(sys.modules)))\n"
        "    if name == 'lineage': print(*({'numpy', 'jinja2', 'huggingface_hub'} & set(sys.modules)))\n"
        "import numpy; 'numpy' in sys.modules or print('the check sees nothing')\n"
    )
    order = "import sys; from fathom.cli import main; main.COMMANDS = {'lineage': '', **main.COMMANDS}\n"
    done = subprocess.run([sys.executable, "-c", order + code], capture_output=True, text=True, check=True)
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines == ["lineage", "", *(name for name in COMMANDS if name != "lineage")], done.stdout


def test_fathom_alone_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: fathom COMMAND") and not said.err
    assert all(f"\n  {name} " in said.out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fathom {__version__}\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError of our own code too: only a FathomError is written for the reader."""

    def broken(options: Namespace) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr("fathom.cli.mechanisms.run", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["mechanisms"])


def test_only_a_file_that_was_named_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is missing is the caller's fault where the command line names it or the way to it."""
    wanted = tmp_path / "folder" / "file"
    monkeypatch.setattr("fathom.cli.mechanisms.run", lambda options: wanted.read_text())
    with pytest.raises(FileNotFoundError):
        main(["mechanisms"])
    with pytest.raises(FileNotFoundError):
        main(["mechanisms", "--config", str(tmp_path / "other")])
    assert main(["mechanisms", "--config", str(wanted)]) == main(["mechanisms", f"--config={wanted / 'below'}"]) == 2
    assert capsys.readouterr().err == f"fathom: {wanted}: No such file or directory\n" * 2


@pytest.mark.parametrize(("number", "code"), [(errno.EISDIR, 2), (errno.EROFS, 2), (errno.ENOSPC, 1), (errno.EIO, 1)])
def test_what_the_system_says(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that cannot be written was asked wrongly; a full disk is nobody's wish."""

    def failing(options: Namespace) -> int:
        raise OSError(number, os.strerror(number), "place")

    monkeypatch.setattr("fathom.cli.mechanisms.run", failing)
    assert main(["mechanisms"]) == code


def test_a_full_disk_is_named_where_it_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a copy the target; safetensors and tokenizers have words of their own. Other errors keep their traceback."""
    errors = [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "package/source.py", None, "export/source.py"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),
        SafetensorError("Error while deserializing header: header too large"),
        Exception("no such merge"),
    ]
    left = iter(errors)

    def failing(options: Namespace) -> int:
        raise next(left)

    monkeypatch.setattr("fathom.cli.mechanisms.run", failing)
    assert main(["mechanisms"]) == main(["mechanisms"]) == main(["mechanisms"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "fathom: export/source.py: No space left on device"
    assert all(line.startswith("fathom: ") and "No space left on device" in line for line in said[1:])
    for kind, words in ((SafetensorError, "header too large"), (Exception, "no such merge")):
        with pytest.raises(kind, match=words):
            main(["mechanisms"])


def test_dry_run(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(RECIPES / "500m.yaml"), f"data.directory={corpus}", "--dry-run"]
    assert main([*words, "model.mixer=depth_attention", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["parameters"] == 498_165_888 and values["mechanism"] == "depth_attention"
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "498,165,888" in text and "sequence_length: 2048" in text and "memory per rank" in text


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("train", "optim.lr = 0.001  (a number)"),
        ("compare", "optim.lr = 0.001  (a number)"),
        ("ladder", "ladder.pairs = 12  (an integer)"),
        ("corpus", "collections.NAME.license = unknown  (text)"),
    ],
)
def test_keys_lists_the_keys_of_the_file(command: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--keys"])
    assert ended.value.code == 0 and f"{key}\n    " in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_train_and_stop(number: signal.Signals, corpus: Path, tmp_path: Path) -> None:
    """The whole thing, as a user runs it: a signal saves, the exit code tells it from the end of a run, `generate`
    names the command that resumes, and that ends with 0."""
    (tmp_path / "recipe.yaml").write_text(
        tiny_recipe(
            corpus, "train.steps=60", "train.checkpoint_every=5", "evaluate.every=0", "track.display=lines"
        ).to_yaml()
    )
    first = Command(["train", "recipe.yaml"], tmp_path, tmp_path)
    while not (tmp_path / "runs/recipe/latest").exists():
        assert first.running, first.err
        time.sleep(0.02)
    first.signal(number)
    assert first.wait() == 128 + number, first.err
    assert not (tmp_path / "runs/recipe/result.json").exists()
    assert "`fathom train runs/recipe` resumes" in first.err and "stopped after step" in first.err
    with pytest.raises(ModelError, match=r"unfinished, stopped after step \d+: `fathom train .*runs/recipe` resumes"):
        find_model(tmp_path / "runs/recipe")
    second = Command(["train", "runs/recipe", "--json"], tmp_path, tmp_path)
    assert second.wait() == 0, second.err
    result = json.loads(second.out)
    assert result["finished"] and result["step"] == 60 and result["evaluation"]["domains"].keys() == {"rivers", "seas"}


WARNING = """
import sys, types, warnings
def run(options):
    for place in range(2):
        warnings.warn("the tide\\nrises", stacklevel=place + 1)
    return 0
sys.modules["fathom.cli.recipes"] = types.SimpleNamespace(add=lambda parser: None, run=run)
from fathom.cli.main import main
sys.exit(main(["recipes"]))
"""


def test_a_warning_is_one_line_once() -> None:
    """In a process of its own: here pytest collects warnings."""
    done = subprocess.run([sys.executable, "-c", WARNING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "fathom: warning: the tide rises\n")
