"""`fathom new mixer NAME`: copy an example from CONTRIBUTING under a new name, and add the lines that register it."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path

from fathom.cli.following import following
from fathom.cli.parser import Parser
from fathom.errors import SettingsError
from fathom.report.files import write_atomically

EXAMPLES = ("fathom new mixer my_mean", "fathom new cache my_choice")
EPILOG = """It writes into the checkout of Fathom that holds the current directory. The code computes the example of \
CONTRIBUTING.md until you write yours."""
PAGE = "CONTRIBUTING.md"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class Scaffold:
    """The files and lines that `fathom new` writes for one kind of addition, such as a mixer. `{name}`, `{Name}` and
    `{NAME}` stand for the new name."""

    example: str
    """The name of CONTRIBUTING's example."""
    files: dict[str, str]
    """Path, and how the example's code in CONTRIBUTING begins."""
    lines: tuple[tuple[str, str, str], ...]
    """File, the text that the addition stands before, and the addition."""
    tests: str


SCAFFOLDS = {
    "mixer": Scaffold(
        "neighbour_mean",
        {
            "src/fathom/models/mixers/{name}.py": '"""`neighbour_mean`',
            "tests/models/test_{name}.py": '"""½ v + ½ ṽ, by hand."""',
        },
        (
            ("src/fathom/models/registry.py", "from .recurrences.ponder ", "from .mixers.{name} import {NAME}\n"),
            ("src/fathom/models/registry.py", "DEPTH_ATTENTION,", "{NAME}, "),
            ("tests/outside/accepted.py", '    "uniform_depth": ', '    "{name}": ACROSS,\n'),
            (
                "docs/explanation/which_mechanism.md",
                "| [`uniform_depth`]",
                "| `{name}` | mixer | no | same | yes | nobody |\n",
            ),
        ),
        "pytest tests/models -k {name}",
    ),
    "family": Scaffold(
        "arcee",
        {"src/fathom/checkpoints/families/{name}.py": '"""Arcee'},
        (
            (
                "src/fathom/checkpoints/families/registry.py",
                "from fathom.checkpoints.families.family ",
                "from fathom.checkpoints.families.{name} import {NAME}\n",
            ),
            ("src/fathom/checkpoints/families/registry.py", "SMOLLM3, ", "{NAME}, "),
            (
                "tests/checkpoints/families/cases.py",
                '    "olmo2": ',
                '    "{name}": ("{Name}", {**WIDE, "num_key_value_heads": 2}),\n',
            ),
        ),
        "pytest tests/checkpoints/families -k {name}",
    ),
    "cache": Scaffold(
        "strided",
        {"src/fathom/kvcache/{name}.py": '"""Every so-many-th entry', "tests/kvcache/test_{name}.py": "import torch"},
        (("src/fathom/kvcache/methods.py", "from .tova ", "from .{name} import {Name} as {Name}\n"),),
        "pytest tests/kvcache -k {name}",
    ),
}


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("kind", choices=sorted(SCAFFOLDS), help="what to add: %(choices)s")
    parser.add_argument("name", help="name of the new mixer, family or cache, in lower case with underscores")
    parser.epilog = EPILOG


def run(options: Namespace) -> int:
    """Write the files and lines of the addition, and print the commands to run next."""
    if not NAME.fullmatch(options.name):
        raise SettingsError(f"{options.name}: a name has lower-case words joined by underscores")
    if iskeyword(options.name):
        raise SettingsError(f"{options.name} is a keyword of Python; choose another name")
    root = checkout(Path.cwd())
    if options.name in _taken(options.kind):
        raise SettingsError(f"{options.name} is the name of something else already; choose another name")
    scaffold, forms = SCAFFOLDS[options.kind], forms_of(options.name)
    texts = dict(_texts(root, scaffold, forms))
    for path, text in texts.items():
        write_atomically(root / path, text)
    _tidy([root / path for path in texts if path.endswith(".py")])
    print("\n".join(texts))
    print(following("python -m tests.pages", _named(scaffold.tests, forms)))
    return 0


def checkout(place: Path) -> Path:
    """The root folder of the Fathom checkout that contains a path."""
    for folder in (place, *place.parents):
        if (folder / PAGE).is_file() and (folder / "src/fathom/cli").is_dir():
            return folder
    raise SettingsError(
        "run this in a checkout of Fathom; a mechanism in a package of your own needs no scaffold: see the tutorial"
    )


def _taken(kind: str) -> set[str]:
    """The names that an addition of a kind may not have; mixers share theirs with residuals and recurrences."""
    from fathom.checkpoints.families import FAMILIES
    from fathom.kvcache.build import METHODS
    from fathom.kvcache.whole import WHOLE
    from fathom.models.registry import VANILLA, known

    return {"mixer": {*known(), VANILLA}, "family": {*FAMILIES}, "cache": {*METHODS, *WHOLE}}[kind]


def forms_of(name: str) -> dict[str, str]:
    """A name in the spelling of variables (`my_name`), of classes (`MyName`) and of constants (`MY_NAME`)."""
    return {"{name}": name, "{Name}": "".join(word.capitalize() for word in name.split("_")), "{NAME}": name.upper()}


def _named(text: str, forms: dict[str, str]) -> str:
    for form, name in forms.items():
        text = text.replace(form, name)
    return text


def _texts(root: Path, scaffold: Scaffold, forms: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Path and text of every file to create or to extend; additions that exist already are refused."""
    page = (root / PAGE).read_text(encoding="utf-8")
    old = forms_of(scaffold.example)
    for path, beginning in scaffold.files.items():
        made = _named(path, forms)
        if (root / made).exists():
            raise SettingsError(f"{made} is there already; choose another name")
        found = re.search(rf"```(?:python|py)\n({re.escape(beginning)}.*?)```", page, re.DOTALL)
        assert found, f"{PAGE} has no code that begins with {beginning}"
        code = found[1]
        for form, word in old.items():
            code = code.replace(word, forms[form])
        yield made, code
    edited: dict[str, str] = {}
    for path, before, line in scaffold.lines:
        text = edited.get(path) or (root / path).read_text(encoding="utf-8")
        if before not in text:
            raise SettingsError(f"{path} lacks the line {before!r}; add your line by hand, as {PAGE} says")
        edited[path] = text.replace(before, _named(line, forms) + before, 1)
    yield from edited.items()


def _tidy(paths: list[Path]) -> None:
    """Sort imports and wrap lines, where ruff is installed."""
    ruff = Path(sys.executable).with_name("ruff")
    if ruff.exists():
        subprocess.run([ruff, "check", "--select", "I", "--fix", "--quiet", *paths], check=False)
        subprocess.run([ruff, "format", "--quiet", *paths], check=False)
