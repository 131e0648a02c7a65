"""What a release fills in: `version v0.1.0` compares a tag with the package, `address URL` writes where it lives.

The repository names no address of its own, since it does not know where it is published: README has a placeholder.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACEHOLDER = "<this repository>"
PAGES = ("README.md", "SECURITY.md")


def version(root: Path = ROOT) -> str:
    """The version that the package states."""
    found = re.search(r'^__version__ = "([^"]+)"', (root / "src/fathom/_version.py").read_text(encoding="utf-8"), re.M)
    assert found, "src/fathom/_version.py states no version"
    return found[1]


def check_version(tag: str, root: Path = ROOT) -> None:
    """Stop unless the tag, the package, the citation and the changelog agree, and the changelog has a date."""
    stated = version(root)
    if tag != f"v{stated}":
        sys.exit(f"release: the tag is {tag}, and src/fathom/_version.py states {stated}")
    if f"\nversion: {stated}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        sys.exit(f"release: CITATION.cff does not state version {stated}")
    if not re.search(rf"^## {re.escape(stated)}, \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text("utf-8"), re.M):
        sys.exit(f"release: CHANGELOG.md needs the heading '## {stated}, YYYY-MM-DD'")


def fill_address(address: str, root: Path = ROOT) -> None:
    """Write the repository's address into the pages, the citation and the package's metadata."""
    if not re.fullmatch(r"https://[\w.-]+/[\w./-]+", address):
        sys.exit(f"release: {address!r} is not an https address")
    for name in PAGES:
        page = root / name
        text = page.read_text(encoding="utf-8")
        if PLACEHOLDER not in text:
            sys.exit(f"release: {name} does not say {PLACEHOLDER}")
        page.write_text(text.replace(PLACEHOLDER, address), encoding="utf-8")
    with (root / "CITATION.cff").open("a", encoding="utf-8") as citation:
        citation.write(f"repository-code: {address}\n")
    metadata = root / "pyproject.toml"
    places = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    urls = "".join(f'{name} = "{address}{place}"\n' for name, place in places.items())
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(
        text.replace("[project.scripts]\n", f"[project.urls]\n{urls}\n[project.scripts]\n", 1), encoding="utf-8"
    )


if __name__ == "__main__":
    steps = {"version": check_version, "address": fill_address}
    if len(sys.argv) != 3 or sys.argv[1] not in steps:
        sys.exit("usage: release.py version TAG | release.py address URL")
    steps[sys.argv[1]](sys.argv[2])
