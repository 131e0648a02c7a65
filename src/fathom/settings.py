"""Settings: dataclasses are the schema, the docstring under a field is its help, YAML gives values.

A file may name another as `base` and overrides its keys; dotted `key=value` words override both. Mappings are merged,
but those of `WHOLE` are replaced. A section checks itself when it is created, from YAML or in Python. An error is one
line: the key, the value, and what is allowed.

The keys of a training run are in `recipe.py`, those of a corpus in `corpus/recipe.py`, those of a ladder in
`experiments/ladder_rules.py`, and those of a paper's table in `experiments/paper.py`. `cli/parser.py` prints keys for
`--keys`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import yaml

from fathom.errors import SettingsError
from fathom.values import LISTS, allowed, finite, fit, hints_of, plain

WHOLE = ("mixture", "shares", "groups")
"""Keys whose mapping replaces an earlier one as a whole, because one value means little without the others."""
Rule = tuple[bool, str, str]
"""A check: whether it passed, the key, and what is allowed."""


class Section:
    """A section of a settings file. Creating one converts its values to their declared types and checks its rules."""

    section: ClassVar[str] = ""
    """Its name in error messages; empty for the file itself, and for sections that occur under several names."""
    short: ClassVar[str] = ""
    """The key whose value may replace the whole section."""

    def __init_subclass__(cls, section: str = "", short: str = "") -> None:
        cls.section, cls.short = section, short

    def __post_init__(self) -> None:
        for key, hint in hints_of(type(self)).items():
            object.__setattr__(self, key, _checked(self._named(key), hint, getattr(self, key)))
        for holds, key, words in self.rules():
            if not holds:
                raise SettingsError(f"{self._named(key)}{_assigned(self, key)}: {words}")

    def _named(self, key: str) -> str:
        return f"{self.section}.{key}" if self.section else key

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types; the key of a rule may be dotted."""
        yield from ()

    def to_dict(self) -> dict[str, object]:
        """Plain lists, dicts and scalars."""
        assert dataclasses.is_dataclass(self)
        return typing.cast("dict[str, object]", plain(dataclasses.asdict(self)))

    def to_yaml(self) -> str:
        """The settings as YAML, from which equal settings can be read back."""
        text = dump(self.to_dict())
        # PyYAML folds these line breaks into spaces when it reads them, unless they are escaped.
        escaped = any(character in text for character in "\x85\u2028\u2029")
        return dump(self.to_dict(), allow_unicode=False) if escaped else text


S = TypeVar("S", bound=Section)


def fill(kind: type[S], values: object, name: str = "") -> S:
    """Build a section of settings from nested values; None counts as a section without values.

    Args:
        kind: The section's class.
        values: A mapping, or the value of the section's short form.
        name: The section's name in error messages, if it has no own.
    """
    name, hints = kind.section or name, hints_of(kind)
    if values is None:
        values = {}
    elif kind.short and isinstance(values, str):
        values = {kind.short: values}
    if not isinstance(values, dict):
        raise SettingsError(f"{name}={show(values)}: expected keys: {', '.join(hints)}")
    check_keys(values, list(hints), name)
    dot = f"{name}." if name else ""
    given = {key: _nested(hints[key], value, f"{dot}{key}") for key, value in values.items()}
    try:
        return kind(**given)
    except SettingsError as error:
        raise (error if kind.section or not name else SettingsError(f"{name}.{error}")) from None


def _nested(hint: object, value: object, name: str) -> object:
    """The value of a field; a mapping becomes a section (a settings dataclass) if the field's type is one."""
    if (kind := _section(hint)) is not None:
        return fill(kind, value, name)
    kind = _section(typing.get_args(hint)[1]) if typing.get_origin(hint) is dict else None
    if kind is None:
        return value
    if not isinstance(value, dict):
        raise SettingsError(f"{name}={show(value)}: expected a mapping of names to values")
    return {str(key): fill(kind, item, f"{name}.{key}") for key, item in value.items()}


def _section(hint: object) -> type[Section] | None:
    return hint if isinstance(hint, type) and issubclass(hint, Section) else None


def describe(kind: type[Section], name: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every key as (dotted key, allowed values, default, help), for a command's help; NAME stands for any name."""
    texts, hints = help_of(kind), hints_of(kind)
    for one in dataclasses.fields(typing.cast("Any", kind)):
        hint, key = hints[one.name], f"{name}{one.name}"
        inner = typing.get_args(hint)[1] if typing.get_origin(hint) is dict else None
        if (nested := _section(hint)) is not None:
            yield from describe(nested, f"{key}.")
        elif (nested := _section(inner)) is not None:
            yield from describe(nested, f"{key}.NAME.")
        else:
            yield key, allowed(hint), default_of(one), texts[one.name]


def default_of(field: dataclasses.Field[Any]) -> str:
    """A field's default, as YAML writes it."""
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return show(plain(made))


def _checked(key: str, hint: object, value: object) -> object:
    """The value converted to the field's type; a `SettingsError` names what is allowed."""
    if (kind := _section(hint)) is not None:
        if not isinstance(value, kind):
            raise SettingsError(f"{key}={show(value)}: expected keys: {', '.join(hints_of(kind))}")
        return value
    try:
        made = convert(hint, value)
    except ValueError:
        raise SettingsError(f"{key}={show(plain(value))}: allowed: {allowed(hint)}") from None
    if not isinstance(made, dict) and not finite(made):
        raise SettingsError(f"{key}={show(plain(made))}: allowed: a finite number")
    return made


def _assigned(section: Section, key: str) -> str:
    """The text `=VALUE` for a dotted key in an error message; empty for a section, an empty text or an empty
    mapping."""
    value: object = section
    for part in key.split("."):
        value = value.get(part, section) if isinstance(value, dict) else getattr(value, part, section)
    return "" if isinstance(value, Section) or value in ("", {}) else f"={show(plain(value))}"


def convert(hint: Any, value: Any) -> Any:
    """A value of YAML, or a word of the command line, converted to a type hint; a `ValueError` if it does not fit.

    Args:
        hint: See `fathom.values.fit`.
        value: A scalar, a list or a mapping; a string is read as YAML unless the hint is a string.
    """
    return fit(hint, value, read=_read)


def _read(hint: Any, value: Any, name: str) -> Any:
    """Convert a value to its type hint: a string is read as YAML unless the hint is text, and a single item becomes a
    list where the hint is a list."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, str):
        if hint is types.NoneType and value == "null":
            return None
        if hint is Path:
            return Path(value)
        if hint in (int, float, bool) or origin in (*LISTS, dict) or (origin is Literal and value not in arguments):
            value = _yaml(value, value)
        if isinstance(value, str) and origin in LISTS and arguments[-1] in (str, Ellipsis):
            return [value]
    return float(value) if hint is float and type(value) is int else value


def help_of(section: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, inherited fields included."""
    kinds = [kind for kind in reversed(section.__mro__) if dataclasses.is_dataclass(kind)]
    return {name: text for kind in kinds for name, text in _helps(kind.__module__)[kind.__name__].items()}


@lru_cache
def _helps(module: str) -> dict[str, dict[str, str]]:
    """The docstrings under the fields of every class in a module, whose source is parsed only once."""
    found: dict[str, dict[str, str]] = {}
    for definition in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(definition, ast.ClassDef):
            texts = found[definition.name] = {}
            for field_, text in itertools.pairwise(definition.body):
                if isinstance(field_, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[ast.unparse(field_.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def check_keys(keys: Iterable[object], known: Sequence[str], section: str = "") -> None:
    """Reject an unknown key; the error suggests the nearest key, or lists all."""
    dot = f"{section}." if section else ""
    for key in map(str, keys):
        if key not in known:
            # Without the section, which all of them share.
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {dot}{close[0]}?" if close else f"allowed: {', '.join(known)}"
            raise SettingsError(f"{dot}{key}: unknown key; {hint}")


class _Loader(yaml.SafeLoader):
    """Safe YAML in which, as in YAML 1.2, 1e-3 is a number and duplicate keys are errors."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Like PyYAML's method of the same name, except that a key that is given twice is an error."""
        node, seen = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes the text 1e-3, which `_Loader` would otherwise read as a number."""


for one in (_Loader, _Dumper):
    one.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def dump(values: object, allow_unicode: bool = True) -> str:
    """Values as YAML that a settings file may contain."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode)


KINDS = {
    "ladder": ("ladder",),
    "corpus": ("collections",),
    "paper": ("paper", "rows", "tiers"),
    "train": ("model", "optim", "train"),
}
"""Sections by which a file of each command is known, the first that fits."""


def require_kind(values: Mapping[str, object], source: str, command: str) -> None:
    """Refuse a settings file that belongs to another command, and name that command in the error."""
    kind = kind_of(values, command)
    if kind != command:
        wanted = {
            "ladder": "a ladder",
            "corpus": "a recipe of a corpus",
            "paper": "a paper's table",
            "train": "a recipe of a run",
        }[command]
        raise SettingsError(f"{source} is a file of `fathom {'compare' if kind == 'paper' else kind}`, not {wanted}")


def kind_of(values: Mapping[str, object], default: str) -> str:
    """The kind of a settings file, as a key of `KINDS`: its values contain one of this kind's sections."""
    return next((name for name, sections in KINDS.items() if any(one in values for one in sections)), default)


@lru_cache(maxsize=64)
def _loaded(text: str) -> Any:
    return yaml.load(text, _Loader)


def _yaml(text: str, source: str) -> Any:
    try:
        # A comparison reads one recipe many times, and PyYAML takes milliseconds; a word takes none.
        return deepcopy(_loaded(text)) if "\n" in text else yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, " ".join(str(error.problem).split())
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise SettingsError(f"{source}: not YAML: {problem}{place}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise SettingsError(f"{source}: nested too deep") from None


def read_values(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, object]:
    """The values of a YAML file merged over those of its `base`, unchecked.

    Args:
        path: The file.
        seen: The files that name it as their base, directly or through others.
    """
    if path.resolve() in seen:
        raise SettingsError(f"{path}: its `base` refers back to the file itself")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not a text file") from None
    values = _yaml(text, str(path))
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: a recipe is a mapping of sections")
    base = values.pop("base", None)
    if base is None:
        return values
    beside = path.parent / str(base)
    # A copy of a packaged recipe in another folder still finds its base.
    ours = (found for found in packaged_recipes().values() if found.name == Path(str(base)).name)
    below = beside if beside.is_file() else next(ours, None)
    if below is None:
        raise SettingsError(f"{path}: base: {beside}: no such file")
    return _merge(read_values(below, (*seen, path.resolve())), values)


def _merge(below: dict[str, object], above: dict[str, object]) -> dict[str, object]:
    merged = dict(below)
    for key, value in above.items():
        under, merged[key] = merged.get(key), value
        if key not in WHOLE and isinstance(under, dict) and isinstance(value, dict):
            merged[key] = _merge(under, value)
    return merged


def _assign(values: dict[str, object], key: Sequence[str], value: object) -> dict[str, object]:
    """The values with one at a key of several parts, outermost first."""
    first, *rest = key
    if not rest:
        return _merge(values, {first: value})
    under = values.get(first)
    return {**values, first: _assign(under if isinstance(under, dict) else {}, rest, value)}


def recipes_folder() -> Path:
    """The folder of the recipes that come with Fathom: inside an installed package, or `recipes/` of the source
    tree."""
    package = Path(__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with Fathom, by name: `tiny`, `specialise/base`, ladders as `ladders/cpu`, and tables of
    papers as `papers/depth-attention/table1`."""
    folder = recipes_folder()
    files = [path for depth in ("*.yaml", "*/*.yaml", "*/*/*.yaml") for path in sorted(folder.glob(depth))]
    return {path.relative_to(folder).as_posix().removesuffix(".yaml"): path for path in files}


def overridden(values: dict[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """The nested values after dotted `key=value` overrides were applied."""
    for assignment in overrides:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise SettingsError(f"{assignment}: an override is written key=value, as in optim.lr=3e-4")
        values = _assign(values, key.split("."), _yaml(text, key))
    return values


def assignment(key: str, text: str | Path) -> str:
    """The override `key=text`, in quotes if YAML would read the text as something else: a number, a list, a comment."""
    try:
        plain_text = _yaml(str(text), key) == str(text)
    except SettingsError:
        plain_text = False
    quoted = yaml.safe_dump(str(text), default_style='"', width=sys.maxsize, allow_unicode=True).rstrip("\n")
    return f"{key}={text if plain_text else quoted}"


def show(value: object) -> str:
    """A value as YAML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
