"""What `make docs` builds has every page in its navigation and every public name in its reference."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import fathom

ROOT = Path(__file__).parent.parent
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
API = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE)


def listed(entries: list) -> list[str]:
    """The pages below some entries of the navigation."""
    below = [value for entry in entries for value in entry.values()]
    return [page for value in below for page in (listed(value) if isinstance(value, list) else [value])]


def missing(pages: list[str]) -> list[str]:
    """Pages of the documentation that a navigation leaves out, and pages that it names and that are not there."""
    pages = ["docs/index.md" if page == "index.md" else page for page in pages]  # `make docs` puts it in front
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    return sorted(own - set(pages)) + sorted(page for page in pages if not (ROOT / page).is_file())


def test_every_page_is_in_the_navigation():
    assert missing(listed(SITE["nav"])) == []


def test_a_page_that_is_left_out_is_seen():
    pages = listed(SITE["nav"])
    assert missing([page for page in pages if page != "docs/explanation/loop.md"]) == ["docs/explanation/loop.md"]
    assert missing([*pages, "docs/planted.md"]) == ["docs/planted.md"]


@pytest.mark.parametrize("name", API)
def test_the_reference_names_what_there_is(name):
    module, _, last = name.rpartition(".")
    found = getattr(import_module(module), last, None) or import_module(name)
    assert found.__doc__


def test_every_public_name_is_in_the_reference():
    said = {name.rpartition(".")[2] for name in API}
    assert set(fathom.__all__) - said - {"__version__", "register"} == set()
