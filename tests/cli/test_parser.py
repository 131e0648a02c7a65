"""What the library calls a parameter, the command line calls by its flag."""

from __future__ import annotations

from importlib import import_module

import pytest

from fathom.cli.parser import Parser
from fathom.errors import SettingsError


@pytest.mark.parametrize(
    ("command", "message", "shown"),
    [
        ("evaluate", "context=0: allowed: 1 or more", "--context 0: allowed: 1 or more"),
        ("evaluate", "num_fewshot=-1: allowed: 0 or more", "--num-fewshot -1: allowed: 0 or more"),
        ("generate", "`kvcache` grows: leave out `batch_size`", "--kvcache grows: leave out --batch-size"),
        ("generate", "`options` num_beams=x: allowed", "--set num_beams=x: allowed"),
        ("export", "export it with `form=fathom`", "export it with --as fathom"),
        ("deepen", "mechanism=loop+ponder: two mechanisms", "--with loop+ponder: two mechanisms"),
        ("train", "branch it: `origin=runs/a` with `run_dir`", "branch it: --from runs/a with --run"),
        ("lineage", "give the base model with `adapter_base`", "give the base model with --adapter-base"),
        (
            "train",
            "`generate_batch` or `kvcache=full` is no flag here",
            "`generate_batch` or `kvcache=full` is no flag here",
        ),
        ("train", "train.steps=0: allowed: 1 or more", "train.steps=0: allowed: 1 or more"),
        ("generate", "the seed and compile=x in the middle stay", "the seed and compile=x in the middle stay"),
        ("generate", "model=x: a positional argument has no flag", "model=x: a positional argument has no flag"),
    ],
)
def test_parameters_are_shown_as_flags(command: str, message: str, shown: str) -> None:
    parser = Parser(prog=command)
    import_module(f"fathom.cli.{command}").add(parser)
    assert parser.in_flags(message) == shown


def test_a_text_may_begin_with_a_dash() -> None:
    """And what is no text may not, so that a misspelt flag stays an error."""
    parser = Parser(prog="prepare")
    import_module("fathom.cli.prepare").add(parser)
    for text in ("---", "--", "- -", "-s", "--sep=a"):
        for words in (["--separator", text], [f"--separator={text}"]):
            assert parser.parse(["a.txt", "--out", "b", *words]).separator == text
    for words in (["--out", "---"], ["--out", "b", "--separator", "--eos-token=x"], ["--out", "b", "---"]):
        with pytest.raises(SettingsError, match=r"unrecognized arguments: ---|expected one argument"):
            parser.parse(["a.txt", *words])
    parser = Parser(prog="generate")
    import_module("fathom.cli.generate").add(parser)
    with pytest.raises(SettingsError, match="--- title; a text that begins with -- follows a --"):
        parser.parse(["model", "--- title"])
    assert parser.parse(["model", "--", "--- title"]).prompt == "--- title"
    with pytest.raises(SettingsError, match=r"unrecognized arguments: --wrong \("):
        parser.parse(["model", "--wrong"])
