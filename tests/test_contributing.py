"""CONTRIBUTING's walk-throughs, walked: each in a copy of the tree, with the files that it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

WITHOUT_CORPUS = (
    *("data.directory=puzzle:hops", "data.sequence_length=67", "train.tokens_per_step=1072", "train.export=false"),
)
RMSPROP = '''
"""RMSprop, torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fathom.recipe import Optim


class RMSprop(torch.optim.RMSprop):
    """Its step does not know `found_inf`."""

    only_matrices = False
    reads_found_inf = False

    @classmethod
    def of(cls, groups: Sequence[dict[str, Any]], optim: Optim) -> RMSprop:
        """The optimizer of some parameter groups, with the recipe's settings."""
        return cls(groups, lr=optim.lr, eps=optim.eps)
'''.lstrip()
RMSPROP_TEST = """
import torch

from fathom.training import build_training, train
from tests.tiny import tiny_recipe


def test_it_trains_and_skips(corpus, tmp_path):
    recipe = tiny_recipe(corpus, "optim.name=rmsprop")
    assert train(recipe, tmp_path / "run").finished
    training = build_training(recipe)
    before = {name: weight.clone() for name, weight in training.weights().items()}
    for weight in training.optimizer.parameters.values():
        weight.grad = torch.ones_like(weight)
    training.optimizer.step(0.1, torch.ones(()))
    assert all(torch.equal(weight, before[name]) for name, weight in training.weights().items())
"""
INI_TEST = """
import pytest

from fathom.evaluation.perplexity import read_domains
from fathom.corpus.ingest import kind_of
from fathom.data.sources import lines_of
from fathom.errors import DataError


def test_sections_are_records(tmp_path):
    path = tmp_path / "a.ini"
    path.write_bytes(b"\\xef\\xbb\\xbf[one]\\ntext = Hello\\n[two]\\ntext = Bye\\n")
    (domain,) = read_domains([str(tmp_path)])
    assert [one.text for one in domain.documents] == ["Hello", "Bye"]
    assert len(list(lines_of(path))) == 2 and kind_of(path) == "ini"


def test_a_damaged_file_is_one_line(tmp_path):
    (tmp_path / "a.ini").write_bytes(b"text = nowhere")
    with pytest.raises(DataError, match=r"a\\.ini: cannot read it: File contains no section headers"):
        list(lines_of(tmp_path / "a.ini"))
"""
IMPORT = "from fathom.training.rmsprop import RMSprop\n"
GREET = '''
"""`fathom greet NAME`."""

from __future__ import annotations

from argparse import Namespace

from fathom.cli.parser import Parser, SettingsError


def add(parser: Parser) -> None:
    """Arguments."""
    parser.add_argument("name", help="whom to greet")


def run(options: Namespace) -> int:
    """Greet."""
    if not options.name.isalpha():
        raise SettingsError(f"{options.name}: not a name")
    print(f"Hello, {options.name}")
    return 0
'''.lstrip()
GREET_TEST = """
from fathom.cli.main import main


def test_it_greets(capsys):
    assert main(["greet", "Ada"]) == 0 and capsys.readouterr().out == "Hello, Ada\\n"
    assert main(["greet", "4"]) == 2 and capsys.readouterr().err == "fathom: 4: not a name\\n"
"""
COMMAND = ('    "lineage": "test', '    "greet": "say hello",\n    "lineage": "test')
GREET_PAGE = "# Greeting\n\n```\nfathom greet Ada\n```\n"


@dataclass(frozen=True)
class Walk:
    """What somebody does who follows a section."""

    files: dict[str, str]
    """New ones."""
    edits: dict[str, tuple[tuple[str, str], ...]]
    """(old, new) in files that are there."""
    tests: tuple[str, ...]
    """What pytest is then asked for, one call each."""
    commands: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Commands, and what they print."""
    new: tuple[str, ...] = ()
    """What `fathom new` is asked for, in place of files and edits by hand."""


WALKS = {
    "a mechanism": Walk(
        {},
        {},
        (
            "tests/models/test_mechanisms.py -k neighbour_mean",
            "tests/models/test_neighbour_mean.py tests/models/test_registry.py tests/test_outside.py",
            "tests/cli/test_mechanisms.py tests/gpu/test_kit.py -k mechanism",
            "tests/gpu/test_waiting.py -k vanilla",
            "tests/models/test_oracle.py -k reach_everything",
            "tests/models/test_oracle.py -k planted",
            "tests/models/test_saved.py -k every_mechanism",
        ),
        {("mechanisms", "--json"): '"neighbour_mean"'},
        ("mixer", "neighbour_mean"),
    ),
    "a cache method": Walk(
        {},
        {},
        ("tests/kvcache -k strided", "tests/kvcache/test_benchmark.py -k row", "tests/kvcache/test_build.py"),
        {("train", "tiny", "--dry-run", *WITHOUT_CORPUS, "kvcache.method=strided", "kvcache.window=64"): "strided"},
        ("cache", "strided"),
    ),
    "an optimizer": Walk(
        {"src/fathom/training/rmsprop.py": RMSPROP, "tests/training/test_rmsprop.py": RMSPROP_TEST},
        {
            "src/fathom/training/optimizer.py": (
                ("from fathom.training.muon import Muon\n", "from fathom.training.muon import Muon\n" + IMPORT),
                ('"muon": Muon}', '"muon": Muon, "rmsprop": RMSprop}'),
            ),
            "src/fathom/recipe.py": (('name: Literal["adamw", "muon"]', 'name: Literal["adamw", "muon", "rmsprop"]'),),
        },
        ("tests/training/test_rmsprop.py",),
    ),
    "a reader": Walk(
        {
            "src/fathom/data/sections.py": re.search(r'```python\n("""Sections.*?)```', PAGE, re.DOTALL)[1],
            "tests/data/test_sections.py": INI_TEST,
        },
        {
            "src/fathom/data/sources.py": (
                (
                    "from fathom.data.shards import",
                    "from fathom.data.sections import ini_rows\nfrom fathom.data.shards import",
                ),
                ('"tsv", "parquet"]', '"tsv", "ini", "parquet"]'),
                (
                    '        Reader("parquet",',
                    '        Reader("ini", (".ini",), _as_lines(ini_rows)),\n        Reader("parquet",',
                ),
            )
        },
        ("tests/data/test_sections.py",),
        {("prepare", "--help"): "INPUT"},
    ),
    "a backbone": Walk({}, {}, ("tests/checkpoints/families -k arcee",), {}, ("family", "arcee")),
    "a command": Walk(
        {"src/fathom/cli/greet.py": GREET, "docs/how-to/greet.md": GREET_PAGE, "tests/cli/test_greet.py": GREET_TEST},
        {"src/fathom/cli/main.py": (COMMAND,)},
        ("tests/cli/test_greet.py", "tests/test_docs.py::test_a_page_does_what_it_says[greet]"),
        {("--help",): "say hello", ("greet", "--help"): "whom to greet"},
    ),
    "a capability": Walk(
        {
            "src/fathom/manners/__init__.py": '"""Politeness."""\n',
            "src/fathom/manners/words.py": '"""Words."""\n\n\ndef hello(name: str) -> str:\n    """A greeting."""\n'
            '    return f"Hello, {name}"\n',
            "src/fathom/cli/greet.py": GREET.replace(
                "import Parser, SettingsError\n",
                "import Parser, SettingsError\nfrom fathom.manners.words import hello\n",
            ).replace('print(f"Hello, {options.name}")', "print(hello(options.name))"),
            "docs/how-to/manners.md": GREET_PAGE,
            "tests/manners/__init__.py": "",
            "tests/manners/test_words.py": GREET_TEST,
        },
        {
            "src/fathom/cli/main.py": (COMMAND,),
            "tests/test_boundaries.py": (
                ('"experiments", "cli", "__main__"', '"experiments", "manners", "cli", "__main__"'),
            ),
        },
        ("tests/manners", "tests/test_docs.py::test_a_page_does_what_it_says[manners]"),
        {("greet", "Ada"): "Hello, Ada"},
    ),
}


def edited(name: str, edits: tuple[tuple[str, str], ...]) -> str:
    """A file of the tree with its edits."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, f"{name}: {old}"
        text = text.replace(old, new)
    return text


def walked(walk: Walk, folder: Path) -> Path:
    """A copy of the tree in which a walk was done."""
    for name in ("src", "tests", "docs", "recipes", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "results", "pictures")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"):
        shutil.copy(path, folder / path.name)
    for name, text in walk.files.items():
        assert not (folder / name).exists(), name
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for name, edits in walk.edits.items():
        (folder / name).write_text(edited(name, edits), encoding="utf-8")
    if walk.new:
        assert "exit code 0" in (report := said(folder, "-m", "fathom", "new", *walk.new)), report
        assert "is there already" in said(folder, "-m", "fathom", "new", *walk.new)
    return folder


def said(folder: Path, *words: str) -> str:
    """What a Python process says in the copy, and its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
    )
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}"


PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist")
COPY = "src/tests/with blank/fathom"
"""A checkout may have any name: `git clone` calls it fathom, and people put blanks in paths."""
# What every change must pass: the order of imports, and pages that say what the code says.
ALWAYS = ("tests/test_boundaries.py::test_boundaries", "tests/models/test_imports.py", "tests/test_pages.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_walked(name: str, tmp_path: Path) -> None:
    walk = WALKS[name]
    folder = walked(walk, tmp_path / COPY)
    assert str(folder) in said(folder, "-c", "import fathom; print(fathom.__file__)")
    assert "exit code 0" in (report := said(folder, "-m", "tests.pages")), report
    for asked in (*walk.tests, " ".join(ALWAYS)):
        words = asked.split()
        report = said(folder, *PYTEST, *words)
        assert "exit code 0" in report and " passed" in report, f"{asked}\n{report}"
    for words, printed in walk.commands.items():
        assert printed in (report := said(folder, "-m", "fathom", *words)) and "exit code 0" in report, report
    new = [path for path in walk.files if path.endswith(".py")] or ["src", "tests"]
    tools = Path(sys.executable).parent
    for tool in (("ruff", "check"), ("ruff", "format", "--check")):
        done = subprocess.run([tools / tool[0], *tool[1:], *new[:1]], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_step_left_out_is_seen(tmp_path: Path) -> None:
    """A new folder has no place among the others yet."""
    walk = WALKS["a capability"]
    edits = {path: edit for path, edit in walk.edits.items() if path != "tests/test_boundaries.py"}
    folder = walked(Walk(walk.files, edits, ()), tmp_path / "copy")
    assert "exit code 1" in said(folder, *PYTEST, "tests/test_boundaries.py::test_boundaries")
