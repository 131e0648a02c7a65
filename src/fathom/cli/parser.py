"""Shared by all commands: a parser with one-line errors, and common arguments."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import itertools
import re
import textwrap
import typing
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from fathom.errors import SettingsError
from fathom.recipe import describe
from fathom.settings import convert, help_of
from fathom.values import allowed

TEXTS = {"prompt", "text", "system", "separator", "eos_token", "api_key"}
"""Arguments that are any text, which may begin with a dash."""
MAY_BE_EMPTY = {*TEXTS, "command"}
"""Arguments that accept an empty string or check it themselves."""

Group: TypeAlias = argparse._ActionsContainer
"""A parser, or a group of its arguments."""
T = TypeVar("T")
Key = tuple[str, str, str, str]
"""A dotted key, what is allowed, its default, and its help."""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that fits on a screen: the usage shows only positional arguments and required options, and tables keep their
    line breaks."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, max_help_position=26, **settings)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap long lines of the help; continuation lines are indented like the line's start, in a list like its second
        column."""
        lines = []
        for line in text.splitlines():
            hanging = re.match(r" *(\S+ {2,})?", line)
            below = " " * (hanging.end() if hanging else 0)
            lines += textwrap.wrap(line, width, subsequent_indent=below, break_on_hyphens=False) or [""]
        return "\n".join(indent + line for line in lines)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None = None
    ) -> None:
        """Add the usage line, with only the positional arguments and the required options."""
        options = [one for one in actions if one.option_strings and one.required]
        shown = [one for one in actions if not one.option_strings or one in options]
        if usage is None and len(shown) < len(list(actions)):
            usage = f"{self._prog} [options] {self._format_actions_usage(shown, [])}".rstrip()
        super().add_usage(usage, shown, groups, prefix)


class Keys(argparse.Action):
    """`--keys`: print the keys of a command's settings file, and stop."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, rows: Callable[[], Iterable[Key]], **more: Any
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=more["help"])
        self.rows = rows

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        """Print and end with exit code 0."""
        for key, words, default, text in self.rows():
            print(f"{key} = {default}  ({words})\n    {text}")
        parser.exit()


class Mode(NamedTuple):
    """A mode that an option selects, and the options that have no meaning in this mode."""

    flag: str
    why: str
    """The command's purpose, to follow the words "with FLAG, which"."""
    refuses: tuple[str, ...]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **settings: Any) -> None:
        # No abbreviations: a new option must not change what an old script means.
        super().__init__(**{"formatter_class": Help, "allow_abbrev": False, **settings})
        self.modes: list[Mode] = []
        self.needed: dict[str, tuple[str, ...]] = {}
        self.elsewhere: Callable[[str], str | None] = lambda flag: None
        """The command that has a flag which this one lacks."""

    def mode(self, flag: str, why: str, *refuses: str) -> None:
        """Refuse options that have no meaning if `flag` is given."""
        self.modes.append(Mode(flag, why, refuses))

    def needs(self, flag: str, *others: str) -> None:
        """Refuse options that have no meaning if `flag` is not given."""
        self.needed |= {other: (*self.needed.get(other, ()), flag) for other in others}

    def parse(self, words: Sequence[str]) -> Namespace:
        """Parse the words of a command line, in which flags and positional arguments may come in any order. `given`
        holds the flags as they were typed."""
        words = self._joined(words)
        if not self._subparsers:
            self.refuse_unknown(words)
        options = self.parse_args(words) if self._subparsers else self.parse_intermixed_args(words)
        options.given = [word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", words)]
        self._refuse_meaningless(options.given)
        return options

    def _joined(self, words: Sequence[str]) -> list[str]:
        """Join a flag and its text value, such as `--separator=---`, because argparse would read a separate `---` as a
        flag."""
        known, joined = self._option_string_actions, list[str]()
        for word in words:
            flag = known.get(joined[-1]) if joined and "--" not in joined else None
            takes_text = flag is not None and flag.dest in TEXTS and flag.nargs is None
            if takes_text and word.startswith("-") and word.partition("=")[0] not in known:
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def _refuse_meaningless(self, given: Collection[str]) -> None:
        for mode in self.modes:
            if mode.flag in given:
                refuse(given, mode.refuses, f"has no meaning with {mode.flag}, which {mode.why}")
        for flag, needed in self.needed.items():
            if not set(needed) & set(given):
                refuse(given, [flag], f"needs {' or '.join(needed)}")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Report an unknown flag before argparse reports missing arguments."""
        for word in itertools.takewhile(lambda word: word != "--", words):
            flag = word.partition("=")[0]
            if word.startswith("--") and flag not in self._option_string_actions:
                close, other = self._nearest(flag), self.elsewhere(flag)
                hint = f"; {other} has it" if other else f"; did you mean {close}?" if close else ""
                if (name := flag.lstrip("-")) in self._arguments():
                    hint = f"; {name} is an argument without --: write it alone"
                elif not re.fullmatch(r"--[a-z][\w-]*", flag) and TEXTS & self._arguments():
                    hint = "; a text that begins with -- follows a --"
                self.error(f"unrecognized arguments: {word}{hint}")

    def _arguments(self) -> set[str]:
        """The names of the positional arguments, in lower case."""
        return {str(one.metavar or one.dest).lower() for one in self._actions if not one.option_strings}

    def _nearest(self, flag: str) -> str | None:
        """The flag, or the key of the settings file, whose name is nearest: `--stpes` may be `train.steps=...`."""
        names = {one.lstrip("-"): one for one in self._option_string_actions if len(one) > 2}
        for action in self._actions:
            for key, *_ in action.rows() if isinstance(action, Keys) else ():
                names.setdefault(key.rpartition(".")[2].replace("_", "-"), f"{key}=...")
        close = difflib.get_close_matches(flag.lstrip("-").replace("_", "-"), names, n=1)
        return names[close[0]] if close else None

    def in_flags(self, message: str) -> str:
        """An error message of the library in which parameter names are replaced by this command's flags.

        The library writes a parameter as `name=value` at the beginning of a message, and anywhere else in backticks.
        A flag's `dest` is the parameter's name; names that are no flag of this command stay.
        """
        flags = {action.dest: next(flag for flag in action.option_strings if len(flag) > 2) for action in self._flags()}

        def flag(found: re.Match[str]) -> str:
            name = found["name"] or found["first"]
            if name not in flags:
                return found[0]
            value = re.sub(r'[\[\]"]|(?<=,) ', "", found["value"] or "")  # a list is KEY,KEY
            return f"{flags[name]}{' ' if found['first'] else value.replace('=', ' ', 1)}"

        return re.sub(r"`(?P<name>\w+)(?P<value>=[^`]*)?`|^(?P<first>\w+)=", flag, message)

    def _flags(self) -> Iterator[argparse.Action]:
        """The flags of this command and of the commands inside it."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from inner._flags()
            elif action.option_strings:
                yield action

    def _get_values(self, action: argparse.Action, words: list[str]) -> object:
        """Get values like argparse, but an empty argument, for instance from an unset shell variable, is an error."""
        if "" in words and action.dest not in MAY_BE_EMPTY:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            self.error(f"argument {name}: empty")
        if words == ["--"] and action.option_strings:  # argparse would drop it
            return "--"
        return super()._get_values(action, words)

    def error(self, message: str) -> NoReturn:
        """Raise a `SettingsError` without the usage, which `--help` prints."""
        # argparse lists key=value among the required arguments, though it is optional.
        message = message.replace(", key=value", "")
        raise SettingsError(f"{message} ({self.prog} --help lists the options)")


def refuse(given: Collection[str], flags: Iterable[str], why: str) -> None:
    """Raise a `SettingsError` for the first of `flags` that the user gave."""
    if found := next((flag for flag in flags if flag in given), None):
        raise SettingsError(f"{found} {why}")


def examples(lines: Sequence[str]) -> str:
    """Format example commands for the end of a command's help."""
    return "\n".join(["examples:", *(f"  {line}" for line in lines)]) if lines else ""


CACHES = "drop, sinks, snapkv, tova, keydiff, key_norm, expected_attention, freqkv, ..."


def add_kvcache(parser: Group, several: str | None = None, required: bool = False) -> None:
    """Add the arguments for the cache's method and schedule; `several`, if given, says what a list of methods is
    for."""
    words = "METHODS" if several else "METHOD"
    what = f"comma-separated KV cache methods {several}" if several else f"KV cache: full (default), {CACHES}"
    parser.add_argument("--kvcache", metavar=words, required=required, help=what)
    parser.add_argument(
        "--kvcache-window",
        type=int,
        metavar="N",
        help="window: maximum number of entries in the cache (default: the window the model was tuned with)",
    )
    parser.add_argument(
        "--kvcache-sinks",
        type=int,
        metavar="S",
        help="number of first entries that are never compressed (default: as many as the model was tuned with, or 4)",
    )
    parser.add_argument(
        "--kvcache-ratio",
        type=float,
        metavar="R",
        help="share of the window that a compression keeps, sinks included (default: the share the model was "
        "tuned with, or 0.5)",
    )
    parser.add_argument(
        "--kvcache-kept",
        type=int,
        metavar="L",
        help="number of entries that a compression keeps in addition to the sinks; replaces --kvcache-ratio",
    )


def add_speculate(parser: Group) -> None:
    """Add `--speculate`: the number of draft iterations."""
    parser.add_argument(
        "--speculate",
        nargs="?",
        type=int,
        const=1,
        metavar="TRIPS",
        help="self-speculative decoding: draft tokens with the first TRIPS loop iterations (1 if TRIPS is left out), "
        "verify them with the rest; the output is unchanged",
    )


def add_control_tokens(parser: Group) -> None:
    """Add `--allow-control-tokens`."""
    parser.add_argument(
        "--allow-control-tokens",
        action="store_true",
        help="read control tokens of the chat template, such as <|im_end|>, in message texts as control tokens "
        "(default: as plain text)",
    )


def add_opening(parser: Group) -> None:
    """Add the arguments for opening a model."""
    parser.add_argument(
        "--dtype",
        default="auto",
        help="float32, bfloat16 or float16 (default: as stored, or float32 if this CPU is slow with the stored type)",
    )
    parser.add_argument(
        "--weights",
        default="stored",
        help="int8 quantises linear layers to 8 bits: a quarter of float32's memory, and faster on a CPU "
        "(default: stored, which keeps the weights as they are)",
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda if available)")
    parser.add_argument("--verify", action="store_true", help="also check the hashes of weights above 2 GB")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="allow Python code of the model directory to run"
    )
    add_ignore_keys(parser)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def add_ignore_keys(parser: Group) -> None:
    """Add `--ignore-keys`."""
    parser.add_argument(
        "--ignore-keys",
        type=_names,
        default=(),
        metavar="KEYS",
        help="comma-separated keys of the model's config.json that Fathom does not support, to ignore when it "
        "opens the model",
    )


def add_kernels(parser: Group) -> None:
    """Add `--kernels`: the functions to replace by kernels."""
    parser.add_argument(
        "--kernels",
        type=_names,
        default=(),
        metavar="NAMES",
        help="comma-separated functions to replace by GPU kernels: "
        "depth_mix,depth_pool,norm_rotate_mix,rms_norm,swiglu",
    )


def chosen(kind: type[T], options: Namespace) -> T:
    """Fill a dataclass from a command's options of the same names; fields without such an option keep their
    defaults."""
    names = [field.name for field in dataclasses.fields(typing.cast("Any", kind))]
    return kind(**{name: getattr(options, name) for name in names if hasattr(options, name)})


def add_recipe(
    parser: Parser,
    runs: bool = False,
    what: str = "a YAML file, or a name that `fathom recipes` lists",
    rows: Callable[[], Iterable[Key]] = describe,
) -> None:
    """Add a recipe (or a run), its overrides, and `--keys`."""
    if runs:
        what += "; or the directory of a run to resume"
    parser.add_argument("recipe", nargs="?" if runs else None, help=what)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override values of the recipe file")
    add_keys(parser, rows)


def add_running(parser: Parser, name: str) -> None:
    """Add the arguments that say where and how a comparison or a ladder runs; `name` ends the name of its
    default directory."""
    parser.add_argument("--out", type=Path, help=f"output directory (default: runs/NAME-{name})")
    parser.add_argument(
        "--workers", type=int, default=1, help="number of worker processes; workers of other machines may join"
    )
    parser.add_argument("--threads", type=int, help="CPU threads per worker (default: 1 with several workers)")
    parser.add_argument(
        "--executor",
        choices=("local", "slurm", "ray"),
        default="local",
        help="where workers run; set partition, time, memory_gb, gpus and environment as executor.KEY=value",
    )
    parser.add_argument(
        "--report", action="store_true", help="only rewrite the report, from the runs that are finished; train nothing"
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="resume runs whose loss diverged; by default diverged runs are excluded",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def add_keys(parser: Parser, rows: Callable[[], Iterable[Key]]) -> None:
    """Add `--keys`, which lists the keys that key=value and the YAML file may set."""
    parser.add_argument(
        "--keys", action=Keys, rows=rows, help="list the keys of the recipe file with their defaults, and stop"
    )


def add_parameters(parser: Parser, function: Callable[..., object], *positional: str) -> None:
    """Turn the parameters of a typed, documented function into command-line options.

    Args:
        parser: Receives an argument for each parameter.
        function: What `call` will call.
        positional: Parameters given without a flag, in this order; a sequence takes one word or more.
    """
    parser.description, _ = _documented(function)
    for name, hint, default, text in _given(function):
        several = getattr(typing.get_origin(hint), "__name__", "") in ("Sequence", "list")
        needed = default is inspect.Parameter.empty
        told = _briefly(text, None if needed else default)
        settings: dict[str, Any] = {"help": told.replace("%", "%%"), "default": None if needed else default}
        flag = "--" + name.replace("_", "-")
        if name in positional:
            many = "+" if several else None if needed else "?"
            metavar = name.upper().removesuffix("S") if several else name.upper()
            parser.add_argument(name, nargs=many, metavar=metavar, **settings)
        elif hint is bool:
            parser.add_argument(flag, action="store_true", help=settings["help"])
        else:
            # Several words or repeated flags make a list, which replaces the default.
            listed = {"nargs": "+", "action": "extend", "default": None} if several else {}
            parser.add_argument(flag, required=needed, **(settings | listed))


def _briefly(text: str, default: object) -> str:
    """Turn a docstring's sentence into a help text: lower case, no full stop, and the default at the end."""
    text = text.replace("`", "").removesuffix(".")
    if text[1:2].islower() or text[1:2] == " ":
        text = text[0].lower() + text[1:]
    shown = not isinstance(default, bool) and default not in (None, "", ())
    return f"{text} (default: {default})" if shown and "default" not in text else text


def call(function: Callable[..., T], options: Namespace) -> T:
    """Call a function with the arguments that `add_parameters` declared."""
    words, given = vars(options), {}
    for name, hint, default, _ in _given(function):
        value = default if words[name] is None else words[name]
        try:
            given[name] = convert(hint, value) if isinstance(value, str) else value
        except ValueError:
            raise SettingsError(f"{name}={value}: allowed: {allowed(hint)}") from None
    for name, kind in _groups(function).items():
        given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
    return function(**given)


class _Given(NamedTuple):
    """The option of a parameter."""

    name: str
    hint: object
    default: object
    text: str


def _given(function: Callable[..., object]) -> Iterator[_Given]:
    """The options of a function: its parameters, where a dataclass parameter is replaced by the dataclass's fields."""
    hints, texts, groups = typing.get_type_hints(function), _documented(function)[1], _groups(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            yield _Given(name, hints[name], parameter.default, texts.get(name, ""))
            continue
        inner, helps = typing.get_type_hints(groups[name]), help_of(groups[name])
        for field in dataclasses.fields(groups[name]):
            yield _Given(field.name, inner[field.name], field.default, helps[field.name])


def _groups(function: Callable[..., object]) -> dict[str, type]:
    """The parameters of a function whose type is a dataclass: name of the parameter and dataclass."""
    found = {}
    for name, hint in typing.get_type_hints(function).items():
        for kind in (hint, *typing.get_args(hint)):
            if name != "return" and isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found[name] = kind
    return found


def _documented(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """The summary in a function's docstring, and the text under `Args:` for each parameter."""
    description, _, arguments = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    entries = re.split(r"^    (\w+): ", arguments.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    texts = (" ".join(text.split()) for text in entries[1::2])
    return description.strip(), dict(zip(entries[::2], texts, strict=True))
