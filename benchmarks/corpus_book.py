"""One book in several files: how far the texts extracted from them agree, and whether they are found to be one.

    python benchmarks/corpus_book.py 6335-h.htm 6335.txt 2004-08-ntqtm10.txt --strip REGEX --out LOG

For each pair of files, the share of characters of either text that stand in both in the same order, in runs of eight
words or more; words are what lies between blanks, so that line ends make no difference and every sign does. Pages are
read both ways, all of their text and their main text by trafilatura, if it is installed. The first file has the highest
priority, so it is the one that deduplication should keep.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from difflib import SequenceMatcher
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

from fathom.corpus.clean import RULES
from fathom.corpus.documents import read_lines, read_part
from fathom.corpus.pipeline import build
from fathom.corpus.recipe import CorpusRecipe, parse_corpus_recipe
from fathom.corpus.stage import Workspace
from fathom.report.files import write_json
from fathom.report.provenance import provenance

RUN = 8
"""Words in a row that count as the same passage."""


def main() -> None:
    """Both ways to read a page, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="the same book, of several kinds or revisions")
    parser.add_argument("--strip", action="append", default=[], metavar="REGEX", help="removed, such as a licence")
    parser.add_argument("--encoding", default="utf-8", help="of text files")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {**vars(provenance()), "files": {one.name: one.stat().st_size for one in options.files}}
    for way in ("plain", *(["trafilatura"] if find_spec("trafilatura") else [])):
        with tempfile.TemporaryDirectory() as place:
            found[way] = measured(recipe_of(options, way), Path(place))
    print(json.dumps(found, indent=1))
    if options.out:
        write_json(options.out, found)


def recipe_of(options: argparse.Namespace, way: str) -> CorpusRecipe:
    """Every file is a collection."""
    collections: dict[str, Any] = {}
    for number, path in enumerate(options.files):
        name, priority = re.sub(r"[^\w-]", "_", path.name), len(options.files) - number
        collections[name] = {"inputs": [str(path)], "priority": priority, "encoding": options.encoding}
    values = {"collections": collections, "ingest": {"html": way}, "normalize": {"strip": options.strip}}
    cheap = {"tokenize": {"train": 300, "held_out": 0}, "executor": {"workers": 1}}
    return parse_corpus_recipe({**values, **cheap, "filter": {"max_words": None}})


def measured(recipe: CorpusRecipe, place: Path) -> dict[str, Any]:
    """What became of the files, and how far each pair of them agrees."""
    report = build(recipe, place)
    workspace = Workspace(place, recipe)
    rows = [one for part in workspace.parts("clean") for one in read_part(workspace.path(part))]
    texts = {one.collection: one.text.split() for one in rows}
    gone = [
        row for one in workspace.outputs("duplicates", "duplicates.jsonl") for row in read_lines(workspace.path(one))
    ]
    return {
        "characters": {name: sum(map(len, words)) for name, words in texts.items()},
        "dropped": {rule: count for rule in RULES if (count := report.stages["clean"].counts[rule])},
        "agreement": {f"{a} and {b}": agreement(texts[a], texts[b]) for a, b in combinations(texts, 2)},
        "removed": [{key: row[key] for key in ("path", "kind", "jaccard", "kept")} for row in gone],
    }


def agreement(one: Sequence[str], other: Sequence[str]) -> list[float]:
    """Of either text, the share of its characters that is in the other too, in the same order."""
    numbers: dict[tuple[str, ...], int] = {}
    runs = [
        [numbers.setdefault(tuple(words[at : at + RUN]), len(numbers)) for at in range(len(words) - RUN + 1)]
        for words in (one, other)
    ]
    common = SequenceMatcher(None, *runs, autojunk=False).get_matching_blocks()
    shares = []
    for words, starts in ((one, [block.a for block in common]), (other, [block.b for block in common])):
        spans = [
            (start, start + block.size + RUN - 1) for start, block in zip(starts, common, strict=True) if block.size
        ]
        same = {place for span in spans for place in range(*span)}
        shares.append(round(sum(len(words[place]) for place in same) / sum(map(len, words)), 5))
    return shares


if __name__ == "__main__":
    main()
