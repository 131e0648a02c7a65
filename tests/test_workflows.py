"""What a workflow of CI runs is there: the files that it names, and the targets of make."""

from __future__ import annotations

import re
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
