"""How many numbers of real pages, papers and books the readers alter or lose.

    python benchmarks/fidelity.py PAGES --out LOG [--before CHECKOUT]

PAGES is a folder of HTML, TEI, JATS and EPUB files. Each is read by the readers of this checkout, and of another one
with `--before`, and its numbers are compared with the text by `fathom.corpus.fidelity`, which shares no code with them.
The log has a row for each reader, and quotes what differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fathom.corpus.fidelity import compared
from fathom.corpus.ingest import kind_of
from fathom.corpus.sandbox import page_texts
from fathom.report.files import write_json
from fathom.report.provenance import provenance

READ = """
import json, sys
from pathlib import Path
from fathom.corpus.ingest import kind_of
from fathom.corpus.sandbox import EXTRACTORS
values = {"max_document_bytes": 1 << 26, "max_file_bytes": 1 << 28, "sentinels": False}
for line in sys.stdin:
    path, html = json.loads(line)
    kind = kind_of(Path(path))
    read = EXTRACTORS.get(kind)
    print(json.dumps(read(Path(path), {**values, "html": html}).text if read else None), flush=True)
"""
SHOWN = 40


def texts(checkout: Path, asked: list[tuple[str, str]]) -> list[str | None]:
    """What the readers of a checkout make of (file, way to read HTML)."""
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    place = os.pathsep.join([str(checkout / "src"), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=lines,
        env=os.environ | {"PYTHONPATH": place},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return list(map(json.loads, done.stdout.splitlines()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked, readers = [], []
    for path in sorted(one for one in options.pages.rglob("*") if one.is_file()):
        kind = str(kind_of(path))
        for way in ("plain", "trafilatura") if kind == "html" else ("plain",):
            asked.append((str(path), way))
            readers.append(f"{kind}, {way}" if kind == "html" else kind)
    here = Path(__file__).resolve().parent.parent
    found: dict[str, Any] = {**vars(provenance()), "pages": len({path for path, _ in asked})}
    for name, checkout in {"before": options.before, "now": here}.items():
        if checkout is None:
            continue
        rows: dict[str, Any] = {}
        for (path, _), reader, text in zip(asked, readers, texts(checkout, asked), strict=True):
            row = rows.setdefault(reader, {"pages": 0, "not read": 0, "numbers": 0, "wrong": 0, "examples": []})
            row["pages"] += 1
            row["not read"] += not text
            if text:
                one = compared(page_texts(reader.partition(",")[0], Path(path)), text)
                row["numbers"] += one.numbers
                row["wrong"] += one.wrong
                row["examples"] += [{"file": Path(path).name, **example} for example in one.examples]
        for reader, row in rows.items():
            print(f"{name} {reader}: {row['wrong']:,} of {row['numbers']:,} numbers, {row['pages']} pages")
            row["examples"] = row["examples"][:SHOWN]
        found[name] = rows
    if options.out:
        write_json(options.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
