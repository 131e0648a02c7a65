"""Whether normalisation changes a number: digits, signs, powers and fractions of real documents, before and after.

    python benchmarks/normalization.py DATA/corpora/*/train*.jsonl.xz --documents 5000 --out LOG

Prints for each form how many documents have other runs of these characters afterwards, and what plain NFKC would do.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from fathom.corpus.normalization import CONTROLS, normalize
from fathom.report.files import write_json
from fathom.report.provenance import provenance

NUMBERS = re.compile("[0-9⁰¹²³⁴-⁹⁺⁻₀-₉½⅓⅔¼¾⅕⅛⅜⅝⅞−+±×÷/%^-]+")
FORMS: dict[str, Callable[[str], str]] = {
    "nfc": normalize,
    "nfkc": lambda text: normalize(text, form="nfkc"),
    "plain NFKC, for comparison": lambda text: unicodedata.normalize("NFKC", text),
}


def texts_of(place: Path) -> Iterator[str]:
    with lzma.open(place, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--documents", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    share = -(-options.documents // len(options.files))
    texts = [text for place in options.files for text in islice(texts_of(place), share)]
    found: dict[str, Any] = {
        **vars(provenance()),
        "documents": len(texts),
        "megacharacters": sum(map(len, texts)) / 1e6,
    }
    before = [NUMBERS.findall(CONTROLS.sub("", text)) for text in texts]
    found["runs"] = sum(map(len, before))
    for name, form in FORMS.items():
        after = [NUMBERS.findall(form(text)) for text in texts]
        changed = [number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
        pairs = ((one, other) for n in changed for one, other in zip(before[n], after[n], strict=False) if one != other)
        found[name] = {"documents_changed": len(changed), "examples": list(islice(pairs, 5))}
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if options.out:
        write_json(options.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
