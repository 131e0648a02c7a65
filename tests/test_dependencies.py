"""What is declared is used, and what is imported is declared."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.test_boundaries import FOREIGN

ROOT = Path(__file__).parent.parent
# Imported beside the package that brings it.
BROUGHT = {"starlette": "fastapi", "pydantic": "fastapi", "pydantic_core": "fastapi"}
HOSTS = {"vllm"}
"""Programs that load a file of ours where they are installed, and are never installed by us."""


def normal(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> tuple[set[str], set[str]]:
    """What every installation has, and what the extras add."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    core, _, rest = text.partition("dependencies = [")[2].partition("\n]")
    extras = rest.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return tuple({normal(name) for name in re.findall(r'"([\w.-]+)', part)} for part in (core, extras))  # type: ignore[return-value]


def owners() -> dict[str, str]:
    """The declared distribution that each package belongs to, of those that are installed."""
    found = {}
    for name in set().union(*declared()):
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue
        found |= {file.parts[0].removesuffix(".py"): name for file in files if file.suffix == ".py"}
    return found


def used() -> set[str]:
    """Distributions that the package imports, of whose modules test_boundaries.py holds the list."""
    known = owners()
    return {normal(BROUGHT.get(name) or known.get(name, name)) for name in set(FOREIGN) - HOSTS}


def test_every_import_is_declared_and_every_core_dependency_is_imported() -> None:
    core, extras = declared()
    assert {"torch", "pyyaml"} <= core and "matplotlib" in extras - core
    assert core <= used() <= core | extras


def test_constraints_name_every_dependency() -> None:
    """Where a release for this Python exists, CI installs exactly that one."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normal(line.partition("==")[0]) for line in lines if "==" in line}
    assert declared()[0] <= pinned


def test_nothing_tells_anyone_to_install_a_name_that_is_not_registered() -> None:
    """Fathom is not on PyPI: `pip install 'fathom-lm[serve]'` would run whatever somebody puts there."""
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "Makefile"]
    assert [path.name for path in files if re.search("install.*fathom-lm", path.read_text(encoding="utf-8"))] == []


def test_extras_ask_for_what_the_constraints_pin() -> None:
    """An upper bound below a pin makes the two impossible together, as xxhash<4 was."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {
        normal(name): rest.partition(";")[0] for name, _, rest in (line.partition("==") for line in lines) if rest
    }
    wanted = [Requirement(found) for found in re.findall(r'"([\w.-]+[<>=,.\d]+)[";]', text)]
    assert len(wanted) > 30
    assert [str(w) for w in wanted if normal(w.name) in pinned and pinned[normal(w.name)] not in w.specifier] == []
    assert "4.1.0" not in Requirement("xxhash>=3,<4").specifier
