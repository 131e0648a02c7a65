"""An option that means nothing next to another is refused, in every command; and each option has been thought about."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from fathom.cli.main import COMMANDS, main, module_of
from fathom.cli.parser import Parser
from fathom.recipe import Recipe

NEVER = {"--help", "--keys"}
SLURM = ("--workers", "--threads", "--executor")
"""In a dry run they are of the script that it prints for Slurm; without that they are refused."""
MEANT = {
    ("compare", "--report"): {"--json"},
    ("compare", "--dry-run"): {
        "--report",
        "--contrasts",
        "--arms",
        "--seeds",
        "--equal",
        "--pairs",
        "--out",
        "--json",
        "--tier",
        "--gpu",
        *SLURM,
    },
    ("ladder", "--report"): {"--json"},
    ("ladder", "--dry-run"): {"--report", "--arms", "--out", "--json", *SLURM},
    ("train", "--dry-run"): {"--run", "--from", "--cooldown", "--json"},
    ("deepen", "--screen"): {"--out", "--text", "--documents", "--tokens", "--json"},
    ("deepen", "--search"): {"--screen", "--with", "--out", "--text", "--sizes", "--documents", "--tokens", "--json"},
    ("deepen", "--exit"): {
        *(
            "--screen",
            "--search",
            "--out",
            "--loss",
            "--test",
            "--shifted",
            "--text",
            "--documents",
            "--tokens",
            "--json",
        ),
    },
}
"""The options that mean something next to a mode's: an option that a command gains is put here, or refused there."""
ONLY_IN_A_NEW_PLAN = {"--arms", "--contrasts", "--seeds", "--equal", "--pairs", "--out", "--tier", "--gpu"}


def parser_of(command: str) -> Parser:
    parser = Parser(prog=f"fathom {command}")
    import_module(module_of(command)).add(parser)
    return parser


PARSERS = {command: parser_of(command) for command in COMMANDS if command != "lineage"}


def words_for(parser: Parser, flag: str) -> list[str]:
    """A flag with a value that parses."""
    action = parser._option_string_actions[flag]
    if action.nargs == 0:
        return [flag]
    return [flag, str(next(iter(action.choices)) if action.choices else 3)]


PAIRS = [
    *((command, mode.flag, other) for command, one in PARSERS.items() for mode in one.modes for other in mode.refuses),
    *((command, None, other) for command, one in PARSERS.items() for other in one.needed),
]


@pytest.mark.parametrize(("command", "flag", "other"), PAIRS)
def test_a_meaningless_option_is_one_line(
    command: str, flag: str | None, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = PARSERS[command]
    required = [
        word
        for one in parser._actions
        if one.required and one.option_strings
        for word in words_for(parser, one.option_strings[0])
    ]
    positional = ["nowhere" for one in parser._actions if not one.option_strings and one.nargs not in ("?", "*")]
    given = [*positional, *([] if flag is None else words_for(parser, flag)), *words_for(parser, other), *required]
    if flag is not None:
        needed = [need for need in parser.needed.get(other, ()) if need != flag]
        given += words_for(parser, needed[0]) if needed and flag not in parser.needed.get(other, ()) else []
    assert main([*command.split(), *given]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{other} " in said
    assert "needs" in said if flag is None else "no meaning" in said


def test_options_of_tasks_and_of_texts_need_them() -> None:
    """`evaluate tuned` has questions and a text of its own."""
    needed = PARSERS["evaluate"].needed
    assert {other for other, flags in needed.items() if "--tasks" in flags} >= {
        "--num-fewshot",
        "--apply-chat-template",
    }
    assert {other for other, flags in needed.items() if "--perplexity" in flags} >= {"--split", "--stride"}
    assert not {"--num-fewshot", "--split", "--stride"} & PARSERS["evaluate tuned"].needed.keys()


@pytest.mark.parametrize(("command", "flag"), MEANT)
def test_every_option_is_meant_or_refused_in_a_mode(command: str, flag: str) -> None:
    parser = PARSERS[command]
    (mode,) = (mode for mode in parser.modes if mode.flag == flag)
    known = {next(word for word in one.option_strings if len(word) > 2) for one in parser._flags()}
    needing = {other for other, flags in parser.needed.items() if flag not in flags}
    planning = ONLY_IN_A_NEW_PLAN & known if flag == "--report" else set()
    assert {*mode.refuses, *needing, *MEANT[command, flag], *planning, flag} == known - NEVER


@pytest.mark.parametrize("command", ["compare", "ladder"])
def test_workers_of_a_dry_run_are_those_of_a_script(
    command: str, small: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.yaml").write_text(small.to_yaml())
    name = str(tmp_path / "small.yaml") if command == "compare" else "toys"
    assert (
        main([command, name, "--arms", "vanilla,loop", "--out", str(tmp_path / "out"), "--dry-run", "--workers", "2"])
        == 2
    )
    assert "--workers has no meaning with --dry-run" in capsys.readouterr().err


def test_what_is_given_is_what_was_typed() -> None:
    """The negative control: a default is not given."""
    parser = Parser(prog="x")
    parser.add_argument("word", nargs="*")
    parser.add_argument("--a", type=int, default=3)
    parser.add_argument("--b")
    parser.mode("--b", "does b", "--a")
    assert parser.parse(["--b", "c"]).a == 3
    assert parser.parse(["a", "--b=c"]).given == ["a", "--b"]
    with pytest.raises(Exception, match="--a has no meaning with --b, which does b"):
        parser.parse(["--b=c", "--a=4"])


def test_an_option_of_a_subcommand_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in (
        ("evaluate model --at 2x", "unrecognized arguments: --at; fathom evaluate caches has it"),
        ("evaluate model --benchmark there", "; fathom evaluate tuned has it"),
        ("evaluate model --taks piqa", "; did you mean --tasks?"),
    ):
        assert main(words.split()) == 2
        assert hint in capsys.readouterr().err
