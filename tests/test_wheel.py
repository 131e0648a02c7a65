"""What a user installs: the wheel of the sdist, alone in an environment, and an editable install."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

import fathom

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "recipes"
RECIPES = {path.relative_to(FOLDER).as_posix().removesuffix(".yaml") for path in FOLDER.rglob("*.yaml")}
# What pyproject.toml, setup.py and the interpreter would find by accident must not help.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"OMP_NUM_THREADS": "1"}


def run(*words: str | Path, cwd: Path) -> str:
    """Standard output of a command that ends well."""
    done = subprocess.run(words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def sources(folder: Path) -> Path:
    """A copy of the tree that packaging reads, so that nothing is built in the repository."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder


def environment(folder: Path) -> Path:
    """The Python of an empty environment that sees this one's packages, but not its editable Fathom."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    # Inside a folder that a .pth file adds, no other .pth file is read.
    (Path(own) / "present.pth").write_text(sysconfig.get_path("purelib") + "\n")
    missing = subprocess.run([python, "-c", "import fathom"], cwd=folder, env=ENVIRONMENT, capture_output=True)
    assert missing.returncode, "the environment has a Fathom already"
    return python


@pytest.mark.slow
def test_the_wheel_of_the_sdist_trains_by_name(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "tree").mkdir()
    tree = sources(tmp_path / "tree")
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    name = run(sys.executable, "-c", build, cwd=tree).splitlines()[-1]
    with tarfile.open(tree / "dist" / name) as archive:
        archive.extractall(tmp_path, filter="data")
    pip = (sys.executable, "-m", "pip")
    unpacked = tmp_path / name.removesuffix(".tar.gz")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, ".", cwd=unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.rmtree(tree)
    shutil.rmtree(unpacked)
    python = environment(tmp_path / "venv")
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    home = tmp_path / "elsewhere"
    home.mkdir()
    assert str(tmp_path) in run(python, "-c", "import fathom; print(fathom.__file__)", cwd=home)
    listed = run(python, "-c", "from fathom.settings import packaged_recipes as p; print(*p())", cwd=home)
    assert set(listed.split()) == RECIPES
    short = (
        "train.steps=2",
        "train.tokens_per_step=512",
        "train.micro_batch=2",
        "train.device=cpu",
        "evaluate.every=0",
    )
    tool = python.with_name("fathom")
    words = (*short, f"data.directory={corpus}", "model.vocab_size=304", "evaluate.tokens=512", "--json")
    result = json.loads(run(tool, "train", "tiny", *words, cwd=home))
    assert result["step"] == 2 and result["finished"]
    assert (home / "runs" / "tiny" / "model" / "config.json").is_file()
    base = run(python, "-c", "import fathom; print(fathom.load_recipe('60m_pondering').config().vocab_size)", cwd=home)
    assert int(base) == fathom.load_recipe("500m").config().vocab_size


@pytest.mark.slow
def test_an_editable_install_reads_the_repository_s_recipes(tmp_path: Path) -> None:
    """With one line in a .pth file and no import hook."""
    (tmp_path / "tree").mkdir()
    tree = sources(tmp_path / "tree")
    python = environment(tmp_path / "venv")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", "-e", ".", cwd=tree)
    assert not list((tmp_path / "venv").rglob("__editable__*finder*"))
    (tree / "recipes" / "mine.yaml").write_text("base: tiny.yaml\n")
    listed = run(python, "-c", "from fathom.settings import packaged_recipes as p; print(*p())", cwd=tmp_path)
    assert set(listed.split()) == {*RECIPES, "mine"}
