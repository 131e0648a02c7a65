"""CI and releases: workflows name what exists, a release fills the address in, the sdist is the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
FOLDERS = (".github", "benchmarks", "docs", "examples", "recipes", "src", "tests")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def strings(value: object) -> Iterator[str]:
    """Every string among the values of a YAML document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def absent(text: str) -> list[str]:
    """Paths of this tree and targets of make that the workflow names, and that are not there."""
    found = []
    for words in strings(yaml.safe_load(text)):
        for word in words.split():
            path = word.strip("\"'").partition("::")[0].removeprefix("./")
            ours = path.partition("/")[0] in FOLDERS or re.fullmatch(r"[\w-]+\.(py|toml|txt|md|cfg)", path)
            if ours and not list(ROOT.glob(path)):
                found.append(path)
        for arguments in re.findall(r"(?:^|[;&|\n]\s*)make\s+([^;&|\n]*)", words):
            plain = re.sub(r"\w+=(\"[^\"]*\"|'[^']*'|\S*)|(?<!\S)-j *\d*|(?<!\S)-\S+", "", arguments)
            found += [f"make {target}" for target in plain.split() if target not in TARGETS]
    return found


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_names_is_there(workflow: Path) -> None:
    assert absent(workflow.read_text(encoding="utf-8")) == []


def test_what_is_not_there_is_caught() -> None:
    """The negative control: planted paths and targets, next to some that exist."""
    steps = [
        "make test",
        'make setup TORCH="torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu"',
        ".venv/bin/python -m pytest tests/test_docs.py::test_recipe_keys_are_known tests/test_gone.py",
        "cd docs && make -j 2 haste lint\nmake speed",
        "pip install -r requirements-gone.txt -c constraints.txt && ./benchmarks/gone.py",
    ]
    text = yaml.safe_dump({"jobs": {"one": {"steps": [{"run": step} for step in steps]}}})
    caught = ["tests/test_gone.py", "make haste", "make speed", "requirements-gone.txt", "benchmarks/gone.py"]
    assert WORKFLOWS and absent(text) == caught


PLACED = ("README.md", "SECURITY.md", "CITATION.cff", "CHANGELOG.md", "pyproject.toml", "src/fathom/_version.py")
SCRIPT = ".github/release.py"
ADDRESS = "https://forge.example/someone/fathom"
# An address with our name in it, which could only be invented: the repository does not know where it is published.
INVENTED = re.compile(r"(?:https?://|git@|ssh://)(?!127|localhost)[\w.:-]+[^\s\"'<>)]*fathom", re.I)


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The release script on a copy of the files that it reads, made at the first call."""
    for name in (*PLACED, SCRIPT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return subprocess.run([sys.executable, folder / SCRIPT, *words], capture_output=True, text=True, timeout=60)


def test_a_release_writes_the_address_where_the_tree_has_a_placeholder(tmp_path: Path) -> None:
    assert release(tmp_path, "address", ADDRESS).returncode == 0
    for name in ("README.md", "SECURITY.md", "CITATION.cff", "pyproject.toml"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert ADDRESS in text and "<this repository>" not in text, name
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"] == ADDRESS
    again = release(tmp_path, "address", ADDRESS)
    assert again.returncode == 1 and "does not say" in again.stderr
    assert "not an https address" in release(tmp_path, "address", "someone/fathom").stderr


def test_a_release_wants_one_version_and_a_date(tmp_path: Path) -> None:
    assert "CHANGELOG.md needs the heading" in release(tmp_path, "version", "v0.1.0").stderr
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(changes.read_text(encoding="utf-8").replace("## 0.1.0, unreleased", "## 0.1.0, 2026-12-01"))
    assert release(tmp_path, "version", "v0.1.0").returncode == 0
    assert "states 0.1.0" in release(tmp_path, "version", "v0.2.0").stderr


def test_nobody_invents_an_address() -> None:
    assert INVENTED.search(f"git clone {ADDRESS}") and INVENTED.search("git@forge.example:someone/fathom.git")
    assert not INVENTED.search('curl http://127.0.0.1:8000/v1 -d \'{"model": "fathom"}\'')
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.cff"),
        *ROOT.glob("*.toml"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob(".github/**/*.*"),
    ]
    found = [
        f"{page.relative_to(ROOT)}: {hit[0]}" for page in pages for hit in INVENTED.finditer(page.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.slow
def test_the_sdist_is_the_tree(tmp_path: Path) -> None:
    """Whoever packages Fathom runs its tests from the sdist."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    for name in names:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path / "tree", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "tree" / "dist" / done.stdout.splitlines()[-1]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in names if name not in packed and not name.startswith(".ci/")] == []
