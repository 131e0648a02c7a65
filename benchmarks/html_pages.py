"""How much of the main text of real pages comes back: `python benchmarks/html_pages.py PAGE.html ... --out LOG`.

The reference is what stands in a page's <main>, else its <article>, else its <body>, without scripts, by lxml. Both of
Fathom's ways are measured: the main text (trafilatura), and all of it (plain).
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lxml.html

from fathom.corpus.html import extract
from fathom.corpus.recipe import IngestOptions
from fathom.report.files import write_json
from fathom.report.provenance import provenance

WAYS = ("trafilatura", "plain")


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text))


def main_text(path: Path) -> str:
    """The text of the element that holds a page's contents."""
    page = lxml.html.fromstring(path.read_bytes())
    for one in page.xpath("//script|//style|//noscript|//template|//nav"):
        one.drop_tree()
    for place in ("//main", "//*[@id='main-content']", "//article", "//body"):
        if found := page.xpath(place):
            return " ".join(text for text in found[0].itertext())
    return str(page.text_content())


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for path in options.pages:
        wanted = words(main_text(path))
        row: dict[str, Any] = {"page": "/".join(path.parts[-3:]), "words": wanted.total()}
        for way in WAYS:
            found = extract(path, asdict(IngestOptions(html=way)))
            there = words(found.text)
            kept = sum((wanted & there).values()) / max(wanted.total(), 1)
            beyond = sum((there - wanted).values()) / max(there.total(), 1)
            row[way] = {"status": found.status, "recalled": round(kept, 4), "beyond": round(beyond, 4)}
        rows.append(row)
        print(f"{row['page'][:60]:60} {row['words']:6}", *(f"{way} {row[way]}" for way in WAYS))
    if options.out:
        write_json(options.out, {**vars(provenance()), "pages": rows})


if __name__ == "__main__":
    main()
